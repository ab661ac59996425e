"""Trains a little, and prints on which cores: `cores OWN LOADING`, its own and how many its loader process may use."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

import farandole


class Cores(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((4,), float(index)), torch.tensor(len(os.sched_getaffinity(0)))


def main() -> None:
    run = farandole.join()
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    run.replicate(model=model, optimizer=optimizer)
    loader = run.loader(Cores(), batch=farandole.GlobalBatch(16, micro=4), num_workers=1)
    for step in run.steps(loader, epochs=2):
        loading = set[int]()
        for values, cores in step:
            loading |= set(cores.tolist())
            step.backward(F.mse_loss(model(values), values[:, :2]))
        optimizer.step()
        if step.number == 0:
            print("cores", *sorted(os.sched_getaffinity(0)), *loading)
    with run.once() as mine:
        if mine:
            Path(sys.argv[1]).write_text(str([p.tolist() for p in model.parameters()]))


if __name__ == "__main__":
    main()
