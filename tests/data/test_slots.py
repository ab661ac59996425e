"""What is handed over through slots arrives as it was sent: values, dtypes, strides, containers."""

from __future__ import annotations

import multiprocessing
import resource
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farandole.data.workers import ALIGNMENT, GO_ANYWHERE, Placed, Slots

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
    monkeypatch.setattr("farandole.data.workers.GO_ANYWHERE", False)
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
        np.zeros(3),
    ],
    ids=["subclass", "grad", "expanded", "gaps", "conj", "sparse", "empty", "numpy"],
)
def test_what_does_not_fit_is_left_as_it_is(tensor: Any) -> None:
    put = Slots(1).put(0, (tensor, torch.ones(2)))
    assert put[0] is tensor
    assert type(put[1]) is Placed


def large(first: int, mebibytes: int = 17) -> torch.Tensor:
    """Longer than a slot is at first; what is in it depends on `first`."""
    return torch.arange(first, first + (mebibytes << 18), dtype=torch.int32)


@pytest.mark.skipif(not GO_ANYWHERE, reason="files without a name are Linux's")
def test_a_slot_becomes_as_long_as_what_is_put_there() -> None:
    slots = Slots(1)
    here = [torch.ones(3), large(1), torch.zeros(2, 2)]
    put = slots.put(0, here)
    assert [type(each) for each in put] == [Placed] * 3
    other = slots.put(1, [large(2, 19)])
    assert_same(slots.take(put), here)
    assert_same(slots.take(other), [large(2, 19)])
    assert_same(slots.take(slots.put(0, [torch.ones(3)])), [torch.ones(3)])


def _loader_process(slots: Slots, answers: Any) -> None:
    torch.set_num_threads(1)  # as a loader process does: what was forked has not the threads of torch's pool
    for number in range(4):
        answers.put(slots.put(number % 2, [large(number, 17 + number)]))


@pytest.mark.skipif(not GO_ANYWHERE, reason="files without a name are Linux's")
@pytest.mark.processes
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_what_another_process_made_longer_is_seen_here(method: Any) -> None:
    """Here each slot is used twice before it is looked at: the second time is what is found."""
    context = multiprocessing.get_context(method)
    slots, answers = Slots(1), context.Queue()
    process = context.Process(target=_loader_process, args=(slots, answers))
    process.start()
    put = [answers.get(timeout=200) for _ in range(4)]
    process.join()
    assert all(type(each) is Placed for [each] in put)
    assert_same(slots.take(put[2:]), [[large(2, 19)], [large(3, 20)]])


def test_what_finds_no_room_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """In anonymous memory, which can't be made longer."""
    monkeypatch.setattr("farandole.data.workers.GO_ANYWHERE", False)
    half = torch.zeros(9 << 20, dtype=torch.uint8)
    put = Slots(1).put(0, [half, half, half[: 1 << 20]])
    assert [type(each) for each in put] == [Placed, torch.Tensor, Placed]


@pytest.mark.skipif(not GO_ANYWHERE, reason="a limit of Linux's")
def test_where_addresses_are_rationed_it_is_left_as_it_is() -> None:
    slots, before = Slots(1), resource.getrlimit(resource.RLIMIT_AS)
    tensor = large(0)
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), before[1]))
    try:
        put = slots.put(0, [tensor])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert put[0] is tensor


def test_requests_take_slots_in_turn_one_more_than_there_are_places() -> None:
    numbers = Slots(2).numbers()
    assert [next(numbers) for _ in range(5)] == [0, 1, 2, 0, 1]
