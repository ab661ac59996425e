"""Trains on a stream of noisy samples, in another order each epoch: with a state and without.

    python streamed.py OUT {plain,state} [--pace FILE]      OUT: the fingerprint, by rank 0

`plain` has no state, and one loader process a worker. `state` has one, and each worker writes how many samples it has
read to OUT.PID. While FILE is there, every micro-batch takes 0.01 s more.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import farandole

sys.path.append(str(Path(__file__).parents[2]))
from tests.support.streams import Noisy, Resumable

SAMPLES, BATCH, MICRO, EPOCHS = 1400, 16, 4, 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("kind", choices=("plain", "state"))
    parser.add_argument("--pace", type=Path)
    args = parser.parse_args()
    run = farandole.join()
    stream = Resumable(SAMPLES) if args.kind == "state" else Noisy(SAMPLES)
    loader = run.loader(DataLoader(stream, BATCH, num_workers=int(args.kind == "plain")), micro=MICRO)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    run.replicate(model=model, optimizer=optimizer)
    for step in run.steps(loader, epochs=EPOCHS):
        for numbers in step:
            if args.pace is not None and args.pace.exists():
                time.sleep(0.01)
            rows = torch.sin(numbers[:, None] * torch.arange(1, 7) / SAMPLES)
            step.backward(F.mse_loss(model(rows), rows.sum(1, keepdim=True)))
        optimizer.step()
    if run.is_leader:
        args.out.write_text(run.fingerprint())
    if args.kind == "state":
        args.out.with_suffix(f".{os.getpid()}").write_text(str(stream.reads))


if __name__ == "__main__":
    main()
