"""A small job for runs that are resumed: quick to start, and every draw of a random number shows in its bits.

    python small.py OUT [--pace FILE] [--epochs N] [--base-steps N] [--samples N] [--rule RULE] [--drop-last]
                    [--width N] [--frozen MB]

While FILE holds a number, every step takes at least so many seconds; what is in it counts at once. With a rule the
batch follows the workers. With frozen parameters a joiner has that much more to take over.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import farandole

SAMPLES, BATCH, MICRO, EPOCHS = 130, 16, 4, 6
STEPS = EPOCHS * -(-SAMPLES // BATCH)


def keep(pace: Path) -> None:
    """A micro-batch's part of it, a quarter."""
    began = time.monotonic()
    with contextlib.suppress(FileNotFoundError):
        while (rest := float(pace.read_text() or 0) / 4 - (time.monotonic() - began)) > 0:
            time.sleep(min(rest, 0.05))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--pace", type=Path)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--base-steps", type=int, help="the run's length in these instead")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--rule")
    parser.add_argument("--drop-last", action="store_true")
    parser.add_argument("--width", type=int, default=32, help="of the hidden layer")
    parser.add_argument("--frozen", type=int, default=0)
    args = parser.parse_args()

    run = farandole.join()
    hidden = nn.Linear(8, args.width), nn.BatchNorm1d(args.width), nn.ReLU(), nn.Dropout(0.2)
    model = nn.Sequential(*hidden, nn.Linear(args.width, 1))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batch: Any = farandole.GlobalBatch(BATCH, micro=MICRO)
    if args.rule:
        batch = farandole.PerWorkerBatch(BATCH // 2, micro=MICRO, rule=getattr(farandole, args.rule)())
        if args.rule != "SquareRoot":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    rest = nn.ParameterList(
        nn.Parameter(torch.arange(n, n + 250_000.0), requires_grad=False) for n in range(args.frozen)
    )
    run.replicate(model=model, optimizer=optimizer, schedule=schedule, rest=rest)
    generator = torch.Generator().manual_seed(5)
    rows = TensorDataset(torch.randn(args.samples, 8, generator=generator))
    loader = run.loader(rows, batch=batch, drop_last=args.drop_last)
    length = {"base_steps": args.base_steps} if args.base_steps else {"epochs": args.epochs}
    for step in run.steps(loader, **length):
        strength = 1 + 0.1 * (random.random() + float(np.random.standard_normal()) + float(torch.rand(())))
        for (inputs,) in step:
            if args.pace is not None:
                keep(args.pace)
            noisy = inputs * (1 + 0.1 * random.random()) + 0.1 * float(np.random.standard_normal())
            step.backward(strength * (model(noisy) - noisy.sum(1, keepdim=True)).square().mean())
        optimizer.step()
        for _ in range(step.base_steps):
            schedule.step()
    if run.is_leader:
        partial = args.out.with_suffix(f".{os.getpid()}")
        partial.write_text(run.fingerprint())
        os.replace(partial, args.out)


if __name__ == "__main__":
    main()
