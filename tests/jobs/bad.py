"""A small job whose data has bad samples: `python bad.py OUT BAD [--pace FILE]`, BAD as "3,17" or "none"; skips them.

OUT gets the fingerprint, and the mean of the labels of what was evaluated.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

import farandole

SAMPLES, EPOCHS = 60, 5


class Torn(Dataset[tuple[torch.Tensor, float]]):
    def __init__(self, bad: set[int]) -> None:
        self.bad = bad
        self.rows = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, float]:
        if index in self.bad:
            raise OSError("image file is truncated")
        return self.rows[index] + 0.1 * torch.rand(8), float(index)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("bad")
    parser.add_argument("--pace", type=Path)
    args = parser.parse_args()
    bad = set() if args.bad == "none" else {int(index) for index in args.bad.split(",")}
    run = farandole.join()
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    one_row = {"model.1.num_batches_tracked": "max"}  # such a micro-batch goes past the batch normalization
    run.replicate(model=model, optimizer=optimizer, buffers=one_row)
    loader = run.loader(Torn(bad), batch=farandole.GlobalBatch(12, micro=3), on_bad_sample="skip", num_workers=1)
    mean = 0.0
    for step in run.steps(loader, epochs=EPOCHS):
        for rows, _ in step:
            if args.pace is not None and args.pace.exists():
                time.sleep(float(args.pace.read_text() or 0))
            output = model(rows) if len(rows) > 1 else model[4](torch.relu(model[0](rows)))
            step.backward((output.squeeze(1) - rows.sum(1)).square().mean())
        optimizer.step()
        if step.ends_epoch:
            mean = run.evaluate(model, Torn(bad), lambda _, labels: labels, micro=4, on_bad_sample="skip")
    if run.is_leader:
        partial = args.out.with_suffix(f".{os.getpid()}")
        partial.write_text(f"{run.fingerprint()} {mean}")
        os.replace(partial, args.out)


if __name__ == "__main__":
    main()
