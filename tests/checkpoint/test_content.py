"""What goes into a checkpoint: every kind of state, loaded without running code, copied while training goes on."""

from __future__ import annotations

from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import torch

from farandole.checkpoint import content
from farandole.checkpoint.content import HostCopy, in_place
from farandole.checkpoint.store import Sealing
from farandole.plan.shards import Position
from tests.support.checkpoints import state


def everything() -> dict[str, Any]:
    shared = torch.arange(6.0)
    return {
        "numbers": [1, -(1 << 63), (1 << 64) - 1, 2.5, float("inf"), True, None],
        "texts": ("ü", b"\x00\xff", ""),
        "nested": OrderedDict([(1, {"a": ()}), (2.5, []), (None, {})]),
        "counted": Counter({3: 2, "x": 1}),
        "none counted": Counter(),
        "tensors": [torch.zeros(0, 3), torch.tensor(True), torch.ones(2, dtype=torch.complex128), shared, shared],
        "half": torch.full((3,), 1.5, dtype=torch.bfloat16),
        "turned": torch.arange(12).reshape(3, 4).t(),
        "a view": torch.arange(1000)[3:5],
    }


def test_every_kind_of_state_survives_loading_without_code(tmp_path: Path) -> None:
    given = {"objects": {"thing": everything()}, "buffers": [], "requires_grad": [], "origin": ""}
    path = tmp_path / "x.pt"
    for taken in (in_place(given), HostCopy().take(given)):
        with path.open("wb") as file:
            content.save(taken, Position(step=3), Sealing(file))
        assert path.stat().st_size < 10_000, "a view is not saved with all that it is a view of"
        with path.open("rb") as file:
            position, loaded = content.load(file, "x")
        assert position == Position(step=3)
        found = loaded["objects"]["thing"]
        assert type(found["counted"]) is type(found["none counted"]) is Counter
        same(found, everything())


def same(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            same(found[key], value)
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    else:
        assert found == expected
        assert type(found) is type(expected)


def test_a_copy_stays_what_it_was_and_its_memory_is_used_again() -> None:
    copy, live = HostCopy(), state(1.0)
    taken = copy.take(live)
    live["objects"]["model"]["weight"].fill_(2.0)
    assert taken.tensors[0].eq(1.0).all()
    places = [tensor.data_ptr() for tensor in taken.tensors]
    again = copy.take(live)
    assert [tensor.data_ptr() for tensor in again.tensors] == places
    assert again.tensors[0].eq(2.0).all()
    live["objects"]["model"]["momentum"] = torch.ones(4)  # an optimizer's state comes with its first step
    grown = copy.take(live)
    assert [tuple(tensor.shape) for tensor in grown.tensors] == [(300, 50), (), (4,), ()]
    assert grown.tensors[0].eq(2.0).all()
