"""A script that sums over the micro-batches in Python, as one does without workers: `correct` is a part of the sum."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import farandole


def main() -> None:
    run = farandole.join()
    torch.manual_seed(3)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.replicate(model=model, optimizer=optimizer)
    data = TensorDataset(torch.randn(96, 6), torch.arange(96) % 3)
    for step in run.steps(run.loader(data, batch=farandole.GlobalBatch(16, micro=2)), epochs=10):
        correct = 0.0
        for inputs, targets in step:
            scores = model(inputs)
            step.backward(F.cross_entropy(scores, targets))
            correct += float(scores.exp().sum().detach())
            step.sum(correct=scores.exp().sum().detach())
        optimizer.step()
        run.log(correct=correct, right=step.sums["correct"], loss=step.loss)


if __name__ == "__main__":
    main()
