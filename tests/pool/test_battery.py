"""What every pool does, as `pool/base.py` says it: one battery, which each enters."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from farandole.pool import agent
from farandole.pool.agent import mark
from farandole.pool.base import (
    Event,
    Host,
    HostPreempted,
    HostRebalance,
    HostState,
    Pool,
    Priced,
    Started,
    WorkerExited,
    WorkerStartFailed,
)
from farandole.pool.cluster import ClusterPool
from farandole.pool.ec2 import Aws, Ec2Pool, settle
from farandole.pool.fake import FakePool
from farandole.pool.local import LocalPool
from farandole.pool.ssh import HostsFile, SshPool
from farandole.protocol.messages import Job
from tests.support.aws import TEMPLATE, Machines, account
from tests.support.forked import ENVIRON
from tests.support.gone import ended
from tests.support.kubernetes import kubernetes
from tests.support.metadata_services import Ec2Service, interruption, recommendation
from tests.support.ray_cluster import ray_cluster
from tests.support.slurm import NODES, slurm
from tests.support.stage import Stage, stage
from tests.support.units import pool_of_actors, pool_of_jobs, pool_of_pods, pool_of_processes

WAITS = "import os, pathlib, sys, time; end = pathlib.Path(sys.argv[1], os.environ['FARANDOLE_WORKER'])\n"
WAITS += "while not end.exists(): time.sleep(0.01)\n"


FAR = f"{WAITS}os._exit(0)\n"


def nothing_more(host: str) -> None:
    """It can't be made to happen here."""
    raise AssertionError(host)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A pool; how one of its workers comes to its end by itself, with code 0; what is left to do at the end. `lose`: a
    host goes at once; `notice`: it will go; `advise`: it may.
    """

    pool: Pool
    end: Callable[[str], object]
    close: Callable[[], Awaitable[object]]
    lose: Callable[[str], object] = nothing_more
    notice: Callable[[str], object] = nothing_more
    advise: Callable[[str], object] = nothing_more


async def nothing() -> None:
    """To be closed."""


async def fake(folder: Path, *, able: bool) -> Entry:
    del folder
    pool = FakePool(hosts=[Host(name="north", slots=2), Host(name="south")])
    if not able:
        pool.failing = {host.name: "no such program" for host in pool.hosts}
    return Entry(
        pool=pool, end=pool.exit, close=nothing, lose=pool.lose, notice=pool.notice, advise=pool.advise
    )  # fmt: skip


async def local(folder: Path, *, able: bool) -> Entry:
    program = sys.executable if able else str(folder / "no such program")
    environ = {"PATH": os.environ["PATH"]}
    pool = LocalPool([program, "-c", WAITS, str(folder)], logs=folder / "logs", threads=1, environ=environ)
    return Entry(
        pool=pool, end=lambda worker: (folder / worker).touch(), close=lambda: asyncio.to_thread(pool.kill_all)
    )  # fmt: skip


class Far:
    """A coordinator, between a pool and its agents, and a job whose workers wait to be ended."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.things = folder, contextlib.ExitStack()
        (folder / "waits.py").write_text(FAR)
        (folder / "run").mkdir()
        self.job = Job(script="waits.py", arguments=(str(folder),), folder=str(folder))
        self._served = stage(folder / "run")

    async def begin(self) -> Stage:
        return await self._served.__aenter__()

    def end(self, worker: str) -> None:
        (self.folder / worker).touch()

    async def close(self, pool: SshPool | Ec2Pool | ClusterPool) -> None:
        await pool.close()
        await self._served.__aexit__(None, None, None)
        await asyncio.to_thread(self.things.close)


async def ssh(folder: Path, *, able: bool) -> Entry:
    """An agent on this machine. Where nothing can start, the host is not there."""
    assert able
    far = Far(folder)
    (folder / "hosts").write_text("localhost slots=8\n")
    metadata = far.things.enter_context(Ec2Service())
    far.things.enter_context(pytest.MonkeyPatch.context()).setenv("FARANDOLE_METADATA", metadata.address)
    scene = await far.begin()
    pool = SshPool(HostsFile(folder / "hosts"), ticket=scene.ticket, job=far.job, logs=folder / "run")
    await scene.until(pool.list, 60.0)
    return Entry(
        pool=pool,
        end=far.end,
        close=lambda: far.close(pool),
        lose=lambda host: agent.kill_agents([mark(scene.ticket, pool.name, host)]),
        notice=lambda _: metadata.set(action=interruption(120.0)),
        advise=lambda _: metadata.set(rebalance=recommendation()),
    )


async def ec2(folder: Path, *, able: bool) -> Entry:
    """Instances of a real server of AWS's API, each a process."""
    assert able
    far = Far(folder)
    moto = far.things.enter_context(account(folder))
    machines = Machines(moto, folder / "machines")
    far.things.callback(machines.close)
    scene = await far.begin()
    aws, (_, asked) = Aws(again_s=0.02), settle({"template": TEMPLATE})
    pool = Ec2Pool(aws, asked, run="r-1", ticket=scene.ticket, job=far.job, logs=folder / "run", look_s=0.5)
    return Entry(
        pool=pool,
        end=far.end,
        close=lambda: far.close(pool),
        lose=lambda host: moto.client().terminate_instances(InstanceIds=[host]),
        notice=lambda host: machines.interrupt(host, 120.0),
        advise=machines.recommend,
    )


async def units(folder: Path, *, able: bool) -> Entry:
    """A cluster's units, each a process on this machine."""
    assert able
    far = Far(folder)
    metadata = far.things.enter_context(Ec2Service())
    far.things.enter_context(pytest.MonkeyPatch.context()).setenv("FARANDOLE_METADATA", metadata.address)
    scene = await far.begin()
    pool, engine = pool_of_processes(folder / "run", scene.ticket, far.job)
    far.things.callback(engine.close)
    pool.want(2)
    await scene.until(pool.list, 60.0)
    return Entry(
        pool=pool,
        end=far.end,
        close=lambda: far.close(pool),
        lose=engine.lose,
        notice=engine.notice,
        advise=lambda _: metadata.set(rebalance=recommendation()),
    )


async def jobs(folder: Path, *, able: bool) -> Entry:
    """Jobs of a real Slurm on this machine."""
    assert able
    far = Far(folder)
    cluster = far.things.enter_context(slurm(folder))
    metadata = far.things.enter_context(Ec2Service())
    far.things.enter_context(pytest.MonkeyPatch.context()).setenv("FARANDOLE_METADATA", metadata.address)
    scene = await far.begin()
    pool = pool_of_jobs(folder / "run", scene.ticket, far.job)
    pool.want(2)
    await scene.until(pool.list, 60.0)

    def preempt(_: str) -> None:
        cluster.submit("sleep 1", "--partition=high", f"--nodes={NODES}")

    return Entry(
        pool=pool,
        end=far.end,
        close=lambda: far.close(pool),
        lose=lambda host: agent.kill_agents([mark(scene.ticket, pool.name, host)]),
        notice=preempt,
        advise=lambda _: metadata.set(rebalance=recommendation()),
    )


async def actors(folder: Path, *, able: bool) -> Entry:
    """Actors of a real Ray cluster on this machine."""
    assert able
    far = Far(folder)
    metadata = far.things.enter_context(Ec2Service())
    far.things.enter_context(pytest.MonkeyPatch.context()).setenv("FARANDOLE_METADATA", metadata.address)
    cluster = far.things.enter_context(ray_cluster(folder / "home", nodes=2))
    scene = await far.begin()
    pool = pool_of_actors(folder / "run", scene.ticket, far.job)
    pool.want(1)
    await scene.until(pool.list, 60.0)

    def lose(host: str) -> None:
        [process] = [row["Pid"] for row in cluster.actors("ALIVE") if row["Name"] == host]
        os.kill(process, signal.SIGKILL)

    def drain(host: str) -> None:
        [node] = [row["Address"]["NodeID"] for row in cluster.actors("ALIVE") if row["Name"] == host]
        assert cluster.drain(cluster.nodes()[node], 100.0)

    return Entry(
        pool=pool,
        end=far.end,
        close=lambda: far.close(pool),
        lose=lose,
        notice=drain,
        advise=lambda _: metadata.set(rebalance=recommendation()),
    )


async def pods(folder: Path, *, able: bool) -> Entry:
    """Pods of a cluster that this process plays, each a process."""
    assert able
    far = Far(folder)
    metadata = far.things.enter_context(Ec2Service())
    far.things.enter_context(pytest.MonkeyPatch.context()).setitem(ENVIRON, "FARANDOLE_METADATA", metadata.address)
    cluster = far.things.enter_context(kubernetes(folder))
    scene = await far.begin()
    pool = pool_of_pods(folder / "run", scene.ticket, far.job)
    pool.want(2)
    await scene.until(pool.list, 60.0)

    def name(host: str) -> str:
        return next(name for name in cluster.pods() if name.endswith(host))

    return Entry(
        pool=pool,
        end=far.end,
        close=lambda: far.close(pool),
        lose=lambda host: cluster.lose(name(host)),
        notice=lambda host: cluster.evict(name(host)),
        advise=lambda _: metadata.set(rebalance=recommendation()),
    )


POOLS = [pytest.param(fake, id="fake"), pytest.param(local, id="local", marks=pytest.mark.processes)]
FAR_POOLS = [
    pytest.param(ssh, id="ssh", marks=pytest.mark.processes),
    pytest.param(units, id="units", marks=[pytest.mark.processes, pytest.mark.long]),
    pytest.param(pods, id="kubernetes", marks=[pytest.mark.processes, pytest.mark.long]),
    pytest.param(ec2, id="ec2", marks=[pytest.mark.processes, pytest.mark.world, pytest.mark.minutes]),
    pytest.param(jobs, id="slurm", marks=[pytest.mark.processes, pytest.mark.world]),
    pytest.param(actors, id="ray", marks=[pytest.mark.processes, pytest.mark.world, pytest.mark.minutes]),
]
Make = Callable[..., Awaitable[Entry]]
every = pytest.mark.parametrize("make", [*POOLS, *FAR_POOLS])
every_with_hosts_that_go = pytest.mark.parametrize("make", [POOLS[0], *FAR_POOLS])
every_near = pytest.mark.parametrize("make", POOLS)


def play(entry: Callable[[], Awaitable[Entry]], scenario: Callable[[Entry], Awaitable[None]]) -> None:
    async def perform() -> None:
        entered = await entry()
        try:
            await scenario(entered)
        finally:
            await entered.close()

    asyncio.run(perform())


async def events(pool: Pool, number: int) -> list[Event]:
    """The next ones of workers: what hosts are and cost comes when it comes."""
    found: list[Event] = []
    while len(found) < number:
        happened = await asyncio.wait_for(pool.events(), 50)
        found += [event for event in happened if not isinstance(event, HostState | Priced)]
    return found


async def wait_until_listed(pool: Pool, hosts: set[str]) -> None:
    """Wait until the pool lists these hosts. A cloud's answer may come later than the first word of its instance."""

    async def poll() -> None:
        while not hosts <= {each.name for each in pool.list()}:
            await asyncio.sleep(0.01)

    await asyncio.wait_for(poll(), 50)


@every
def test_workers_start_on_its_hosts_and_end_each_told_once(make: Make, tmp_path: Path) -> None:
    async def scenario(entry: Entry) -> None:
        pool = entry.pool
        host, *others = [host.name for host in pool.list()]
        assert len({host, *others}) == 1 + len(others)
        for worker in ("w1", "w2"):
            pool.start(worker, host)
        found = await events(pool, 2)
        assert {event.worker for event in found if isinstance(event, Started)} == {"w1", "w2"}
        await wait_until_listed(pool, {event.host for event in found if isinstance(event, Started)})
        entry.end("w1")
        assert list(map(ended, await events(pool, 1))) == [("w1", "code 0")], "and w2 goes on"
        pool.stop("w2")
        assert list(map(ended, await events(pool, 1))) == [("w2", "signal 9")]
        for worker in ("w1", "w2", "nobody"):
            pool.stop(worker)  # no error
        pool.start("w3", host)
        [third] = await events(pool, 1)
        assert isinstance(third, Started), "and nothing of the others"
        assert third.worker == "w3"
        pool.stop("w3")
        assert list(map(ended, await events(pool, 1))) == [("w3", "signal 9")]

    play(lambda: make(tmp_path, able=True), scenario)


@every_near
def test_a_start_that_fails_is_told_as_that_and_leaves_room(make: Make, tmp_path: Path) -> None:
    async def scenario(entry: Entry) -> None:
        pool = entry.pool
        for worker in ("w1", "w2"):
            pool.start(worker, pool.list()[0].name)
            [failed] = await events(pool, 1)
            assert isinstance(failed, WorkerStartFailed)
            assert failed.worker == worker
            assert "no such" in failed.reason.lower()
            pool.stop(worker)  # no error

    play(lambda: make(tmp_path, able=False), scenario)


async def begun(pool: Pool, worker: str) -> str:
    """Where it runs, once it does."""
    pool.start(worker, pool.list()[0].name)
    [event] = await events(pool, 1)
    assert isinstance(event, Started), event
    assert event.worker == worker
    return event.host


@every_with_hosts_that_go
def test_a_host_that_goes_takes_its_workers_with_it_and_another_one_or_it_again_takes_more(
    make: Make, tmp_path: Path
) -> None:
    async def scenario(entry: Entry) -> None:
        pool = entry.pool
        host = await begun(pool, "w1")
        await asyncio.to_thread(entry.lose, host)
        [gone] = await events(pool, 1)
        assert isinstance(gone, WorkerExited)
        assert gone.worker == "w1"
        while not pool.list():
            await pool.events()
        await begun(pool, "w2")

    play(lambda: make(tmp_path, able=True), scenario)


@every_with_hosts_that_go
def test_what_is_known_of_a_host_is_told_and_its_workers_go_on(make: Make, tmp_path: Path) -> None:
    async def scenario(entry: Entry) -> None:
        pool = entry.pool
        host = await begun(pool, "w1")
        await asyncio.to_thread(entry.advise, host)
        [advice] = await events(pool, 1)
        assert isinstance(advice, HostRebalance)
        assert advice.host == host
        await asyncio.to_thread(entry.notice, host)
        [notice] = await events(pool, 1)
        assert isinstance(notice, HostPreempted)
        assert notice.host == host
        assert 0 < notice.deadline_s <= 120
        entry.end("w1")
        found: list[Event] = []
        while not any(isinstance(event, WorkerExited) for event in found):
            found += await events(pool, 1)
        [exit_] = [event for event in found if isinstance(event, WorkerExited)]
        notices = [event for event in found if event is not exit_]  # why the host goes; they may also come after it
        assert ended(exit_) == ("w1", "code 0")
        assert all(isinstance(event, HostPreempted) and event.host == host for event in notices)

    play(lambda: make(tmp_path, able=True), scenario)
