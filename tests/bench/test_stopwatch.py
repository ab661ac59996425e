"""Where a step's time goes, on a clock of the test's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from farandole.bench import stopwatch
from farandole.bench.stopwatch import Stopwatch, TimedGradients
from farandole.data.loader import Key, Loader
from farandole.plan.batch import GlobalBatch
from farandole.training.gradients import ShardTotals
from farandole.training.replica import Replica
from tests.support.steps import data


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(stopwatch, "clock", clock)
    return clock


KEY = Key(epoch=0, step=0, shard=0, start=0, stop=4)


def test_each_part_has_its_time_and_the_rest_is_what_is_left(clock: Clock) -> None:
    loader = Loader(data(), GlobalBatch(8, micro=4), seed=0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: clock.passes(0.5))  # before ours: not the update's
    watch = Stopwatch(loader, [model, optimizer])
    optimizer.register_step_pre_hook(lambda *_: clock.passes(32))

    def fetched(seconds: float) -> None:
        watch.fetch(KEY, lambda _: clock.passes(seconds))

    for _ in range(2):  # what was before `begin` is not counted
        watch.begin()
        fetched(1)
        clock.passes(0.25)  # a step's beginning
        watch.open()
        clock.passes(2)
        watch.folding += 1
        watch.close()
        fetched(4)
        watch.open()
        clock.passes(8)
        watch.close()
        clock.passes(16)
        watch.step_ended(2, 4)
        optimizer.step()
        clock.passes(64)  # an evaluation's
    spent = watch.end()
    assert (spent.data, spent.compute, spent.folding) == (5, 9, 1)
    assert (spent.waiting, spent.update) == (16, 32)
    assert spent.step == 5 + 10 + 16 + 32 + 64.75
    assert spent.rest == 64.75


def test_what_is_added_up_and_what_becomes_of_it_is_told(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient in `backward`, and one of an earlier pass in `close`, which is not counted twice."""
    model = nn.Linear(3, 2)
    watch = Stopwatch(Loader(data(), GlobalBatch(8, micro=4), seed=0), [])
    gradients = TimedGradients(Replica({"model": model}), watch=watch)
    add_gradient = gradients.partials.add_gradient

    def slow(index: int, gradient: torch.Tensor) -> None:
        clock.passes(1)
        add_gradient(index, gradient)

    monkeypatch.setattr(gradients.partials, "add_gradient", slow)
    gradients.partials.begin(1)
    gradients.partials.open(0, last=True)
    gradients.backward(model.weight.sum(), 1.0, last=False)
    assert watch.folding == 0
    gradients.backward(model.bias.sum(), 1.0, last=True)
    assert watch.folding == 1
    monkeypatch.setattr(gradients.replica, "buffers_to", lambda _: clock.passes(2))
    gradients.fill(ShardTotals(loss=1.0, weight=4.0, samples=4, scale=1.0))
    gradients.close(lambda *_: None)
    assert watch.folding == 1 + 1 + 2
    monkeypatch.setattr(gradients.replica, "buffers_from", lambda *_: clock.passes(4))
    gradients.publish([held[0, 0].flat for held in gradients.partials.nodes], 4)
    assert watch.landing == 4
