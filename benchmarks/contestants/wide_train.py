"""One layer of `--mb` MB of parameters and hardly any computing, so that a step is its exchange."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset

import farandole

INPUTS = 250


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, required=True)
    parser.add_argument("--micro", type=int, default=1, help="samples of a micro-batch; a step has 8 samples")
    options = parser.parse_args()
    run = farandole.join()
    model = nn.Linear(INPUTS, options.mb * 1_000_000 // 4 // INPUTS, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    run.replicate(model=model, optimizer=optimizer)
    batch = farandole.GlobalBatch(8, micro=options.micro)
    loader = run.loader(TensorDataset(torch.ones(64, INPUTS)), batch=batch, num_workers=0)
    for step in run.steps(loader, epochs=10_000):
        for (rows,) in step:
            step.backward(model(rows).square().mean())
        optimizer.step()


if __name__ == "__main__":
    main()
