"""Whose worker is whose, where several pools send some.

A pool counts its own processes, w1, w2 and so on, and knows nothing of other pools. So an id that a pool gives is a
name within that pool. The run calls the workers of its first pool as that does, and those of any other POOL-ID. What a
pool says of an id is said of its own worker, and it is told of its own only. Two pools of one name can't be told apart:
the second one is refused.

The first pool is that of `farandole run`, which has told the coordinator its name and process before anybody could
come; nobody else is taken for it, be it away or not. A worker that no pool has started may bring a name, but none of
those that a pool gives, nor of those that the run gives to guests. A worker's own word is all that there is on which
pool has started it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from farandole.membership.books import Books
from farandole.membership.messages import Hello, Roster

_POOLS = re.compile(r"(?:.*-)?w\d+")  # how `pool/base.py` names them


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


def brought(books: Books, hello: Hello) -> str:
    """The run's name for a worker that is not known; "" if it brings none that it may have.

    Who comes back, with an `attempt` beyond the first, says what it was called.
    """
    worker, again = hello.worker, hello.attempt > 1
    if not hello.pool:
        given = _POOLS.fullmatch(worker) or (not again and worker.startswith("guest-"))
        return "" if given and books.settings.pool else worker
    if again:
        return worker if owns(books, hello.pool, worker) else ""
    return of_run(books, hello.pool, worker)


def fresh(books: Books, hello: Hello) -> str:
    """An id that nobody has, or has had."""
    given = worker = brought(books, hello)
    used = not worker or (hello.attempt <= 1 and books.has_part(worker))  # a name that the views still hold
    while used or worker in books.workers or worker in books.departed:
        books.guests, used = books.guests + 1, False
        worker = f"{given or 'guest'}-{books.guests}"
    return worker


def owns(books: Books, pool: str, worker: str) -> bool:
    """Whether `worker`, in the run's names, is of `pool`, or would be."""
    known = books.workers.get(worker) or books.departed.get(worker)
    if known is not None or not pool:
        return known is not None and known.pool == pool != ""
    if prefix := _prefix(books, pool):
        return worker.startswith(prefix)
    others = [_prefix(books, each) for each in books.pools[1:]]
    return not worker.startswith(("guest-", *others))


def is_runs(books: Books, pool: str) -> bool:
    """Whether that is the pool of `farandole run`."""
    return bool(pool) and not _prefix(books, pool)


def refusal(books: Books, hello: Hello, connected: Iterable[Hello]) -> str:
    """Why that pool is not to be heard, in words; "" if it is. `connected` are those that are there."""
    own = books.settings.pool
    if not hello.pool:
        return "a pool has to have a name: give this one one of its own"
    others = [own, *connected] if own else connected
    if any(o.pool == hello.pool and (o.host, o.pid) != (hello.host, hello.pid) for o in others):
        return f"another pool of this run is called {hello.pool!r}: give this one a name of its own"
    return ""


def _prefix(books: Books, pool: str) -> str:
    if pool and pool not in books.pools:
        books.pools.append(pool)
    return f"{pool}-" if pool and pool != books.pools[0] else ""
