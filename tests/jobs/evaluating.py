"""The job of test_evaluation: two steps, after each an evaluation that can be held up in the middle.

    python evaluating.py OUT

While OUT/hold-STEP is there, who comes to its second micro-batch of that step's evaluation says so in OUT/held-STEP-PID
and waits. OUT/done-STEP-PID names the first samples of the micro-batches that the process has computed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import farandole

sys.path.append(str(Path(__file__).parents[2]))
from tests.support.measures import tm

STEPS, BATCH, MICRO, CLASSES = 2, 30, 4, 3
SAMPLES = STEPS * BATCH


def times(sample: int) -> Callable[..., torch.Tensor]:
    """How often a sample is counted, as a part of all."""
    return lambda _logits, _classes, ids: ids == sample


class Ranked(tm.Metric):
    """A list of all samples' first logits: their order counts."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("logits", [], dist_reduce_fx="cat")

    def update(self, logits: torch.Tensor, classes: torch.Tensor, ids: torch.Tensor) -> None:
        del classes, ids
        self.logits.append(logits[:, 0])

    def compute(self) -> torch.Tensor:
        logits = torch.cat(self.logits)
        assert len(logits) == SAMPLES
        return logits @ torch.arange(1.0, SAMPLES + 1)


METRICS = {
    "ranked": Ranked(),
    "loss": lambda logits, classes, _: F.cross_entropy(logits, classes, reduction="none"),
    "error": lambda logits, classes, _: (logits.softmax(1) - F.one_hot(classes, CLASSES)).square().mean(),
    **{str(sample): times(sample) for sample in range(SAMPLES)},
}


def main() -> None:
    out = Path(sys.argv[1])
    run = farandole.join()
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run.replicate(model=model, optimizer=optimizer)
    x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
    rows = TensorDataset(x, x[:, :CLASSES].argmax(1), torch.arange(SAMPLES))
    for step in run.steps(run.loader(rows, batch=farandole.GlobalBatch(BATCH, micro=MICRO)), epochs=1):
        for inputs, classes, _ in step:
            step.backward(F.cross_entropy(model(inputs), classes))
        optimizer.step()
        done = out / f"done-{step.number}-{os.getpid()}"

        def predict(model: nn.Module, batch: Any, number: int = step.number, done: Path = done) -> tuple[Any, ...]:
            inputs, classes, ids = batch
            while done.exists() and (out / f"hold-{number}").exists():
                (out / f"held-{number}-{os.getpid()}").touch()
                time.sleep(0.01)
            with done.open("a") as file:
                print(ids[0].item(), file=file)
            return model(inputs), classes, ids

        run.log(**run.evaluate(model, rows, METRICS, predict=predict, micro=MICRO))


if __name__ == "__main__":
    main()
