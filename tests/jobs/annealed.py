"""The job of test_annealed_buffers: a temperature that falls, and a noise that shrinks, set in the loop body.

    python annealed.py OUT

While OUT/pace is there, a step takes 20 ms. OUT/result is the final state's fingerprint, and the two buffers.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import farandole

SAMPLES, BATCH, EPOCHS, RATE = 240, 4, 10, 0.999
STEPS = EPOCHS * SAMPLES // BATCH


class Annealed(nn.Module):
    """`temperature` is set anew in each step, `noise` is what it was, and a little less."""

    temperature: torch.Tensor
    noise: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("temperature", torch.ones(()))
        self.register_buffer("noise", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x) + 0.1 * self.noise.sum() * torch.randn_like(x)) / self.temperature


def main() -> None:
    out = Path(sys.argv[1])
    run = farandole.join()
    model = Annealed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.replicate(model=model, optimizer=optimizer)
    rows = TensorDataset(torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1)))
    for step in run.steps(run.loader(rows, batch=farandole.GlobalBatch(BATCH, micro=2)), epochs=EPOCHS):
        model.temperature.fill_(2.0 - step.number / STEPS)
        model.noise.mul_(RATE)
        for (inputs,) in step:
            step.backward(model(inputs).square().mean())
        optimizer.step()
        if (out / "pace").exists():
            time.sleep(0.02)
    if run.is_leader:
        partial = out / f"result.{os.getpid()}"
        partial.write_text(f"{run.fingerprint()} {model.temperature.item()} {model.noise[0].item()}")
        os.replace(partial, out / "result")


if __name__ == "__main__":
    main()
