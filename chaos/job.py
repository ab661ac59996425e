"""The job of the chaos runs: handwritten digits, convolutions with normalisation and dropout, momentum.

    job.py DIGITS [--loaders N] [--pace FILE] [--epochs N] [--unlike data|replica]

examples/digits.py made small and quick to start, so that a run is mostly what is done to it. What most workers' lives
would be spent on is imports: scikit-learn (1.5 s on one core, so DIGITS is a file of its images and labels) and torch's
compiler, which the first optimizer of torch.optim brings in (2 s, so momentum is written out). While FILE holds a
number, every micro-batch takes so many seconds more: faults need something to hit, and afterwards the rest is quick.
Process ids behind that number are of processes that stand still for good, as a script that waits for what never comes.
With `--unlike` the process may not join the run: its training data is shorter, or its model has another function.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import farandole

EPOCHS, BATCH, MICRO = 10, 96, 16
RATE = 0.05
UNLIKE = ("data", "replica")
LARGE = 288  # features: with so many, sums are used where their owners have made them


def net(width: int = 8) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(2 * width * 16, LARGE),
        nn.ReLU(),
        nn.Linear(LARGE, 10),
    )


class Momentum:
    """Gradient descent with momentum, whose velocity is the state that has to come through."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.parameters = list(parameters)
        self.velocity = [torch.zeros_like(parameter) for parameter in self.parameters]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for parameter, velocity in zip(self.parameters, self.velocity, strict=True):
            velocity.mul_(0.9).add_(parameter.grad)
            parameter.sub_(velocity, alpha=rate)

    def state_dict(self) -> dict[str, list[torch.Tensor]]:
        return {"velocity": self.velocity}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, list[torch.Tensor]]) -> None:
        for mine, theirs in zip(self.velocity, state["velocity"], strict=True):
            mine.copy_(theirs)


def correct(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(1) == labels


def wrong(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(1) != labels


def pace(file: Path | None) -> None:
    with contextlib.suppress(FileNotFoundError, ValueError):  # removed, or being written, at this very moment
        if file is not None:
            seconds, *hung = file.read_text().split()
            while str(os.getpid()) in hung:
                time.sleep(1.0)
            time.sleep(float(seconds))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("digits", type=Path)
    parser.add_argument("--loaders", type=int, default=0)
    parser.add_argument("--pace", type=Path)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--unlike", choices=UNLIKE)
    args = parser.parse_args()

    run = farandole.join()
    with np.load(args.digits) as data:
        images, labels = torch.from_numpy(data["images"]).unsqueeze(1) / 16, torch.from_numpy(data["labels"])
    test = torch.arange(len(labels)) % 5 == 4
    train = ~test
    if args.unlike == "data":
        train &= train.cumsum(0) < train.sum()
    train_set = TensorDataset(images[train], labels[train])
    test_set = TensorDataset(images[test], labels[test])
    model = net().to(run.device)
    model.correct = wrong if args.unlike == "replica" else correct
    optimizer = Momentum(model.parameters())
    loader = run.loader(train_set, batch=farandole.GlobalBatch(BATCH, micro=MICRO), num_workers=args.loaders)
    run.replicate(model=model, optimizer=optimizer)

    steps = args.epochs * len(loader)
    for step in run.steps(loader, epochs=args.epochs):
        for images, labels in step:
            pace(args.pace)
            loss = F.cross_entropy(model(images.to(run.device)), labels.to(run.device))
            step.backward(loss)
        optimizer.step(rate=RATE * (1 - step.number / steps))
        if step.ends_epoch:
            run.log(accuracy=run.evaluate(model, test_set, correct, micro=64))
    if run.is_leader:
        print(f"fingerprint {run.fingerprint()}", flush=True)


if __name__ == "__main__":
    main()
