"""Whose worker is whose, where several pools send some.

A pool counts its own processes, w1, w2 and so on, and knows nothing of other pools. So an id that a pool gives is a
name within that pool. The run calls the workers of its first pool as that does, and those of any other POOL-ID. What a
pool says of an id is said of its own worker, and it is told of its own only. Two pools of one name can't be told apart:
the second one is refused (see `control/server.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from farandole.membership.books import Books
from farandole.membership.messages import Roster


def of_run(books: Books, pool: str, worker: str) -> str:
    """The run's name for what `pool` calls `worker`; "" is nobody's pool, and nobody's worker."""
    return _prefix(books, pool) + worker if worker else ""


def roster_of(books: Books, roster: Roster, pool: str) -> Roster:
    """The part of the run's roster that concerns `pool`, in its own names."""
    prefix = _prefix(books, pool)
    if not prefix:
        return roster

    def own(workers: Iterable[str]) -> tuple[str, ...]:
        return tuple(worker.removeprefix(prefix) for worker in workers if worker.startswith(prefix))

    return msgspec.structs.replace(
        roster,
        leaving=own(roster.leaving),
        released=own(roster.released),
        evicted=own(roster.evicted),
        present=own(roster.present),
    )


def _prefix(books: Books, pool: str) -> str:
    if pool and pool not in books.pools:
        books.pools.append(pool)
    return f"{pool}-" if pool and pool != books.pools[0] else ""
