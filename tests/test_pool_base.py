"""What a pool does about a roster: the decision as a truth table, the keeper over time, and both behind a server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import pytest

from farandole.control.journal import Journal
from farandole.control.server import Server
from farandole.control.ticket import Ticket, new_secret
from farandole.errors import CoordinatorUnreachable
from farandole.membership import messages as m
from farandole.membership.messages import Roster
from farandole.membership.records import RunSettings
from farandole.pool.base import GRACE_S, QUIET_S, Decision, Keeper, decide, keep
from farandole.pool.fake import FakePool

pytestmark = pytest.mark.timeout(60)
DECISIONS = [
    # roster, running, earlier leavers, start, kill, remark
    (Roster(wanted=2), (), (), 2, (), "a run begins"),
    (Roster(wanted=2), ("w1", "w2"), (), 0, (), "as wanted"),
    (Roster(wanted=3), ("w1", "w2"), (), 1, (), "scaled up, or one has exited"),
    (Roster(wanted=1), ("w1", "w2"), (), 0, (), "too many: the coordinator says who leaves, not the pool"),
    (Roster(wanted=2, leaving=("w1",)), ("w1", "w2"), (), 1, (), "notice: replaced before it is gone"),
    (Roster(wanted=1, leaving=("w1",)), ("w1", "w2"), (), 0, (), "released: not replaced"),
    (Roster(wanted=2), ("w1", "w2"), ("w1",), 1, (), "has left, its process is still there"),
    (Roster(wanted=2, evicted=("w2",)), ("w1", "w2"), (), 1, ("w2",), "evicted: killed and replaced"),
    (Roster(wanted=2, evicted=("w2",)), ("w1", "w3"), (), 0, (), "evicted long ago"),
    (Roster(wanted=2, evicted=("x1",)), ("w1", "w2"), (), 0, (), "not ours: never touched"),
    (Roster(wanted=0), ("w1",), (), 0, (), "ending: no replacements"),
    (Roster(wanted=0, over=0), ("w1",), (), 0, (), "over: they exit by themselves"),
    (Roster(wanted=2, over=1, evicted=("w1",)), ("w1",), (), 0, ("w1",), "over, and one is frozen"),
]


@pytest.mark.parametrize(("roster", "running", "out", "start", "kill", "remark"), DECISIONS)
def test_decide(
    roster: Roster, running: tuple[str, ...], out: tuple[str, ...], start: int, kill: tuple[str, ...], remark: str
) -> None:
    assert decide(roster, running, out) == Decision(start=start, kill=kill), remark


def keeper() -> tuple[Keeper, FakePool]:
    pool = FakePool()
    return Keeper(pool), pool


def test_ids_are_never_used_twice() -> None:
    keep_, pool = keeper()
    keep_.update(Roster(wanted=2), 0)
    for worker in ("w2", "w1", "w3"):
        keep_.exited(worker, 0)
        keep_.act(QUIET_S)
    assert pool.started == ["w1", "w2", "w3", "w4", "w5"]


def test_a_resumed_run_counts_on() -> None:
    pool = FakePool()
    Keeper(pool, 5).update(Roster(wanted=2), 0)
    assert pool.started == ["w6", "w7"]


def test_a_lost_worker_is_replaced_after_the_others_recovery() -> None:
    keep_, pool = keeper()
    keep_.update(Roster(wanted=2), 0)
    keep_.exited("w1", 5.0)
    keep_.act(5.0 + QUIET_S / 2)
    assert pool.started == ["w1", "w2"]
    keep_.act(5.0 + QUIET_S)
    assert pool.started == ["w1", "w2", "w3"]
    keep_.exited("w2", 7.0)
    keep_.exited("w3", 7.0)  # nobody is left who could be disturbed
    assert pool.started == ["w1", "w2", "w3", "w4", "w5"]
    assert keep_.running == ["w4", "w5"]


def test_a_leaver_that_does_not_exit_is_killed_after_its_grace() -> None:
    keep_, pool = keeper()
    keep_.update(Roster(wanted=2), 0)
    keep_.update(Roster(wanted=2, leaving=("w1",)), 100)
    keep_.act(100 + 10 * GRACE_S)
    assert pool.killed == [], "it may take as long as it needs to leave the view"
    assert pool.started == ["w1", "w2", "w3"]
    keep_.update(Roster(wanted=2), 300)  # it has been let go
    keep_.act(300 + GRACE_S - 1)
    assert pool.killed == []
    keep_.act(300 + GRACE_S + 1)
    assert pool.killed == ["w1"]
    assert pool.started == ["w1", "w2", "w3"], "its replacement was there already"


def test_when_the_run_is_over_processes_get_a_grace_and_nothing_is_started() -> None:
    keep_, pool = keeper()
    keep_.update(Roster(wanted=2), 0)
    keep_.update(Roster(wanted=0, over=0), 10)
    keep_.exited("w2", 11)
    assert (pool.started, pool.killed, keep_.done) == (["w1", "w2"], [], False)
    keep_.act(10 + GRACE_S + 1)
    assert pool.killed == ["w1"]
    keep_.exited("w1", 30)
    assert keep_.done


seen: list[Roster] = []
Scenario = Callable[[Server, Ticket, FakePool, "asyncio.Task[Roster]"], Awaitable[None]]


def play(folder: Path, scenario: Scenario) -> None:
    async def perform() -> None:
        secret = new_secret()
        with closing(Journal(folder)) as journal:
            server = Server(RunSettings(run="r", wanted=2), secret=secret, journal=journal)
            ticket = Ticket(address=await server.start(), secret=secret, run="r")
            pool = FakePool()
            seen.clear()
            serving = asyncio.create_task(server.serve())
            keeping = asyncio.create_task(keep(pool, ticket, seen.append))
            try:
                await scenario(server, ticket, pool, keeping)
            finally:
                for task in (serving, keeping):
                    task.cancel()
                await asyncio.gather(serving, keeping, return_exceptions=True)
                await server.close()

    asyncio.run(perform())


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_keep_follows_the_coordinator_to_the_end(tmp_path: Path) -> None:
    async def scenario(server: Server, ticket: Ticket, pool: FakePool, keeping: asyncio.Task[Roster]) -> None:
        del ticket
        await until(lambda: pool.started == ["w1", "w2"])
        pool.exit("w1")
        await until(lambda: pool.started == ["w1", "w2", "w3"])
        server.coordinator.hello(m.Hello(kind="worker", worker="w2", pool="fake"), server.now())
        server.coordinator.receive("w2", m.Welcome(run="", worker="", folder="", seed=0, threads=1, minimum=1,
                                                   heartbeat_s=1, stall_s=1), server.now())  # fmt: skip
        server.flush()
        await until(lambda: pool.killed == ["w2"])  # evicted for that
        await until(lambda: pool.started == ["w1", "w2", "w3", "w4"])
        server.coordinator.stop("enough", 9, server.now())
        server.flush()
        await until(lambda: seen[-1].over == 9)
        for worker in ("w3", "w4"):
            pool.exit(worker)
        roster = await keeping
        assert (roster.over, roster.reason) == (9, "enough")

    play(tmp_path, scenario)


def test_a_dead_coordinator_ends_the_processes(tmp_path: Path) -> None:
    async def scenario(server: Server, ticket: Ticket, pool: FakePool, keeping: asyncio.Task[Roster]) -> None:
        await until(lambda: pool.started == ["w1", "w2"])
        await server.close()
        with pytest.raises(CoordinatorUnreachable, match=f"run r: the coordinator at {ticket.address} has gone"):
            await keeping
        assert sorted(pool.killed) == ["w1", "w2"]

    play(tmp_path, scenario)


def test_a_cancelled_keep_ends_the_processes(tmp_path: Path) -> None:
    async def scenario(server: Server, ticket: Ticket, pool: FakePool, keeping: asyncio.Task[Roster]) -> None:
        del server, ticket
        await until(lambda: pool.started == ["w1", "w2"])
        pool.exit("w1")  # told or not told yet: it must not be waited for twice
        keeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await keeping
        assert pool.killed[-1] == "w2" or pool.killed == ["w2", "w3"]

    play(tmp_path, scenario)
