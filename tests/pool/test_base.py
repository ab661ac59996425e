"""What a pool does about a roster: the decision as a truth table, the keeper over time, and both behind a server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from farandole.control.ticket import Ticket, new_secret
from farandole.coordinator.journal import Journal
from farandole.coordinator.server import Server
from farandole.errors import CoordinatorUnreachable
from farandole.membership import messages as m
from farandole.membership.messages import Roster
from farandole.membership.records import RunSettings
from farandole.membership.terms import RunTerms
from farandole.pool.base import GRACE_S, LONGEST_S, QUIET_S, Decision, Keeper, decide, keep, pause
from farandole.pool.fake import FakePool
from tests.support.scene import Scene

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
    (Roster(wanted=0, over=0, present=("w1",)), ("w1",), (), 0, (), "over: they exit by themselves"),
    (Roster(wanted=0, over=0, present=("w1",)), ("w1", "w2"), (), 0, ("w2",), "over, and one is only starting"),
    (Roster(wanted=0, over=0, released=("w1",)), ("w1",), ("w1",), 0, (), "over, and one was let go before"),
    (Roster(wanted=2, over=1, evicted=("w1",), present=("w1",)), ("w1",), (), 0, ("w1",), "over, and one is frozen"),
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
    keep_.exited("w3", 7.0)
    keep_.act(7.0)  # nobody is left who could be disturbed
    assert pool.started == ["w1", "w2", "w3", "w4", "w5"]
    assert keep_.running == ["w4", "w5"]


@pytest.mark.parametrize(
    ("losses", "others", "seconds", "remark"),
    [
        (0, True, QUIET_S, "an accident: the others recover first"),
        (0, False, 0.0, "nobody is left who could be disturbed"),
        (1, True, QUIET_S, "the first of a row looks like an accident"),
        (1, False, QUIET_S, "the coordinator's count may be on its way"),
        (2, False, 2 * QUIET_S, "again in the same place"),
        (3, True, 4 * QUIET_S, "and again"),
        (6, False, 32 * QUIET_S, "a pool does not know when it is to end"),
        (100, False, LONGEST_S, "no longer than this"),
    ],
)
def test_how_long_a_replacement_waits(losses: int, others: bool, seconds: float, remark: str) -> None:
    assert pause(losses, others=others) == seconds, remark


def test_replacements_in_a_row_of_losses_come_slower_and_slower() -> None:
    keep_, pool = keeper()
    keep_.update(Roster(wanted=1), 0)
    keep_.exited("w1", 10)
    keep_.act(10)
    assert pool.started == ["w1", "w2"], "at once, the first time"
    keep_.update(Roster(wanted=1, losses=1), 10)
    keep_.exited("w2", 20)
    keep_.act(20)
    keep_.update(Roster(wanted=1, losses=2), 20.01)  # the count comes after the exit
    keep_.act(20 + 2 * QUIET_S - 0.1)
    assert pool.started == ["w1", "w2"]
    keep_.act(20 + 2 * QUIET_S)
    assert pool.started == ["w1", "w2", "w3"]
    keep_.update(Roster(wanted=1), 30)  # it got further
    keep_.exited("w3", 30)
    keep_.act(30)
    assert pool.started == ["w1", "w2", "w3", "w4"]


def test_a_leaver_that_does_not_exit_is_killed_after_its_grace() -> None:
    keep_, pool = keeper()
    keep_.update(Roster(wanted=2), 0)
    keep_.update(Roster(wanted=2, leaving=("w1",)), 100)
    keep_.act(100 + 10 * GRACE_S)
    assert pool.killed == [], "it may take as long as it needs to leave the view"
    assert pool.started == ["w1", "w2", "w3"]
    keep_.update(Roster(wanted=2, released=("w1",)), 300)
    keep_.act(300 + GRACE_S - 1)
    assert pool.killed == []
    keep_.act(300 + GRACE_S + 1)
    assert pool.killed == ["w1"]
    assert pool.started == ["w1", "w2", "w3"], "its replacement was there already"


def test_when_the_run_is_over_processes_get_a_grace_and_nothing_is_started() -> None:
    keep_, pool = keeper()
    keep_.update(Roster(wanted=2), 0)
    keep_.update(Roster(wanted=0, over=0, present=("w1", "w2")), 10)
    keep_.exited("w2", 11)
    assert (pool.started, pool.killed, keep_.done) == (["w1", "w2"], [], False)
    keep_.act(10 + GRACE_S + 1)
    assert pool.killed == ["w1"]
    keep_.exited("w1", 30)
    assert keep_.done


class Stage:
    """A pool, kept for a run whose coordinator comes and goes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.secret = new_secret()
        self.pool = FakePool()
        self.seen: list[Roster] = []
        self.server: Server
        self.ticket: Ticket
        self.keeping: asyncio.Task[Roster]
        self._port = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        """A coordinator, at the address of the one before."""
        self._journal = Journal(self.folder)
        known = self._journal.books()
        self.server = Server(RunSettings(run="r", wanted=2), secret=self.secret, journal=self._journal, known=known)
        address = await self.server.start(port=self._port)
        self._port = urlsplit(address).port or 0
        self.ticket = Ticket(address=address, secret=self.secret, run="r")
        self._tasks.append(asyncio.create_task(self.server.serve()))

    async def end(self) -> None:
        """It is gone; it says nothing."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.server.close()
        self._journal.close()

    def gone(self) -> list[str]:
        """Whose exits the coordinator knows of."""
        return sorted(self.server.coordinator.gone)


Scenario = Callable[[Stage], Awaitable[None]]


def play(folder: Path, scenario: Scenario) -> None:
    async def perform() -> None:
        stage = Stage(folder)
        await stage.begin()
        stage.keeping = asyncio.create_task(keep(stage.pool, stage.ticket, stage.seen.append))
        try:
            await scenario(stage)
        finally:
            stage.keeping.cancel()
            await asyncio.gather(stage.keeping, return_exceptions=True)
            await stage.end()

    asyncio.run(perform())


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_keep_follows_the_coordinator_to_the_end(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        server, pool, seen = stage.server, stage.pool, stage.seen
        await until(lambda: pool.started == ["w1", "w2"])
        pool.exit("w1")
        await until(lambda: pool.started == ["w1", "w2", "w3"])
        server.coordinator.hello(m.Hello(kind="worker", worker="w2", pool="fake"), server.now())
        nonsense = m.Welcome(run="", worker="", folder="", terms=RunTerms(), lines=(-1, 0))
        server.coordinator.receive("w2", nonsense, server.now())
        server.flush()
        await until(lambda: pool.killed == ["w2"])  # evicted for that
        await until(lambda: pool.started == ["w1", "w2", "w3", "w4"])
        for worker in ("w3", "w4"):
            server.coordinator.hello(m.Hello(kind="worker", worker=worker, pool="fake"), server.now())
        server.coordinator.stop("enough", 9, server.now())
        server.flush()
        await until(lambda: seen[-1].over == 9)
        for worker in ("w3", "w4"):
            pool.exit(worker)
        roster = await stage.keeping
        assert (roster.over, roster.reason) == (9, "enough")

    play(tmp_path, scenario)


def test_a_dead_coordinator_is_waited_for(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        pool = stage.pool
        await until(lambda: pool.started == ["w1", "w2"])
        pool.exit("w1")
        await until(lambda: stage.gone() == ["w1"])
        await until(lambda: pool.started == ["w1", "w2", "w3"])
        await stage.end()
        pool.exit("w2")
        await stage.begin()
        await until(lambda: stage.gone() == ["w1", "w2"])
        assert stage.server.coordinator.startup_failures == 2, "w1 was told again, and counts once"
        await until(lambda: pool.started == ["w1", "w2", "w3", "w4"])
        assert pool.killed == [], "the workers train on meanwhile"

    play(tmp_path, scenario)


def test_one_that_knows_nothing_is_told_all_exits(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        pool = stage.pool
        await until(lambda: pool.started == ["w1", "w2"])
        pool.exit("w1")
        await until(lambda: stage.gone() == ["w1"])
        await stage.end()
        for file in tmp_path.iterdir():
            file.unlink()
        await stage.begin()
        await until(lambda: stage.gone() == ["w1"])

    play(tmp_path, scenario)


def test_a_run_that_is_over_needs_no_coordinator_to_end_its_processes(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        pool = stage.pool
        await until(lambda: pool.started == ["w1", "w2"])
        stage.server.coordinator.hello(m.Hello(kind="worker", worker="w1", pool="fake"), stage.server.now())
        stage.server.coordinator.stop("enough", 9, stage.server.now())
        stage.server.flush()
        await until(lambda: stage.seen and stage.seen[-1].over == 9)
        await stage.end()
        await until(lambda: pool.killed == ["w2"])  # it was only starting
        pool.exit("w1")
        assert (await stage.keeping).over == 9

    play(tmp_path, scenario)


def test_a_coordinator_that_was_never_there_is_not_waited_for() -> None:
    nowhere = Ticket(address="http://127.0.0.1:1", secret=new_secret(), run="r")
    with pytest.raises(CoordinatorUnreachable, match="run r: no answer at http://127"):
        asyncio.run(keep(FakePool(), nowhere))


def test_a_cancelled_keep_ends_the_processes(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        pool, keeping = stage.pool, stage.keeping
        await until(lambda: pool.started == ["w1", "w2"])
        pool.exit("w1")  # told or not told yet: it must not be waited for twice
        keeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await keeping
        assert pool.killed[-1] == "w2" or pool.killed == ["w2", "w3"]

    play(tmp_path, scenario)


def test_a_second_pool_hears_of_its_own() -> None:
    scene = Scene(wanted=1, minimum=1)
    scene.hello("w1", pool="first")
    scene.hello("second-w2", pool="second")
    scene.coordinator.stop("enough", 9, scene.now)
    assert scene.coordinator.roster("second").present == ("second-w2",)
