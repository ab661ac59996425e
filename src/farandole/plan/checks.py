"""Shards that are computed a second time, by another worker, to see that both find the same: which, and by whom.

Each shard has one right answer, whoever computes it. So the digests of what two workers have found of the same shard
(loss, gradients, buffers) are equal, or one of them computes wrong, or is another machine, or runs another script.

    proof   in the first step that counts for a joiner it computes the first shard too, which another one holds
    audit   in any step each shard is chosen with a probability, by the run's seed; a worker's are checked by one other
    again   in a round that is done again the coordinator says who computes what too, since two have not found the same

All of it follows from what every member knows, so nothing is sent but two numbers in each control word: of what a
worker has found of its own shards that are checked, and of what it has found of another's. So a worker checks one other
in a round, and all who check the same worker check the same shards: what does not fit in is left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

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
