"""The job of test_once: a few steps, after one of which a worker has work to do that takes its time.

    python training/step.py OUT [--work SECONDS]

With --work who does it says so in OUT/began-PID, and at its end puts its process id into OUT/done. It draws random
numbers, runs the model in another mode and so changes buffers, none of which may show in the bits. OUT/fingerprint is
the final state's; OUT/learned-PID is what each worker learned: whether the work was its own.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import farandole

STEPS, BATCH, AT = 6, 12, 2


def work(out: Path, model: nn.Module, seconds: float) -> None:
    (out / f"began-{os.getpid()}").touch()
    until = time.monotonic() + seconds
    model.eval()
    model.train()
    while time.monotonic() < until:
        model(torch.randn(5, 4) + random.random() + float(np.random.standard_normal()))
        time.sleep(0.05)
    model.eval()
    partial = out / f"done.{os.getpid()}"
    partial.write_text(str(os.getpid()))
    os.replace(partial, out / "done")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--work", type=float, default=-1.0)
    args = parser.parse_args()
    run = farandole.join()
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.replicate(model=model, optimizer=optimizer)
    rows = TensorDataset(torch.randn(STEPS * BATCH, 4, generator=torch.Generator().manual_seed(1)))
    for step in run.steps(run.loader(rows, batch=farandole.GlobalBatch(BATCH, micro=4)), epochs=1):
        for (inputs,) in step:
            step.backward(model(inputs).square().mean())
        if step.number == AT and args.work >= 0:
            with run.once() as mine:
                (args.out / f"learned-{os.getpid()}").write_text(str(mine))
                if mine:
                    work(args.out, model, args.work)
        optimizer.step()
        with torch.no_grad():
            model[3].bias += torch.randn(1) + random.random() + float(np.random.standard_normal())
    if run.is_leader:
        partial = args.out / f"fingerprint.{os.getpid()}"
        partial.write_text(run.fingerprint())
        os.replace(partial, args.out / "fingerprint")


if __name__ == "__main__":
    main()
