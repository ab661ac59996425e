"""Under `--bits any` replicas may drift apart: it is told, and ends nothing."""

from __future__ import annotations

import pytest

from farandole.errors import UsageError
from farandole.protocol import messages as m
from farandole.protocol.messages import RunTerms
from farandole.protocol.view import CommitMessage, View
from farandole.protocol.worker.state_machine import EVERY, Drift, WorkerStateMachine
from tests.support.scene import trained

VIEW = View(number=1, members=("a", "b", "c"), group=1)


def member(*, tolerant: bool) -> WorkerStateMachine:
    it = WorkerStateMachine("a")
    it.phase, it.view, it.synced = "member", VIEW, True
    it.drift = Drift() if tolerant else None
    return it


def words(round_: int, *digests: int) -> list[CommitMessage]:
    return [
        CommitMessage(view=1, round=round_, prepared=0, compute_us=0, shards=1, digest=digest) for digest in digests
    ]


def test_the_round_ends_and_it_is_told_ever_more_seldom() -> None:
    it, told = member(tolerant=True), list[m.Message]()
    for round_ in range(10):
        it.step = round_
        assert it.end_round(words(round_, 5, 5, 7))
        told += it.report()  # type: ignore[arg-type]
    assert told == [m.Drifts(step=step, workers=("c",), times=step + 1) for step in (0, 1, 3, 7)]


@pytest.mark.failure(
    "External workers, pools and machines",
    "under `--bits any` the replica of an admitted worker drifts by the rounding of its optimizer",
)
def test_every_so_many_steps_the_longest_standing_one_gives_the_state_to_who_differs_from_it() -> None:
    drift = Drift()
    drift.on_step(VIEW, 5, {"a": 5, "b": 5, "c": 7})
    drift.on_step(VIEW, 6, {"a": 5, "b": 5, "c": 5})
    assert drift.renewal(VIEW, EVERY - 1) is None
    renewal = drift.renewal(VIEW, EVERY)
    assert renewal is not None
    assert (renewal.number, renewal.senders("any"), renewal.joining) == (1, ("a",), ("c",))
    assert drift.renewal(VIEW, 2 * EVERY) is None, "it has been done"
    drift.on_step(VIEW, EVERY, {"a": 5, "b": 7, "c": 7})
    renewal = drift.renewal(VIEW, 2 * EVERY)
    assert renewal is not None
    assert renewal.joining == ("b", "c"), "also where most differ from it"


@pytest.mark.parametrize(("bits", "who"), [("same", ("a", "b")), ("portable", ("a", "b")), ("any", ("a",))])
def test_all_who_hold_the_state_send_it_unless_they_may_hold_different_ones(bits: str, who: tuple[str, ...]) -> None:
    assert View(number=2, members=("a", "b", "c"), joining=("c",), group=2).senders(bits) == who


def test_what_was_seen_in_another_view_does_not_count() -> None:
    """Who has come in since has not seen it."""
    drift, next_ = Drift(), View(number=2, members=("a", "b", "c", "d"), group=2)
    drift.on_step(VIEW, 5, {"a": 5, "b": 5, "c": 7})
    assert drift.renewal(next_, EVERY) is None
    drift.on_step(next_, EVERY + 1, {"a": 5, "b": 7, "c": 5, "d": 5})
    renewal = drift.renewal(next_, 2 * EVERY)
    assert renewal is not None
    assert renewal.joining == ("b",)


def test_elsewhere_it_does_not_end() -> None:
    it = member(tolerant=False)
    assert not it.end_round(words(0, 5, 5, 7))
    assert it.report() == [m.Differs(step=0, workers=("c",))]


def test_it_is_one_event_for_all_who_say_so() -> None:
    scene = trained("a", "b", "c", bits="any")
    for worker in "abc":
        scene.say(worker, m.Drifts(step=7, workers=("c",), times=1))
    assert scene.events == ["drifting"]
    assert scene.fields["drifting"]["workers"] == ["c"]


def test_that_they_differ_is_no_reason_to_put_anyone_out() -> None:
    scene = trained("a", "b", bits="any")
    for worker in "ab":
        scene.say(worker, m.Differs(step=7, workers=("b",)))
    assert not scene.coordinator.stopping
    assert scene.coordinator.ending is None


def test_who_says_so_without_being_asked_is_not_heard() -> None:
    scene = trained("a", "b", "c")
    scene.say("a", m.Drifts(step=7, workers=("c",), times=1))
    assert scene.events == []


@pytest.mark.parametrize(("bits", "differs"), [("any", 0), ("same", 1)])
def test_the_end_with_other_states_is_a_failure_only_where_they_should_be_equal(bits: str, differs: int) -> None:
    scene = trained("a", "b", bits=bits)
    for worker in "ab":
        scene.say(worker, m.Finished(fingerprint=worker, view=1, round=9, step=9))
    assert scene.events.count("replicas differ") == differs
    assert not scene.fields["finished"]["equal"]
    assert scene.coordinator.ending is not None
    assert scene.coordinator.ending.failed is bool(differs)


def test_what_differs_in_any_case_is_not_audited() -> None:
    with pytest.raises(UsageError, match=r"--audit 0\.1\b.*--bits any"):
        RunTerms(bits="any", audit=0.1)
