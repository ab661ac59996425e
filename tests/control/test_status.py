"""What `farandole status` says of a training that does not move, and of a rate that is no longer true."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from farandole.control.status import describe, samples_per_s
from farandole.observe.tables import status_table
from farandole.observe.text import describe as in_words
from farandole.protocol import messages as m
from tests.support.metric_lines import made, step_line
from tests.support.scene import trained

STEPS = [step_line(n, samples=50, seconds=0.4, time=1000.0 + 0.4 * n) for n in range(1, 51)]  # until 1020


@pytest.mark.parametrize(
    ("time", "rate"),
    [
        (None, 125.0),
        (1020.0, 125.0),
        (1021.9, 125.0),  # lines come with heartbeats
        (1040.0, 62.5),
        (1080.0, 31.25),
        (1020.0 + 3600, 0.69),
    ],
)
@pytest.mark.failure(
    "Standing still",
    "training slows down or stands still while you watch the samples/s",
    seen="the figure falls while no step ends",
    outcome="it is never minutes old",
)
def test_a_rate_falls_while_nothing_comes(time: float | None, rate: float) -> None:
    assert samples_per_s(STEPS, time) == pytest.approx(rate, rel=0.01)


def test_steps_that_take_long_may_be_waited_for() -> None:
    slow = [step_line(n, samples=50, seconds=10.0, time=10.0 * n) for n in range(5)]
    assert samples_per_s(slow, 40.0 + 29) == pytest.approx(5.0)
    assert samples_per_s(slow, 40.0 + 31) == pytest.approx(250 / 81)


@pytest.mark.failure(
    "Standing still",
    "the script hangs in the only worker, or in all of them",
)
def test_a_training_that_stands_is_called_so() -> None:
    scene = trained("a", "b")
    for seconds in range(100):
        scene.now = float(seconds)
        for worker in ("a", "b"):
            scene.say(
                worker, m.Heartbeat(view=scene.coordinator.number, round=5, step=5, waits_for_peers=worker == "a")
            )
        scene.coordinator.tick(scene.now)
    asked = {"pid": 1, "address": "http://x", "steps": STEPS}
    status = describe(scene.coordinator, now=50.0, time=1021.0, **asked)
    assert (status.state, status.stalled, status.samples_per_s) == ("training", None, pytest.approx(125.0))
    status = describe(scene.coordinator, now=99.0, time=1099.0, **asked)
    assert (status.state, status.samples_per_s) == ("stalled", None)
    assert status.stalled
    assert status.stalled.workers == ("b",)
    shown = io.StringIO()
    Console(file=shown, width=120).print(status_table(status))
    assert re.search(r"\b99 s\b.*\bb\b", shown.getvalue())
    assert "samples/s" not in shown.getvalue()
    scene.coordinator.request_end("SIGTERM", 143, scene.now)
    status = describe(scene.coordinator, now=99.0, time=1099.0, **asked)
    assert (status.state, status.stalled is not None) == ("ending", True)


def test_it_says_since_when_the_bits_are_not_promised() -> None:
    scene = trained("a", facts=(("operation matmul", "1"),), bits="any")
    scene.say("a", m.Heartbeat(view=scene.coordinator.number, step=7))
    scene.ready("b", facts=(("operation matmul", "2"),))
    asked = {"now": 0.0, "time": 0.0, "pid": 1, "address": "http://x", "steps": []}
    for coordinator in (scene.coordinator, scene.restarted().coordinator):
        assert re.search(r"^\W*bits +any\b.*\b7\b", shown_of(coordinator, asked), re.M)
    assert "bits         same  " in shown_of(trained("a").coordinator, asked)


def shown_of(coordinator: Any, asked: dict[str, Any]) -> str:
    shown = io.StringIO()
    Console(file=shown, width=120).print(status_table(describe(coordinator, **asked)))
    return shown.getvalue()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            {"event": "stalled", "step": 5, "seconds": 60.1, "workers": ["w1"], "reason": "step 5 has stood for 60 s"},
            "STALLED: step 5 has stood for 60 s, waiting for w1, whose stacks are in logs/w1.log",
        ),
        (
            {"event": "stalled", "step": 5, "workers": [], "reason": "step 5 has stood for 60 s"},
            "STALLED: step 5 has stood for 60 s, and every worker waits for others",
        ),
        (
            {"event": "cut short", "step": 5, "workers": ["w1", "w2"], "reason": "step 5 has not ended for 30 s"},
            "the stop no longer waits: step 5 has not ended for 30 s, waiting for w1, w2, whose stacks are in "
            "logs/w1.log ...",
        ),
        ({"event": "died", "worker": "w3", "reason": "killed by signal 11"}, "w3 was killed by signal 11"),
        ({"event": "died", "worker": "w3", "reason": "exited with code 134"}, "w3 exited with code 134"),
    ],
)
def test_events_in_words(line: dict[str, Any], words: str) -> None:
    assert in_words(made(line)) == words
