"""Windows, shards and plans: which samples a step takes, how they are cut, and who computes what.

All of it is integer arithmetic on the position in the epoch and on the lineage of views, so every worker computes every
worker's plan and nothing needs to be sent. The last window of an epoch may be shorter. A window is cut as evenly as
possible, so that no shard is left with a single sample, which batch normalisation can't take, while others have many.
Who computes a shard changes nothing in the sum, whose order is that of the shards: so they may be dealt by speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where the run is: the epoch, the first position of the next window in it, and the number of the next step."""

    epoch: int = 0
    offset: int = 0
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class Window:
    """The samples `[start, stop)` of an epoch's order that one step takes, cut into shards of at most `micro` samples:
    as few as possible, of sizes that differ by at most one, the larger ones first.
    """

    start: int
    stop: int
    micro: int

    @property
    def samples(self) -> int:
        return self.stop - self.start

    @property
    def shards(self) -> int:
        return -(-self.samples // self.micro)

    def shard(self, number: int) -> tuple[int, int]:
        """Positions `[start, stop)` of one shard."""
        return self._edge(number), self._edge(number + 1)

    def _edge(self, number: int) -> int:
        size, larger = divmod(self.samples, self.shards)
        return self.start + number * size + min(number, larger)


def window(position: Position, length: int, size: int, micro: int) -> Window:
    """The window at `position` of an epoch of `length` samples, for a batch of `size`."""
    return Window(start=position.offset, stop=min(position.offset + size, length), micro=micro)


def advance(position: Position, taken: Window, length: int) -> Position:
    """The position after the step that took `taken`."""
    if taken.stop >= length:
        return Position(epoch=position.epoch + 1, offset=0, step=position.step + 1)
    return Position(epoch=position.epoch, offset=taken.stop, step=position.step + 1)


@lru_cache(maxsize=256)
def assign(
    shards: int, lineage: tuple[tuple[str, ...], ...], shares: tuple[int, ...] = ()
) -> dict[str, tuple[int, ...]]:
    """Who computes which shards of a round.

    The first tuple of `lineage` gets contiguous ranges in its order, in proportion to `shares` (one for each of it;
    none: equal ranges). Each later one is a subset of the one before: its workers keep what they have, and the shards
    of the missing are dealt out over them, equally.
    """
    first = lineage[0]
    edges = [0, *accumulate(split(shards, len(first), shares))]
    held = {worker: tuple(range(edges[rank], edges[rank + 1])) for rank, worker in enumerate(first)}
    for survivors in lineage[1:]:
        orphaned = sorted(shard for worker, mine in held.items() if worker not in survivors for shard in mine)
        held = {
            worker: (*held.get(worker, ()), *deal(orphaned, rank, len(survivors)))
            for rank, worker in enumerate(survivors)
        }
    return {worker: tuple(sorted(mine)) for worker, mine in held.items()}


def split(shards: int, ranks: int, shares: Sequence[int] = ()) -> list[int]:
    """How many shards each rank gets: equally, or in proportion to `shares` (1 or more each), by largest remainder.

    Where there are enough, everyone gets at least one, so that its speed goes on being measured; who has most gives it.
    """
    if not shares:
        return [shards * (rank + 1) // ranks - shards * rank // ranks for rank in range(ranks)]
    whole = sum(shares)
    counts = [shards * share // whole for share in shares]
    for rank in sorted(range(ranks), key=lambda rank: -(shards * shares[rank] % whole))[: shards - sum(counts)]:
        counts[rank] += 1
    for rank in [rank for rank in range(ranks) if not counts[rank]] if shards >= ranks else ():
        counts[max(range(ranks), key=lambda rank: counts[rank])] -= 1
        counts[rank] = 1
    return counts


def range_of(shards: int, rank: int, ranks: int) -> tuple[int, ...]:
    """The contiguous range of one rank: sizes differ by at most one."""
    return tuple(range(shards * rank // ranks, shards * (rank + 1) // ranks))


def deal(items: Sequence[int], rank: int, ranks: int) -> tuple[int, ...]:
    return tuple(items[i] for i in range_of(len(items), rank, ranks))
