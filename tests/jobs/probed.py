"""A job whose data or compute is as slow as it is told to be.

python probed.py --decode MS --burn MS --train MS [--processes N] [--epochs N] [--store URL] [--forgets]

Decoding and training sleep, burning computes; decoding and burning are for each sample, training for each micro-batch.
With a store the samples lie in one file, URL/shard, which is downloaded, and kept in memory unless it `forgets`.
"""

from __future__ import annotations

import argparse
import time
import urllib.request

import torch
from torch import nn
from torch.utils.data import Dataset

import farandole
from farandole.data import store_clock


class Slow(Dataset[torch.Tensor]):
    """Samples that take so long to make."""

    def __init__(self, milliseconds: float, burn: float, store: str, *, forgets: bool) -> None:
        self.seconds, self.burn, self.store, self.forgets = milliseconds / 1e3, burn / 1e3, store, forgets
        self.kept: bytes | None = None

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.store:
            self.read()
        time.sleep(self.seconds)
        enough = time.process_time() + self.burn
        while time.process_time() < enough:
            sum(range(1000))
        return torch.full((4,), float(index))

    def read(self) -> None:
        with store_clock.reading():
            if self.kept is None:
                with store_clock.fetching():
                    found = self.download(f"{self.store}/shard")
                self.kept = None if self.forgets else found

    def download(self, url: str) -> bytes:
        with store_clock.request(url) as request, urllib.request.urlopen(url) as answer:
            data = answer.read()
            request.bytes = len(data)
            return data


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--decode", type=float, default=0)
    parser.add_argument("--burn", type=float, default=0)
    parser.add_argument("--train", type=float, default=0)
    parser.add_argument("--processes", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=10_000)
    parser.add_argument("--store", default="")
    parser.add_argument("--forgets", action="store_true")
    args = parser.parse_args()
    run = farandole.join()
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    run.replicate(model=model, optimizer=optimizer)
    batch = farandole.GlobalBatch(8, micro=4)
    data = Slow(args.decode, args.burn, args.store, forgets=args.forgets)
    loader = run.loader(data, batch=batch, num_workers=args.processes)
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
