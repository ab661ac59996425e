"""The job of test_unfed: small steps, an evaluation and work for one in each epoch, and data that some can't get.

python unfed.py OUT [--shards URL]      OUT/weights: the fingerprint and the evaluations' mean, by rank 0

OUT/short   JSON: by worker, "*" for all, where it gets none from now on: "open", "train", "evaluate" or "once"
OUT/pace    while it is there, steps take at least so many seconds
URL         of prepared shards, in place of rows; OUT/cache-WORKER is each one's cache
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import farandole
from farandole.errors import ShardError

SAMPLES, BATCH, MICRO, EPOCHS = 60, 12, 3, 5
WORKER = os.environ.get("FARANDOLE_WORKER", "")
WIDTH = 8


def see(out: Path, where: str) -> None:
    """Raises ShardError where this worker is to get no data."""
    if (out / "short").exists():
        short = json.loads((out / "short").read_text())
        if where in (short.get(WORKER), short.get("*")):
            raise ShardError(f"shard 7 can't be written to {out}/cache: No space left on device; make room there")


class Rows(Dataset[tuple[torch.Tensor, float]]):
    def __init__(self, out: Path, where: str) -> None:
        self.out, self.where = out, where
        self.rows = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, float]:
        see(self.out, self.where)
        return self.rows[index] + 0.1 * torch.rand(WIDTH), float(index)


class Mean:
    """Of the evaluations so far: part of the state, so that a run that goes on from a checkpoint has them all."""

    def __init__(self) -> None:
        self.sum = torch.zeros((), dtype=torch.float64)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"sum": self.sum}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.sum = state["sum"].clone()


def row(image: Any) -> torch.Tensor:
    return torch.tensor(list(image.tobytes()[:WIDTH])) / 255 + 0.1 * torch.rand(WIDTH)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--shards")
    args = parser.parse_args()
    out, pace = args.out, args.out / "pace"
    run = farandole.join()
    see(out, "open")
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    mean = Mean()
    run.replicate(model=model, optimizer=optimizer, mean=mean)
    data: Any = Rows(out, "train")
    if args.shards:
        data = farandole.ShardedImages(args.shards, transform=row, cache=out / f"cache-{WORKER}")
    loader = run.loader(data, batch=farandole.GlobalBatch(BATCH, micro=MICRO), num_workers=0 if args.shards else 1)
    for step in run.steps(loader, epochs=EPOCHS):
        for rows, _ in step:
            if pace.exists():
                time.sleep(float(pace.read_text() or 0) / 4)
            step.backward((model(rows).squeeze(1) - rows.sum(1)).square().mean())
        optimizer.step()
        if step.ends_epoch:
            mean.sum += run.evaluate(model, Rows(out, "evaluate"), lambda _, labels: labels, micro=4)
            with run.once() as mine:
                if mine:
                    see(out, "once")
    if run.is_leader:
        partial = out / f"weights.{os.getpid()}"
        partial.write_text(f"{run.fingerprint()} {mean.sum.item()}")
        os.replace(partial, out / "weights")


if __name__ == "__main__":
    main()
