"""The job of test_replicas_differ: what a script may do on one worker alone, from step 5 on.

python drifting.py HOW
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import farandole

BATCH, STEPS, TROUBLE = 8, 600, 5


def trouble(
    how: str, step: int, *, leads: bool, model: nn.Module, optimizer: torch.optim.Optimizer, schedule: object
) -> None:
    if how == "rate" and leads:
        optimizer.param_groups[0]["lr"] = 0.05
    if how == "setting" and leads:
        torch.set_flush_denormal(True)
    if how == "forward" and leads:
        model(torch.ones(3, 4))
    if how == "schedule" and not leads:
        schedule.step()  # type: ignore[attr-defined]
    if how in ("element", "renewed") and not leads and step == TROUBLE:
        with torch.no_grad():
            model[0].weight[1, 2] += 1e-3  # type: ignore[index]


def main() -> None:
    how = sys.argv[1]
    run = farandole.join()
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
    run.replicate(model=model, optimizer=optimizer, schedule=schedule)
    generator = torch.Generator().manual_seed(5)
    steps = {"end": 12, "renewed": 1100}.get(how, STEPS)
    data = TensorDataset(torch.randn(BATCH * steps, 4, generator=generator))
    loader = run.loader(data, batch=farandole.GlobalBatch(BATCH, micro=4))
    for step in run.steps(loader, epochs=1):
        for (rows,) in step:
            step.backward(model(rows).square().mean())
        optimizer.step()
        schedule.step()
        if step.number >= TROUBLE:
            trouble(how, step.number, leads=run.is_leader, model=model, optimizer=optimizer, schedule=schedule)
    if how == "end" and run.is_leader:
        with torch.no_grad():
            model[2].bias.add_(1.0)


if __name__ == "__main__":
    main()
