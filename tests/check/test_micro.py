"""The gradient of a micro-batch and those of its parts, of real losses."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from farandole.check.micro import Vector, cause_of

SAMPLES, WIDTH = 16, 8
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def mean(out: torch.Tensor, x: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    del used
    return F.mse_loss(out, x[:, :4])


def total(out: torch.Tensor, x: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    del used
    return F.mse_loss(out, x[:, :4], reduction="sum")


def token_mean(out: torch.Tensor, x: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    return (out - x[:, :4]).square()[used].mean()


def contrastive(out: torch.Tensor, x: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    del used
    return F.cross_entropy(out @ out.T, torch.arange(len(x)))


def gradients(loss: Loss, parts: int, model: nn.Module) -> tuple[list[Vector], list[int], list[float]]:
    """The gradient of each of so many parts, its samples and its tokens."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, WIDTH, generator=generator)
    used = torch.arange(4) < torch.randint(1, 5, (SAMPLES, 1), generator=generator)
    vectors, samples, tokens = list[Vector](), list[int](), list[float]()
    for part, mask in zip(x.chunk(parts), used.chunk(parts), strict=True):
        grads = torch.autograd.grad(loss(model(part), part, mask), list(model.parameters()))
        vectors.append(np.concatenate([grad.double().reshape(-1).numpy() for grad in grads]))
        samples.append(len(part))
        tokens.append(float(mask.sum()))
    return vectors, samples, tokens


def made(*, norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, 12), nn.BatchNorm1d(12) if norm else nn.Identity(), nn.ReLU(), nn.Linear(12, 4)
    )


@pytest.mark.parametrize(
    "case",
    [
        (mean, False, ""), (total, False, "sum"), (token_mean, False, "weights"), (contrastive, False, "batch"),
        (mean, True, "batch"),
    ]
)  # fmt: skip
def test_causes(case: tuple[Loss, bool, str]) -> None:
    loss, norm, cause = case
    model = made(norm=norm)
    [whole], _, _ = gradients(loss, 1, model)
    parts, samples, _ = gradients(loss, 4, model)
    assert cause_of(whole, parts, samples) == cause


def test_a_mean_over_tokens_with_its_weights() -> None:
    model = made()
    [whole], _, _ = gradients(token_mean, 1, model)
    parts, _, tokens = gradients(token_mean, 4, model)
    assert cause_of(whole, parts, tokens) == ""


def test_unequal_parts_of_a_mean() -> None:
    generator = np.random.default_rng(0)
    parts = [generator.normal(size=100) for _ in range(2)]
    assert cause_of((3 * parts[0] + 2 * parts[1]) / 5, parts, [3, 2]) == ""
    assert cause_of((3 * parts[0] + 2 * parts[1]) / 5, parts, [1, 1]) == "weights"
