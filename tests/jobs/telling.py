"""A job that has much to say, for runs whose disk is full, whose terminal is gone, or whose coordinator is frozen.

    python telling.py OUT [--pace FILE] [--manners] [--silent]

Every step prints a kilobyte, unless `--silent`, and its number replaces OUT.step, which needs nobody else to be read.
While FILE holds a number, every step takes at least so many seconds. OUT gets the fingerprint at the end, by rank 0.
With `--manners` it has bad ones: it prints control sequences, starts a process in a session of its own (its id is in
OUT.child-WORKER), raises in w3 before that has joined, and closes its standard output.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import farandole

SAMPLES, BATCH, EPOCHS = 64, 8, 40
ESCAPES = "\x1b[2J\x1b]0;owned\x07\x1b[31mred\x1b[0m\x08"


def replace(path: Path, text: str) -> None:
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(text)
    new.replace(path)


def misbehave(out: Path) -> None:
    if os.environ.get("FARANDOLE_WORKER") == "w3":
        raise RuntimeError("a trouble of w3's own")
    print(f"{ESCAPES} and plain")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    replace(out.with_suffix(f".child-{os.environ['FARANDOLE_WORKER']}"), str(child.pid))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--pace", type=Path)
    parser.add_argument("--manners", action="store_true")
    parser.add_argument("--silent", action="store_true")
    args = parser.parse_args()
    if args.manners:
        misbehave(args.out)
    run = farandole.join()
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))
    run.replicate(model=model)
    rows = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(5))
    loader = run.loader(TensorDataset(rows), batch=farandole.GlobalBatch(BATCH, micro=2))
    for step in run.steps(loader, epochs=EPOCHS):
        for (inputs,) in step:
            step.backward((model(inputs) - inputs.sum(1, keepdim=True)).square().mean())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.01)
        if not args.silent:
            print(f"step {step.number} {'.' * 1000}")
        replace(args.out.with_suffix(".step"), str(step.number))
        with contextlib.suppress(FileNotFoundError, TypeError):
            time.sleep(float(args.pace.read_text() or 0) if args.pace else 0)
    if run.is_leader:
        replace(args.out, run.fingerprint())
    if args.manners:
        sys.stdout.close()


if __name__ == "__main__":
    main()
