"""Who was there, from when to when, and why: by hand-made events whose answer is known."""

from __future__ import annotations

from typing import Any

import pytest

from farandole.observe.story import WorkerSpan, WorkerSpans
from tests.support.metric_lines import made


def stays(*told: dict[str, Any]) -> WorkerSpans:
    found = WorkerSpans()
    for line in told:
        found.take(made(line))
    return found


def starting(worker: str, time: float) -> dict[str, Any]:
    return {"event": "starting", "worker": worker, "host": "h", "time": time}


def view(time: float, *members: str, **more: Any) -> dict[str, Any]:
    return {"event": "view", "members": members, "time": time, "cause": "why", **more}


BEGUN = (starting("w1", 1.0), starting("w2", 1.5), view(2.0, "w1", "w2"))


def test_one_comes_leaves_and_the_other_dies() -> None:
    found = stays(
        *BEGUN,
        {"event": "notice", "worker": "w1", "time": 5.0, "reason": "released"},
        view(6.0, "w2"),
        {"event": "left", "worker": "w1", "time": 6.5, "reason": "left gracefully"},
        {"event": "lost", "worker": "w2", "time": 9.0, "reason": "killed by signal 9"},
    )
    assert found.all == [
        WorkerSpan(
            worker="w1", host="h", came=1.0, entered=2.0, cause="why", notice=5.0, gone=6.5, how="left", why="released"
        ),
        WorkerSpan(
            worker="w2", host="h", came=1.5, entered=2.0, cause="why", gone=9.0, how="lost", why="killed by signal 9"
        ),
    ]
    assert found.last_gone is found.all[1]
    assert found.members == ("w2",), "until a view says so"


def test_who_never_got_in_is_none_that_left() -> None:
    found = stays(*BEGUN, starting("w3", 3.0), {"event": "exited", "worker": "w3", "time": 4.0, "reason": "no torch"})
    assert (found.all[2].how, found.all[2].entered, found.all[2].why) == ("failed", None, "no torch")
    assert found.last_gone is None


def test_the_end_of_the_run_ends_all() -> None:
    found = stays(*BEGUN, {"event": "over", "time": 7.0, "code": 0, "reason": "the script has run to its end"})
    assert [(stay.gone, stay.how) for stay in found.all] == [(7.0, "end"), (7.0, "end")]
    assert found.last_gone is None


def test_a_run_that_was_killed_whole_and_is_on_again() -> None:
    found = stays(
        *BEGUN, view(3.0, "w1", "w2"), starting("w1", 100.0), starting("w3", 100.5),
        {"event": "resumed", "worker": "w1", "time": 101.0, "step": 5, "path": "p"}, view(102.0, "w1", "w3"),
    )  # fmt: skip
    assert [(stay.worker, stay.came, stay.gone) for stay in found.all] == [
        ("w1", 1.0, 3.0), ("w2", 1.5, 3.0), ("w1", 100.0, None), ("w3", 100.5, None),
    ]  # fmt: skip
    assert [stay.how for stay in found.all] == ["lost", "lost", "", ""]


START = {"event": "run started"}
RESUMED = {"event": "resumed", "worker": "w3", "time": 102.0, "step": 5, "path": "p"}


@pytest.mark.failure("Processes, signals and crash loops", "a run resumes in its folder after it ended or was killed")
def test_who_ended_well_was_not_lost_when_the_run_goes_on_later() -> None:
    for start in ((), ({**START, "time": 99.0},)):  # an older version wrote no such line
        found = stays(
            *BEGUN, {"event": "over", "time": 7.0, "code": 0, "reason": "the script has run to its end"}, *start,
            starting("w3", 100.0), starting("w4", 100.5), view(101.0, "w3"), RESUMED, view(103.0, "w3", "w4"),
        )  # fmt: skip
        assert [(stay.worker, stay.gone, stay.how) for stay in found.all] == [
            ("w1", 7.0, "end"), ("w2", 7.0, "end"), ("w3", None, ""), ("w4", None, ""),
        ]  # fmt: skip
        assert found.last_gone is None


def test_who_waited_when_the_run_was_killed_is_gone_when_it_is_on_again() -> None:
    found = stays(*BEGUN, starting("w9", 3.0), {**START, "time": 99.0}, starting("w3", 100.0), view(101.0, "w3"))
    assert [(stay.worker, stay.gone, stay.how) for stay in found.all] == [
        ("w1", 2.0, "lost"), ("w2", 2.0, "lost"), ("w9", 2.0, "lost"), ("w3", None, ""),
    ]  # fmt: skip


def test_who_waits_when_the_state_is_lost_goes_on() -> None:
    lost = [{"event": "lost", "worker": "w1", "time": 5.0, "reason": "x"}, {"event": "state lost", "time": 5.0}]
    found = stays({**START, "time": 0.5}, *BEGUN, *lost, view(6.0, "w2"), {**RESUMED, "worker": "w2"})
    assert [(stay.worker, stay.how) for stay in found.all] == [("w1", "lost"), ("w2", "")]


def test_changes_name_what_is_new() -> None:
    found = stays(*BEGUN)
    before = len(found.changes)
    found.take(made({"event": "notice", "worker": "w2", "time": 5.0, "reason": "released"}))
    assert found.changes[before:] == [1]


def test_events_of_nobody_known_are_passed_over() -> None:
    found = stays(
        {"event": "lost", "worker": "w9", "time": 1.0, "reason": "x"},
        {"event": "notice", "worker": "w9", "time": 1.0, "reason": "x"},
        {"event": "left", "worker": "w9", "time": 1.0, "reason": "x"},
    )
    assert found.all == []
