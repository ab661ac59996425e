"""Several passes over each batch, while workers join and are killed between the passes and in them."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from farandole.control.run_folder import LEDGER
from farandole.data.ledger import count
from tests.jobs.passes import EPOCHS, ROWS, STEPS
from tests.support.harness import Elastic, alone, read_lines

JOB = Path(__file__).parents[1] / "jobs" / "passes.py"


def values(folder: Path) -> list[tuple[Any, ...]]:
    names = ("step", "judged", "fooled", "center", "out", "samples")
    return [tuple(line[name] for name in names) for line in read_lines(folder) if "judged" in line]


@pytest.mark.long
@pytest.mark.failure(
    "The training loop",
    "a worker is killed in a pass over a batch, or between two passes",
    seen="the worker is lost, as in any crash",
    outcome="the others compute its micro-batches of the current pass; nothing is lost",
)
@pytest.mark.processes
@pytest.mark.parametrize("place", ["gather", pytest.param("pass", marks=pytest.mark.long)])
def test_with_joins_and_kills_and_alone(tmp_path: Path, place: str) -> None:
    out, single, pace, once = (tmp_path / name for name in ("out", "single", "pace", "once"))
    pace.touch()
    options = [str(out), "--pace", str(pace), "--die", place, "--once", str(once)]
    with Elastic(tmp_path / "run", JOB, *options, workers=2, options=["--ledger"]) as run:
        run.until_step(2)
        first, second = run.until_members(2)
        run.command("scale", "3")
        run.until_members(3, without=(second,))
        assert run.events("lost")[-1]["worker"] == second
        run.signal(first, signal.SIGKILL)
        run.until_members(3, without=(first, second))
        assert run.step < STEPS - 1
        pace.unlink()
        run.finish()
    alone(tmp_path / "alone", JOB, str(single))
    assert out.read_text() == single.read_text()
    assert values(tmp_path / "run") == values(tmp_path / "alone")
    assert [step for step, *_ in values(tmp_path / "run")] == list(range(STEPS))
    assert count(tmp_path / "run" / LEDGER) == Counter((epoch, row) for epoch in range(EPOCHS) for row in range(ROWS))
