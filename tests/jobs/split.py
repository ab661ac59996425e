"""The job of test_code_runs, which edits copies of it: a script that imports a module of its folder, `split_net`.

    split.py OUT [--pace FILE] [--spawn]

While FILE holds a number, every step takes at least so many seconds. Each process that trains writes OUT/seen-PID, what
it takes itself for, and OUT/end-PID, its fingerprint. With --spawn a loader process is spawned, which runs this file
once more.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from split_net import net
from torch.utils.data import Dataset

import farandole

RATE = 0.01
SCALE = 1.0


class Rows(Dataset[Any]):
    def __init__(self) -> None:
        self.rows = torch.randn(48, 8, generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return SCALE * self.rows[index]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--pace", type=Path)
    parser.add_argument("--spawn", action="store_true")
    args = parser.parse_args()

    seen = [__file__, sys.argv[0], sys.path[0], os.getcwd(), sys.modules["split_net"].__file__]
    (args.out / f"seen-{os.getpid()}").write_text(json.dumps(seen))
    run = farandole.join()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    run.replicate(model=model, optimizer=optimizer)
    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "spawn"} if args.spawn else {}
    loader = run.loader(Rows(), batch=farandole.GlobalBatch(16, micro=4), **options)
    for step in run.steps(loader, epochs=40):
        for rows in step:
            step.backward((model(rows) - rows.sum(1, keepdim=True)).square().mean())
        optimizer.step()
        if args.pace is not None and args.pace.exists():
            time.sleep(float(args.pace.read_text() or 0))
    (args.out / f"end-{os.getpid()}").write_text(run.fingerprint())


if __name__ == "__main__":
    main()
