"""What a worker finds of one shard, by digests: equal for who computes the same; the first that differs is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from farandole.collective.buckets import Layout, Partials
from farandole.training.gradients import ShardDigests

NAMES = ["net.weight", "net.bias"]


def find(*, batch: Any = None, loss: float = 2.0, gradient: float = 1.0, buffer: float = 3.0) -> dict[str, int]:
    findings = ShardDigests(NAMES, None)
    findings.read(torch.ones(2, 3) if batch is None else batch)
    findings.add_gradient(1, torch.full((2,), 0.5))
    findings.add_gradient(0, torch.tensor([[gradient, 1.0], [2.0, 3.0]]))
    return dict(zip(*findings.close(torch.tensor([loss, 9.0, buffer], dtype=torch.float64), 0, 2), strict=True))


def test_in_the_order_in_which_a_shard_comes_by_them() -> None:
    order = ["the micro-batch", "the loss", "the gradient of net.weight", "the gradient of net.bias", "the buffers"]
    assert list(find()) == order
    assert find() == find()


@pytest.mark.parametrize(
    ("what", "changed"),
    [
        ("the micro-batch", {"batch": torch.ones(2, 3).double()}),
        ("the micro-batch", {"batch": [torch.ones(2, 3), 7]}),
        ("the loss", {"loss": 2.0000000000000004}),
        ("the gradient of net.weight", {"gradient": 1.0000001}),
        ("the buffers", {"buffer": -3.0}),
    ],
)
def test_the_one_that_differs_is_named(what: str, changed: dict[str, Any]) -> None:
    one, other = find(), find(**changed)
    assert [name for name in one if one[name] != other[name]] == [what]


def test_elements_count_in_their_order_and_not_as_they_lie_in_memory() -> None:
    batch = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    assert find(batch=batch) == find(batch=batch.contiguous(memory_format=torch.channels_last))


def test_what_has_no_digest_is_left_out() -> None:
    assert "the micro-batch" not in find(batch=object())


def test_its_own_shard_goes_into_the_sums_and_anothers_does_not() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    partials = Partials(Layout([parameter], lanes=2))
    partials.begin(1)
    partials.open(0)
    mine = ShardDigests(["p"], partials)
    assert mine.mine
    assert not mine.has_gradient(0)
    mine.add_gradient(0, torch.tensor([1.0, 2.0, 3.0]))
    assert mine.has_gradient(0)
    assert partials.has_gradient(0)
    assert not ShardDigests(["p"], None).mine
