"""Short trainings through the public API, in a world of one that stands for a history of workers.

A test module imports the fixture `join` and what it needs beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import farandole
from farandole import joining
from farandole.plan.batch import PerWorkerBatch
from farandole.plan.rules import Rule

Join = Callable[[str], farandole.Run]
SAMPLES, SIZE, EPOCHS = 90, 8, 3
HISTORY = "0 1\n5 4\n14 2\n"


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], farandole.Run]]:
    """A world of one that stands for a history."""
    for name in ("TICKET", "WORKER", "POOL", "FOLDER", "LEDGER", "THREADS", "HISTORY", "SEED"):
        monkeypatch.delenv(f"FARANDOLE_{name}", raising=False)
    threads = torch.get_num_threads()

    def joined(history: str) -> farandole.Run:
        if history:
            (tmp_path / "history").write_text(history)
            monkeypatch.setenv("FARANDOLE_HISTORY", str(tmp_path / "history"))
        monkeypatch.setattr(joining, "_current", None)
        return farandole.join()

    yield joined
    torch.set_num_threads(threads)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(SAMPLES, 6, generator=generator), torch.randn(SAMPLES, 1, generator=generator))


def net() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(run: farandole.Run, rule: Rule, make: Callable[[nn.Module], Any] = sgd, **bounds: Any) -> dict[str, Any]:
    """Three epochs of one shard a step, so that plain PyTorch gives the same bits."""
    model = net()
    optimizer = make(model)
    loader = run.loader(data(), batch=PerWorkerBatch(SIZE, micro=SIZE, rule=rule, **bounds))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    run.replicate(model=model, optimizer=optimizer, schedule=schedule)
    seen: list[tuple[int, float, float, int]] = []
    stretched: list[float] = []
    for step in run.steps(loader, epochs=EPOCHS):
        for inputs, targets in step:
            step.backward(F.mse_loss(model(inputs), targets))
        assert run._loop is not None
        optimizer.step()
        stretched.append(run._loop.learning_rate._stretch)
        factor, rate = run._loop.learning_rate.factor, float(optimizer.param_groups[0]["lr"])
        seen.append((step.samples, factor, rate, step.base_steps))
        for _ in range(step.base_steps):
            schedule.step()
    return {"model": model, "seen": seen, "stretched": stretched, "ticks": schedule.last_epoch, "order": loader.order}
