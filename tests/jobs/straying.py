"""The job of test_calls: a few short steps, in which the workers' scripts go different ways.

    python straying.py HOW

HOW is a function's name below, called after each step with the run, the model, the data and the step's number; whatever
it returns, True ends the loop.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import farandole

BATCH, STEPS, TROUBLE = 8, 12, 5

How = Callable[[farandole.Run, nn.Sequential, TensorDataset, int], bool]


def error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean(1)


def leader_evaluates(run: farandole.Run, model: nn.Sequential, rows: TensorDataset, number: int) -> bool:
    if number == TROUBLE and run.is_leader:
        run.evaluate(model, rows, error, micro=16)
    return False


def unequal_evaluations(run: farandole.Run, model: nn.Sequential, rows: TensorDataset, number: int) -> bool:
    if number == TROUBLE:
        run.evaluate(model, rows, {"a": error, "b": error} if run.is_leader else error, micro=16)
    return False


def leader_thaws(run: farandole.Run, model: nn.Sequential, rows: TensorDataset, number: int) -> bool:
    del rows
    if number == TROUBLE and run.is_leader:
        model[0].requires_grad_(True)
    return False


def everyone_thaws(run: farandole.Run, model: nn.Sequential, rows: TensorDataset, number: int) -> bool:
    del run, rows
    if number == TROUBLE:
        model[0].requires_grad_(True)
    return False


def one_breaks(run: farandole.Run, model: nn.Sequential, rows: TensorDataset, number: int) -> bool:
    del model, rows
    return number == TROUBLE and run.rank == 1


def one_exits(run: farandole.Run, model: nn.Sequential, rows: TensorDataset, number: int) -> bool:
    del model, rows
    if number == TROUBLE and run.is_leader:
        sys.exit(0)
    return False


def everyone_breaks(run: farandole.Run, model: nn.Sequential, rows: TensorDataset, number: int) -> bool:
    del run, model, rows
    return number == TROUBLE


def leader_evaluates_at_the_end(run: farandole.Run, model: nn.Sequential, rows: TensorDataset, number: int) -> bool:
    if number == TROUBLE and run.is_leader:
        run.evaluate(model, rows, error, micro=16)
    return number == TROUBLE


def main() -> None:
    how: How = globals()[Path(sys.argv[1]).name]
    run = farandole.join()
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.replicate(model=model, optimizer=optimizer)
    x = torch.randn(BATCH * STEPS, 4)
    rows = TensorDataset(x, x[:, :1])
    for step in run.steps(run.loader(rows, batch=farandole.GlobalBatch(BATCH, micro=2)), epochs=1):
        for inputs, targets in step:
            step.backward(error(model(inputs), targets).mean())
        optimizer.step()
        if how(run, model, rows, step.number):
            break


if __name__ == "__main__":
    main()
