"""The job of test_forked: it forks, and lets the children run on into the training code, and past its end.

forking.py OUT [--fork]      OUT/end-PID: [fingerprint, the children's exit codes]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import farandole


class Rows(Dataset[Any]):
    def __init__(self, device: torch.device) -> None:
        self.rows = torch.randn(48, 8, generator=torch.Generator().manual_seed(5), device=device)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


def main() -> list[Any]:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--fork", action="store_true")
    args = parser.parse_args()

    run = farandole.join()
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.replicate(model=model, optimizer=optimizer)
    loader = run.loader(Rows(run.device), batch=farandole.GlobalBatch(16, micro=4), num_workers=1)
    children: list[int] = []
    ended: list[int] = []
    for step in run.steps(loader, epochs=4):
        for rows in step:
            if args.fork and step.number == 3 and not children:
                children.append(os.fork())  # the child goes on with the micro-batch
            step.backward((model(rows) - rows.sum(1, keepdim=True)).square().mean())
        optimizer.step()
        if args.fork and step.number == 5:
            children.append(os.fork())  # the child goes on with the next step
        if args.fork and step.number == 6:
            helper = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
            helper.start()
            helper.terminate()
            helper.join()
            ended.append(helper.exitcode or 0)
    if args.fork:
        children.append(os.fork())
        if not children[-1]:
            print("the last child leaves", end="")
            sys.exit(7)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    (args.out / f"end-{os.getpid()}").write_text(json.dumps([run.fingerprint(), codes + ended]))
    return children


if __name__ == "__main__" and main():
    last = os.fork()
    if last:
        assert os.waitpid(last, 0)[1] == 0
