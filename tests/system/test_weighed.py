"""Means over tokens and values over the batch, while workers join and are killed: those of a single process."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.weighed import BATCH, MICRO, STEPS
from tests.support.harness import Elastic, alone, read_lines

JOB = Path(__file__).parents[1] / "jobs" / "weighed.py"


def values(folder: Path) -> list[tuple[Any, ...]]:
    lines = [line for line in read_lines(folder) if "accuracy" in line]
    return [tuple(line[name] for name in ("step", "accuracy", "tokens", "longest", "again", "best")) for line in lines]


@pytest.mark.processes
def test_with_joins_and_a_kill_and_alone(tmp_path: Path) -> None:
    """In the end there are more workers than micro-batches: some give no value, and know them all the same."""
    out, single, pace = tmp_path / "out", tmp_path / "single", tmp_path / "pace"
    pace.touch()
    with Elastic(tmp_path / "run", JOB, str(out), "--pace", str(pace), workers=2, options=[]) as run:
        run.until_step(2)
        first, _ = run.until_members(2)
        run.command("scale", str(BATCH // MICRO + 1))
        run.until_members(BATCH // MICRO + 1)
        run.signal(first, signal.SIGKILL)
        run.until_members(BATCH // MICRO + 1, without=(first,))
        assert run.events("lost")[-1]["worker"] == first
        assert run.step < STEPS - 1
        pace.unlink()
        run.finish()
    alone(tmp_path / "alone", JOB, str(single))
    assert out.read_text() == single.read_text()
    assert values(tmp_path / "run") == values(tmp_path / "alone")
    assert [step for step, *_ in values(tmp_path / "run")] == list(range(STEPS))
