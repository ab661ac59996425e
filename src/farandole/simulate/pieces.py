"""The data that simulated workers exchange: buckets without elements, whose parts record their content."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from farandole.plan.shards import Node

UNIT = 8  # elements


@dataclass(frozen=True)
class SimulatedBucket:
    """A bucket of `numel` elements, cut like a real one, with slices of at most `most_pieces` pieces."""

    numel: int
    most_pieces: int = 1

    def slice(self, part: int, parts: int) -> tuple[int, int]:
        units = self.numel // UNIT
        return units * part // parts * UNIT, units * (part + 1) // parts * UNIT

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        units = (stop - start) // UNIT
        parts = min(max(units, 1), self.most_pieces)
        return list(pairwise([*(start + units * part // parts * UNIT for part in range(parts)), stop]))


# The buckets of a round of each kind. Sizes differ, so that a message that meets another kind's receive is detected.
BUCKETS = {
    "train": (SimulatedBucket(64), SimulatedBucket(40), SimulatedBucket(16)),
    "evaluate": (SimulatedBucket(24),),
    "other": (SimulatedBucket(32),),
    "idle": (),
    "call": (),
}


Sum = tuple[tuple[int, ...], tuple[int, ...]]  # the shards, and their values


@dataclass(frozen=True)
class SimulatedPiece:
    """The content of the elements `[start, stop)` of a bucket: the sum of these shards' values, in this order."""

    bucket: int
    start: int
    stop: int
    shards: tuple[int, ...]
    values: tuple[int, ...]


def covered(node: Node, shards: int) -> tuple[int, ...]:
    """Returns the shards that a node of the tree over `shards` shards covers."""
    level, number = node
    return tuple(range(number << level, min((number + 1) << level, shards)))
