"""A job whose data or compute is as slow as it is told to be.

python probed.py --decode MILLISECONDS --train MILLISECONDS [--processes N] [--epochs N]
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from torch.utils.data import Dataset

import farandole


class Slow(Dataset[torch.Tensor]):
    """Samples that take so long to make."""

    def __init__(self, milliseconds: float) -> None:
        self.seconds = milliseconds / 1e3

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.full((4,), float(index))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--decode", type=float, default=0)
    parser.add_argument("--train", type=float, default=0)
    parser.add_argument("--processes", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=10_000)
    args = parser.parse_args()
    run = farandole.join()
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    run.replicate(model=model, optimizer=optimizer)
    batch = farandole.GlobalBatch(8, micro=4)
    loader = run.loader(Slow(args.decode), batch=batch, num_workers=args.processes)
    for step in run.steps(loader, epochs=args.epochs):
        for rows in step:
            time.sleep(args.train / 1e3)
            step.backward(model(rows).mean())
        optimizer.step()
        if step.ends_epoch:
            run.evaluate(model, torch.utils.data.TensorDataset(torch.ones(8, 4), torch.ones(8)), _error)


def _error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.squeeze(1) - targets).abs()


if __name__ == "__main__":
    main()
