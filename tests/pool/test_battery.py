"""What every pool does, as `pool/base.py` says it: one battery, which each enters."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from farandole.membership.hosts import Job
from farandole.pool.base import Event, Gone, Host, Pool, Seen, Started, StartFailed
from farandole.pool.fake import FakePool
from farandole.pool.local import LocalPool
from farandole.pool.ssh.hosts_file import Watched
from farandole.pool.ssh.pool import SshPool
from tests.support.stage import stage

pytestmark = pytest.mark.timeout(60)
WAITS = "import os, pathlib, sys, time; end = pathlib.Path(sys.argv[1], os.environ['FARANDOLE_WORKER'])\n"
WAITS += "while not end.exists(): time.sleep(0.01)\n"


FAR = f"{WAITS}os._exit(0)\n"


@dataclass(frozen=True)
class Entry:
    """A pool, how one of its workers comes to its end by itself, with code 0, and what is left to do at the end."""

    pool: Pool
    end: Callable[[str], object]
    close: Callable[[], Awaitable[object]]


async def nothing() -> None:
    """To be closed."""


async def fake(folder: Path, *, able: bool) -> Entry:
    del folder
    pool = FakePool(hosts=[Host(name="north", slots=2), Host(name="south")])
    if not able:
        pool.failing = {host.name: "no such program" for host in pool.hosts}
    return Entry(pool, pool.exit, nothing)


async def local(folder: Path, *, able: bool) -> Entry:
    program = sys.executable if able else str(folder / "no such program")
    environ = {"PATH": os.environ["PATH"]}
    pool = LocalPool([program, "-c", WAITS, str(folder)], logs=folder / "logs", threads=1, environ=environ)
    return Entry(pool, lambda worker: (folder / worker).touch(), lambda: asyncio.to_thread(pool.kill_all))


async def ssh(folder: Path, *, able: bool) -> Entry:
    """An agent on this machine, and a coordinator between them. Where nothing can start, the host is not there."""
    assert able
    (folder / "hosts").write_text("localhost slots=8\n")
    (folder / "waits.py").write_text(FAR)
    (folder / "run").mkdir()
    served = stage(folder / "run")
    scene = await served.__aenter__()
    job = Job(script="waits.py", arguments=(str(folder),), folder=str(folder))
    pool = SshPool(Watched(folder / "hosts"), ticket=scene.ticket, job=job, logs=folder / "run")

    async def close() -> None:
        await pool.close()
        await served.__aexit__(None, None, None)

    await scene.until(pool.list, 60.0)
    return Entry(pool, lambda worker: (folder / worker).touch(), close)


POOLS = [pytest.param(fake, id="fake"), pytest.param(local, id="local", marks=pytest.mark.processes)]
FAR_POOLS = [pytest.param(ssh, id="ssh", marks=pytest.mark.processes)]
Make = Callable[..., Awaitable[Entry]]
every = pytest.mark.parametrize("make", [*POOLS, *FAR_POOLS])
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
    found: list[Event] = []
    while len(found) < number:
        happened = await asyncio.wait_for(pool.events(), 30)
        found += [event for event in happened if not isinstance(event, Seen)]
    return found


@every
def test_workers_start_on_its_hosts_and_end_each_told_once(make: Make, tmp_path: Path) -> None:
    async def scenario(entry: Entry) -> None:
        pool = entry.pool
        host, *others = [host.name for host in pool.list()]
        assert len({host, *others}) == 1 + len(others)
        for worker in ("w1", "w2"):
            pool.start(worker, host)
        assert set(await events(pool, 2)) == {Started("w1", host), Started("w2", host)}
        entry.end("w1")
        assert await events(pool, 1) == [Gone("w1", "exited with code 0")], "and w2 goes on"
        pool.stop("w2")
        assert await events(pool, 1) == [Gone("w2", "killed by signal 9")]
        for worker in ("w1", "w2", "nobody"):
            pool.stop(worker)  # no error
        pool.start("w3", host)
        assert await events(pool, 1) == [Started("w3", host)], "and nothing of the others"
        pool.stop("w3")
        assert await events(pool, 1) == [Gone("w3", "killed by signal 9")]

    play(lambda: make(tmp_path, able=True), scenario)


@every_near
def test_a_start_that_fails_is_told_as_that_and_leaves_room(make: Make, tmp_path: Path) -> None:
    async def scenario(entry: Entry) -> None:
        pool = entry.pool
        for worker in ("w1", "w2"):
            pool.start(worker, pool.list()[0].name)
            [failed] = await events(pool, 1)
            assert isinstance(failed, StartFailed)
            assert failed.worker == worker
            assert "no such" in failed.reason.lower()
            pool.stop(worker)  # no error

    play(lambda: make(tmp_path, able=False), scenario)
