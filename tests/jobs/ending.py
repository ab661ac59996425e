"""A small job for a run's end and its last state, and for `farandole bench steps`: `python ending.py OUT [options]`.

  --epochs, --samples   how long it is
  --pace FILE           while FILE is there, every micro-batch takes a while
  --break-at STEP       the loop is left after this step
  --nan-at STEP         the loss of this step is NaN
  --fail-at STEP        this step raises ZeroDivisionError
  --hang                after the loop a worker that does not lead sleeps for ever
  --save                after the loop the leader writes its process id to "saving" beside OUT and waits to be killed
  --models 2            two models are trained
  --record              WORKER.PID beside OUT has the run's folder, and for each step its kind and a digest of its
                        gradient; there is no fingerprint then

Otherwise OUT.PID is the fingerprint of each process after the loop.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

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


def record(file: TextIO, step: farandole.Step, parameters: Iterable[nn.Parameter]) -> None:
    gradient = torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None])
    print(type(step).__name__, hashlib.sha256(gradient.numpy()).hexdigest(), file=file, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--pace", type=Path)
    parser.add_argument("--break-at", type=int, default=-1)
    parser.add_argument("--nan-at", type=int, default=-1)
    parser.add_argument("--fail-at", type=int, default=-1)
    parser.add_argument("--hang", action="store_true")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--models", type=int, choices=(1, 2), default=1)
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()

    run = farandole.join()
    objects = made()
    model, optimizer = objects["model"], objects["optimizer"]
    assert isinstance(model, Masked)
    assert isinstance(optimizer, torch.optim.Optimizer)
    models: list[nn.Module] = [model]
    if args.models == 2:
        models.append(nn.Linear(8, 1))
        objects["other"] = models[1]
        optimizer.add_param_group({"params": models[1].parameters()})
    parameters = [parameter for each in models for parameter in each.parameters()]
    run.replicate(**objects)
    rows = TensorDataset(torch.randn(args.samples, 8, generator=torch.Generator().manual_seed(5)))
    recorded: TextIO | None = None
    if args.record:
        recorded = args.out.with_name(f"{os.environ['FARANDOLE_WORKER']}.{os.getpid()}").open("w")
        print(Path(os.environ["FARANDOLE_TICKET"]).parent, file=recorded, flush=True)
    for step in run.steps(run.loader(rows, farandole.GlobalBatch(BATCH, micro=MICRO)), epochs=args.epochs):
        for (inputs,) in step:
            if args.pace is not None and args.pace.exists():
                time.sleep(0.05)
            outputs = sum((each(inputs)[:, 0] for each in models), torch.zeros(()))
            loss = (outputs - inputs.sum(1)).square().mean()
            step.backward(loss * math.nan if step.number == args.nan_at else loss)
        if step.number == args.fail_at:
            raise ZeroDivisionError("mine")
        if recorded:
            record(recorded, step, parameters)
        optimizer.step()
        if step.number == args.break_at:
            break
    if recorded:
        return
    args.out.with_name(f"{args.out.name}.{os.getpid()}").write_text(run.fingerprint())
    if args.hang and not run.is_leader:
        print("hanging", flush=True)
        time.sleep(1e6)
    if args.save and run.is_leader:
        args.out.with_name("saving").write_text(str(os.getpid()))
        time.sleep(1e6)


if __name__ == "__main__":
    main()
