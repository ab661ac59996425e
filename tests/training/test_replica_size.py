"""A joiner makes room for the state before it has one of that size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from farandole.collective.state_transfer import Snapshot
from farandole.training.replica import Replica


@pytest.mark.parametrize(
    ("make", "exactly"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), True),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), True),
        (lambda p: torch.optim.AdamW(p, lr=0.1), True),
        (lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True), False),
    ],
    ids=["SGD", "momentum", "AdamW", "a third moment, which is not foreseen"],
)
def test_how_large_the_state_will_be_is_known_before_the_first_step(
    make: Callable[[Any], torch.optim.Optimizer], exactly: bool
) -> None:
    model = nn.Sequential(nn.Linear(2000, 300), nn.BatchNorm1d(300), nn.Linear(300, 2000))
    model[2].requires_grad_(False)
    optimizer = make(model.parameters())
    replica = Replica({"model": model, "optimizer": optimizer})
    foreseen = replica.most_bytes
    model(torch.randn(4, 2000)).sum().backward()
    optimizer.step()
    size = Snapshot(replica.state()).bytes
    assert (size <= foreseen) is exactly
    assert abs(foreseen - size) < 1.1 * (1 << 20) or not exactly
