"""The summation tree over a round's shards: it fixes the order of every sum, whoever holds what.

Node `(level, i)` covers the shards `[i * 2**level, (i + 1) * 2**level)` that exist. A node's value is left + right; a
missing right child passes the left one through. A worker holds the values of its maximal nodes, at most about
`2 * log2(shards)` for a contiguous range, and adding nodes up in this tree gives the same bits from any split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

Node = tuple[int, int]
T = TypeVar("T")


def root(shards: int) -> Node:
    return ((shards - 1).bit_length(), 0)


def parent(node: Node) -> Node:
    return (node[0] + 1, node[1] // 2)


def sibling(node: Node) -> Node:
    return (node[0], node[1] ^ 1)


def exists(node: Node, shards: int) -> bool:
    return node[1] << node[0] < shards


def maximal(held: Iterable[int], shards: int) -> tuple[Node, ...]:
    """The fewest nodes that cover exactly the shards `held`, ordered by the first shard that each covers."""
    nodes = {(0, shard) for shard in held}
    done: list[Node] = []
    level = 0
    while nodes:
        above: set[Node] = set()
        for node in nodes:
            other = sibling(node)
            if node != root(shards) and (other in nodes or not exists(other, shards)):
                above.add(parent(node))
            else:
                done.append(node)
        nodes, level = above, level + 1
    return tuple(sorted(done, key=lambda node: node[1] << node[0]))


def combine(values: Mapping[Node, T], shards: int, add: Callable[[T, T, bool], T], top: Node | None = None) -> T:
    """The value of `top`, the root if none is given, from the values of nodes that together cover its shards.

    `add(left, right, last)` adds two values; `last` tells that the result is the top's.
    """
    top = root(shards) if top is None else top

    def value(node: Node) -> T:
        if node in values:
            return values[node]
        assert node[0] > 0, f"shard {node[1]} is covered by nobody"
        left = (node[0] - 1, node[1] * 2)
        right = (node[0] - 1, node[1] * 2 + 1)
        if not exists(right, shards):
            return value(left)
        first = value(left)
        return add(first, value(right), node == top)

    return value(top)
