"""The order is a bijection, is the same for ever, and looks like a shuffle."""

from __future__ import annotations

import itertools
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.data.order import SampleOrder
from farandole.errors import UsageError

# (length, seed, epoch, start) -> samples. These may never change: a run that is resumed, or replayed from its journal
# by a later version, must see the same samples.
GOLDEN = [
    (1, 0, 0, 0, [0]),
    (2, 0, 0, 0, [0, 1]),
    (10, 0, 0, 0, [7, 9, 2, 8, 0, 6, 4, 5, 3, 1]),
    (10, 0, 1, 0, [6, 3, 0, 7, 1, 4, 9, 2, 8, 5]),
    (10, 1, 0, 0, [4, 6, 3, 2, 0, 1, 7, 8, 5, 9]),
    (50_000, 42, 3, 49_994, [40768, 16240, 3136, 32487, 28594, 42019]),
    (10**9 + 7, 2**63 + 5, 7, 10**9, [959059631, 90759096, 508312726, 189384379]),
]


@pytest.mark.parametrize(("length", "seed", "epoch", "start", "samples"), GOLDEN)
def test_golden_order(length: int, seed: int, epoch: int, start: int, samples: list[int]) -> None:
    assert SampleOrder(length, seed).samples(epoch, start, start + len(samples)).tolist() == samples


@given(length=st.integers(1, 10_000), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 1000))
@settings(max_examples=150, deadline=None)
def test_every_sample_once_an_epoch(length: int, seed: int, epoch: int) -> None:
    counts = np.bincount(SampleOrder(length, seed).samples(epoch, 0, length), minlength=length)
    assert counts.tolist() == [1] * length


@given(length=st.integers(1, 20_000), cuts=st.lists(st.integers(0, 20_000), max_size=6))
@settings(max_examples=100, deadline=None)
def test_any_slices_join_to_the_whole(length: int, cuts: list[int]) -> None:
    """Random access: across the borders of remembered blocks and in any sizes."""
    order = SampleOrder(length, seed=11)
    edges = [0, *sorted(min(cut, length) for cut in cuts), length]
    slices = [order.samples(5, start, stop) for start, stop in pairwise(edges)]
    assert np.array_equal(np.concatenate(slices), order.samples(5, 0, length))


@pytest.mark.parametrize("border", [4096, 8192])
def test_a_micro_batch_across_the_border_of_two_blocks_is_of_one_epoch_and_seed(border: int) -> None:
    """Also where the same positions of other epochs, seeds and lengths are remembered."""
    orders = [SampleOrder(10_000, seed=3), SampleOrder(10_000, seed=4), SampleOrder(9_999, seed=3)]
    for order, epoch in itertools.product(orders, (0, 1, 7)):
        whole = order.samples(epoch, 0, order.length)
        for start, stop in ((border - 64, border + 1), (border - 1, border + 63), (border - 1, border + 4)):
            assert np.array_equal(order.samples(epoch, start, stop), whole[start:stop])


def test_a_billion_samples_at_random_places_are_distinct_and_in_range() -> None:
    length = 3 * 10**9
    order = SampleOrder(length, seed=1)
    seen = np.concatenate([order.samples(0, start, start + 10_000) for start in range(0, length - 10_000, 10**8)])
    assert seen.dtype == np.int64
    assert seen.min() >= 0
    assert seen.max() < length
    assert np.unique(seen).size == seen.size


def test_a_billion_samples_take_no_more_memory_than_a_thousand() -> None:
    """What a run does: micro-batch after micro-batch, here and there, over two epochs; the most that was ever held."""

    def most(length: int) -> int:
        tracemalloc.start()
        order = SampleOrder(length, seed=9)
        for epoch in (0, 1):
            for start in range(0, length - 640, length // 50):
                for offset in range(0, 640, 64):
                    order.samples(epoch, start + offset, start + offset + 64)
        held = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return held

    for warm_up in (10**4, 10**9):
        most(warm_up)
    small, large = most(10**6), most(10**9)
    assert large < 1.2 * small
    assert large < 2 << 20


@pytest.mark.parametrize("length", [97, 4096, 65_537])
def test_the_order_is_uniform(length: int) -> None:
    """Displacements, neighbours and where a position goes: each statistic within 5 sigma of a uniform shuffle's."""
    positions = np.arange(length)
    order = SampleOrder(length, seed=2024)
    runs = [order.samples(epoch, 0, length) for epoch in range(40)]
    for name, values, variance in [
        ("position and sample", [np.corrcoef(positions, run)[0, 1] for run in runs], 1 / length),
        ("neighbours", [np.corrcoef(run[:-1], run[1:])[0, 1] for run in runs], 1 / length),
        ("epochs", [np.corrcoef(a, b)[0, 1] for a, b in pairwise(runs)], 1 / length),
    ]:
        assert abs(np.mean(values) + 1 / length) < 5 * np.sqrt(variance / len(values)), name
    fixed = sum(int((run == positions).sum()) for run in runs)
    ascending = sum(int((np.diff(run) == 1).sum()) for run in runs)
    assert abs(fixed - len(runs)) < 5 * np.sqrt(len(runs))  # Poisson with mean 1 an epoch, both
    assert abs(ascending - len(runs)) < 5 * np.sqrt(len(runs))


def test_all_orders_of_five_samples_are_equally_frequent() -> None:
    """Chi-square over the 120 permutations; tiny domains are where a Feistel network is weakest."""
    permutations = np.stack([SampleOrder(5, seed).samples(0, 0, 5) for seed in range(2400)])
    codes = permutations @ np.array([1, 5, 25, 125, 625])
    _, counts = np.unique(codes, return_counts=True)
    chi_square = ((counts - 20.0) ** 2 / 20).sum() + 20 * (120 - len(counts))
    assert chi_square < 119 + 5 * np.sqrt(2 * 119)


@pytest.mark.parametrize("other", [SampleOrder(1000, 8), SampleOrder(1000, 7 + 2**32)])
def test_seeds_differ(other: SampleOrder) -> None:
    same = (SampleOrder(1000, 7).samples(0, 0, 1000) == other.samples(0, 0, 1000)).sum()
    assert same < 10  # 1 expected


def test_epochs_differ() -> None:
    order = SampleOrder(1000, 7)
    firsts = {tuple(order.samples(epoch, 0, 20).tolist()) for epoch in range(200)}
    assert len(firsts) == 200


def test_without_shuffle_the_order_is_the_dataset_s() -> None:
    assert SampleOrder(10, 3, shuffle=False).samples(4, 2, 7).tolist() == [2, 3, 4, 5, 6]


def test_what_is_returned_belongs_to_the_caller() -> None:
    order = SampleOrder(100, 3)
    before = order.samples(0, 0, 10).tolist()
    order.samples(0, 0, 10)[:] = -1
    assert order.samples(0, 0, 10).tolist() == before


@pytest.mark.parametrize(("epoch", "start", "stop"), [(0, -1, 3), (0, 4, 3), (0, 0, 11), (0, 11, 11), (-1, 0, 3)])
def test_bad_ranges_are_refused(epoch: int, start: int, stop: int) -> None:
    with pytest.raises(UsageError, match=r"positions \[|epoch -1"):
        SampleOrder(10, 3).samples(epoch, start, stop)


@pytest.mark.parametrize("length", [0, -5, 2**63])
def test_bad_lengths_are_refused(length: int) -> None:
    with pytest.raises(UsageError, match=str(length)):
        SampleOrder(length, 3)
