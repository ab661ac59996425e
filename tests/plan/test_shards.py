"""Windows cut epochs without rest, plans deal shards without rest."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.errors import UsageError
from farandole.plan.batch import GlobalBatch
from farandole.plan.shards import Position, Window, advance, assign, deal, range_of, split, window


def epochs_of(length: int, size: int, micro: int, epochs: int) -> list[tuple[Position, Window]]:
    position, steps = Position(), []
    while position.epoch < epochs:
        taken = window(position, length, size, micro)
        steps.append((position, taken))
        position = advance(position, taken, length)
    return steps


@given(st.integers(1, 200), st.integers(1, 64), st.integers(1, 64))
def test_every_position_of_an_epoch_is_in_exactly_one_shard(length: int, size: int, micro: int) -> None:
    steps = epochs_of(length, size, min(micro, size), epochs=2)
    seen: Counter[tuple[int, int]] = Counter()
    for position, taken in steps:
        edges = [taken.shard(number) for number in range(taken.shards)]
        assert [edges[0][0], edges[-1][1]] == [taken.start, taken.stop]
        assert all(a[1] == b[0] for a, b in pairwise(edges))
        assert sum(stop - start for start, stop in edges) == taken.samples
        sizes = [stop - start for start, stop in edges]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] <= taken.micro
        assert sizes[0] - sizes[-1] <= 1
        assert taken.shards == -(-taken.samples // taken.micro)
        seen.update((position.epoch, p) for start, stop in edges for p in range(start, stop))
    assert seen == Counter((epoch, p) for epoch in range(2) for p in range(length))
    assert [position.step for position, _ in steps] == list(range(len(steps)))
    assert len(steps) == 2 * -(-length // size)


def test_the_last_window_of_an_epoch_is_short_and_the_next_epoch_starts_afresh() -> None:
    """100 samples, 24 a step, 8 a shard: four full windows and one of 4 samples, which is one short shard."""
    steps = epochs_of(100, 24, 8, epochs=2)
    assert [taken.samples for _, taken in steps] == [24, 24, 24, 24, 4] * 2
    assert [taken.shards for _, taken in steps] == [3, 3, 3, 3, 1] * 2
    assert steps[4][1].shard(0) == (96, 100)
    assert steps[5][0] == Position(epoch=1, offset=0, step=5)


@pytest.mark.parametrize(
    ("samples", "micro", "sizes", "remark"),
    [
        (65, 64, [33, 32], "no shard of one sample, which batch normalisation can't take"),
        (11, 4, [4, 4, 3], "the larger ones first"),
        (9, 4, [3, 3, 3], "as few as possible, and even"),
        (16, 4, [4, 4, 4, 4], "where it divides, all are full"),
        (3, 8, [3], "a short window"),
        (2, 1, [1, 1], "asked for"),
    ],
)
def test_a_window_is_cut_evenly(samples: int, micro: int, sizes: list[int], remark: str) -> None:
    taken = Window(start=10, stop=10 + samples, micro=micro)
    edges = [taken.shard(k) for k in range(taken.shards)]
    assert [stop - start for start, stop in edges] == sizes, remark
    assert edges[0][0] == 10


@pytest.mark.parametrize(
    ("shards", "ranks", "sizes", "remark"),
    [
        (8, 2, [4, 4], "divides"),
        (8, 3, [2, 3, 3], "three do not divide eight"),
        (3, 5, [0, 1, 0, 1, 1], "more ranks than shards: some have nothing to do"),
        (1, 1, [1], "a world of one"),
        (1, 4, [0, 0, 0, 1], "one shard"),
    ],
)
def test_ranges(shards: int, ranks: int, sizes: list[int], remark: str) -> None:
    ranges = [range_of(shards, rank, ranks) for rank in range(ranks)]
    assert [len(mine) for mine in ranges] == sizes, remark
    assert [s for mine in ranges for s in mine] == list(range(shards)), "contiguous, in rank order"


@given(st.lists(st.integers(), max_size=40), st.integers(1, 12))
def test_dealing_gives_each_item_once_and_sizes_differ_by_one(items: list[int], ranks: int) -> None:
    hands = [deal(items, rank, ranks) for rank in range(ranks)]
    assert [item for hand in hands for item in hand] == items
    assert max(map(len, hands)) - min(map(len, hands)) <= 1


@st.composite
def lineages(draw: st.DrawFn) -> tuple[tuple[str, ...], ...]:
    workers = tuple(draw(st.permutations([f"w{i}" for i in range(draw(st.integers(1, 8)))])))
    lineage = [workers]
    for _ in range(draw(st.integers(0, 5))):
        kept = draw(st.sets(st.sampled_from(lineage[-1]), min_size=1))
        lineage.append(tuple(w for w in lineage[-1] if w in kept))
    return tuple(lineage)


@given(st.integers(0, 60), lineages())
def test_every_shard_is_assigned_once_through_any_lineage(shards: int, lineage: tuple[tuple[str, ...], ...]) -> None:
    held = assign(shards, lineage)
    assert tuple(held) == lineage[-1]
    assert Counter(s for mine in held.values() for s in mine) == Counter(range(shards))


@pytest.mark.parametrize(
    ("shards", "shares", "counts", "remark"),
    [
        (16, (1000, 480), [11, 5], "10.8 and 5.2: the larger remainder gets the last one"),
        (16, (480, 1000), [5, 11], "whatever the order"),
        (16, (1000, 1000), [8, 8], "equal"),
        (7, (1000, 1000, 1000), [3, 2, 2], "equal remainders: the first get more"),
        (8, (1000, 10), [7, 1], "with enough shards everyone gets one, so that it goes on being measured"),
        (5, (1000, 10, 10, 10), [2, 1, 1, 1], "... which the most laden gives"),
        (8, (10, 1000, 10), [1, 6, 1], "... wherever that one stands"),
        (6, (10, 400, 600), [1, 2, 3], "... and not the first, which would be left with none itself"),
        (8, (300, 10, 290, 10), [3, 1, 3, 1], "... each time the one that is the most laden then"),
        (6, (300, 300, 10), [2, 3, 1], "... and of equals the first"),
        (2, (10, 1000, 500), [0, 1, 1], "with fewer shards than workers the slowest may get none"),
        (1, (500, 1000), [0, 1], "one shard, for the fastest"),
        (0, (1000, 500), [0, 0], "nothing to do"),
        (2**53, (1000, 1), [2**53 - 2**53 // 1001, 2**53 // 1001], "integers all the way"),
    ],
)
def test_shards_are_split_in_proportion(shards: int, shares: tuple[int, ...], counts: list[int], remark: str) -> None:
    assert split(shards, len(shares), shares) == counts, remark


@given(st.integers(0, 10_000), st.lists(st.integers(1, 1000), min_size=1, max_size=12))
def test_nobody_is_more_than_a_shard_from_its_part(shards: int, shares: list[int]) -> None:
    counts = split(shards, len(shares), shares)
    assert sum(counts) == shards
    parts = [shards * share / sum(shares) for share in shares]
    if min(parts) >= 1:
        assert all(abs(count - part) < 1 for count, part in zip(counts, parts, strict=True))
    assert shards < len(shares) or min(counts) >= 1


@given(st.integers(0, 60), lineages(), st.data())
def test_shares_move_shards_and_lose_none(
    shards: int, lineage: tuple[tuple[str, ...], ...], data: st.DataObject
) -> None:
    size = len(lineage[0])
    shares = tuple(data.draw(st.lists(st.integers(1, 1000), min_size=size, max_size=size)))
    first = assign(shards, lineage[:1], shares)
    assert [len(mine) for mine in first.values()] == split(shards, len(shares), shares)
    assert [shard for mine in first.values() for shard in mine] == list(range(shards)), "contiguous, in rank order"
    held = assign(shards, lineage, shares)
    assert tuple(held) == lineage[-1]
    assert Counter(s for mine in held.values() for s in mine) == Counter(range(shards))
    assert all(set(first[worker]) <= set(mine) for worker, mine in held.items()), "survivors keep what they had"


@given(st.integers(0, 60), lineages())
def test_survivors_keep_what_they_had(shards: int, lineage: tuple[tuple[str, ...], ...]) -> None:
    for earlier in range(1, len(lineage)):
        before, after = assign(shards, lineage[:earlier]), assign(shards, lineage[: earlier + 1])
        for worker, mine in after.items():
            assert set(before[worker]) <= set(mine)
            assert list(mine) == sorted(mine)


def test_a_crash_deals_out_the_shards_of_the_dead_alone() -> None:
    """Golden: six shards over three; b dies, then a."""
    assert assign(6, (("a", "b", "c"),)) == {"a": (0, 1), "b": (2, 3), "c": (4, 5)}
    assert assign(6, (("a", "b", "c"), ("a", "c"))) == {"a": (0, 1, 2), "c": (3, 4, 5)}
    assert assign(6, (("a", "b", "c"), ("a", "c"), ("c",))) == {"c": (0, 1, 2, 3, 4, 5)}


def test_a_lineage_that_repeats_itself_changes_nothing() -> None:
    once = assign(7, (("a", "b", "c"),))
    assert assign(7, (("a", "b", "c"), ("a", "b", "c"), ("a", "b", "c"))) == once


@pytest.mark.failure(
    "The training loop", "the script gives over 2^53 steps, or a batch, epochs or a dataset too large for a message"
)
@pytest.mark.parametrize(
    ("size", "micro", "message"),
    [
        (0, 1, r"size=0"),
        (8, 0, r"micro=0"),
        (8, 9, r"size=8.*micro=9"),
    ],
)
def test_batches_that_are_refused(size: int, micro: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        GlobalBatch(size, micro=micro)
