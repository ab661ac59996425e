"""A value that each worker computes from its own micro-batches and passes to `run.log` is found in the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.harness import Elastic, alone, read_lines

JOB = Path(__file__).parents[1] / "jobs" / "plain_sum.py"


@pytest.mark.long
@pytest.mark.failure(
    "The training loop",
    "the script passes a value to `run.log` that each worker computes from its own micro-batches, such as a Python sum",
    seen="`RUN.LOG(correct=...) DIFFERS BETWEEN WORKERS`, once for each name, with both values and the line to write",
    outcome=(
        "training continues; `metrics.jsonl` has the value of rank 0; only the newest lines of each half second are "
        "compared"
    ),
)
@pytest.mark.processes
def test_a_python_sum_of_the_inner_loop_is_an_event_and_what_step_sum_gives_is_none(tmp_path: Path) -> None:
    with Elastic(tmp_path / "run", JOB, workers=2, options=[]) as run:
        run.finish()
        found = run.events("values differ")
    assert [event["name"] for event in found] == ["correct"], run.report()
    (event,) = found
    line = next(
        line for line in read_lines(tmp_path / "run") if line.get("event") == "log" and line["step"] == event["step"]
    )
    assert float(event["written"]) == line["correct"] != float(event["value"])
    assert float(event["written"]) + float(event["value"]) == pytest.approx(line["right"])
    alone(tmp_path / "alone", JOB)
    assert not [line for line in read_lines(tmp_path / "alone") if line.get("event") == "values differ"]
