"""Images of a store, through a loader process, read and not decoded; a micro-batch takes as long as it is told to.

A worker that begins while `$BENCH_FOLDER/cold` is there has a cache of its own, which is empty; the others share one.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from contestants.recorder import Recorder
from torch import nn

import farandole

MICRO_BATCHES, MICRO = 6, 8
MICRO_SECONDS = 0.05


class Read(farandole.ShardedImages):
    """Lengths of the images, which are read."""

    def __getitem__(self, index: int) -> tuple[int, int]:
        data, label = self.read(index)
        return len(data), label


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--warm", required=True, help="the veterans' cache")
    parser.add_argument("--cold", required=True, help="the joiner's")
    options = parser.parse_args()
    cold = Path(os.environ["BENCH_FOLDER"], "cold").exists()
    run = farandole.join()
    recorder = Recorder(os.environ.get("FARANDOLE_WORKER", "alone"))
    data = Read(options.url, cache=options.cold if cold else options.warm)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    run.replicate(model=model, optimizer=optimizer)
    loader = run.loader(data, batch=farandole.GlobalBatch(MICRO_BATCHES * MICRO, micro=MICRO), num_workers=1)
    recorder.mark("ready")
    for step in run.steps(loader, epochs=100_000):
        for lengths, _ in step:
            time.sleep(MICRO_SECONDS)  # as a process does whose accelerator computes
            step.backward(model(lengths.float().unsqueeze(1) / 1e6).mean())
        optimizer.step()
        recorder.step(step.number, step.view.size)


if __name__ == "__main__":
    main()
