"""Whose lines of metrics go to the file, and when: rank 0's, each once, as soon as another one has got so far."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.control.status import describe
from farandole.platform.bounds import MAX_COUNT
from farandole.protocol import events
from farandole.protocol import messages as m
from farandole.protocol.coordinator import metric_lines
from farandole.protocol.kept_lines import append
from farandole.protocol.metrics import as_written, parse_line
from tests.support.metric_lines import logged, stepped
from tests.support.scene import Scene, trained, view_of

FAR = 10**6


def beat(scene: Scene, worker: str, step: int, *said: m.Line, view: int | None = None) -> None:
    """`worker` is in `step`, and says these lines."""
    number = scene.coordinator.view.number if scene.coordinator.view and view is None else view or 0
    scene.say(worker, m.Heartbeat(view=number, round=step, step=step, lines=said))


def steps(*numbers: int) -> tuple[m.Line, ...]:
    return tuple(stepped(number) for number in numbers)


def test_a_line_is_written_when_another_one_has_got_as_far() -> None:
    scene = trained("a", "b", "c")
    beat(scene, "a", 3, *steps(0, 1, 2))
    assert scene.lines == [*steps(0)], "everyone has switched in step 0"
    beat(scene, "c", 1)
    assert scene.lines == [*steps(0, 1)]
    beat(scene, "b", 3)
    assert scene.lines == [*steps(0, 1, 2)]
    beat(scene, "a", 4, stepped(3), logged(3, 1, accuracy=0.5))
    assert scene.lines == [*steps(0, 1, 2, 3), logged(3, 1, accuracy=0.5)], "b has said so before"


def test_a_worker_without_others_is_believed() -> None:
    scene = trained("a")
    beat(scene, "a", 3, *steps(0, 1, 2))
    assert scene.lines == [*steps(0, 1, 2)]
    scene.ready("b")  # asks in, and is in no view yet
    beat(scene, "a", 4, *steps(3))
    assert scene.lines == [*steps(0, 1, 2, 3)]


def test_nobody_but_rank_0_is_heard() -> None:
    scene = trained("a", "b", "c")
    scene.ready("d")
    scene.hello("guest", pool="")
    for worker in ("b", "c", "d", "guest"):
        beat(scene, worker, 9, *steps(0, 1, 2))
    beat(scene, "a", 9)
    assert scene.lines == []
    assert scene.coordinator.unwritten_lines == {}


def test_a_line_of_a_step_that_its_sender_is_not_in_is_none() -> None:
    scene = trained("a", "b")
    beat(scene, "b", 9)
    beat(scene, "a", 3, *steps(3, 4, 5))
    assert scene.lines == [*steps(3)]


@pytest.mark.parametrize("far", [FAR, 2**53])
def test_a_step_far_ahead_silences_nobody(far: int) -> None:
    """Said by rank 0, which then goes on as if nothing had been, and later leaves."""
    scene = trained("a", "b", "c")
    beat(scene, "a", far, stepped(far), logged(far, 2**53, text="forged"))
    beat(scene, "a", 2, *steps(0, 1))
    beat(scene, "b", 2)
    assert scene.lines == [*steps(0, 1)]
    assert scene.coordinator.unwritten_lines == {}
    beat(scene, "a", far, stepped(far))
    scene.lose("a")
    for worker in ("b", "c"):
        scene.report(worker, 2, view=view_of(1, "a", "b", "c", joining=("b", "c")))
    beat(scene, "b", 4, *steps(0, 1, 2, 3))
    beat(scene, "c", 4)
    assert scene.lines == [*steps(0, 1, 2, 3)]
    assert scene.coordinator.unwritten_lines == {}, "nothing of who is gone"


def test_a_member_that_says_it_is_far_makes_nobody_s_lines_count_but_rank_0_s() -> None:
    scene = trained("a", "b", "c")
    beat(scene, "b", FAR, *steps(FAR))
    beat(scene, "a", 3, *steps(1, 2))
    assert scene.lines == [*steps(1, 2)]


# --- hand-over ---------------------------------------------------------------------------------------------------


def test_the_last_lines_of_a_leaving_worker_count_and_so_do_the_next_one_s() -> None:
    scene = trained("a", "b", "c")
    scene.say("a", m.LeaveRequest(reason="SIGTERM"))
    view = scene.coordinator.proposed
    assert view is not None
    assert view.members == ("b", "c")
    scene.switch(view, 6, "b")
    beat(scene, "a", 5, *steps(3, 4, 5), view=1)  # still under way when the switch began
    assert scene.lines == [*steps(3, 4, 5)], "b has switched in step 6"
    beat(scene, "b", 7, *steps(4, 5, 6), view=view.number)
    scene.switch(view, 6, "c")
    assert scene.lines == [*steps(3, 4, 5, 6)]
    scene.switch(view, 6, "a")
    assert "a" not in scene.coordinator.workers
    beat(scene, "a", 9, *steps(9), view=1)
    beat(scene, "c", 9)
    assert scene.lines == [*steps(3, 4, 5, 6)]


def test_the_next_rank_0_may_be_heard_before_it_has_reported_the_switch() -> None:
    scene = trained("a", "b")
    scene.say("a", m.LeaveRequest(reason="SIGTERM"))
    view = scene.coordinator.proposed
    assert view is not None
    beat(scene, "b", 6, *steps(4, 5), view=view.number)
    beat(scene, "a", 6, view=1)
    assert scene.lines == [*steps(4, 5)]


def test_a_heartbeat_that_left_before_a_recovery_counts() -> None:
    """Of a view that nobody is in any more, from one that is rank 0 still."""
    scene = trained("a", "b", "c")
    scene.lose("c")
    for worker in ("a", "b"):
        scene.report(worker, 5)
    assert scene.coordinator.view
    assert scene.coordinator.view.number > 1
    beat(scene, "a", 5, *steps(3, 4), view=1)
    beat(scene, "b", 5, view=1)
    assert scene.lines == [*steps(3, 4)]


def test_lines_wait_no_longer_for_who_is_gone() -> None:
    scene = trained("a", "b")
    beat(scene, "a", 5, *steps(3, 4))
    scene.lose("b")
    scene.report("a", 5)
    assert scene.lines == [*steps(3, 4)]


def test_the_last_lines_of_all_count() -> None:
    scene = trained("a", "b")
    scene.say("a", m.Heartbeat(view=1, round=9, step=8, lines=steps(7, 8)), m.Finished(view=1, round=9, step=8))
    scene.say("b", m.Finished(view=1, round=9, step=8))
    assert scene.lines == [*steps(7, 8)]


def test_a_killed_coordinator_is_told_again_what_waited() -> None:
    scene = trained("a", "b")
    beat(scene, "a", 3, *steps(0, 1))
    beat(scene, "b", 1)
    beat(scene, "a", 3, stepped(2))
    assert scene.lines == [*steps(0, 1)]
    again = scene.restarted()
    again.coordinator.last_line = (1, 0)  # what the journal has
    again.back("a")
    assert again.last("a", m.Welcome).lines == (1, 0)
    beat(again, "a", 3, stepped(2))
    assert again.lines == [], "b is not back"
    again.back("b")
    beat(again, "b", 3)
    assert again.lines == [stepped(2)]


def test_where_the_state_is_lost_steps_count_from_the_beginning() -> None:
    scene = trained("a", "b")
    beat(scene, "a", 500, *steps(499))
    beat(scene, "b", 499)
    beat(scene, "a", 600, *steps(600))
    scene.lose("a")
    scene.lose("b")
    assert scene.coordinator.last_line == (-1, 0)
    assert scene.coordinator.unwritten_lines == {}


def test_who_has_lost_its_state_stands_for_nothing_until_it_is_in_a_view_again() -> None:
    """Its heartbeats still say in which step it was."""
    scene = trained("a", "b")
    beat(scene, "b", 500)
    scene.lose("a")
    scene.report("b", 500, synced=False)
    assert scene.last("b", m.ViewWithdrawn)
    scene.ready("c")
    view = scene.coordinator.proposed
    assert view is not None
    rank_0, other = view.members
    scene.switch(view, 0, rank_0, synced=False)
    beat(scene, other, 500, view=0)
    beat(scene, rank_0, 400, *steps(400), view=view.number)
    assert scene.lines == []


# --- bounds ------------------------------------------------------------------------------------------------------


def lost(scene: Scene) -> list[events.LinesLostEvent]:
    return [event for event in scene.recorded if isinstance(event, events.LinesLostEvent)]


def test_what_waits_is_bounded_and_what_is_left_out_is_counted() -> None:
    scene = trained("a", "b")
    for start in range(0, 2 * metric_lines.WAITING, m.MAX_LINES):
        beat(scene, "a", FAR, *steps(*range(start, start + m.MAX_LINES)))
    assert len(scene.coordinator.unwritten_lines["a"]) == metric_lines.WAITING + 1
    beat(scene, "b", FAR)
    left_out = 2 * metric_lines.WAITING - len(scene.lines)
    [event] = lost(scene)
    assert (event.worker, event.lines, event.step) == ("a", left_out, 2 * metric_lines.WAITING - 1)
    assert scene.coordinator.last_line == (2 * metric_lines.WAITING - 1, 0)


def test_what_a_worker_could_not_keep_is_said_where_it_stood() -> None:
    scene = trained("a", "b")
    missing = m.Line(step=3, index=7, fields=9)
    beat(scene, "b", 9)
    beat(scene, "a", 4, *steps(0, 1, 2), missing, logged(3, 8, n=1))
    beat(scene, "a", 4, missing)
    assert scene.lines == [*steps(0, 1, 2), logged(3, 8, n=1)]
    assert [(event.worker, event.lines, event.step, event.index) for event in lost(scene)] == [("a", 9, 3, 7)]


@pytest.mark.failure(
    "Files, disks and output",
    (
        "lines of metrics are lost: over 100,000 without a coordinator, rank 0 died beside a new joiner, all workers "
        "died, the disk was full"
    ),
)
@pytest.mark.parametrize(
    ("first", "then", "missing"),
    [(stepped(1), stepped(4), 2), (stepped(1), logged(2, 3, n=1), 3), (logged(1, 2, n=1), logged(1, 9, n=1), 6),
     (logged(1, 2, n=1), stepped(2), 0), (stepped(1), logged(1, 1, n=1), 0)],
)  # fmt: skip
def test_lines_that_nobody_who_is_left_has_are_missed(first: m.Line, then: m.Line, missing: int) -> None:
    """As where rank 0 dies beside a worker that has just joined."""
    scene = trained("a", "b")
    scene.coordinator.last_line = (first.step, first.index)
    beat(scene, "b", 9)
    beat(scene, "a", 9, then)
    assert scene.lines == [then]
    assert [event.lines for event in lost(scene)] == [missing] * (missing > 0)


def test_a_count_of_missing_lines_can_always_be_written() -> None:
    """What workers say is bounded each by itself; the sum may be beyond what a line can hold."""
    scene = trained("a", "b")
    beat(scene, "b", MAX_COUNT)
    beat(scene, "a", MAX_COUNT, logged(MAX_COUNT, 1, n=1))
    [event] = (msgspec.structs.replace(event, time=1.0) for event in lost(scene))
    assert parse_line(as_written(event).rstrip()) == event
    waiting = deque([stepped(0)])
    for index in (1, 2):
        append(waiting, m.Line(step=0, index=index, fields=MAX_COUNT), 1)
    assert waiting[-1].missing == MAX_COUNT


@pytest.mark.failure(
    "Files, disks and output",
    (
        "lines of metrics are lost: over 100,000 without a coordinator, rank 0 died beside a new joiner, all workers "
        "died, the disk was full"
    ),
)
@pytest.mark.parametrize(("step", "missing"), [(9, 5), (5, 1), (4, 0), (2, 0), (0, 0)])
def test_steps_before_a_checkpoint_that_were_never_written_are_counted(step: int, missing: int) -> None:
    """All workers were lost with lines that they had not sent, and the checkpoint is newer than those that came."""
    scene = trained("a")
    beat(scene, "a", 9, *steps(0, 1, 2, 3))
    scene.lose("a")
    scene.ready("b")
    view = scene.coordinator.proposed
    assert view is not None
    scene.switch(view, 0, "b")
    scene.say("b", m.Restored(step=step, path="/c"))
    assert [event.lines for event in lost(scene)] == [missing] * (missing > 0)
    beat(scene, "b", step + 1, stepped(step), view=view.number)
    assert scene.lines[-1] == stepped(step)
    assert len(lost(scene)) == (missing > 0)


NUMBERS = st.integers(0, 6) | st.just(FAR)
BEATS = st.lists(st.tuples(st.sampled_from("abcg"), NUMBERS, st.lists(NUMBERS, max_size=4)), max_size=20)


@given(beats=BEATS)
@settings(max_examples=300, deadline=None)
def test_whatever_is_said_each_line_is_written_once_in_order_and_by_rank_0(
    beats: list[tuple[str, int, list[int]]],
) -> None:
    """... of no step that nobody but its sender has claimed."""
    scene = trained("a", "b", "c")
    scene.hello("g", pool="")
    claimed = 0  # by Switched
    for worker, step, told in beats:
        beat(scene, worker, step, *(stepped(number, samples=ord(worker)) for number in told))
        claimed = max(claimed, step) if worker in "bc" else claimed
    assert all(first.step < second.step for first, second in pairwise(scene.lines))
    for line in scene.lines:
        assert isinstance(line.fields, m.Metrics)
        assert line.fields.samples == ord("a")
        assert line.step <= claimed


def test_what_an_external_worker_says_of_its_step_is_nobody_s_progress() -> None:
    scene = trained("a", "b")
    scene.hello("guest", pool="")
    beat(scene, "a", 3)
    beat(scene, "guest", FAR)
    assert scene.coordinator.reached == 3
    asked = {"pid": 1, "address": "http://x", "steps": [], "now": 0.0, "time": 0.0}
    assert describe(scene.coordinator, **asked).step == 3  # type: ignore[arg-type]


# --- the end -----------------------------------------------------------------------------------------------------


def stopped(scene: Scene, *workers: str) -> None:
    """All of them have agreed on the empty view after step 5."""
    scene.coordinator.request_end("farandole stop", 0, scene.now)
    view = scene.look().coordinator.proposed
    assert view is not None
    assert view.members == ()
    for worker in workers:
        scene.say(worker, m.Switched(view=view.number, round=6, step=6))


@pytest.mark.failure(
    "Processes, signals and crash loops",
    "the run is stopped, or rank 0 leaves, between two heartbeats",
    seen="nothing: all lines are in `metrics.jsonl` before `over`; else `lines lost` with their number",
    outcome="rank 0 sends its lines before it leaves, and the worker that saves sends them again",
)
def test_what_rank_0_says_before_it_switches_to_the_empty_view_counts() -> None:
    scene = trained("a", "b")
    scene.coordinator.request_end("farandole stop", 0, scene.now)
    view = scene.look().coordinator.proposed
    assert view is not None
    beat(scene, "a", 6, *steps(*range(6)), view=view.number)
    scene.switch(view, 6, "a", "b")
    scene.say("a", m.Saved(path="p"))
    assert scene.events[-1] == "over"
    assert scene.lines == [*steps(*range(6))]


@pytest.mark.failure(
    "Processes, signals and crash loops", "the run is stopped, or rank 0 leaves, between two heartbeats"
)
def test_who_saves_the_final_state_says_what_rank_0_could_not() -> None:
    scene = trained("a", "b", "c")
    beat(scene, "a", 3, *steps(0, 1, 2))
    stopped(scene, "a", "b", "c")
    scene.lose("a")
    assert scene.last("b", m.End).save
    view = scene.coordinator.view
    assert view is not None
    beat(scene, "c", 6, *steps(*range(6)), view=view.number)
    beat(scene, "b", 6, *steps(*range(6)), view=view.number)
    assert scene.lines == [*steps(*range(6))]
    scene.say("b", m.Saved(path="p"))
    assert scene.events[-1] == "over"
    assert "lines lost" not in scene.events


@pytest.mark.failure(
    "Processes, signals and crash loops", "the run is stopped, or rank 0 leaves, between two heartbeats"
)
def test_lines_that_nobody_stands_for_when_the_run_ends_are_told() -> None:
    scene = trained("a", "b")
    stopped(scene, "a", "b")
    view = scene.coordinator.view
    assert view is not None
    beat(scene, "a", 9, *steps(*range(9)), view=view.number)
    scene.say("a", m.Saved(path="p"))
    assert scene.lines == [*steps(*range(7))], "b is in step 6"
    assert scene.fields["lines lost"]["worker"] == "a"


def test_no_line_follows_the_end_of_the_run() -> None:
    """Readers would take the run for one that goes on."""
    scene = trained("a")
    beat(scene, "a", 3, *steps(0, 1, 2))
    stopped(scene, "a")
    scene.say("a", m.Saved(path="p"))
    assert scene.events[-1] == "over"
    before = list(scene.lines)
    beat(scene, "a", 9, *steps(*range(9)), view=1)
    assert scene.lines == before
    assert scene.events[-1] == "over"
