"""The job of test_data_loader_deaths: steps whose samples come from loader processes and draw random numbers.

    python loading.py OUT

While OUT/hold is there, the script waits after step `HOLD`, outside the inner loop, where what torch's handler of
SIGCHLD raises would be the script's failure. The processes that load for it are in OUT/held-PID then.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

import farandole

SAMPLES, BATCH, HOLD = 120, 12, 3


class Drawn(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(4) + index / SAMPLES + random.random()


def main() -> None:
    out = Path(sys.argv[1])
    run = farandole.join()
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.replicate(model=model, optimizer=optimizer)
    loader = run.loader(Drawn(), batch=farandole.GlobalBatch(BATCH, micro=3), num_workers=2)
    for step in run.steps(loader, epochs=1):
        for rows in step:
            step.backward(model(rows).square().mean())
        optimizer.step()
        while step.number == HOLD and (out / "hold").exists():
            held = out / f"held-{os.getpid()}"
            if not held.exists():
                partial = out / f"partial-{os.getpid()}"
                partial.write_text(" ".join(str(process.pid) for process in multiprocessing.active_children()))
                os.replace(partial, held)
            time.sleep(0.01)
    if run.is_leader:
        partial = out / f"fingerprint.{os.getpid()}"
        partial.write_text(run.fingerprint())
        os.replace(partial, out / "fingerprint")


if __name__ == "__main__":
    main()
