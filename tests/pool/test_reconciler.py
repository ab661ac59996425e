"""What a pool is told to do: the decision as a truth table, and the reconciler over time with a fake pool."""

from __future__ import annotations

import pytest

from farandole.pool.base import Started, WorkerExited
from farandole.pool.reconciler import GRACE_S, LONGEST_S, QUIET_S, Decision, decide, restart_delay_s
from farandole.protocol import messages as m
from farandole.protocol.messages import Roster
from tests.support.kept import Play

DECISIONS = [
    # roster, running, earlier leaving workers, start, stop, remark
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


@pytest.mark.parametrize(("roster", "running", "out", "start", "stop", "remark"), DECISIONS)
def test_decide(
    roster: Roster, running: tuple[str, ...], out: tuple[str, ...], start: int, stop: tuple[str, ...], remark: str
) -> None:
    assert decide(roster, running, out) == Decision(start=start, stop=stop), remark


def test_ids_are_never_used_twice() -> None:
    play = Play()
    play.roster(wanted=2)
    for number, worker in enumerate(("w2", "w1", "w3")):
        play.exits(worker, 100.0 * number)
        play.at(100.0 * number + QUIET_S)
    assert play.pool.started == ["w1", "w2", "w3", "w4", "w5"]


def test_a_resumed_run_counts_on_and_ids_carry_the_pools_mark() -> None:
    play = Play(count=5)
    play.roster(wanted=2, mark="there-")
    assert play.pool.started == ["there-w6", "there-w7"]


def test_a_lost_worker_is_replaced_after_the_others_recovery() -> None:
    play = Play()
    play.roster(wanted=2)
    play.exits("w1", 5.0)
    play.at(5.0 + QUIET_S / 2)
    assert play.pool.started == ["w1", "w2"]
    play.at(5.0 + QUIET_S)
    assert play.pool.started == ["w1", "w2", "w3"]
    play.pool.exit("w2")
    play.exits("w3", 7.0)  # nobody is left who could be disturbed
    assert play.pool.started == ["w1", "w2", "w3", "w4", "w5"]
    assert play.reconciler.running == ["w4", "w5"]


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
    assert restart_delay_s(losses, others=others) == seconds, remark


@pytest.mark.failure(
    "Processes, signals and crash loops",
    "all workers die at the same step after every restart (a broken library, a sample that crashes, too little memory)",
)
def test_replacements_in_a_row_of_losses_come_slower_and_slower() -> None:
    play = Play()
    play.roster(wanted=1)
    play.exits("w1", 10)
    assert play.pool.started == ["w1", "w2"], "at once, the first time"
    play.roster(wanted=1, losses=1)
    play.pool.exit("w2")
    play.reconciler.on_event(play.pool.waiting()[-1], 20)
    play.roster(20.01, wanted=1, losses=2)  # the count comes after the exit
    play.at(20 + 2 * QUIET_S - 0.1)
    assert play.pool.started == ["w1", "w2"]
    play.at(20 + 2 * QUIET_S)
    assert play.pool.started == ["w1", "w2", "w3"]
    play.roster(30, wanted=1)  # it got further
    play.exits("w3", 30)
    assert play.pool.started == ["w1", "w2", "w3", "w4"]


def test_a_leaving_worker_that_does_not_exit_is_stopped_after_its_grace() -> None:
    play = Play()
    play.roster(wanted=2)
    play.roster(100, wanted=2, leaving=("w1",))
    play.at(100 + 10 * GRACE_S)
    assert play.pool.stopped == [], "it may take as long as it needs to leave the view"
    assert play.pool.started == ["w1", "w2", "w3"]
    play.roster(300, wanted=2, released=("w1",))
    play.roster(300 + GRACE_S - 1, wanted=2, released=("w1",))  # said again
    assert play.pool.stopped == []
    play.at(300 + GRACE_S + 1)
    assert play.pool.stopped == ["w1"]
    assert play.pool.started == ["w1", "w2", "w3"], "its replacement was there already"


def test_when_the_run_is_over_workers_get_a_grace_and_nothing_is_started() -> None:
    play = Play()
    play.roster(wanted=2)
    play.roster(10, wanted=0, over=0, present=("w1", "w2"))
    play.exits("w2", 11)
    play.roster(10 + GRACE_S - 1, wanted=0, over=0, present=("w1",))
    assert (play.pool.started, play.pool.stopped, play.reconciler.is_done) == (["w1", "w2"], [], False)
    play.at(10 + GRACE_S + 1)
    assert play.pool.stopped == ["w1"]
    assert play.reconciler.is_done


def test_what_is_told_twice_or_of_nobody_counts_once_or_not_at_all() -> None:
    play = Play()
    play.roster(wanted=1)
    play.exits("w1", 100)
    play.pool.repeat(WorkerExited("w1", "exited with code 1"))
    play.pool.repeat(WorkerExited("x1", "exited with code 1"))
    play.at(200)
    assert play.told(m.WorkerProcessExited) == [m.WorkerProcessExited(worker="w1", reason="exited with code 1")]
    play.pool.repeat(Started("w2", "here"))
    play.act()
    assert play.reconciler.running == ["w2"]
    assert play.pool.stopped == []


def test_nothing_is_done_before_the_first_roster() -> None:
    assert not Play().act().pool.started
