"""Which parameters take part in a step: unused ones, frozen ones, those that are switched between and within steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import farandole
from tests.support.steps import (
    BATCH,
    TwoHeads,
    adversaries,
    assert_grads,
    compare,
    data,
    entropy,
    grads,
    mlp,
    suppress_usage_error,
    two_losses,
    whole_batches,
)


def test_unused_parameters_keep_no_gradient_and_are_not_updated(run: farandole.Run) -> None:
    """As in plain PyTorch: None, so that neither weight decay nor momentum touches them."""
    model = TwoHeads()
    before = model.spare.weight.detach().clone()
    compare(run, [model], two_losses, 4)
    assert model.spare.weight.grad is None
    assert torch.equal(model.spare.weight, before)


def test_a_parameter_that_some_shards_use_has_their_gradient(run: farandole.Run) -> None:
    """Which branch a sample takes depends on its label; some steps use a branch not at all."""
    torch.manual_seed(8)
    model = nn.ModuleList([nn.Linear(6, 1) for _ in range(3)])

    def losses(modules: list[nn.Module], x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        branches = modules[0]
        total = torch.zeros(())
        for label in y.unique().tolist():
            total = total + branches[label](x[y == label]).square().sum()  # type: ignore[index]
        return [total / len(x)]

    compare(run, [model], losses, 1, epochs=3)


def test_frozen_parameters_and_those_unfrozen_and_frozen_between_steps(run: farandole.Run) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    before = model[0].weight.detach().clone()

    def between(number: int, modules: list[nn.Module]) -> None:
        layer = modules[0][0]  # type: ignore[index]
        if number == 1:
            assert torch.equal(layer.weight, before)
            layer.requires_grad_(True)
        elif number == 3:
            modules[0][2].requires_grad_(False)  # type: ignore[index]

    compare(run, [model], entropy, 4, epochs=3, between=between)
    assert not torch.equal(model[0].weight, before)


@pytest.mark.parametrize("at_the_end", [True, False], ids=["unfrozen at the end", "left frozen"])
def test_switching_requires_grad_within_a_step_gives_the_gradient_or_an_error(
    run: farandole.Run, at_the_end: bool
) -> None:
    """GAN loops do it around their passes. Never a gradient that is one worker's own, or one shard's."""
    torch.manual_seed(4)
    modules = [nn.Linear(1, 6), nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 1))]
    plain = copy.deepcopy(modules)
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4))

    def passes(modules: list[nn.Module], x: torch.Tensor, y: torch.Tensor, backward: Callable[..., None]) -> None:
        modules[1].requires_grad_(True)
        backward(adversaries(modules, x, y)[0], last=False)
        modules[1].requires_grad_(False)
        backward(adversaries(modules, x, y)[1], last=True)
        modules[1].requires_grad_(at_the_end)

    def alone(loss: torch.Tensor, *, last: bool) -> None:
        del last
        loss.backward()

    run.replicate(generator=modules[0], critic=modules[1])
    with nullcontext() if at_the_end else suppress_usage_error("requires_grad"):
        for step, (xs, ys) in zip(run.steps(loader, epochs=2), whole_batches(loader, 2), strict=True):
            for x, y in step:
                passes(modules, x, y, step.backward)
            for module in plain:
                module.zero_grad()
            passes(plain, xs, ys, alone)
            assert_grads(grads(*modules), grads(*plain), exact=False)
