"""A small job for `farandole bench steps`: it writes down its run's folder, and for each step its kind and a digest of
its gradient.

    python benched.py FOLDER [--epochs N] [--models N] [--leave STEP] [--fail STEP]

`--models 2` trains two; with `--leave` it leaves its loop in that step, with `--fail` it raises.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import farandole

SAMPLES, BATCH, MICRO = 320, 16, 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--models", type=int, choices=(1, 2), default=1)
    parser.add_argument("--leave", type=int, default=-1)
    parser.add_argument("--fail", type=int, default=-1)
    args = parser.parse_args()

    run = farandole.join()
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
    models = {"model": model, "other": nn.Linear(8, 1)} if args.models == 2 else {"model": model}
    parameters = [parameter for each in models.values() for parameter in each.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
    run.replicate(**models, optimizer=optimizer)
    generator = torch.Generator().manual_seed(5)
    loader = run.loader(
        TensorDataset(torch.randn(SAMPLES, 8, generator=generator)), farandole.GlobalBatch(BATCH, micro=MICRO)
    )
    with (args.folder / f"{os.environ['FARANDOLE_WORKER']}.{os.getpid()}").open("w") as lines:
        print(Path(os.environ["FARANDOLE_TICKET"]).parent, file=lines, flush=True)
        for step in run.steps(loader, epochs=args.epochs):
            for (inputs,) in step:
                outputs = sum(each(inputs) for each in models.values())
                step.backward((outputs - inputs.sum(1, keepdim=True)).square().mean())
            if args.fail == step.number:
                raise ZeroDivisionError("mine")
            gradient = torch.cat([p.grad.reshape(-1) for p in parameters])
            print(type(step).__name__, hashlib.sha256(gradient.numpy()).hexdigest(), file=lines, flush=True)
            optimizer.step()
            if args.leave == step.number:
                break


if __name__ == "__main__":
    main()
