"""The summation tree: one order of additions, whoever holds what."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farandole.plan.shards import Node, combine, exists, maximal, parent, root, sibling


def leaves(node: Node, shards: int) -> list[int]:
    level, index = node
    return list(range(index << level, min((index + 1) << level, shards)))


def reference(values: list[torch.Tensor]) -> torch.Tensor:
    """The documented sum, written another way: add neighbours until one is left; the odd one out moves up."""
    while len(values) > 1:
        pairs = [values[i] + values[i + 1] for i in range(0, len(values) - 1, 2)]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]


def add(left: torch.Tensor, right: torch.Tensor, last: bool) -> torch.Tensor:
    del last
    return left + right


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def rough(count: int, seed: int) -> list[torch.Tensor]:
    """Values over 60 binary orders of magnitude, so that every other order of additions gives other bits."""
    generator = torch.Generator().manual_seed(seed)
    magnitude = torch.randint(-30, 30, (count, 7), generator=generator).to(torch.float32)
    return list(torch.randn(count, 7, generator=generator) * magnitude.exp2())


@given(st.data(), st.integers(1, 70), st.integers(1, 6))
def test_any_split_over_holders_gives_the_bits_of_the_reference(data: st.DataObject, shards: int, holders: int) -> None:
    values = rough(shards, seed=shards)
    holder = data.draw(st.lists(st.integers(0, holders - 1), min_size=shards, max_size=shards))
    nodes: dict[Node, torch.Tensor] = {}
    for rank in range(holders):
        held = [shard for shard in range(shards) if holder[shard] == rank]
        for node in maximal(held, shards):
            assert node not in nodes
            nodes[node] = reference([values[shard] for shard in leaves(node, shards)])
    assert bits(combine(nodes, shards, add)) == bits(reference(values))


def test_rough_values_do_tell_orders_apart() -> None:
    """The evidence above is worth something only if a plain left-to-right sum differs."""
    values = rough(16, seed=16)
    assert bits(sum(values[1:], values[0])) != bits(reference(values))


@given(st.integers(1, 300), st.sets(st.integers(0, 299)))
def test_maximal_nodes_cover_each_held_shard_once_and_no_other(shards: int, held: set[int]) -> None:
    held = {shard for shard in held if shard < shards}
    nodes = maximal(held, shards)
    assert Counter(s for node in nodes for s in leaves(node, shards)) == Counter(held)
    assert [node[1] << node[0] for node in nodes] == sorted(node[1] << node[0] for node in nodes)
    for node in nodes:
        assert node == root(shards) or not set(leaves(parent(node), shards)) <= held, "a bigger node would do"


@pytest.mark.parametrize("shards", [1, 2, 3, 5, 8, 31, 32, 33, 100])
def test_a_contiguous_range_has_at_most_two_nodes_a_level(shards: int) -> None:
    bound = max(1, 2 * math.ceil(math.log2(shards))) if shards > 1 else 1
    for start in range(shards):
        for stop in range(start + 1, shards + 1):
            assert len(maximal(range(start, stop), shards)) <= bound, (start, stop)


def test_an_aligned_range_is_one_node() -> None:
    assert maximal(range(8, 12), 32) == ((2, 2),)
    assert maximal(range(32), 32) == ((5, 0),)


def test_a_missing_right_child_passes_the_left_one_through() -> None:
    """Five shards: node (2, 1) covers shard 4 alone, and nothing, not even a zero, is added to it."""
    assert root(5) == (3, 0)
    assert not exists((0, 5), 5)
    assert not exists((1, 3), 5)
    assert exists((2, 1), 5)
    assert maximal([4], 5) == ((2, 1),)
    minus_zero = torch.tensor([-0.0])
    added: list[tuple[float, float, bool]] = []

    def recorded(left: torch.Tensor, right: torch.Tensor, last: bool) -> torch.Tensor:
        added.append((left.item(), right.item(), last))
        return left + right

    values = {(0, s): torch.tensor([-0.0]) for s in range(4)} | {(0, 4): minus_zero}
    assert bits(combine(values, 5, recorded)) == bits(minus_zero), "adding a zero would have made it 0.0"
    assert len(added) == 4
    assert [last for *_, last in added] == [False, False, False, True]


def test_the_order_is_the_documented_one() -> None:
    """Golden: V = 7, as a bracketed sum."""
    text = combine({(0, s): str(s) for s in range(7)}, 7, lambda left, right, _: f"({left}+{right})")
    assert text == "(((0+1)+(2+3))+((4+5)+6))"


def test_one_shard_is_its_own_sum() -> None:
    assert root(1) == (0, 0)
    assert combine({(0, 0): "only"}, 1, lambda *_: "added") == "only"


def test_a_shard_that_nobody_covers_is_our_own_bug() -> None:
    with pytest.raises(AssertionError, match=r"\b2\b"):
        combine({(1, 0): 1, (0, 3): 1}, 4, lambda left, right, _: left + right)


@given(st.integers(0, 20), st.integers(0, 1 << 20))
def test_siblings_share_their_parent(level: int, index: int) -> None:
    node = (level, index)
    assert sibling(sibling(node)) == node
    assert parent(sibling(node)) == parent(node)
