"""Operators that are not known to be portable are named once, whatever modes the script is within."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from farandole.numerics import portable
from farandole.numerics.portable import KernelMode


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(portable, "KNOWN_OPERATORS", frozenset({"aten.add.Tensor", "aten.detach.default"}))
    return []


def test_each_is_named_once_with_the_types_that_are_not_float32(told: list[str]) -> None:
    it, x = KernelMode(told.append), torch.ones(3)
    it.watch()
    _ = x + x, x * x, x * x, x.double() * x, [torch.cat([x.bfloat16()])]
    it.end()
    _ = x - x
    assert told == [
        "aten.mul.Tensor", "aten._to_copy.default", "aten.mul.Tensor float64", "aten.cat.default bfloat16",
    ]  # fmt: skip


def test_backward_passes_and_updates_are_seen(told: list[str]) -> None:
    it, x = KernelMode(told.append), torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([x], lr=0.1)
    it.watch()
    x.square().sum().backward()
    optimizer.step()
    it.end()
    assert "aten.sum.default" in told
    assert "aten._foreach_add_.List" in told or "aten.add_.Tensor" in told


def test_it_ends_with_the_second_step(told: list[str]) -> None:
    it, x = KernelMode(told.append), torch.ones(3)
    it.watch()
    for number in it.until_the_second(iter(range(4))):
        _ = (x.mul, x.div, x.sub, x.pow)[number](x)
    assert told == ["aten.mul.Tensor", "aten.div.Tensor"]


def test_the_first_evaluation_is_watched_and_no_other(told: list[str]) -> None:
    it, x = KernelMode(told.append), torch.ones(3)
    with it.first("evaluate"):
        _ = x - x
    it.watch()
    it.end()
    for function in (x.mul, x.div):
        with it.first("evaluate"):
            function(x)
    assert told == ["aten.mul.Tensor"], "not before it has begun, and once"


def test_a_mode_of_the_scripts_is_left_alone(told: list[str]) -> None:
    it, a = KernelMode(told.append), torch.ones(3, 3)
    it.watch()
    with FlopCounterMode(display=False) as counter:
        it.end()
        a @ a
    assert counter.get_total_flops() == 2 * 27
    assert told == ["aten.mm.default"]
    it.end()
    _ = a - a
    assert told == ["aten.mm.default"]
