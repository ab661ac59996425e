"""What is handed over through slots arrives as it was sent: values, dtypes, strides, containers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farandole.data.slots import ALIGNMENT, Placed, Slots

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    made = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    return made.to(draw(st.sampled_from(_DTYPES))).permute(draw(st.permutations(range(len(shape)))))


def batches() -> st.SearchStrategy[Any]:
    leaves = tensors() | st.text() | st.none() | st.integers()
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    )


def assert_same(sent: Any, got: Any) -> None:
    assert type(sent) is type(got)
    if isinstance(sent, torch.Tensor):
        assert sent.dtype == got.dtype
        assert sent.stride() == got.stride()
        assert torch.equal(sent, got)
    elif isinstance(sent, dict):
        assert list(sent) == list(got)
        assert_same(list(sent.values()), list(got.values()))
    elif isinstance(sent, (list, tuple)):
        assert len(sent) == len(got)
        for one, other in zip(sent, got, strict=True):
            assert_same(one, other)
    else:
        assert sent == got


@given(batches())
def test_what_is_put_is_what_is_taken(batch: Any) -> None:
    slots = Slots(1)
    assert_same(batch, slots.take(slots.put(1, batch)))


def test_tensors_go_through_the_slot_and_what_is_taken_is_the_taker_s_own() -> None:
    slots = Slots(1)
    images, labels = torch.arange(30.0).view(2, 3, 5).transpose(0, 1), torch.arange(3)
    put = slots.put(0, [images, labels])
    assert all(type(each) is Placed and each.offset % ALIGNMENT == 0 for each in put)
    taken = slots.take(put)
    slots.put(0, [torch.zeros(100)])
    assert torch.equal(taken[0], images)
    assert all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in taken)
    assert torch.equal(slots.take(slots.put(1, taken))[1], labels)


def test_without_a_file_they_are_for_forked_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farandole.data.slots.GO_ANYWHERE", False)
    slots = Slots(1)
    assert_same([torch.ones(3)], slots.take(slots.put(1, [torch.ones(3)])))


class Tagged(torch.Tensor):
    """A subclass, as torchvision's are."""


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, 3).as_subclass(Tagged),
        torch.zeros(3, requires_grad=True),
        torch.zeros(3).expand(2, 3),
        torch.zeros(8)[::2],
        torch.zeros(3, dtype=torch.complex64).conj(),
        torch.sparse_coo_tensor(size=(2, 2), check_invariants=True),
        torch.zeros(0, 3),
        torch.zeros(1, dtype=torch.uint8).expand((16 << 20) + 1).contiguous(),
        np.zeros(3),
    ],
    ids=["subclass", "grad", "expanded", "gaps", "conj", "sparse", "empty", "large", "numpy"],
)
def test_what_does_not_fit_is_left_as_it_is(tensor: Any) -> None:
    put = Slots(1).put(0, (tensor, torch.ones(2)))
    assert put[0] is tensor
    assert type(put[1]) is Placed


def test_what_finds_no_room_any_more_is_left_as_it_is() -> None:
    half = torch.zeros(9 << 20, dtype=torch.uint8)
    put = Slots(1).put(0, [half, half, half[: 1 << 20]])
    assert [type(each) for each in put] == [Placed, torch.Tensor, Placed]


def test_requests_take_slots_in_turn_one_more_than_there_are_places() -> None:
    numbers = Slots(2).numbers()
    assert [next(numbers) for _ in range(5)] == [0, 1, 2, 0, 1]
