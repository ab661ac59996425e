"""What is told of a run that is over, from its metrics alone; and the words for the events at a run's end."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest
from rich.console import Console

from farandole.observe.past import Past, past
from farandole.observe.table import past_table
from farandole.observe.words import describe

VIEW = {"event": "view", "time": 1.0, "view": 1, "members": ["w1"], "step": 0, "cause": "why"}
SAVED = {"event": "saved", "time": 2.0, "worker": "w1", "path": "/c/step-10.pt", "whole": True}
FINISHED = {"event": "finished", "time": 2.0, "fingerprint": "abc", "equal": True}


def step(number: int) -> dict[str, Any]:
    return {"step": number, "epoch": number // 5, "loss": 1.5, "total": 10}


def over(code: int, reason: str = "why") -> dict[str, Any]:
    return {"event": "over", "time": 3.0, "code": code, "reason": reason}


def told(*lines: dict[str, Any]) -> Past:
    return past("r", [msgspec.json.encode(line) + b"\n" for line in lines])


TRAINED = (VIEW, step(0), step(1))
WHOLE = (*TRAINED, FINISHED, SAVED, over(0))
OUTCOMES = [
    # lines, outcome, code, fingerprint, checkpoint
    (WHOLE, "finished", 0, "abc", "/c/step-10.pt"),
    ((*TRAINED, SAVED, over(143)), "stopped", 143, "", "/c/step-10.pt"),
    ((*TRAINED, SAVED, over(0)), "stopped", 0, "", "/c/step-10.pt"),
    ((*TRAINED, over(1)), "failed", 1, "", ""),
    ((*TRAINED, FINISHED, over(1)), "failed", 1, "abc", ""),
    ((*TRAINED, {**FINISHED, "equal": False, "fingerprint": "a != b"}, over(1)), "failed", 1, "", ""),
    (TRAINED, "cut off", None, "", ""),
    ((), "cut off", None, "", ""),
    ((*TRAINED, {**SAVED, "whole": False}, over(1)), "failed", 1, "", ""),
    ((*WHOLE, {"event": "starting", "time": 4.0}), "finished", 0, "abc", "/c/step-10.pt"),
    ((*WHOLE, {"event": "nothing left", "time": 4.0}, over(0)), "finished", 0, "abc", "/c/step-10.pt"),
    ((*WHOLE, VIEW, step(2)), "cut off", None, "", "/c/step-10.pt"),
    ((*WHOLE, step(2)), "cut off", None, "", "/c/step-10.pt"),  # a world of one that goes on
    ((*WHOLE, VIEW, step(2), over(1)), "failed", 1, "", "/c/step-10.pt"),
]


@pytest.mark.parametrize(("lines", "outcome", "code", "fingerprint", "checkpoint"), OUTCOMES)
def test_outcomes(lines: Any, outcome: str, code: int | None, fingerprint: str, checkpoint: str) -> None:
    found = told(*lines)
    assert (found.outcome, found.code) == (outcome, code)
    assert (found.fingerprint, found.checkpoint) == (fingerprint, checkpoint)


def test_steps_are_those_that_count() -> None:
    again = {"event": "resumed", "time": 4.0, "step": 1, "path": "/c/step-1.pt"}
    assert told(*TRAINED, again).steps == 1
    assert told(*TRAINED, again, step(1), step(2)).steps == 3
    found = told(*TRAINED)
    assert (found.steps, found.total, found.epoch, found.loss) == (2, 10, 0, 1.5)


def test_a_state_that_is_not_finite_is_told() -> None:
    found = told(*TRAINED, {**SAVED, "finite": False}, over(0))
    assert not found.finite
    stream = io.StringIO()
    Console(file=stream, width=40).print(past_table(found), soft_wrap=True)
    assert "checkpoint   /c/step-10.pt (a state that is NOT FINITE)\n" in stream.getvalue()


def test_lines_that_are_none_say_nothing() -> None:
    assert past("r", [b'{"event":\n', b'{"step":1,\n', b"\xff\n"]) == Past(run="r", damaged=3)


def test_words() -> None:
    assert describe({"event": "not finite", "worker": "w1", "step": 5, "loss": "nan"}).startswith("THE LOSS OF STEP 5")
    assert "NOT FINITE" in describe({**SAVED, "finite": False})
    assert describe(SAVED) == "checkpoint saved: /c/step-10.pt"
    assert "NOT FINITE" in describe({"event": "checkpoint", "step": 4, "path": "p", "finite": False})
    resumed = {"event": "resumed", "step": 4, "path": "p", "differences": [], "finite": False, "last_finite": "q"}
    assert describe(resumed).endswith("the last that is, for --resume and another --folder, is q")
    assert describe({"event": "nothing left", "step": 4, "path": "p"}).startswith("nothing is left to train after 4")
    assert describe({"event": "hung", "worker": "w2", "host": "h", "reason": "why"}) == "w2 HANGS: why"
