"""A value of `run.log` that differs between workers is an event: once for each name, wherever the lines meet."""

from __future__ import annotations

import math

import pytest

from farandole.protocol import messages as m
from farandole.protocol.coordinator.logged_values import MOST_NAMES, MOST_WAITING, MOST_WRITTEN, LoggedValues
from farandole.protocol.kept_lines import KeptLines
from tests.support.metric_lines import logged, stepped
from tests.support.played_session import Worker
from tests.support.scene import Scene, trained

EVENT = "values differ"


def beat(scene: Scene, worker: str, step: int, *lines: m.Line, own: tuple[m.Line, ...] = ()) -> None:
    """`worker` is in `step`, and says these lines as rank 0, or `own` as another one."""
    scene.say(worker, m.Heartbeat(view=1, round=step, step=step, lines=lines, logged=own))


@pytest.mark.failure(
    "The training loop",
    "the script passes a value to `run.log` that each worker computes from its own micro-batches, such as a Python sum",
)
@pytest.mark.parametrize("first", ["a", "b"])
def test_a_value_that_differs_is_an_event_whoever_s_line_comes_first(first: str) -> None:
    scene = trained("a", "b")
    for worker in ("a", "b") if first == "a" else ("b", "a"):
        if worker == "a":
            beat(scene, "a", 3, stepped(0), stepped(1), stepped(2), logged(2, 1, correct=15, lr=0.5))
            beat(scene, "b", 3)
        else:
            beat(scene, "b", 3, own=(logged(2, 1, correct=12, lr=0.5),))
    assert scene.events.count(EVENT) == 1
    found = scene.fields[EVENT]
    assert (found["worker"], found["step"], found["name"]) == ("b", 2, "correct")
    assert (found["value"], found["written"]) == ("12", "15")


def test_equal_values_are_none_not_even_if_they_are_nan() -> None:
    scene = trained("a", "b")
    fields = {"loss": math.nan, "text": "x", "whole": 1}
    beat(scene, "a", 3, stepped(0), stepped(1), logged(1, 1, **fields), stepped(2))
    beat(scene, "b", 3, own=(logged(1, 1, loss=math.nan, text="x", whole=1.0),))
    assert EVENT not in scene.events


def test_a_name_is_an_event_once_and_names_are_bounded() -> None:
    values = LoggedValues()
    for step in range(MOST_NAMES + 5):
        assert not [*values.written(logged(step, 1, **{f"v{step}": 1.0}))]
        for worker in ("b", "c"):
            found = [*values.on_lines(worker, (logged(step, 1, **{f"v{step}": 2.0}),), (step, 1))]
            assert [event.name for event in found] == ([f"v{step}"] if worker == "b" and step < MOST_NAMES else [])


def test_what_waits_and_what_is_kept_is_bounded_and_old_lines_are_dropped() -> None:
    values = LoggedValues()
    far = tuple(logged(step, 1, v=2.0) for step in range(MOST_WAITING + 9))
    for at in range(0, len(far), m.MAX_COMPARED):
        assert not [*values.on_lines("b", far[at : at + m.MAX_COMPARED], (-1, 0))]
    assert not [*values.written(logged(8, 1, v=1.0))], "the oldest of those that wait are dropped"
    assert [event.step for event in values.written(logged(9, 1, v=1.0))] == [9]
    for step in range(10, 10 + MOST_WRITTEN):
        assert not [*values.written(logged(step, 1, v=1.0, w=1.0))]
    assert not [*values.on_lines("b", (logged(9, 1, w=2.0),), (9 + MOST_WRITTEN, 1))]
    assert [event.name for event in values.on_lines("b", (logged(10, 1, w=2.0),), (9 + MOST_WRITTEN, 1))] == ["w"]


def test_after_a_restart_from_a_checkpoint_lines_of_before_are_not_compared() -> None:
    values = LoggedValues()
    assert not [*values.written(logged(5, 1, v=1.0))]
    values.clear()
    assert not [*values.on_lines("b", (logged(5, 1, v=2.0),), (3, 1))]
    assert [event.step for event in values.written(logged(5, 1, v=1.0))] == [5]


def test_a_worker_sends_the_newest_line_of_each_call_since_the_last_time() -> None:
    lines = KeptLines()
    for step in range(3):
        lines.add(stepped(step))
        lines.add(logged(step, 1, loss=0.5))
        lines.add(logged(step, 2, accuracy=0.5, k=1))
    assert lines.to_compare
    assert lines.take_to_compare() == (logged(2, 1, loss=0.5), logged(2, 2, accuracy=0.5, k=1))
    assert not lines.to_compare
    for number in range(m.MAX_COMPARED + 2):
        lines.add(logged(3, 1 + number, **{f"v{number}": 1}))
    assert [*lines.take_to_compare()[0].fields] == ["v2"]  # type: ignore[misc]


def sent(it: Worker) -> list[m.Line]:
    return [line for message in it.said() if isinstance(message, m.Heartbeat) for line in message.logged]


@pytest.mark.parametrize("leads", [False, True])
def test_a_worker_that_is_not_rank_0_sends_them_with_heartbeats_and_before_its_last_message(leads: bool) -> None:
    it = Worker()
    it.welcomed()
    it.member_of("a", "b") if leads else it.member_of("b", "a")
    it.said()
    it.session.add_line(logged(0, 1, v=1))
    it.session.beat(1.0)
    assert sent(it) == ([] if leads else [logged(0, 1, v=1)])
    it.session.beat(2.0)
    assert sent(it) == []
    it.session.add_line(logged(1, 1, v=2))
    it.session.tell(m.Finished(), 3.0)
    assert sent(it) == ([] if leads else [logged(1, 1, v=2)])
