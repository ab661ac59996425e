"""Windows, shards and plans: the samples of a step, the shards (micro-batches) of them, and the worker of each shard.

A plan is integer arithmetic on the position in the epoch and on the lineage of views (the history of the shard
assignment in a round). So every worker computes the plan of all workers, and no plan is sent. The last window of an
epoch may be shorter. A window is cut as evenly as possible, so that no shard has a single sample, which batch
normalisation can't take, while others have many. The assignment of shards does not change the sum, whose order is that
of the shards: so shards may be assigned by the workers' speed.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import TypeVar

from farandole.errors import UsageError
from farandole.platform.bounds import MAX_WORKERS, whole

# --- shards -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LoopStart:
    """The beginning of a loop over `run.steps`.

    Attributes:
        number: the loop's number in the script, from 0.
        step, epoch: its first step and its first epoch, which are numbered through all loops of the run.
        facts: a digest of its data, batch and length, 53 bits; 0 for loop 0, whose facts are in the signature.
    """

    number: int = 0
    step: int = 0
    epoch: int = 0
    facts: int = 0


FIRST_LOOP = LoopStart()


@dataclass(frozen=True, kw_only=True)
class Position:
    """The position of a run: the epoch, the offset of the next window in it, and the number of the next step.

    `loop`: the loop that the step is in.
    """

    epoch: int = 0
    offset: int = 0
    step: int = 0
    loop: LoopStart = FIRST_LOOP

    def next_loop(self, facts: int) -> Position:
        """Returns the beginning of the next loop, if the loop in hand ends before this position."""
        epoch = self.epoch + (self.offset > 0)
        start = LoopStart(number=self.loop.number + 1, step=self.step, epoch=epoch, facts=facts)
        return Position(epoch=epoch, step=self.step, loop=start)


@dataclass(frozen=True, kw_only=True)
class Window:
    """The samples `[start, stop)`, in the epoch's order, of one step.

    They are cut into as few shards as possible of at most `micro` samples. Sizes differ by at most one, the larger
    shards first.
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
        """Returns the positions `[start, stop)` of one shard."""
        return self._edge(number), self._edge(number + 1)

    def _edge(self, number: int) -> int:
        size, larger = divmod(self.samples, self.shards)
        return self.start + number * size + min(number, larger)


def window(position: Position, length: int, size: int, micro: int) -> Window:
    """Returns the window at `position` of an epoch of `length` samples, for a batch of `size` samples."""
    return Window(start=position.offset, stop=min(position.offset + size, length), micro=micro)


def advance(position: Position, step_window: Window, length: int) -> Position:
    """Returns the position after the step with the window `step_window`."""
    if step_window.stop >= length:
        return replace(position, epoch=position.epoch + 1, offset=0, step=position.step + 1)
    return replace(position, offset=step_window.stop, step=position.step + 1)


@lru_cache(maxsize=256)
def assign(
    shards: int, lineage: tuple[tuple[str, ...], ...], shares: tuple[int, ...] = ()
) -> dict[str, tuple[int, ...]]:
    """Returns the shards of a round by worker.

    The workers in the first tuple of `lineage` get contiguous ranges in their order, in proportion to `shares` (one for
    each of them; empty: equal ranges). Each later tuple is a subset of the one before: its workers keep their shards,
    and the shards of the missing workers are distributed equally over them.
    """
    first = lineage[0]
    edges = [0, *accumulate(split(shards, len(first), shares))]
    assignment = {worker: tuple(range(edges[rank], edges[rank + 1])) for rank, worker in enumerate(first)}
    for survivors in lineage[1:]:
        orphaned = sorted(shard for worker, mine in assignment.items() if worker not in survivors for shard in mine)
        assignment = {
            worker: (*assignment.get(worker, ()), *deal(orphaned, rank, len(survivors)))
            for rank, worker in enumerate(survivors)
        }
    return {worker: tuple(sorted(mine)) for worker, mine in assignment.items()}


def split(shards: int, ranks: int, shares: Sequence[int] = ()) -> list[int]:
    """Returns the number of shards of each rank: equal, or in proportion to `shares` (1 or more each).

    Proportions are rounded by largest remainder. If there are enough shards, every rank gets at least one, taken from
    the rank with most, so that its speed is still measured.
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
    """Returns the contiguous range of one rank; sizes differ by at most one."""
    return tuple(range(shards * rank // ranks, shards * (rank + 1) // ranks))


def deal(items: Sequence[int], rank: int, ranks: int) -> tuple[int, ...]:
    return tuple(items[i] for i in range_of(len(items), rank, ranks))


# --- tree -------------------------------------------------------------------------------------------------------------
#
# The summation tree over a round's shards: it fixes the order of every sum, for any assignment of the shards.
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


def maximal(own_shards: Iterable[int], shards: int) -> tuple[Node, ...]:
    """Returns the fewest nodes that cover exactly the shards `own_shards`, ordered by the first shard of each."""
    nodes = {(0, shard) for shard in own_shards}
    maximal_nodes: list[Node] = []
    level = 0
    while nodes:
        above: set[Node] = set()
        for node in nodes:
            other = sibling(node)
            if node != root(shards) and (other in nodes or not exists(other, shards)):
                above.add(parent(node))
            else:
                maximal_nodes.append(node)
        nodes, level = above, level + 1
    return tuple(sorted(maximal_nodes, key=lambda node: node[1] << node[0]))


def combine(values: Mapping[Node, T], shards: int, add: Callable[[T, T, bool], T], top: Node | None = None) -> T:
    """Returns the value of node `top`, by default the root, from `values` of nodes that together cover its shards.

    `add(left, right, last)` adds two values; `last` is True if the result is that of `top`.
    """
    top = root(shards) if top is None else top

    def value(node: Node) -> T:
        if node in values:
            return values[node]
        assert node[0] > 0, f"no node covers shard {node[1]}"
        left = (node[0] - 1, node[1] * 2)
        right = (node[0] - 1, node[1] * 2 + 1)
        if not exists(right, shards):
            return value(left)
        first = value(left)
        return add(first, value(right), node == top)

    return value(top)


# --- checks -----------------------------------------------------------------------------------------------------------
#
# Shards that a second worker computes too, to verify the result: which shards, and which workers.
#
# Each shard has one correct result on any worker. So if two workers compute the same shard, the digests of their
# results (loss, gradients, buffers) are equal; otherwise one of them computes wrong, or is a different kind of machine,
# or runs a different script.
#
#     proof   admission check: in the first step that counts for a joiner, it also computes the first shard, which
#             another worker holds
#     audit   in any step each shard is chosen with a probability, by the run's seed; one other worker checks all chosen
#             shards of a worker
#     again   in a repeated round the coordinator assigns additional shards, because two workers had different results
#
# All checks follow from facts that every member knows, so only two numbers are sent, in each commit message: a digest
# of the worker's results for its own shards that are checked, and one of its results for the shards that it checks. So
# a worker checks at most one other worker in a round, and all checkers of a worker check the same shards. A check that
# does not fit these limits is dropped.

Assignment = Mapping[str, Sequence[int]]  # the shards of the round by worker
ShardRequests = Sequence[tuple[str, tuple[int, ...]]]  # workers, and the shards that each must compute in addition


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check: `checker` also computes `shards`, which belong to `owner`."""

    owner: str
    checker: str
    shards: tuple[int, ...]


def select_checks(
    assignment: Assignment, unchecked: Sequence[str], rechecks: ShardRequests | None, audited: Iterable[Check]
) -> tuple[Check, ...]:
    """Returns the checks of a round. Admission checks come first; audits are used only if no other check is due.

    `unchecked`: workers that have not passed the admission check. `rechecks`: checks that the coordinator requested.
    """
    requested = [*((worker, (0,)) for worker in unchecked), *(rechecks or ())]
    checks = list[Check]()
    for check in _pairs(assignment, requested) if requested or rechecks is not None else audited:
        fits = of_owner(checks, check.owner) in ((), check.shards)
        if fits and of_checker(checks, check.checker) is None:
            checks.append(check)
    return tuple(checks)


def audit(assignment: Assignment, workers: Sequence[str], fraction: float, seed: int, step: int) -> Iterator[Check]:
    """Yields audits: each shard is chosen with probability `fraction`. The pairs of workers change with each step."""
    count = len(workers)
    if not fraction or count < 2:
        return
    away = 1 + int(_draw(seed, step, -1) * (count - 1))
    for place, owner in enumerate(workers):
        shards = tuple(shard for shard in assignment.get(owner, ()) if _draw(seed, step, shard) < fraction)
        if shards:
            yield Check(owner=owner, checker=workers[(place + away) % count], shards=shards)


def of_owner(checks: Iterable[Check], owner: str) -> tuple[int, ...]:
    """Returns the shards of `owner` that another worker checks."""
    return next((check.shards for check in checks if check.owner == owner), ())


def compared(checks: Iterable[Check]) -> tuple[str, ...]:
    """Returns the workers whose results are compared with another's: owners and checkers, each once."""
    return tuple(dict.fromkeys(worker for check in checks for worker in (check.owner, check.checker)))


def of_checker(checks: Iterable[Check], checker: str) -> Check | None:
    """Returns the check that `checker` does; None if there is none."""
    return next((check for check in checks if check.checker == checker), None)


def _pairs(assignment: Assignment, requested: ShardRequests) -> Iterator[Check]:
    """Yields the requested checks with their owners; none for a checker's own shards, which no other computes."""
    owners = {shard: worker for worker, mine in assignment.items() for shard in mine}
    for checker, shards in requested:
        for owner in dict.fromkeys(owners[shard] for shard in shards if shard in owners):
            theirs = tuple(shard for shard in shards if owners.get(shard) == owner)
            if owner != checker:
                yield Check(owner=owner, checker=checker, shards=theirs)


def _draw(seed: int, step: int, shard: int) -> float:
    """Returns a pseudorandom number in [0, 1), the same on every worker."""
    digest = hashlib.blake2b(f"audit {seed} {step} {shard}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


# --- history ----------------------------------------------------------------------------------------------------------
#
# A history: the number of workers that began each step. The weights depend only on it and on the seed, under any batch
# policy.
#
#     # step workers
#     0      1
#     300    12
#     450    4
#
# Each line is valid from its step on. A history is the input of `farandole rehearse`, and `farandole replay` reads it
# from a run.


@dataclass(frozen=True)
class History:
    """The number of workers by step. `changes` are (step, workers) pairs in the order of the steps, from step 0 on."""

    changes: tuple[tuple[int, int], ...]

    def workers(self, step: int) -> int:
        return self.changes[bisect_right(self.changes, (step, 1 << 62)) - 1][1]

    def text(self) -> str:
        return "# step workers\n" + "".join(f"{step} {workers}\n" for step, workers in self.changes)

    @staticmethod
    def parse(text: str, name: str) -> History:
        """Parses a history; `name` is its name in errors.

        Raises:
            UsageError: a line is not a valid change. The message has the line.
        """
        changes: list[tuple[int, int]] = []
        for number, line in enumerate(text.splitlines(), 1):
            words = line.split("#")[0].split()
            if words:
                changes.append(_change(words, f"{name}, line {number}: {line.strip()!r}", changes))
        if not changes:
            raise UsageError(f"{name}: the history has no line; write `0 4` for four workers from step 0 on")
        return History(tuple(changes))

    @property
    def peak(self) -> int:
        return max(workers for _, workers in self.changes)

    @staticmethod
    def from_steps(steps: Iterable[tuple[int, int]]) -> History:
        """Builds a history from the workers of each step, as (step, workers) in order."""
        changes: list[tuple[int, int]] = []
        for step, workers in steps:
            if not changes or changes[-1][1] != workers:
                changes.append((step, workers))
        return History(tuple(changes))


def _change(words: list[str], where: str, before: list[tuple[int, int]]) -> tuple[int, int]:
    try:
        step, workers = map(int, words)
    except ValueError:
        raise UsageError(f"{where}: write two whole numbers, the step and the number of workers from it on") from None
    whole(f"{where}: step {{}}", step)
    whole(f"{where}: {{}} workers", workers, 1, MAX_WORKERS, why="at least one worker trains")
    if not before and step != 0:
        raise UsageError(f"{where}: the first line must be for step 0")
    if before and step <= before[-1][0]:
        raise UsageError(f"{where}: steps must increase, and the line before is for step {before[-1][0]}")
    return step, workers
