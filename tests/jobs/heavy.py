"""A job that computes as much as a file says, so that a host short of cores shows it; its bits do not depend on it.

    python heavy.py OUT --load FILE      OUT: the fingerprint, by rank 0

While FILE holds a number, every micro-batch multiplies matrices so many times beside what it does otherwise.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import farandole

STEPS, SHARDS, MICRO = 200, 15, 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--load", type=Path)
    args = parser.parse_args()

    run = farandole.join()
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    run.replicate(model=model, optimizer=optimizer)
    generator = torch.Generator().manual_seed(5)
    rows = TensorDataset(torch.randn(STEPS * SHARDS * MICRO, 8, generator=generator))
    loader = run.loader(rows, batch=farandole.GlobalBatch(SHARDS * MICRO, micro=MICRO))
    matrix = torch.eye(256)
    for step in run.steps(loader, epochs=1):
        load = int(args.load.read_text() or 0) if args.load and args.load.exists() else 0
        for (batch,) in step:
            for _ in range(load):
                torch.mm(matrix, matrix)
            step.backward((model(batch) - batch.sum(1, keepdim=True)).square().mean())
        optimizer.step()
    if run.is_leader:
        partial = args.out.with_suffix(f".{os.getpid()}")
        partial.write_text(run.fingerprint())
        os.replace(partial, args.out)


if __name__ == "__main__":
    main()
