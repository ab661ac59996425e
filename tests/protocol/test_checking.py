"""What a worker owes, and what its word says, of shards that two compute."""

from __future__ import annotations

import pytest

from farandole.plan.shards import Check
from farandole.protocol.messages import NO_DIGESTS, Resume, RunTerms, Stop, Stopped
from farandole.protocol.view import CommitMessage, Lineage, View, unlike
from farandole.protocol.worker.state_machine import Checking, WorkerStateMachine
from tests.support.mentioned import mentions

SEEN = ("the loss",)
VIEW = View(number=1, members=("a", "b", "c"), group=1)
LINEAGE = Lineage(sets=(("a", "b", "c"),))


def checking(worker: str, view: View = VIEW, **terms: float) -> tuple[WorkerStateMachine, Checking]:
    member = WorkerStateMachine(worker)
    member.view, member._admission_pending = view, True
    return member, Checking(member, RunTerms(wanted=3, **terms))  # type: ignore[arg-type]


def test_a_holder_says_what_it_has_found_once_all_of_it_is_there() -> None:
    member, mine = checking("a", audit=1.0)
    mine.arrange(LINEAGE, 6, 0)
    assert [shard for shard in range(6) if mine.concerns(shard)] == [0, 1]
    mine.on_digests(0, SEEN, (1,))
    assert member.own_results == NO_DIGESTS
    mine.on_digests(1, SEEN, (2,))
    first, second = member.own_results.names
    assert mentions(first, "shard 0")
    assert mentions(second, "shard 1")
    assert member.own_results.digests == (1, 2)
    assert member.own_results.number > 0


def test_who_proves_itself_is_known_alike_to_all_whatever_round_they_were_in() -> None:
    """One that had not ended the last step, and one that had, go on with the same round."""
    view = View(number=2, members=("a", "b", "c"), group=1, unchecked=("b",))
    for behind in (False, True):
        member, _ = checking("b")
        member.phase, member.synced, member.computes_step = "stopped", True, True
        member.round, member.has_result = (6, True) if behind else (7, False)
        member.on_message(Resume(view=view, round=7, commit=False, lineage=LINEAGE))
        assert (member.round, member.unchecked) == (7, ("b",))


@pytest.mark.parametrize(("trains", "unchecked"), [(False, ("b",)), (True, ())])
def test_an_idle_round_proves_nothing(trains: bool, unchecked: tuple[str, ...]) -> None:
    member, _ = checking("b", View(number=1, members=("a", "b"), group=1, unchecked=("b",)))
    member.phase, member.synced, member.computes_step = "member", True, trains
    assert member.end_round([CommitMessage(view=1, round=0, prepared=0, compute_us=0, shards=0)] * 2)
    assert member.unchecked == unchecked


def test_a_checker_owes_all_of_it_before_its_word() -> None:
    member, mine = checking("b", audit=1.0)
    mine.arrange(LINEAGE, 6, 0)
    first, second = mine.checks_left()
    mine.on_check(first, SEEN, (1,))
    assert mine.checks_left() == (second,)
    assert member.check_results == NO_DIGESTS
    mine.on_check(second, SEEN, (2,))
    assert mine.checks_left() == ()
    assert member.check_results.owner != "b"


def test_who_finds_the_same_says_the_same_and_who_does_not_does_not() -> None:
    words = {}
    for worker, digest in (("a", 1), ("b", 1), ("c", 2)):
        member, mine = checking(worker)
        mine.arrange(Lineage(sets=LINEAGE.sets, rechecks=(("b", (0,)), ("c", (0,)))), 3, 0)
        (mine.on_digests if worker == "a" else mine.on_check)(0, SEEN, (digest,))
        checks = member.checks
        words[worker] = CommitMessage(
            view=1,
            round=0,
            prepared=0,
            compute_us=0,
            shards=1,
            own_results=member.own_results.number,
            check_results=member.check_results.number,
        )
    assert unlike(checks, words) == (Check(owner="a", checker="c", shards=(0,)),)


def test_what_has_been_found_is_kept_when_the_round_is_done_again_and_no_longer() -> None:
    member, mine = checking("b", View(number=1, members=("a", "b"), joining=("b",), group=1, unchecked=("b",)))
    mine.arrange(LINEAGE, 3, 0)
    assert mine.checks_left() == (0,)
    mine.on_check(0, SEEN, (1,))
    mine.arrange(Lineage(sets=(("a", "b", "c"), ("a", "b"))), 3, 0)
    assert mine.checks_left() == ()
    assert member.check_results.digests == (1,)
    mine.begin()
    mine.arrange(LINEAGE, 3, 1)
    assert mine.checks_left() == (0,)


def test_everyone_says_whose_results_are_compared() -> None:
    """Also one that is neither: it may be the only one that is left."""
    view = View(number=1, members=("a", "b", "c"), group=1, unchecked=("b",))
    for worker in view.members:
        member, mine = checking(worker, view)
        mine.arrange(LINEAGE, 3, 0)
        (report,) = member.on_message(Stop(stop=1))
        assert isinstance(report, Stopped)
        assert set(report.compared) == {"a", "b"}
        mine.arrange(LINEAGE, 0, 0)
        (report,) = member.on_message(Stop(stop=2))
        assert isinstance(report, Stopped)
        assert report.compared == ()


@pytest.mark.parametrize("undecided", [True, False])
def test_two_that_nobody_can_tell_apart_check_each_other_no_more(undecided: bool) -> None:
    _, mine = checking("a", View(number=1, members=("a", "b"), group=1, undecided=undecided), audit=1.0)
    mine.arrange(Lineage(sets=(("a", "b"),)), 4, 0)
    assert bool(mine.checks_left()) is not undecided


def test_a_round_that_is_no_step_proves_nothing() -> None:
    member, mine = checking("b", View(number=1, members=("a", "b"), joining=("b",), group=1, unchecked=("b",)))
    mine.arrange(LINEAGE, 0, 0)
    assert member.checks == ()


def test_who_is_to_prove_itself_is_until_a_step_has_ended_in_the_view() -> None:
    view = View(number=3, members=("a", "b"), group=1, unchecked=("b",))
    member, _ = checking("a")
    member.phase, member.round, member._admission_pending = "member", 7, False
    member.on_message(Resume(view=view, round=7, commit=False, lineage=LINEAGE))
    assert member.unchecked == ("b",), "stopped, and done again"
    for trains, left in ((False, ("b",)), (True, ())):
        member.computes_step = trains
        words = [CommitMessage(view=3, round=member.round, prepared=0, compute_us=0, shards=1)] * 2
        assert member.end_round(words)
        assert member.unchecked == left
