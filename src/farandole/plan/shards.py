"""Windows, shards and plans: which samples a step takes, how they are cut, and who computes what.

All of it is integer arithmetic on the position in the epoch and on the lineage of views, so every worker computes every
worker's plan and nothing needs to be sent. The last window of an epoch may be shorter. A window is cut as evenly as
possible, so that no shard is left with a single sample, which batch normalisation can't take, while others have many.
Who computes a shard changes nothing in the sum, whose order is that of the shards: so they may be dealt by speed.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TypeVar

from farandole.errors import UsageError
from farandole.platform.bounds import MAX_WORKERS, whole

# --- shards -----------------------------------------------------------------------------------------------------------


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


# --- tree -------------------------------------------------------------------------------------------------------------
#
# The summation tree over a round's shards: it fixes the order of every sum, whoever holds what.
#
# Node `(level, i)` covers the shards `[i * 2**level, (i + 1) * 2**level)` that exist. A node's value is left + right; a
# missing right child passes the left one through. A worker holds the values of its maximal nodes, at most about
# `2 * log2(shards)` for a contiguous range, and adding nodes up in this tree gives the same bits from any split.

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


# --- checks -----------------------------------------------------------------------------------------------------------
#
# Shards that are computed a second time, by another worker, to see that both find the same: which, and by whom.
#
# Each shard has one right answer, whoever computes it. So the digests of what two workers have found of the same shard
# (loss, gradients, buffers) are equal, or one of them computes wrong, or is another machine, or runs another script.
#
#     proof   in the first step that counts for a joiner it computes the first shard too, which another one holds
#     audit   in any step each shard is chosen with a probability, by the run's seed; a worker's are checked by one
#     other again   in a round that is done again the coordinator says who computes what too, since two have not found
#     the same
#
# All of it follows from what every member knows, so nothing is sent but two numbers in each control word: of what a
# worker has found of its own shards that are checked, and of what it has found of another's. So a worker checks one
# other in a round, and all who check the same worker check the same shards: what does not fit in is left out.

Held = Mapping[str, Sequence[int]]  # who computes which shards of the round
Asked = Sequence[tuple[str, tuple[int, ...]]]  # who is to compute which shards too


@dataclass(frozen=True, kw_only=True)
class Check:
    """`checker` computes `shards` too, which are some of `holder`'s."""

    holder: str
    checker: str
    shards: tuple[int, ...]


def due(held: Held, unproven: Sequence[str], again: Asked | None, audited: Iterable[Check]) -> tuple[Check, ...]:
    """The checks of a round. Who has to prove itself comes first, and an audit only where nothing else is due."""
    asked = [*((worker, (0,)) for worker in unproven), *(again or ())]
    kept = list[Check]()
    for check in _pairs(held, asked) if asked or again is not None else audited:
        fits = of_holder(kept, check.holder) in ((), check.shards)
        if fits and of_checker(kept, check.checker) is None:
            kept.append(check)
    return tuple(kept)


def audit(held: Held, workers: Sequence[str], fraction: float, seed: int, step: int) -> Iterator[Check]:
    """Each shard with a probability of `fraction`. Whose are whose to check is another matter in each step."""
    count = len(workers)
    if not fraction or count < 2:
        return
    away = 1 + int(_draw(seed, step, -1) * (count - 1))
    for place, holder in enumerate(workers):
        shards = tuple(shard for shard in held.get(holder, ()) if _draw(seed, step, shard) < fraction)
        if shards:
            yield Check(holder=holder, checker=workers[(place + away) % count], shards=shards)


def of_holder(checks: Iterable[Check], holder: str) -> tuple[int, ...]:
    """Its shards that somebody checks."""
    return next((check.shards for check in checks if check.holder == holder), ())


def of_checker(checks: Iterable[Check], checker: str) -> Check | None:
    """What it checks."""
    return next((check for check in checks if check.checker == checker), None)


def _pairs(held: Held, asked: Asked) -> Iterator[Check]:
    """With whoever holds the shards; what a checker holds itself nobody else has computed."""
    holders = {shard: worker for worker, mine in held.items() for shard in mine}
    for checker, shards in asked:
        for holder in dict.fromkeys(holders[shard] for shard in shards if shard in holders):
            theirs = tuple(shard for shard in shards if holders.get(shard) == holder)
            if holder != checker:
                yield Check(holder=holder, checker=checker, shards=theirs)


def _draw(seed: int, step: int, shard: int) -> float:
    """From [0, 1), the same everywhere."""
    digest = hashlib.blake2b(f"audit {seed} {step} {shard}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


# --- history ----------------------------------------------------------------------------------------------------------
#
# A history: how many workers began each step. With the seed, all that the weights depend on under any batch policy.
#
#     # step workers
#     0      1
#     300    12
#     450    4
#
# Each line holds from its step on. It is what `farandole rehearse` is given and what `farandole replay` reads off a
# run.


@dataclass(frozen=True)
class History:
    """`changes`: (step, workers) pairs, from step 0 on, in the order of the steps."""

    changes: tuple[tuple[int, int], ...]

    def workers(self, step: int) -> int:
        return self.changes[bisect_right(self.changes, (step, 1 << 62)) - 1][1]

    def text(self) -> str:
        return "# step workers\n" + "".join(f"{step} {workers}\n" for step, workers in self.changes)

    @staticmethod
    def parse(text: str, name: str) -> History:
        """The history in `text`; `name` is what errors call it.

        Raises:
            UsageError: a line that is no change; names the line.
        """
        changes: list[tuple[int, int]] = []
        for number, line in enumerate(text.splitlines(), 1):
            words = line.split("#")[0].split()
            if words:
                changes.append(_change(words, f"{name}, line {number}: {line.strip()!r}", changes))
        if not changes:
            raise UsageError(f"{name}: no line says how many workers there are; write `0 4` for four from step 0 on")
        return History(tuple(changes))

    @property
    def peak(self) -> int:
        return max(workers for _, workers in self.changes)

    @staticmethod
    def of(steps: Iterable[tuple[int, int]]) -> History:
        """From each step's workers, as (step, workers) in order."""
        changes: list[tuple[int, int]] = []
        for step, workers in steps:
            if not changes or changes[-1][1] != workers:
                changes.append((step, workers))
        return History(tuple(changes))


def _change(words: list[str], where: str, before: list[tuple[int, int]]) -> tuple[int, int]:
    try:
        step, workers = map(int, words)
    except ValueError:
        raise UsageError(f"{where}: two whole numbers, the step and the workers from there on") from None
    whole(f"{where}: step {{}}", step)
    whole(f"{where}: {{}} workers", workers, 1, MAX_WORKERS, why="at least one worker trains")
    if not before and step != 0:
        raise UsageError(f"{where}: the first line is that of step 0")
    if before and step <= before[-1][0]:
        raise UsageError(f"{where}: steps go up, and the line before is that of step {before[-1][0]}")
    return step, workers
