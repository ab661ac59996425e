"""A world of one that is resumed from what it has saved comes to the bits of one that nothing happened to."""

from __future__ import annotations

import atexit
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import farandole
from farandole import joining
from tests.support.steps import BATCH, SEED, data, mlp

Join = Callable[[str], farandole.Run]
EPOCHS = 4  # of two steps each


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Join]:
    """Begins a run in a folder of this name, or goes on with it. It does not end with the tests' process."""
    for name in ("TICKET", "WORKER", "POOL", "THREADS", "HISTORY", "LEDGER"):
        monkeypatch.delenv(f"FARANDOLE_{name}", raising=False)
    monkeypatch.setenv("FARANDOLE_SEED", str(SEED))
    monkeypatch.setenv("FARANDOLE_CHECKPOINT_EVERY", "never")
    threads, opened = torch.get_num_threads(), list[Any]()

    def joined(folder: str) -> farandole.Run:
        monkeypatch.setenv("FARANDOLE_FOLDER", str(tmp_path / folder))
        monkeypatch.setattr(joining, "_current", None)
        run = farandole.join()
        atexit.unregister(run._participant._end)  # type: ignore[attr-defined]
        opened.append(run._participant._file)  # type: ignore[attr-defined]
        return run

    yield joined
    for file in opened:
        file.close()
    torch.set_num_threads(threads)


class Interrupted(Exception):
    """What a script of these tests raises in the middle."""


class Script:
    """A training script; subclasses say what they do at the top of the body, in a micro-batch and after the update."""

    def __init__(self, run: farandole.Run) -> None:
        self.run = run
        self.model = self.make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8)
        run.replicate(**self.replicated())

    def make_model(self) -> nn.Sequential:
        return mlp()

    def replicated(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}

    def top(self, step: farandole.Step) -> None: ...

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(inputs), targets)

    def after(self, step: farandole.Step) -> None: ...

    def train(self, stops: Callable[[str, int], bool] = lambda *_: False) -> str:
        """To its end, or to where it `stops`: at a place (top, within, after) of a step. The model's fingerprint."""

        def come_to(place: str, step: farandole.Step) -> None:
            if stops(place, step.number):
                raise Interrupted

        loader = self.run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4))
        for step in self.run.steps(loader, epochs=EPOCHS):
            self.top(step)
            come_to("top", step)
            for inputs, targets in step:
                step.backward(self.loss(inputs, targets))
                come_to("within", step)
            self.optimizer.step()
            self.after(step)
            come_to("after", step)
        return self.run.fingerprint()


def interrupted(join: Join, script: type[Script], place: str, number: int) -> str:
    """The fingerprint of a run that was saved where its script raised, and was resumed from that."""
    run = join("interrupted")
    with pytest.raises(Interrupted):
        script(run).train(lambda *at: at == (place, number))
    assert run._end_alone()
    return script(join("interrupted")).train()


# --- the random state at the top of a loop body ------------------------------------------------------------------


class Mixup(Script):
    def top(self, step: farandole.Step) -> None:
        del step
        self.strength = 1 + torch.rand(()) + random.random() + np.random.rand()

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return super().loss(inputs * self.strength, targets)


def test_what_the_body_draws_at_its_top_is_the_steps_own(join: Join) -> None:
    assert interrupted(join, Mixup, "within", 5) == Mixup(join("whole")).train()
