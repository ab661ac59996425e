"""A small job in which one worker is slow, for traces: the others wait for it.

    python traced.py OUT SLOW PACE

While PACE holds a number, each micro-batch takes the worker SLOW so many seconds; it looks again after each twentieth.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import farandole

STEPS = 1000


def rest(pace: Path) -> None:
    began = time.monotonic()
    with contextlib.suppress(FileNotFoundError):
        while (left := float(pace.read_text() or 0) - (time.monotonic() - began)) > 0:
            time.sleep(min(left, 0.05))


def main() -> None:
    out, slow, pace = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    run = farandole.join()
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.replicate(model=model, optimizer=optimizer)
    rows = TensorDataset(torch.randn(12 * STEPS, 8, generator=torch.Generator().manual_seed(5)))
    for step in run.steps(run.loader(rows, batch=farandole.GlobalBatch(12, micro=4)), epochs=1):
        for (inputs,) in step:
            if os.environ.get("FARANDOLE_WORKER") == slow:
                rest(pace)
            step.backward((model(inputs) - inputs.sum(1, keepdim=True)).square().mean())
        optimizer.step()
    if run.is_leader:
        partial = out.with_suffix(f".{os.getpid()}")
        partial.write_text(run.fingerprint())
        os.replace(partial, out)


if __name__ == "__main__":
    main()
