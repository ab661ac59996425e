"""A small job for what happens at a run's end and to its last state.

    python ending.py OUT [--epochs N] [--pace FILE] [--break-at STEP] [--nan-at STEP] [--hang] [--save]

While FILE is there every step takes a while. After the loop: with `--hang` whoever does not lead sleeps for ever; with
`--save` the leader says that it saves and waits, until it is killed.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import farandole

SAMPLES, BATCH, MICRO, EPOCHS = 66, 16, 4, 2
STEPS_AN_EPOCH = -(-SAMPLES // BATCH)


class Masked(nn.Module):
    """Its mask is infinite, as those of attention are; that says nothing about its state."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
        self.register_buffer("mask", torch.tensor([0.0, 0.0, 0.0, -math.inf]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (self.body(inputs) + self.mask).softmax(1)


def made() -> dict[str, nn.Module | torch.optim.Optimizer]:
    """What is replicated."""
    model = Masked()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--pace", type=Path)
    parser.add_argument("--break-at", type=int, default=-1)
    parser.add_argument("--nan-at", type=int, default=-1)
    parser.add_argument("--hang", action="store_true")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()

    run = farandole.join()
    objects = made()
    model, optimizer = objects["model"], objects["optimizer"]
    assert isinstance(model, Masked)
    assert isinstance(optimizer, torch.optim.Optimizer)
    run.replicate(**objects)
    rows = TensorDataset(torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(5)))
    for step in run.steps(run.loader(rows, farandole.GlobalBatch(BATCH, micro=MICRO)), epochs=args.epochs):
        for (inputs,) in step:
            if args.pace is not None and args.pace.exists():
                time.sleep(0.05)
            loss = (model(inputs)[:, 0] - inputs.sum(1)).square().mean()
            step.backward(loss * math.nan if step.number == args.nan_at else loss)
        optimizer.step()
        if step.number == args.break_at:
            break
    args.out.with_name(f"{args.out.name}.{os.getpid()}").write_text(run.fingerprint())
    if args.hang and not run.is_leader:
        print("hanging", flush=True)
        time.sleep(1e6)
    if args.save and run.is_leader:
        args.out.with_name("saving").write_text(str(os.getpid()))
        time.sleep(1e6)


if __name__ == "__main__":
    main()
