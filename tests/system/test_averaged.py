"""A moving average of the weights, adapters and activation checkpointing, with joins and kills: equal to one worker."""

from __future__ import annotations

import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.jobs.averaged import KINDS, STEPS
from tests.support.harness import Elastic, alone, read_lines

JOB = Path(__file__).parents[1] / "jobs" / "averaged.py"
OFTEN = {"ema", "peft"}


def values(folder: Path) -> list[tuple[Any, ...]]:
    lines = [line for line in read_lines(folder) if "exact" in line]
    return [tuple(line.get(name) for name in ("step", "exact", "best", "accuracy")) for line in lines]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in OFTEN else [pytest.mark.long]) for kind in KINDS]
)
def test_with_joins_and_kills_and_alone(tmp_path: Path, kind: str) -> None:
    """The worker that saves the best state is killed while it does; then another one is killed in a step."""
    if kind == "peft" and find_spec("peft") is None:
        pytest.skip("adapters need peft")
    out, single, pace, died = (tmp_path / name for name in ("out", "single", "pace", "died"))
    pace.write_text("0.1" if kind == "peft" else "0.01")  # a worker that imports peft takes longer to begin
    options = [kind, str(out), "--pace", str(pace), "--die", str(died)]
    with Elastic(tmp_path / "run", JOB, *options, workers=2, options=[]) as run:
        run.until_step(2)
        run.command("scale", "3")
        run.until(died.exists, "a worker that dies while it saves")
        run.until(lambda: bool(run.events("lost")), "its loss")
        lost = run.events("lost")[-1]["worker"]
        first, *_ = run.until_members(3, without=(lost,))
        run.signal(first, signal.SIGKILL)
        run.until_members(3, without=(lost, first))
        assert run.step < STEPS - 1
        pace.unlink()
        run.finish()
    alone(tmp_path / "alone", JOB, kind, str(single))
    assert out.read_text() == single.read_text()
    assert values(tmp_path / "run") == values(tmp_path / "alone")
    assert [step for step, *_ in values(tmp_path / "run")] == list(range(STEPS))
    best, best_alone = (torch.load(f"{path}.best", weights_only=True) for path in (out, single))
    assert same(best, best_alone)
    assert best["state"]["best"] == values(tmp_path / "run")[-1][2]
    assert list(tmp_path.glob(".out.best*")) == [], "what the killed worker had begun to write is gone"
