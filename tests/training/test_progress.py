"""A run's length in epochs or in base steps, and what a step's line tells of rate and factor."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import farandole
from farandole.errors import StepAbandoned, UsageError
from farandole.plan.batch import GlobalBatch, PerWorkerBatch
from farandole.plan.rules import AdaScale, LinearScaling, Rule
from farandole.plan.shards import Position
from farandole.protocol.metrics import StepLine, metrics_line
from farandole.protocol.view import Lineage
from farandole.training.progress import Length, Progress
from tests.support.rehearsed import EPOCHS, HISTORY, SIZE, Join, data, join, net, sgd, train

__all__ = ["join"]  # a fixture


def ticked(run: farandole.Run, rule: Rule | None, base_steps: int) -> dict[str, Any]:
    """A run of so many base steps, with a schedule that goes by them."""
    model = net()
    optimizer = sgd(model)
    batch = PerWorkerBatch(SIZE, micro=4, rule=rule) if rule else GlobalBatch(SIZE, micro=4)
    loader = run.loader(data(), batch=batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=base_steps)
    run.replicate(model=model, optimizer=optimizer, schedule=schedule)
    ticks, factors, samples, totals = [], [], 0, []
    for step in run.steps(loader, base_steps=base_steps):
        if isinstance(rule, AdaScale):
            with pytest.raises(StepAbandoned, match=rf"step {step.number}\b"):
                _ = step.base_steps
        for inputs, targets in step:
            step.backward(F.mse_loss(model(inputs), targets))
        optimizer.step()
        assert run._loop is not None
        factors.append(run._loop.learning_rate.factor)
        ticks.append(step.base_steps)
        totals.append(run._loop.progress.total)
        samples += step.samples
        for _ in range(step.base_steps):
            schedule.step()
    return {"ticks": ticks, "factors": factors, "samples": samples, "totals": totals, "rate": schedule.get_last_lr()}


@pytest.mark.parametrize("rule", [None, LinearScaling()], ids=repr)
def test_a_run_of_so_many_base_steps(join: Join, rule: Rule | None) -> None:
    """An epoch is 12 base steps, 11 of 8 samples and one of 2. From step 5 on there are four workers."""
    done = ticked(join(HISTORY), rule, 20)
    assert sum(done["ticks"]) == 20
    assert done["rate"] == pytest.approx([0.0], abs=1e-12), "the schedule is at its end"
    assert done["totals"][-1] == len(done["ticks"])
    if rule:
        assert done["ticks"] == [1] * 5 + [4, 3, 4, 4]
        assert done["totals"] == [20] * 5 + [9] * 4, "of what is left, at the pace of this step"
        assert done["samples"] == 90 + 64
    else:
        assert done["ticks"] == [1] * 20


@pytest.mark.failure(
    "The training loop",
    (
        "the script gives the length of a run in epochs and in base steps, or reads `step.base_steps` before the gain "
        "is known"
    ),
)
def test_under_adascale_the_clock_is_the_sum_of_gains(join: Join) -> None:
    done = ticked(join("0 4\n"), AdaScale(), 30)
    gains = [sum(done["factors"][:n]) for n in range(len(done["factors"]) + 1)]
    assert gains[-2] < 30 <= gains[-1]
    assert gains[-1] != int(gains[-1]), "whole gains would show nothing"
    assert done["ticks"] == [min(int(after), 30) - int(before) for before, after in pairwise(gains)]
    assert sum(done["ticks"]) == 30
    assert done["rate"] == pytest.approx([0.0], abs=1e-12)
    assert done["totals"][-1] == len(done["ticks"])


def test_who_has_no_shards_is_not_looked_for_without_end(join: Join) -> None:
    """Three workers and two shards a step: one has nothing to fetch ahead, and the run's end is not known."""
    batch = PerWorkerBatch(SIZE, micro=SIZE // 2, max_batch=SIZE, rule=AdaScale())
    loader = join("").loader(data(), batch=batch)
    progress = Progress(loader, Length(base_steps=1000), lambda _, members: members, lambda: (0.0, 0.0))
    progress.enter(Position(), 3)
    later = Lineage(sets=(("a", "b", "c"),))
    found = {worker: list(progress.upcoming(worker, later, ())) for worker in later.sets[0]}
    assert not found["c"] or not found["a"]
    assert max(map(len, found.values())) == 999


def test_adascale_in_a_run_of_epochs_goes_by_samples(join: Join) -> None:
    assert train(join("0 4\n"), AdaScale())["ticks"] == EPOCHS * 12


@pytest.mark.failure(
    "The training loop",
    (
        "the script gives the length of a run in epochs and in base steps, or reads `step.base_steps` before the gain "
        "is known"
    ),
    seen="an error says why",
    outcome="the script fails there",
)
@pytest.mark.failure(
    "The training loop",
    "the script gives over 2^53 steps, or a batch, epochs or a dataset too large for a message",
    seen="an error at the call names the value and the limit",
    outcome="the script fails, exit code 1; the state is saved; no worker is removed",
)
@pytest.mark.parametrize(
    ("length", "values"),
    [
        ({}, "epochs=None, base_steps=None"),
        ({"epochs": 2, "base_steps": 20}, r"epochs=2, base_steps=20\)"),
        ({"epochs": 2**53 + 1}, r"epochs=9007199254740993\).*9007199254740992"),
        ({"base_steps": 10**18}, r"base_steps=1000000000000000000\)"),
        ({"epochs": 2**53}, r"epochs=9007199254740992\).* \d+ .* \d+ .*9007199254740992"),
        ({"epochs": 1.5}, r"epochs=1\.5\)"),
        ({"epochs": 0}, r"epochs=0\)"),
        ({"base_steps": -1}, r"base_steps=-1\)"),
    ],
)
def test_a_length_that_is_none(join: Join, length: dict[str, int], values: str) -> None:
    run, model = join(""), net()
    run.replicate(model=model, optimizer=sgd(model))
    with pytest.raises(UsageError, match=values):
        run.steps(run.loader(data(), batch=GlobalBatch(SIZE, micro=SIZE)), **length)


@pytest.mark.parametrize("rule", [None, LinearScaling()], ids=repr)
def test_every_line_has_the_learning_rate_and_the_factor(join: Join, rule: Rule | None) -> None:
    """The rate as the schedule has set it, for the step that is told of."""
    run, lines = join("0 2\n"), []
    run._context.add_line = lines.append  # type: ignore[method-assign]
    ticked(run, rule, 20)
    written = [line for said in lines if isinstance(line := metrics_line(said), StepLine)]
    assert {line.factor for line in written} == ({1.0} if rule is None else {2.0, 1.25})
    assert written[0].learning_rate == 0.1
    rates_ = [line.learning_rate for line in written]
    assert rates_ == sorted(rates_, reverse=True)
    assert 0 < rates_[-1] < 0.01
