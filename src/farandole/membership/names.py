"""Whose worker is whose, where several pools send some.

One rule: a worker's id begins with its pool's mark, and w1, w2 and so on follow. The mark of the run's own pool is
empty, that of any other one is NAME-. A pool learns its mark from the roster before it starts anybody, so an id says
whose it is wherever it is met, in messages, logs and commands, and nothing is translated. A pool is told of its own
workers only, and what it says of others is not heard. Two pools of one name can't be told apart: the second one is
refused.

The run's own pool is that of `farandole run`, which has told the coordinator its name and process before anybody could
come; nobody else is taken for it, be it away or not. A worker that no pool has started may bring a name, but none of
those that a pool gives, nor of those that the run gives to guests. A worker's own word is all that there is on which
pool has started it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from farandole.membership.books import Books
from farandole.membership.messages import Hello

_POOLS = re.compile(r"(?:.*-)?w(\d+)")  # how `worker_id` names them


def worker_id(prefix: str, number: int) -> str:
    """What a pool calls the worker that it starts as its `number`th, from 1."""
    return f"{prefix}w{number}"


def number_of(worker: str) -> int:
    """The other way round; 0 for a name that no pool gives."""
    match = _POOLS.fullmatch(worker)
    return int(match[1]) if match else 0


def mark(books: Books, pool: str) -> str:
    """What the ids of that pool's workers begin with."""
    if pool and pool not in books.pools:
        books.pools.append(pool)
    return f"{pool}-" if pool and pool != books.pools[0] else ""


def brought(books: Books, hello: Hello) -> str:
    """The id that a worker which is not known brings; "" if it brings none that it may have.

    Who comes back, with an `attempt` beyond the first, says what it was called.
    """
    worker, again = hello.worker, hello.attempt > 1
    if not hello.pool:
        given = _POOLS.fullmatch(worker) or (not again and worker.startswith("guest-"))
        return "" if given and books.settings.pool else worker
    its = owns(books, hello.pool, worker) if again else _begins(books, hello.pool, worker)
    return worker if its else ""


def fresh(books: Books, hello: Hello) -> str:
    """An id that nobody has, or has had."""
    given = worker = brought(books, hello)
    used = not worker or (hello.attempt <= 1 and books.has_part(worker))  # a name that the views still hold
    while used or worker in books.workers or worker in books.departed:
        books.guests, used = books.guests + 1, False
        worker = f"{given or 'guest'}-{books.guests}"
    return worker


def owns(books: Books, pool: str, worker: str) -> bool:
    """Whether `worker` is of `pool`, or would be."""
    known = books.workers.get(worker) or books.departed.get(worker)
    if known is not None or not pool:
        return known is not None and known.pool == pool != ""
    return _begins(books, pool, worker)


def refusal(books: Books, hello: Hello, connected: Iterable[Hello]) -> str:
    """Why that pool is not to be heard, in words; "" if it is. `connected` are those that are there."""
    own = books.settings.pool
    if not hello.pool:
        return "a pool has to have a name: give this one one of its own"
    others = [own, *connected] if own else connected
    if any(o.pool == hello.pool and (o.host, o.pid) != (hello.host, hello.pid) for o in others):
        return f"another pool of this run is called {hello.pool!r}: give this one a name of its own"
    return ""


def _begins(books: Books, pool: str, worker: str) -> bool:
    """Whether an id begins with the pool's mark, and with no longer one of another's."""
    own = mark(books, pool)
    others = (mark(books, other) for other in books.pools)
    taken = ("guest-", *(other for other in others if len(other) > len(own)))
    return worker != "" and worker.startswith(own) and not worker.startswith(taken)
