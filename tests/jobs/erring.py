"""The job of test_proofs: one worker whose arithmetic, script or data are not those of the others.

    python erring.py HOW WORKER FROM [PACE]

HOW: `batch`, `loss`, `gradient` (one bit of it; `gradient:BIT` says which, `gradient:BIT:once` flips it in one step
alone) or `buffers`. From step FROM on WORKER computes otherwise. Steps
are slow while there is a file PACE.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

import farandole

BATCH, MICRO, STEPS = 24, 4, 60


class Rows(Dataset[torch.Tensor]):
    def __init__(self, odd: float) -> None:
        self.odd = odd
        self.rows = torch.randn(BATCH * STEPS, 4, generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index] + self.odd


def main() -> None:
    how, worker, since = sys.argv[1], sys.argv[2], int(sys.argv[3])
    pace = Path(sys.argv[4]) if len(sys.argv) > 4 else None
    mine = os.environ.get("FARANDOLE_WORKER") == worker
    run = farandole.join()
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    run.replicate(model=model, optimizer=optimizer)
    loader = run.loader(Rows(1e-3 * (mine and how == "batch")), batch=farandole.GlobalBatch(BATCH, micro=MICRO))
    now = -1

    what, *more = how.split(":")
    bit, once = int(more[0]) if more else 96, "once" in more

    def flip(gradient: torch.Tensor) -> torch.Tensor:
        if mine and what == "gradient" and (now == since if once else now >= since):
            gradient = gradient.clone()
            gradient.view(-1).view(torch.int32)[bit // 32] ^= 1 << bit % 31
        return gradient

    model[0].weight.register_hook(flip)
    for step in run.steps(loader, epochs=1):
        now = step.number
        errs = mine and now >= since
        if pace is not None and pace.exists():
            time.sleep(0.1)
        for rows in step:
            loss = model(rows).square().mean()
            if errs and how == "buffers":
                model[1].running_mean.data.add_(1e-3)  # type: ignore[operator]
            step.backward(loss * (1.001 if errs and how == "loss" else 1.0))
        optimizer.step()


if __name__ == "__main__":
    main()
