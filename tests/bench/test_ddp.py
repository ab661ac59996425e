"""DistributedDataParallel in the place of a model's forward, and why it can't be there."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farandole.bench import ddp
from farandole.bench.ddp import Ddp, connect, unfit


@pytest.mark.parametrize(
    ("models", "seen", "unused", "values"),
    [
        (["model"], [(1, 1), (1, 1)], [], ""),
        (["coder", "decoder"], [(1, 1)], [], r"\b2\b.*coder, decoder"),
        (["model"], [], [], "micro"),
        (["model"], [(1, 1), (0, 1)], [], r"model\(inputs\)"),
        (["model"], [(1, 1), (3, 1)], [], r"\b3\b"),
        (["model"], [(1, 1), (1, 2)], [], r"\b2\b"),
        (["model"], [(1, 1)], ["a.bias"], r"a\.bias"),
        (["model"], [(1, 1)], ["a.a", "a.b", "a.c", "a.d", "a.e"], r"a\.a, a\.b, a\.c\b(?!,).*\b2\b"),
    ],
)
def test_a_reason_is_the_first_thing_that_is_known_against_it(
    models: list[str], seen: list[tuple[int, int]], unused: list[str], values: str
) -> None:
    found = unfit(models, seen, unused, compiled=False)
    assert re.search(values, found)
    assert bool(found) == bool(values)


def test_a_model_that_was_compiled_in_place_is_one() -> None:
    assert "compiled in place" in unfit(["model"], [(1, 1)], [], compiled=True)


class Counting(nn.Linear):
    """Says in which mode its forward was called."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.called: list[str] = []

    def forward(self, inputs: torch.Tensor, mode: str = "") -> torch.Tensor:
        self.called.append(mode)
        return super().forward(inputs)


def in_a_bucket(model: nn.Linear) -> bool:
    """Whether the gradients lie in memory of DistributedDataParallel's; they are None then."""
    weight, bias = model.weight.grad, model.bias.grad
    assert weight is not None
    assert bias is not None
    model.zero_grad()
    return weight.untyped_storage().data_ptr() == bias.untyped_storage().data_ptr()


def test_it_is_there_within_a_micro_batch_and_nothing_of_it_afterwards(tmp_path: Path) -> None:
    model, inputs = Counting(), torch.ones(4, 3)
    way = Ddp(model, connect(tmp_path / "group", 0, 1, torch.device("cpu")))
    own = model.forward
    with way.around():
        way.opens(last=False)
        way.backward(model(inputs, mode="named").sum(), 0.5, last=True)
        way.opens(last=True)
        way.backward(model(inputs).sum(), 0.25, last=True)
        assert model.bias.grad is not None
        assert model.bias.grad.tolist() == [3, 3]
        assert in_a_bucket(model)
        model(inputs).sum().backward()  # no micro-batch: an evaluation's, if that had a backward pass
        assert not in_a_bucket(model)
    assert model.called == ["named", "", ""]
    assert model.forward == own
    assert "forward" not in model.__dict__
    assert way.reason == ""
    model(inputs).sum().backward()
    assert not in_a_bucket(model)
    assert not dist.is_initialized(), "nothing in a script takes itself for distributed"


def test_none_of_its_hooks_is_left_for_the_other_contestants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go with it; it may be in a circle, as a process's first one is, and would stay until a collection."""
    made: list[weakref.ref[object]] = []

    class Made(ddp.DistributedDataParallel):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            self.circle = [self]
            made.append(weakref.ref(self))

    monkeypatch.setattr(ddp, "DistributedDataParallel", Made)
    model = Counting()
    gc.disable()
    try:
        way = Ddp(model, connect(tmp_path / "group", 0, 1, torch.device("cpu")))
        with way.around():
            way.opens(last=True)
            way.backward(model(torch.ones(4, 3)).sum(), 1.0, last=True)
            assert [each() is None for each in made] == [False]
        assert [each() for each in made] == [None]
    finally:
        gc.enable()


def test_the_group_outlives_the_reducer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its destructor waits for its threads: in the reducer's, which holds the GIL, that could be for ever."""

    class Group:
        pass

    group = Group()
    left = weakref.ref(group)
    held: list[bool] = []

    class Reducer:
        """It refers to the group too, and goes with the model around it."""

        def __init__(self, inner: nn.Module, process_group: Group, **_: Any) -> None:
            del inner
            self.group = process_group

        def __del__(self) -> None:
            del self.group
            held.append(left() is not None)

    monkeypatch.setattr(ddp, "DistributedDataParallel", Reducer)
    way = Ddp(Counting(), group)
    del group
    with way.around():
        pass
    assert held == [True]


def test_what_stood_in_the_place_of_a_forward_stands_there_again(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    model.forward = instead = lambda inputs: 2 * inputs  # type: ignore[assignment]
    with Ddp(model, connect(tmp_path / "group", 0, 1, torch.device("cpu"))).around():
        assert model.forward is not instead
    assert model.forward is instead


def test_what_it_raises_is_its_reason_and_the_script_goes_on(tmp_path: Path) -> None:
    """Two forwards of which one has no backward pass: torch's own check, in the second."""
    model = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    used = [model[0]]
    model.forward = lambda inputs: used[0](inputs)  # type: ignore[assignment]
    way = Ddp(model, connect(tmp_path / "group", 0, 1, torch.device("cpu")))
    with way.around():
        for _ in range(2):
            way.opens(last=True)
            way.backward(model(torch.ones(1, 1)).sum(), 1.0, last=True)
    assert way.reason.startswith("Expected to have finished reduction in the prior iteration")
    assert used[0].weight.grad is not None


def test_a_model_that_has_nothing_to_train_is_refused_in_its_words(tmp_path: Path) -> None:
    model = nn.Linear(1, 1).requires_grad_(False)
    way = Ddp(model, connect(tmp_path / "group", 0, 1, torch.device("cpu")))
    assert "DistributedDataParallel is not needed" in way.reason
