"""What simulated workers exchange: buckets without elements, whose stretches say what they hold."""

from __future__ import annotations

from dataclasses import dataclass

from farandole.plan.shards import Node

UNIT = 8  # elements


@dataclass(frozen=True)
class SimulatedBucket:
    """Of so many elements, cut as real ones are."""

    numel: int

    def slice(self, part: int, parts: int) -> tuple[int, int]:
        units = self.numel // UNIT
        return units * part // parts * UNIT, units * (part + 1) // parts * UNIT


# What a round of each kind exchanges. Sizes differ, so that a message which meets another kind's receive shows.
BUCKETS = {
    "train": (SimulatedBucket(64), SimulatedBucket(40), SimulatedBucket(16)),
    "evaluate": (SimulatedBucket(24),),
    "other": (SimulatedBucket(32),),
    "idle": (),
    "call": (),
}


Sum = tuple[tuple[int, ...], tuple[int, ...]]  # of which shards, and their values


@dataclass(frozen=True)
class SimulatedPiece:
    """What a stretch of a bucket holds: the sum of these shards' values, added in this order."""

    bucket: int
    start: int
    stop: int
    shards: tuple[int, ...]
    values: tuple[int, ...]


def covered(node: Node, shards: int) -> tuple[int, ...]:
    """The shards that a node of the tree over so many covers."""
    level, number = node
    return tuple(range(number << level, min((number + 1) << level, shards)))
