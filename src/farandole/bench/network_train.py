"""The script of `farandole bench network`: one layer of so many MB of parameters, whose step is nearly all exchange.

It is copied into a folder of its own, because `farandole run` sends a script's folder to the other hosts.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset

import farandole

INPUTS = 250
MICRO_BATCHES = 64  # of a step: as many workers have something to compute


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=float, required=True)
    options = parser.parse_args()
    run = farandole.join()
    model = nn.Linear(INPUTS, max(1, round(options.mb * 1e6 / 4 / INPUTS)), bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    run.replicate(model=model, optimizer=optimizer)
    batch = farandole.PerWorkerBatch(1, micro=1)
    loader = run.loader(TensorDataset(torch.ones(MICRO_BATCHES, INPUTS)), batch=batch, num_workers=0)
    for step in run.steps(loader, epochs=100_000):
        for (rows,) in step:
            step.backward(model(rows).square().mean())
        optimizer.step()


if __name__ == "__main__":
    main()
