"""Buffers that the loop body sets before the inner loop: kept, once in each step, whoever joins."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import farandole
from tests.jobs.small import RATE
from tests.support.harness import Elastic, alone
from tests.support.steps import BATCH, data

JOB = Path(__file__).parents[1] / "jobs" / "small.py"
STEPS = 600
ANNEAL = ("--anneal", "--epochs", "10", "--samples", "240", "--batch", "4", "--micro", "2")


class Scaled(nn.Module):
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("scale", torch.ones(()))
        self.used: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.used.append(self.scale.item())
        return self.linear(x) * self.scale


@pytest.mark.parametrize("write", ["mul_", "data.mul_"])
def test_every_shard_sees_the_value_and_the_next_step_goes_on_from_it(run: farandole.Run, write: str) -> None:
    model = Scaled()
    run.replicate(model=model)
    for step in run.steps(run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=BATCH // 2)), epochs=1):
        (model.scale if write == "mul_" else model.scale.data).mul_(0.5)
        fingerprint = run.fingerprint()
        state = run._loop.state.snapshot()["objects"]["model"]["scale"]  # type: ignore[union-attr]
        assert state.item() == 0.5**step.number, "a joiner, or a resumed run, does the loop body itself"
        model.used.clear()
        for inputs, _ in step:
            step.backward(model(inputs).mean())
        assert set(model.used) == {0.5 ** (step.number + 1)}
        assert model.scale.item() == 0.5 ** (step.number + 1)
        assert run.fingerprint() == fingerprint, "nothing else has changed"


@pytest.mark.long
@pytest.mark.processes
def test_with_a_join_in_the_middle_and_alone(tmp_path: Path) -> None:
    out, single, pace = tmp_path / "out", tmp_path / "single", tmp_path / "pace"
    pace.write_text("0.04")
    arguments = (str(out), *ANNEAL, "--pace", str(pace))
    with Elastic(tmp_path / "run", JOB, *arguments, workers=1, options=[]) as run:
        run.until_step(2)
        run.command("scale", "2")
        run.until_members(2)
        assert 2 <= run.events("view")[-1]["step"] < STEPS - 1
        pace.unlink()
        run.finish()
        assert [event["equal"] for event in run.events("finished")] == [True]
    alone(tmp_path / "alone", JOB, str(single), *ANNEAL)
    assert out.read_text() == single.read_text()
    temperature, noise = map(float, out.read_text().split()[1:])
    assert temperature == pytest.approx(1.0 + RATE ** (STEPS - 1))
    assert noise == pytest.approx(RATE**STEPS, rel=1e-4)
