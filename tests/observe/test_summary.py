"""What is said of a run at its end: what its lines tell, "unknown" where they do not, and nothing that is guessed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from farandole.observe.summary import LOGGED, NAME, PAUSES, Course, summary
from farandole.observe.text import COLUMNS
from farandole.protocol import events
from farandole.protocol.cost import Prices
from farandole.protocol.events import WorkerTime
from farandole.protocol.metrics import Line, LogLine, as_written
from tests.support.mentioned import mentions
from tests.support.metric_lines import an, step_line
from tests.support.summary_rows import rows_of

PRICES = Prices(date="2026-11-01", pools={"local": 3.6})
FINISHED = [an(events.FinishedEvent, equal=True), an(events.SavedEvent, path="/c/step-9.pt", whole=True)]
OVER = an(events.OverEvent, code=0, reason="the script has run to its end", time=200.0)


def told(*lines: Line | bytes, over: events.OverEvent | None = None, prices: Prices = PRICES) -> dict[str, str]:
    """Its rows; those of the view changes under the names of 0, 1, ..."""
    course = Course()
    for line in lines:
        course.take(line if isinstance(line, bytes) else as_written(line))
    first, *rows = summary(course, course.account.account("r", prices) if lines else None, over)
    assert first == ""
    for row in rows:
        assert len(row) <= COLUMNS or " " not in row.strip().removeprefix(row[:NAME].strip()).strip(), row
    return rows_of(rows)


def steps(first: int, last: int, **more: Any) -> list[Line]:
    return [step_line(n, time=100.0 + n, samples=16, total=10, seconds=1.0, **more) for n in range(first, last + 1)]


def began(worker: str = "w1") -> list[Line]:
    return [
        an(events.StartingEvent, worker=worker, time=90.0),
        an(events.ViewEvent, members=(worker,), step=0, time=99.0),
    ]


def spent() -> Line:
    time = WorkerTime(host="h", pool="local", step=9, seconds={"start": 9.0, "compute": 27.0})
    return an(events.TimeSpentEvent, workers={"w1": time}, ended=("w1",), time=150.0)


def test_a_run_that_ended_well() -> None:
    log = [LogLine(step=4, fields={"accuracy": 0.5, "n": 3, "note": "x", "good": True}),
           LogLine(step=9, fields={"accuracy": 0.987654321})]  # fmt: skip
    found = told(*began(), *steps(0, 9), *log, spent(), *FINISHED, OVER)
    assert mentions(found.pop("outcome"), "finished", OVER.reason, "exit code 0")
    logged = found.pop("logged")
    assert mentions(logged, "accuracy 0.98765", "n 3")
    assert "note" not in logged
    assert "good" not in logged
    assert mentions(found.pop("steps"), "10 of 10", 160)
    assert mentions(found.pop("dollars"), "0.036", "2026-11-01")
    assert found == {
        "time": "2 min",
        "steps took": "10 s",
        "throughput": "16 samples/s",
        "worker-hours": "0.01",
        "goodput": "75.0 %",
        "samples lost": "0",
        "model": "/c/step-9.pt",
    }


def test_what_is_unknown_is_not_0() -> None:
    found = told(*began(), *steps(0, 9), *FINISHED, OVER, prices=Prices())
    assert [found["worker-hours"], found["goodput"]] == ["unknown"] * 2
    assert "dollars" not in found, "nobody has named a price"
    partly = told(*began(), *steps(0, 9), spent(), *FINISHED, OVER, prices=Prices(date="2026-11-01", pools={"x": 1.0}))
    assert partly["dollars"].startswith("unknown")
    gap = told(*began(), *steps(0, 3), *steps(6, 9), *FINISHED, OVER)
    assert gap["steps"] == "10 of 10", "whose samples are not all there"
    assert "samples lost" not in gap


def test_what_was_taken_again_is_told() -> None:
    back = an(events.ResumedEvent, step=4, path="/c/step-4.pt")
    found = told(*began(), *steps(0, 6), an(events.StateLostEvent), back, *steps(4, 9), *FINISHED, OVER)
    assert mentions(found["taken again"], 3, 48)
    assert mentions(found["steps"], "10 of 10", 160)
    assert len(re.findall(r"\d+ (?:s|min)\b", found["time"])) == 2, "since it first began, too"
    assert "samples lost" not in found
    unrecorded = told(*began(), *steps(0, 6), *steps(4, 9), *FINISHED, OVER)
    assert mentions(unrecorded["taken again"], 3)


def test_a_run_that_was_stopped_has_taken_more_steps_than_have_lines() -> None:
    leaves = an(events.ViewEvent, members=(), step=8)
    found = told(*began(), *steps(0, 5), leaves, an(events.SavedEvent, path="/c/step-8.pt", whole=True), OVER)
    assert mentions(found["steps"], "8 of 10", 96, 6)
    back = an(events.ResumedEvent, step=8, path="/c/step-8.pt")
    assert told(*began(), *steps(0, 5), leaves, OVER, back, *steps(8, 9), OVER)["steps"] == "10 of 10"


@pytest.mark.failure("Processes, signals and crash loops", "a run resumes in its folder after it ended or was killed")
def test_the_time_between_two_starts_is_not_the_runs() -> None:
    start = an(events.RunStartedEvent, time=300.0)
    first, again = steps(0, 5), [step_line(n, time=310.0 + n, samples=16, total=10) for n in range(6, 10)]
    for end in ([OVER], []):  # it ended, or was killed
        found = told(*began(), *first, *end, start, an(events.StartingEvent, worker="w2", time=301.0), *again)
        assert mentions(found["time"], "2 min" if end else "34 s", "4 min")
    older = told(*began(), *first, OVER, an(events.StartingEvent, worker="w2", time=301.0), *again)
    assert mentions(older["time"], "2 min", "4 min")


def test_a_state_that_was_lost_before_any_checkpoint_is_taken_again() -> None:
    found = told(*began(), *steps(0, 6), an(events.StateLostEvent), *steps(0, 9), *FINISHED, OVER)
    assert "lost" not in found
    assert mentions(found["taken again"], 7)


def test_a_state_that_is_gone() -> None:
    over = an(events.OverEvent, code=1, reason="nobody is left")
    found = told(
        *began(), *steps(0, 6), an(events.StateLostEvent), an(events.NotSavedEvent, reason="nobody is left"), over
    )
    assert found["lost"]
    assert "taken again" not in found
    assert mentions(found["outcome"], "failed", "nobody is left", "exit code 1")
    assert mentions(found["model"], "nobody is left")


CHECKPOINT = an(events.CheckpointEvent, step=4, path="/c/step-4.pt")
MODELS = [
    ([], (), "nothing is"),
    ([CHECKPOINT], ("/c/step-4.pt", 5), "it was killed"),
    ([CHECKPOINT, an(events.NotSavedEvent, reason="a full disk")], ("/c/step-4.pt", "a full disk"),
     "the last one failed"),
    ([CHECKPOINT, an(events.SavedEvent, path="/c/after-4.pt", whole=False)], ("/c/after-4.pt", "/c/step-4.pt"),
     "half a step"),
    ([an(events.SavedElsewhereEvent, host="far", path="/tmp/x.pt")], ("far", "/tmp/x.pt"), "elsewhere"),
    ([an(events.SavedEvent, path="/c/x.pt", whole=True, finite=False)], ("/c/x.pt",), "not finite"),
    ([CHECKPOINT, an(events.SavedEvent, path="/c/x.pt", whole=True)], ("/c/x.pt",), "the end's"),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "named", "remark"), MODELS)
def test_where_the_model_is(lines: Sequence[Line], named: tuple[object, ...], remark: str) -> None:
    found = told(*began(), *steps(0, 8), *lines)
    assert mentions(found["model"], *named), remark
    assert ("/c" in found["model"] or "/tmp" in found["model"]) == bool(named), remark
    assert (found["model"] in named) == (remark == "the end's"), "else there is more to say of it"
    assert mentions(found["outcome"], "cut off")
    assert ("samples lost" in found) == (remark in ("elsewhere", "not finite", "the end's")), remark


def test_the_longest_pauses_are_shown_and_the_others_counted() -> None:
    lines = [*began(), *steps(0, 9)]
    for number in range(20):
        at = 110.0 + 20 * number
        members = ("w1", *"x" * (number % 2 + 1))
        lines += [an(events.ProposedEvent, view=number, time=at)]
        lines += [an(events.ViewEvent, view=number, time=at, step=10 * number + 10, members=members)]
        lines += [step_line(10 * number + n, time=at + n + (number > 15)) for n in range(10, 20)]
    found = told(*lines, OVER)
    assert mentions(found["view changes"], 20)
    rows = [text for name, text in found.items() if name.isdigit()]
    assert len(rows) == PAUSES + 1
    assert mentions(rows[-1], 20 - PAUSES)


def test_a_run_whose_folder_is_gone_has_its_outcome() -> None:
    found = told(over=OVER)
    assert list(found) == ["outcome", "figures"]
    assert mentions(found["outcome"], OVER.reason, "exit code 0")
    assert mentions(found["figures"], "unknown", "metrics.jsonl")
    found = told(*began(), *steps(0, 3), over=OVER)
    assert mentions(found["outcome"], OVER.reason, "exit code 0")
    assert mentions(found["figures"], "metrics.jsonl")
    assert not mentions(found["figures"], "unknown")


def test_a_run_without_a_step_has_its_outcome_alone() -> None:
    over = an(events.OverEvent, code=2, reason="the script failed on w1", time=120.0)
    found = told(an(events.StartingEvent, worker="w1", time=90.0), an(events.FailedEvent, worker="w1"), over)
    assert list(found) == ["outcome", "steps"]
    assert mentions(found["outcome"], "failed", "exit code 2")
    assert mentions(found["steps"], 0)
    assert len(told(*began(), *steps(0, 0), over)) > 2


def test_a_long_text_goes_on_below_its_beginning() -> None:
    many: dict[str, Any] = {f"name{n}": n for n in range(LOGGED)}
    path = f"/home/{'x' * COLUMNS}/step-9.pt"
    course = Course()
    for line in (*began(), *steps(0, 9), LogLine(step=1, fields=many), an(events.SavedEvent, path=path, whole=True)):
        course.take(as_written(line))
    rows = summary(course, course.account.account("r", PRICES))
    [first] = [number for number, row in enumerate(rows) if row.startswith("logged")]
    assert rows[first + 1].startswith(" " * NAME + "name")
    assert rows_of(rows)["logged"] == ", ".join(f"name{n} {n}" for n in range(LOGGED))
    assert f"model{' ' * (NAME - 5)}{path}" in rows, "a path is in one piece"


def test_names_of_others_stay_in_their_lines_and_are_not_all_shown() -> None:
    many: dict[str, Any] = {f"name{n}": n for n in range(LOGGED + 5)}
    found = told(*began(), *steps(0, 9), b"torn\n", LogLine(step=1, fields={"a\nmodel": 1.5, **many}), OVER)
    assert mentions(found["logged"], "a\ufffdmodel 1.5", "name0 0")
    assert re.search(r"\b6\b[^\d,]*$", found["logged"])
    assert mentions(found["damaged"], 1)


def test_what_is_logged_last_as_no_number_is_left_out() -> None:
    log = [LogLine(step=1, fields={"a": 1.5}), LogLine(step=2, fields={"a": None})]
    assert "logged" not in told(*began(), *steps(0, 9), *log, OVER)
