"""Pauses are read off the metrics: by hand-made runs whose answer is known."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from farandole.observe.summary import Pause, pauses
from farandole.protocol import events
from farandole.protocol.metrics import Line
from tests.support.mentioned import mentions
from tests.support.metric_lines import an, step_line


def steps(first: int, last: int, start: float, gap: float = 0.1) -> list[Line]:
    return [step_line(n, time=start + (n - first) * gap) for n in range(first, last + 1)]


def view(number: int, time: float, members: str, step: int, cause: str = "why", **more: Any) -> Line:
    return an(
        events.ViewEvent, view=number, time=time, members=tuple(members.split()), step=step, cause=cause, **more
    )  # fmt: skip


def proposed(number: int, time: float) -> Line:
    return an(events.ProposedEvent, view=number, time=time)


FIRST = [proposed(1, 0.0), view(1, 0.5, "w1 w2", 0)]


def only(lines: list[Line]) -> Pause:
    [pause] = pauses(lines)
    return pause


def test_a_join_that_costs_nothing() -> None:
    lines = [*FIRST, *steps(1, 10, 1.0), proposed(2, 1.91), view(2, 2.35, "w1 w2 w3", 14), *steps(11, 30, 2.0)]
    pause = only(lines)
    assert (pause.kind, pause.view, pause.cause, pause.step) == ("join", 2, "why", 14)
    assert pause.pause_ms == pytest.approx(0, abs=0.01)


def test_a_slow_step_in_the_two_after_a_leave_counts() -> None:
    # steps 1-13 at 0.1 s, 14 after 0.4 s, on at 0.1 s; the view changes at step 12
    lines = [*FIRST, proposed(2, 2.0), *steps(1, 13, 1.0), view(2, 2.15, "w1", 12), *steps(14, 30, 2.6)]
    pause = only(lines)
    assert pause.kind == "leave"
    assert pause.pause_ms == pytest.approx(300)


def test_a_slow_step_far_from_the_change_does_not_count() -> None:
    lines = [*FIRST, *steps(1, 3, 0.1), *steps(4, 20, 1.0), proposed(2, 1.55), view(2, 1.65, "w1", 10),
             *steps(21, 40, 9.0)]  # fmt: skip
    assert only(lines).pause_ms == pytest.approx(0, abs=0.01)


def test_a_crash_counts_from_its_first_loss() -> None:
    lost = an(events.LostEvent, worker="w2", time=1.95)
    recovery = view(2, 2.0, "w1", 10, outcome="redo")
    pause = only([*FIRST, *steps(1, 10, 1.0), lost, recovery, *steps(11, 30, 2.15)])
    assert (pause.kind, pause.step) == ("crash", 10)
    assert pause.pause_ms == pytest.approx(150)


def test_a_crash_before_a_planned_switch_is_a_crash() -> None:
    lost = an(events.LostEvent, worker="w2", time=1.95)
    lines = [*FIRST, *steps(1, 10, 1.0), proposed(2, 1.92), lost, view(3, 2.0, "w1", 10, outcome="commit"),
             *steps(11, 30, 2.0)]  # fmt: skip
    assert [p.kind for p in pauses(lines)] == ["crash"]


def test_lost_candidates_do_not_open_a_crash() -> None:
    other = an(events.LostEvent, worker="w7", time=0.9)
    lost = an(events.LostEvent, worker="w2", time=3.95)
    slow_start = [step_line(0, time=0.0), *steps(1, 30, 1.0)]  # a gap of 1 s while w7 died
    recovery = view(2, 4.0, "w1", 30, outcome="redo")
    assert only([*FIRST, other, *slow_start, lost, recovery, *steps(31, 50, 4.0)]).pause_ms == pytest.approx(0, abs=0.1)


def test_first_views_and_the_last_one_have_no_pause() -> None:
    again = [an(events.StateLostEvent, time=3.0), proposed(2, 3.0), view(2, 3.1, "w3", 0)]
    stop = [proposed(3, 9.0), view(3, 9.1, "", 20)]
    assert pauses([*FIRST, *steps(1, 10, 1.0), *again, *steps(1, 20, 4.0), *stop]) == []


def test_nothing_to_measure() -> None:
    assert pauses([]) == []
    assert pauses([*FIRST, proposed(2, 1.0), view(2, 1.1, "w1", 0)]) == []


FURTHER = [an(events.ResumedEvent, time=231.1, step=11), proposed(2, 231.2), view(2, 231.4, "w5 w6", 12),
           *steps(11, 30, 231.3)]  # fmt: skip
ENDS = {
    "it ended": [an(events.OverEvent, time=2.1), an(events.RunStartedEvent, time=230.0)],
    "it was killed": [an(events.RunStartedEvent, time=230.0)],
    "it ended, and an older version wrote": [an(events.OverEvent, time=2.1)],
    "it was killed, and an older version wrote": [],
}


@pytest.mark.failure(
    "Processes, signals and crash loops",
    "a run resumes in its folder after it ended or was killed",
    seen=(
        "`run started` in `metrics.jsonl`; the time between is no pause, and counts only in the time since the first "
        "start"
    ),
    outcome="workers that ended well are not counted as lost; those of a killed run are",
)
@pytest.mark.parametrize("end", ENDS)
def test_the_time_between_two_starts_is_no_pause(end: str) -> None:
    again = [proposed(1, 230.5), view(1, 231.0, "w5", 11)]
    join = only([*FIRST, *steps(1, 10, 1.0), *ENDS[end], *again, *FURTHER])
    assert (join.kind, join.step) == ("join", 12)
    assert join.pause_ms == pytest.approx(0, abs=0.01)


def test_a_change_at_the_end_of_a_start_is_not_around_the_next_one() -> None:
    leave = [proposed(2, 1.8), view(2, 1.85, "w1", 10)]  # one more step was taken, and then it was killed
    again = [an(events.RunStartedEvent, time=230.0), proposed(1, 230.5), view(1, 231.0, "w5", 11)]
    first, join = pauses([*FIRST, *steps(1, 10, 1.0), *leave, *steps(11, 11, 2.0), *again, *FURTHER])
    assert (first.kind, join.kind) == ("leave", "join")
    assert first.pause_ms == pytest.approx(0, abs=0.01)


def test_an_evaluation_after_a_change_is_no_pause() -> None:
    lines = [*FIRST, *steps(1, 10, 1.0), proposed(2, 1.91), view(2, 2.35, "w1 w2 w3", 14)]
    slow = step_line(11, time=22.0, seconds=20.1, evaluation_s=15.0, once_s=5.0)
    assert only([*lines, slow, *steps(12, 30, 22.1)]).pause_ms == pytest.approx(0, abs=1)


WORDS = [
    ([an(events.LostEvent, worker="w1", reason="gone", time=1.95), view(2, 2.0, "w2 w3", 10, outcome="redo"),
      an(events.DiedEvent, worker="w1", reason="killed by signal 9")],
     ("w1", "killed", "step 10", "two")),
    ([an(events.LostEvent, worker="w1", reason="it stood still", time=1.95), view(2, 2.0, "w3", 10, outcome="commit")],
     ("w1", "it stood still", "w2", "why", "step 10", "one")),
    ([view(2, 2.0, "w1 w2 w3", 10, outcome="redo")], ("step 10", "why", "three")),
    ([proposed(2, 1.9), view(2, 2.0, "w1 w2 w3 w4", 10)], ("w4", "step 10", "four")),
    ([proposed(2, 1.9), an(events.LeftEvent, worker="w2", reason="released"), view(2, 2.0, "w1 w3", 10)],
     ("w2", "step 10", "released", "two")),
    ([proposed(2, 1.9), an(events.NoticeEvent, worker="w2", reason="SIGTERM"),
      an(events.LeftEvent, worker="w2", reason="left gracefully"), view(2, 2.0, "w1 w3", 10)],
     ("w2", "step 10", "SIGTERM", "two")),
    ([proposed(2, 1.9), view(2, 2.0, "w1 w3 w4", 10)], ("w4", "w2", "step 10", "three")),
    ([proposed(2, 1.9), view(2, 2.0, "w1 w2 w3", 10)], ("why", "step 10")),
]  # fmt: skip


@pytest.mark.parametrize(("change", "named"), WORDS)
def test_a_pause_says_what_happened(change: list[Line], named: tuple[str, ...]) -> None:
    first = [proposed(1, 0.0), view(1, 0.5, "w1 w2 w3", 0), *steps(1, 9, 1.0)]
    pause = only([*first, *change, *steps(10, 20, 2.1)])
    assert mentions(pause.words, *named)
    if any(isinstance(line, events.ViewEvent) and line.outcome == "redo" for line in change):
        held = [
            msgspec.structs.replace(line, outcome="commit") if isinstance(line, events.ViewEvent) else line
            for line in change
        ]
        assert only([*first, *held, *steps(10, 20, 2.1)]).words != pause.words, "that the step is done again is told"
