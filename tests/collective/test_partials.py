"""Partial sums are those of the tree, in whatever order shards are folded."""

from __future__ import annotations

import itertools
import math
import random
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.collective.arena import Ordinary
from farandole.collective.buckets import Layout, Partials
from farandole.collective.codec import CODECS
from farandole.collective.quantization import Place, Quantization
from farandole.plan.shards import maximal, range_of, root
from tests.support.exchanging import assert_same, decoded, parameters_of, tree_sum

Gradients = list[torch.Tensor | None]

SHAPES = [(5,), (3, 4), (17,), (1,)]


def gradients_of(shards: int, *, unused: float, seed: int) -> list[Gradients]:
    """Per shard and parameter a gradient over many orders of magnitude, or None."""
    choice = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)

    def gradient(shape: tuple[int, ...]) -> torch.Tensor | None:
        if choice.random() < unused:
            return None
        found = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).mul(20).exp2()
        return found.copysign(torch.randn(shape, generator=generator)).where(found.abs() > 1e-3, -0.0)

    return [[gradient(shape) for shape in SHAPES] for _ in range(shards)]


def reference(values: list[torch.Tensor]) -> torch.Tensor:
    while len(values) > 1:
        pairs = [values[i] + values[i + 1] for i in range(0, len(values) - 1, 2)]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]


def expected(shards: list[Gradients], index: int) -> torch.Tensor:
    dense = [torch.zeros(SHAPES[index]) if g[index] is None else g[index] for g in shards]
    return reference([value for value in dense if value is not None])


def lanes_of(shard: int) -> torch.Tensor:
    return torch.tensor([0.1 * shard, 1.0, 10.0**shard], dtype=torch.float64)


def compute(partials: Partials, gradients: Gradients, shard: int, order: random.Random, *, last: bool = False) -> None:
    """One shard's backward pass: its gradients come in any order."""
    partials.open(shard, last=last)
    produced = [index for index, gradient in enumerate(gradients) if gradient is not None]
    order.shuffle(produced)
    for index in produced:
        gradient = gradients[index]
        assert gradient is not None
        assert not partials.has_gradient(index)
        partials.add_gradient(index, gradient.clone())
        assert partials.has_gradient(index)
    partials.close(lanes_of(shard))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.contiguous().view(torch.uint8).equal(b.contiguous().view(torch.uint8))


@settings(deadline=None, max_examples=500)
@given(st.data(), st.integers(1, 17), st.sampled_from([0.0, 0.4, 0.8]), st.integers(0, 99))
def test_folding_in_any_order_of_shards_gives_the_reference_sum(
    data: st.DataObject, shards: int, unused: float, seed: int
) -> None:
    gradients = gradients_of(shards, unused=unused, seed=seed)
    layout = Layout(parameters_of(*SHAPES), lanes=3)
    partials = Partials(layout)
    partials.begin(shards)
    todo = data.draw(st.permutations(range(shards)))
    if data.draw(st.booleans()):
        todo = sorted(todo)
    for shard in todo:
        compute(partials, gradients[shard], shard, random.Random(shard), last=data.draw(st.booleans()))
        if data.draw(st.booleans()):  # a round is done again, in the middle
            assert all(len(held.flat) for nodes in partials.nodes for held in nodes.values())
    for bucket, nodes in zip(layout.buckets, partials.nodes, strict=True):
        assert list(nodes) == [root(shards)]
        views = layout.views(bucket, nodes[root(shards)].flat)
        for index, view in views.items():
            assert same(view, expected(gradients, index)), f"parameter {index}"
    lanes = partials.nodes[-1][root(shards)].flat[:3]
    assert same(lanes, reference([lanes_of(shard) for shard in range(shards)]))


def test_what_two_shards_have_not_used_is_no_part_of_a_slot_that_is_given_back() -> None:
    """A round was done again: nodes lie in slots, and what comes above them does not."""
    values = [torch.full((3,), float(shard + 1)) if shard not in (2, 3) else None for shard in range(8)]
    partials = Partials(Layout(parameters_of((3,)), lanes=0))
    partials.begin(8)
    for shard, value in enumerate(values):
        partials.open(shard, last=shard == 5)
        if value is not None:
            partials.add_gradient(0, value.clone())
        partials.close(None)
        if shard == 1:
            assert partials.nodes[0][1, 0].flat[:3].tolist() == [3.0] * 3
    assert partials.nodes[0][root(8)].flat[:3].tolist() == [sum(v[0].item() for v in values if v is not None)] * 3


@settings(deadline=None)
@given(st.data(), st.integers(1, 40))
def test_any_set_of_shards_leaves_exactly_its_maximal_nodes(data: st.DataObject, shards: int) -> None:
    """What one worker holds and what its peers expect from it must be the same nodes: see Round.nodes."""
    held = data.draw(st.lists(st.integers(0, shards - 1), unique=True))
    partials = Partials(Layout(parameters_of((3,)), lanes=1))
    partials.begin(shards)
    for shard in held:
        partials.open(shard)
        partials.add_gradient(0, torch.ones(3))
        partials.close(torch.ones(1, dtype=torch.float64))
    for nodes in partials.nodes:
        assert sorted(nodes) == sorted(maximal(held, shards))


def test_memory_is_a_few_slots_a_bucket_and_none_more_in_the_next_rounds() -> None:
    shards = 64
    partials = Partials(Layout(parameters_of((3,)), lanes=1))
    most = 0
    for step, rank in itertools.product(range(2), range(5)):
        partials.begin(shards)
        for shard in range_of(shards, rank, 5):
            partials.open(shard)
            partials.add_gradient(0, torch.full((3,), float(step)))
            partials.close(torch.ones(1, dtype=torch.float64))
        slots = [len(nodes) + len(free) for nodes, free in zip(partials.nodes, partials._free, strict=True)]
        assert max(slots) <= 2 * math.log2(shards) + 1
        if (step, rank) == (0, 4):
            most = sum(slots)
    assert sum(slots) == most, "a second step allocates nothing"


def test_what_a_round_leaves_behind_does_not_show_in_the_next() -> None:
    partials = Partials(Layout(parameters_of(*SHAPES), lanes=3))
    order = random.Random(0)
    partials.begin(3)
    for shard, gradients in enumerate(gradients_of(2, unused=0.0, seed=1)):
        compute(partials, gradients, shard, order)
    fresh = gradients_of(5, unused=0.4, seed=2)
    partials.begin(5)
    for shard, gradients in enumerate(fresh):
        compute(partials, gradients, shard, order)
    for bucket, nodes in zip(partials.layout.buckets, partials.nodes, strict=True):
        for index, view in partials.layout.views(bucket, nodes[root(5)].flat).items():
            assert same(view, expected(fresh, index))


def test_padding_between_parameters_stays_zero() -> None:
    """It is sent and summed like the rest: NaNs in it would cost time on some processors."""
    layout = Layout(parameters_of(*SHAPES), lanes=3)
    partials = Partials(layout)
    for _ in range(2):
        partials.begin(4)
        for shard, gradients in enumerate(gradients_of(4, unused=0.3, seed=7)):
            compute(partials, gradients, shard, random.Random(0))
    flat = partials.nodes[0][root(4)].flat.clone()
    for view in layout.views(layout.buckets[0], flat).values():
        view.zero_()
    assert not flat.any()


def test_a_bucket_is_announced_once_for_each_shard_when_its_last_gradient_is_in() -> None:
    layout = Layout(parameters_of((512, 512), (512, 512), (3,)), lanes=1)
    assert [bucket.params for bucket in layout.buckets] == [(2, 1), (0,), ()]
    told: list[tuple[str, int]] = []
    partials = Partials(layout)
    partials.begin(1)
    partials.complete = lambda bucket: told.append(("complete", bucket))
    partials.open(0)
    for index in (2, 1, 0):
        told.append(("fold", index))
        partials.add_gradient(index, torch.zeros(layout.parameters[index].shape))
    partials.close(torch.zeros(1, dtype=torch.float64))
    assert told == [
        ("fold", 2), ("fold", 1), ("complete", 0), ("fold", 0), ("complete", 1), ("complete", 2),
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_sums_are_in_the_parameters_own_dtype(dtype: torch.dtype) -> None:
    values = [torch.randn(5, generator=torch.Generator().manual_seed(k)).to(dtype) for k in range(6)]
    partials = Partials(Layout(parameters_of((5,), dtype=dtype), lanes=0))
    partials.begin(6)
    for shard in (3, 0, 5, 1, 4, 2):
        partials.open(shard)
        partials.add_gradient(0, values[shard].clone())
        partials.close(None)
    assert same(partials.nodes[0][root(6)].flat[:5], reference(values))


class Counted(Ordinary):
    def __init__(self) -> None:
        self.bytes = 0

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self.bytes += numel * dtype.itemsize
        return super().empty(numel, dtype)


def test_memory_that_was_warmed_is_that_of_the_first_step() -> None:
    parameters = parameters_of(*SHAPES)
    memory = Counted()
    partials = Partials(Layout(parameters, 2), memory)
    partials.warm()
    before = memory.bytes
    assert before
    for step in range(2):
        partials.begin(3)
        for shard in (0, 1):
            partials.open(shard, last=shard == 1)
            for index in reversed(range(len(SHAPES))):
                partials.add_gradient(index, torch.full(SHAPES[index], float(step)))
            partials.close(torch.ones(2, dtype=torch.float64))
    assert memory.bytes == before


def test_the_next_shard_waits_until_the_numbers_of_the_last_one_are_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantization takes long here, so it would read what the next shard writes."""
    shards = gradients_of(5, unused=0.3, seed=11)
    partials = Partials(Layout(parameters_of(*SHAPES), lanes=3, codec=CODECS["int8"]))
    bucket = partials.layout.buckets[0]
    leaves = list[torch.Tensor]()
    for gradients in shards:
        numbers = torch.zeros(bucket.numbers_before(bucket.numel))
        for index, place in partials.layout.views(bucket, numbers).items():
            gradient = gradients[index]
            place.copy_(torch.tensor(0.0) if gradient is None else gradient)
        leaves.append(bucket.quantize(numbers, torch.empty(bucket.numel, dtype=torch.uint8), 0))
    wanted = tree_sum(leaves, lambda left, right: bucket.add(left, right, torch.empty_like(left), 0, 0))

    quantize, threads = Quantization.quantize, set[int]()

    def slow(self: Quantization, numbers: torch.Tensor, out: torch.Tensor, place: Place) -> torch.Tensor:
        threads.add(threading.get_ident())
        time.sleep(0.02)
        return quantize(self, numbers, out, place)

    monkeypatch.setattr(Quantization, "quantize", slow)
    partials.begin(5)
    for shard, gradients in enumerate(shards):
        compute(partials, gradients, shard, random.Random(shard), last=shard == 4)
    partials.wait_until_quantized()
    got, *others = (nodes[root(5)].flat for nodes in partials.nodes)
    assert_same(decoded(partials.layout, [got, *others]), decoded(partials.layout, [wanted, *others]))
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_quantization_takes_denormal_numbers_as_the_training_thread_does() -> None:
    partials = Partials(Layout(parameters_of((60,)), lanes=0, codec=CODECS["int8"]))
    gradient, sums = torch.full((60,), 2.0**-127), []
    for flushes in (False, True, False):
        torch.set_flush_denormal(flushes)
        try:
            partials.begin(1)
            partials.open(0)
            partials.add_gradient(0, gradient.clone())
            partials.close(None)
            partials.wait_until_quantized()
            sums.append(partials.nodes[0][root(1)].flat.clone())
        finally:
            torch.set_flush_denormal(False)
    assert same(sums[0], sums[2])
    assert not same(sums[0], sums[1])
