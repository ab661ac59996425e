"""A script for `farandole check`, with one fault: `python checked.py FAULT`.

none         none: the same bits always, and the gradient does not depend on micro=
generator    the dataset has a random generator of its own
noise        the inner loop has one
counter      the loss depends on a plain number that counts the steps
attribute    it depends on a tensor of the module that is no buffer
average      it depends on an average of the weights that is not replicated
rate         the update depends on a plain number
first        the weights do not come from the run's random numbers
parts        a plain sum over the inner loop
sum, tokens  the loss is a sum; a mean over tokens without weight=
weighed      a mean over tokens with weight=
norm         the model has batch normalization
pairs        the loss compares the samples of a micro-batch with each other
raises       the second step raises ZeroDivisionError
short        the loop has two steps only
"""

from __future__ import annotations

import copy
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import farandole

SAMPLES, WIDTH, BATCH, MICRO = 64, 8, 16, 4


NOISE = torch.Generator().manual_seed(7)


class Rows(Dataset[torch.Tensor]):
    """Rows of random numbers. `noisy`: each sample gets noise from `NOISE`."""

    def __init__(self, *, noisy: bool) -> None:
        self.rows = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(5))
        self.noisy = noisy

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        row = self.rows[index]
        return row + 0.1 * torch.randn(WIDTH, generator=NOISE) if self.noisy else row


class Net(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(16) if fault == "norm" else nn.Identity()
        self.body = nn.Sequential(nn.Linear(WIDTH, 16), norm, nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
        self.scale = torch.ones(1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.body(rows) * self.scale


def main(fault: str) -> None:
    run = farandole.join()
    if fault == "first":
        torch.seed()
    model = Net(fault)
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.replicate(model=model, optimizer=optimizer)
    rows = Rows(noisy=fault == "generator")
    own = torch.Generator().manual_seed(3)
    loader = run.loader(rows, batch=farandole.GlobalBatch(BATCH, micro=MICRO))
    calls, total = 0, 0.0
    length = {"base_steps": 2} if fault == "short" else {"epochs": 3}
    for step in run.steps(loader, **length):
        calls += 1  # noqa: SIM113
        for x in step:
            if fault == "noise":
                x = x + 0.1 * torch.randn(x.shape, generator=own)
            outputs, targets = model(x), x[:, :4]
            loss = F.mse_loss(outputs, targets, reduction="sum" if fault == "sum" else "mean")
            weight = None
            if fault in ("tokens", "weighed"):
                used = x[:, 4:] > 0
                used[:, 0] = True
                loss = (outputs - targets).square()[used].mean()
                weight = used.sum() if fault == "weighed" else None
            elif fault == "pairs":
                loss = F.cross_entropy(outputs @ outputs.T, torch.arange(len(x)))
            elif fault == "counter":
                loss = loss * (1 + 0.1 * calls)
            elif fault == "average":
                loss = loss + (average(x) - outputs).square().mean()
            step.backward(loss, weight=weight)
            total += float(loss) if fault == "parts" else 0.0
        if fault == "raises" and step.number == 1:
            raise ZeroDivisionError("mine")
        if fault == "rate":
            optimizer.param_groups[0]["lr"] = 0.01 / calls
        optimizer.step()
        if fault == "attribute":
            model.scale = model.scale * 0.9
        with torch.no_grad():
            for mean, parameter in (
                () if fault != "average" else zip(average.parameters(), model.parameters(), strict=True)
            ):
                mean.lerp_(parameter, 0.5)


if __name__ == "__main__":
    main(sys.argv[1])
