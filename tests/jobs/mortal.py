"""The job of test_losses and test_stalled: short steps until it is told to end, and a trouble that is asked for.

    python mortal.py OUT TROUBLE

    everyone    whoever comes to step 5 dies of signal 11
    joiner      who has joined after the beginning dies of it in its first step
    anew        the first who comes to step 5 is no use any more, as a joiner whose state is not the run's
    hang        who comes to step 5 never comes out of it; its process id is in OUT/hung
    hang after  the same between two steps, after the update of step 5

Otherwise it trains on until it is stopped.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import farandole
from farandole.errors import WorkerSuperseded

BATCH, EPOCHS, TROUBLE = 8, 1000, 5


def die_of_signal_11() -> None:
    time.sleep(0.7)  # a heartbeat tells the step
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSEGV)


def stand_for_ever(out: Path) -> None:
    (out / "hung").write_text(str(os.getpid()))
    while True:
        time.sleep(1.0)


def main() -> None:
    out, trouble = Path(sys.argv[1]), sys.argv[2]
    run = farandole.join()
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.replicate(model=model, optimizer=optimizer)
    loader = run.loader(TensorDataset(torch.randn(BATCH * 20, 4)), batch=farandole.GlobalBatch(BATCH, micro=2))
    first = -1
    for step in run.steps(loader, epochs=EPOCHS):
        first = step.number if first < 0 else first
        for (rows,) in step:
            time.sleep(0.01)
            at_trouble = step.number == TROUBLE
            if (trouble == "everyone" and at_trouble) or (trouble == "joiner" and first > 0):
                die_of_signal_11()
            if trouble == "anew" and at_trouble and not (out / "anew").exists():
                (out / "anew").touch()
                raise WorkerSuperseded("no use any more")
            if trouble == "hang" and at_trouble:
                stand_for_ever(out)
            step.backward(model(rows).square().mean())
        optimizer.step()
        if trouble == "hang after" and step.number == TROUBLE:
            stand_for_ever(out)


if __name__ == "__main__":
    main()
