"""A small job whose data is what matters: `python loading.py OUT [options]`, OUT being a folder.

It evaluates and does some work for one worker in each epoch. Options and files for what may happen to data:

  --bad 3,17 --on-bad skip   these samples can't be decoded; they are left out, or raised ("raise")
  --shards URL               the data is prepared shards, each worker's cache is OUT/cache-WORKER, and OUT/began-WORKER
                             has the number of shards in it when the worker begins its first step
  --cores                    prints "cores OWN LOADING" after step 0: this process's cores, its loader process's number
  --hold STEP                while OUT/hold is there, a worker waits after this step, outside the inner loop, and
                             OUT/held-PID has the process ids of its loader processes
  OUT/short                  JSON: by worker, "*" for all, where no data comes from now on: "open", "train", "evaluate"
                             or "once"
  OUT/pace                   while it is there, a step takes at least so many seconds more

OUT/weights has the fingerprint and the sum of the evaluations' means of labels, by rank 0.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
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


def check_data(out: Path, where: str) -> None:
    """Raises ShardError where this worker is to get no data."""
    if (out / "short").exists():
        short = json.loads((out / "short").read_text())
        if where in (short.get(WORKER), short.get("*")):
            raise ShardError(f"shard 7 can't be written to {out}/cache: No space left on device; make room there")


class Rows(Dataset[tuple[torch.Tensor, float]]):
    """Noisy rows; a label is the row's index, or with `cores` the number of cores of the process that loads it."""

    def __init__(self, out: Path, where: str, bad: set[int], *, cores: bool = False) -> None:
        self.out, self.where, self.bad, self.cores = out, where, bad, cores
        self.rows = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, float]:
        check_data(self.out, self.where)
        if index in self.bad:
            raise OSError("image file is truncated")
        label = len(os.sched_getaffinity(0)) if self.cores else index
        return self.rows[index] + 0.1 * (torch.rand(WIDTH) + random.random()), float(label)


class Mean:
    """Sum of the evaluations so far: part of the state, so that a run that goes on from a checkpoint has them all."""

    def __init__(self) -> None:
        self.sum = torch.zeros((), dtype=torch.float64)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"sum": self.sum}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.sum = state["sum"].clone()


def row(image: Any) -> torch.Tensor:
    return torch.tensor(list(image.tobytes()[:WIDTH])) / 255 + 0.1 * torch.rand(WIDTH)


def replace(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(text)
    os.replace(partial, path)


def hold(out: Path) -> None:
    held = out / f"held-{os.getpid()}"
    while (out / "hold").exists():
        if not held.exists():
            partial = out / f"partial-{os.getpid()}"
            partial.write_text(" ".join(str(process.pid) for process in multiprocessing.active_children()))
            os.replace(partial, held)
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--bad", default="", help="indices, with commas between")
    parser.add_argument("--on-bad", choices=["raise", "skip"], default="raise")
    parser.add_argument("--shards", help="URL or folder")
    parser.add_argument("--cores", action="store_true")
    parser.add_argument("--hold", type=int, default=-1, metavar="STEP")
    parser.add_argument("--loaders", type=int, default=1, help="loader processes")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    args = parser.parse_args()
    out, pace = args.out, args.out / "pace"
    bad = {int(index) for index in args.bad.split(",") if index}
    run = farandole.join()
    check_data(out, "open")
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    mean = Mean()
    one_row = {"model.1.num_batches_tracked": "max"}  # such a micro-batch goes past the batch normalization
    run.replicate(model=model, optimizer=optimizer, mean=mean, **({"buffers": one_row} if bad else {}))
    data: Any = Rows(out, "train", bad, cores=args.cores)
    cache, began = out / f"cache-{WORKER}", out / f"began-{WORKER}"
    if args.shards:
        data = farandole.ShardedImages(args.shards, transform=row, cache=cache)
    batch = farandole.GlobalBatch(BATCH, micro=MICRO)
    loader = run.loader(data, batch=batch, on_bad_sample=args.on_bad, num_workers=args.loaders)
    for step in run.steps(loader, epochs=args.epochs):
        if args.shards and not began.exists():
            replace(began, str(len(list(cache.glob("*.tar")))))
        loading = set[int]()
        for rows, labels in step:
            if pace.exists():
                time.sleep(float(pace.read_text() or 0) / 4)
            loading |= {int(label) for label in labels}
            outputs = model(rows) if len(rows) > 1 or not bad else model[4](torch.relu(model[0](rows)))
            step.backward((outputs.squeeze(1) - rows.sum(1)).square().mean())
        optimizer.step()
        if args.cores and step.number == 0:
            print("cores", *sorted(os.sched_getaffinity(0)), *loading)
        if step.number == args.hold:
            hold(out)
        if step.ends_epoch:
            evaluated = Rows(out, "evaluate", bad)
            mean.sum += run.evaluate(model, evaluated, lambda _, labels: labels, micro=4, on_bad_sample=args.on_bad)
            with run.once() as mine:
                if mine:
                    check_data(out, "once")
    if run.is_leader:
        replace(out / "weights", f"{run.fingerprint()} {mean.sum.item()}")


if __name__ == "__main__":
    main()
