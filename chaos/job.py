"""The job of the chaos runs: handwritten digits, convolutions with normalisation and dropout, momentum, a schedule.

    job.py DIGITS [--pace FILE]

examples/digits.py made small, so that a run is mostly what is done to it: DIGITS is a file of the images and labels,
because importing scikit-learn takes a worker longer than the training. While FILE holds a number, every micro-batch
takes so many seconds more: faults need something to hit, and once they are over the rest should be quick.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import farandole

EPOCHS, BATCH, MICRO = 6, 96, 16


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
        nn.Linear(2 * width * 16, 10),
    )


def correct(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(1) == labels


def pace(file: Path | None) -> None:
    with contextlib.suppress(FileNotFoundError, ValueError):  # removed, or being written, at this very moment
        if file is not None:
            time.sleep(float(file.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("digits", type=Path)
    parser.add_argument("--pace", type=Path)
    args = parser.parse_args()

    run = farandole.join()
    with np.load(args.digits) as data:
        images, labels = torch.from_numpy(data["images"]).unsqueeze(1) / 16, torch.from_numpy(data["labels"])
    test = torch.arange(len(labels)) % 5 == 4
    train_set = TensorDataset(images[~test], labels[~test])
    test_set = TensorDataset(images[test], labels[test])
    model = net().to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    loader = run.loader(train_set, batch=farandole.GlobalBatch(BATCH, micro=MICRO))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * len(loader))
    run.replicate(model=model, optimizer=optimizer, schedule=schedule)

    for step in run.steps(loader, epochs=EPOCHS):
        for images, labels in step:
            pace(args.pace)
            loss = F.cross_entropy(model(images.to(run.device)), labels.to(run.device))
            step.backward(loss)
        optimizer.step()
        schedule.step()
        if step.ends_epoch:
            run.log(accuracy=run.evaluate(model, test_set, correct, micro=64))
    if run.is_leader:
        print(f"fingerprint {run.fingerprint()}", flush=True)


if __name__ == "__main__":
    main()
