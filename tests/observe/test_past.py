"""What is told of a run that is over, from its metrics alone; and the words for the events at a run's end."""

from __future__ import annotations

import io
import re
from typing import Any

import msgspec
import pytest
from rich.console import Console

from farandole.observe.past import DEPARTURES, Past, departures, past
from farandole.observe.tables import past_table
from farandole.observe.text import describe
from farandole.protocol import events
from farandole.protocol.metrics import Line, as_written
from tests.support.mentioned import mentions
from tests.support.metric_lines import an, step_line

VIEW = an(events.ViewEvent)
SAVED = an(events.SavedEvent, path="/c/step-10.pt")
FINISHED = an(events.FinishedEvent, fingerprint="abc")


def step(number: int) -> Line:
    return step_line(number, epoch=number // 5, loss=1.5, total=10)


def over(code: int) -> events.OverEvent:
    return an(events.OverEvent, code=code)


def told(*lines: Line) -> Past:
    return past("r", [as_written(line) for line in lines])


TRAINED = (VIEW, step(0), step(1))
WHOLE = (*TRAINED, FINISHED, SAVED, over(0))
OUTCOMES = [
    # lines, outcome, code, fingerprint, checkpoint
    (WHOLE, "finished", 0, "abc", "/c/step-10.pt"),
    ((*TRAINED, SAVED, over(143)), "stopped", 143, "", "/c/step-10.pt"),
    ((*TRAINED, SAVED, over(0)), "stopped", 0, "", "/c/step-10.pt"),
    ((*TRAINED, over(1)), "failed", 1, "", ""),
    ((*TRAINED, over(2)), "failed", 2, "", ""),  # with the script's exit code
    ((*TRAINED, FINISHED, over(1)), "failed", 1, "abc", ""),
    ((*TRAINED, an(events.FinishedEvent, equal=False, fingerprint="a != b"), over(1)), "failed", 1, "", ""),
    (TRAINED, "cut off", None, "", ""),
    ((*TRAINED, SAVED, over(0), VIEW), "cut off", None, "", "/c/step-10.pt"),
    ((), "cut off", None, "", ""),
    ((*TRAINED, an(events.SavedEvent, whole=False), over(1)), "failed", 1, "", ""),
    ((*WHOLE, an(events.StartingEvent)), "finished", 0, "abc", "/c/step-10.pt"),
    ((*WHOLE, an(events.NothingLeftEvent), over(0)), "finished", 0, "abc", "/c/step-10.pt"),
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
    again = an(events.ResumedEvent, step=1, path="/c/step-1.pt")
    assert told(*TRAINED, again).steps == 1
    assert told(*TRAINED, again, step(1), step(2)).steps == 3
    found = told(*TRAINED)
    assert (found.steps, found.total, found.epoch, found.loss) == (2, 10, 0, 1.5)


def test_a_state_that_is_not_finite_is_told() -> None:
    found = told(*TRAINED, msgspec.structs.replace(SAVED, finite=False), over(0))
    assert not found.finite
    whole = msgspec.structs.replace(found, finite=True)
    rows: list[str] = []
    for each in (found, whole):
        stream = io.StringIO()
        Console(file=stream, width=40).print(past_table(each), soft_wrap=True)
        rows += re.findall(r"^checkpoint .*", stream.getvalue(), re.M)
    assert [mentions(row, "/c/step-10.pt") for row in rows] == [True, True]
    assert rows[0] != rows[1]


def test_it_is_told_since_when_the_bits_are_not_promised() -> None:
    assert told(*WHOLE).bits == ""
    external_workers = [an(events.BitsNotPromisedEvent, step=step, worker=f"guest-{step}") for step in (7, 9)]
    found = told(VIEW, *external_workers, *TRAINED, over(0), VIEW, step(2))
    assert mentions(found.bits, "step 7")
    console = Console(file=io.StringIO(), width=200)
    console.print(past_table(found))
    assert found.bits in console.file.getvalue()  # type: ignore[attr-defined]


def test_lines_that_are_none_say_nothing() -> None:
    assert past("r", [b'{"event":\n', b'{"step":1,\n', b"\xff\n"]) == Past(run="r", damaged=3)


def test_the_newest_departures_have_a_worker_and_a_reason() -> None:
    lost = [an(events.LostEvent, worker=f"w{number}", reason=f"reset {number}") for number in range(DEPARTURES)]
    left = an(events.LeftEvent, worker="w8", reason="released")
    died = an(events.DiedEvent, worker="w5", reason="killed by signal 9")
    lines = [as_written(line) for line in (*TRAINED, *lost, step(2), left, died, SAVED)]
    found = departures([*lines, b'{"event":"lost"'])
    assert len(found) == DEPARTURES - 1, "one of the newest is torn"
    assert [mentions(found[index], worker) for index, worker in ((0, "w3"), (-2, "w8"), (-1, "w5"))] == [True] * 3
    assert mentions(found[-2], "released")
    assert mentions(found[-1], "killed by signal 9")
    assert departures(as_written(line) for line in WHOLE) == []


def test_words() -> None:
    assert mentions(describe(an(events.NotFiniteEvent, step=5)).lower(), "step 5")
    for finite in (SAVED, an(events.CheckpointEvent, path="/c/step-10.pt")):
        other = describe(msgspec.structs.replace(finite, finite=False))
        assert mentions(describe(finite), "/c/step-10.pt")
        assert mentions(other, "/c/step-10.pt")
        assert other != describe(finite)
    resumed = an(events.ResumedEvent, finite=False, last_finite="q")
    assert mentions(describe(resumed), "--resume", "--folder", "q")
    assert mentions(describe(an(events.NothingLeftEvent, step=4)), 4)
    assert mentions(describe(an(events.HungEvent, worker="w2", reason="why")), "w2", "why")


def test_a_run_that_was_started_again_and_killed_has_no_code() -> None:
    assert told(over(0), an(events.RunStartedEvent)).code is None


def test_a_final_state_counts_until_a_new_start_trains_on() -> None:
    ended = (step(0), an(events.FinishedEvent, fingerprint="f", equal=True), over(0), an(events.RunStartedEvent))
    assert told(*ended).fingerprint == "f"
    assert told(*ended, an(events.ResumedEvent)).fingerprint == ""
