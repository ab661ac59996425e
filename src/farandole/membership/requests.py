"""What people and notices ask of a run: more workers, fewer, these ones not.

What the run wants of each pool is `targets`: `scale` and `release` change it, a crash leaves it alone. Where a run has
several pools, what one of them can have again makes the next ones let go (`shrink`); see `preference`.
"""

from __future__ import annotations

import math
from collections import Counter

import msgspec

from farandole.errors import UsageError
from farandole.membership import events, names, preference
from farandole.membership import messages as m
from farandole.membership.books import Books
from farandole.membership.records import Worker


def targets(books: Books) -> dict[str, int]:
    """Workers wanted of each pool, by its mark."""
    if not books.settings.pools:
        return dict(books.wants)
    sizes = [(names.mark(books, pool.name), pool.size) for pool in books.settings.pools]
    return preference.targets(books.shared, sizes, books.wants, books.can, _there(books), books.gather)


def _there(books: Books) -> Counter[str]:
    """Workers that do not leave, of each pool."""
    return Counter(names.mark(books, w.pool) for w in books.workers.values() if w.pool and not w.leaving)


def scale(books: Books, wanted: int, pool: str = "") -> None:
    """How many workers the run wants of a pool; without a name, of its own, or of those of which no number is fixed.

    Raises:
        UsageError: the run is ending, there is no such pool, or in all below the minimum or above the maximum.
    """
    _see_that_it_goes_on(books, f"scale {wanted}")
    if pool and pool not in books.pools:
        raise UsageError(f"scale --pool {pool}: no such pool; there are: {', '.join(books.pools) or 'none'}")
    s, of_all = books.settings, bool(books.settings.pools) and not pool
    ours = {names.mark(books, each.name) for each in s.pools} if of_all else {names.mark(books, pool)}
    its = targets(books)
    before = sum(its.get(mark, 0) for mark in ours)
    total = sum(its.values()) - before + wanted
    with_others = "" if total == wanted else f"with other pools' {total - wanted} that is "
    if total < s.minimum:
        raise UsageError(
            f"scale {wanted}: {with_others}below the run's --min {s.minimum}; use `farandole stop` to end the run"
        )
    if s.maximum is not None and total > s.maximum:
        raise UsageError(f"scale {wanted}: {with_others}above the run's --max {s.maximum}")
    books.losses = msgspec.structs.replace(books.losses, joiners=0)
    books.startup_failures = {m: n for m, n in books.startup_failures.items() if m not in ours}
    if of_all:
        books.wants = {mark: n for mark, n in books.wants.items() if mark not in ours}
        books.shared = wanted
    else:
        fix(books, names.mark(books, pool), wanted, before)
    books.record(events.Scale(wanted=wanted, before=before))
    after = targets(books)
    for mark in ours:
        _let_go(books, mark, after.get(mark, 0), f"scaled to {wanted}")


def shrink(books: Books) -> None:
    """Where a pool is to have fewer since another one can have more, its newest workers go."""
    if not books.settings.pools or books.ending or books.over:
        return
    before, books.targets = books.targets, targets(books)
    for mark, wanted in books.targets.items():
        if wanted < before.get(mark, 0):
            _let_go(books, mark, wanted, "a pool that is preferred has its place")


def release(books: Books, name: str) -> list[str]:
    """Let a worker (its id) or a host (its name) go; what is wanted falls by what its pools had of it.

    Never below the minimum: the last to leave hands the state over to its replacement.

    Raises:
        UsageError: the run is ending, or there is no such worker or host.
    """
    _see_that_it_goes_on(books, f"release {name}")
    found = [w for w in books.workers.values() if name in (w.id, w.host) and not w.leaving]
    if not found:
        known = ", ".join(f"{w.id} on {w.host}" for w in books.workers.values()) or "none"
        raise UsageError(f"release {name}: no such worker or host; there are: {known}")
    for worker in found:
        mark, its = names.mark(books, worker.pool), targets(books)
        if worker.pool and its.get(mark) and sum(its.values()) > books.settings.minimum:
            has = min(its[mark], _there(books)[mark]) if books.settings.pools else its[mark]
            fix(books, mark, has - 1, has)  # but who leaves last hands over to a replacement
        notice(books, worker, "released")
    return [w.id for w in found]


def _see_that_it_goes_on(books: Books, request: str) -> None:
    if ending := books.over or books.ending:
        raise UsageError(f"{request}: the run is ending ({ending.reason}); nobody joins or is replaced any more")


def fix(books: Books, mark: str, wanted: int, before: int) -> None:
    """So many are wanted of that pool from now on, whatever others have; of what they share it had `before`."""
    if mark not in books.wants and books.shared is not None:
        books.shared = max(books.shared - before, 0)
    books.wants[mark] = wanted


def _let_go(books: Books, mark: str, wanted: int, reason: str) -> None:
    ours = [w for w in books.workers.values() if w.pool and names.mark(books, w.pool) == mark and not w.leaving]
    for worker in ours[wanted:]:  # the newest go first
        notice(books, worker, reason)


def notice(books: Books, worker: Worker, reason: str) -> None:
    """The worker is to leave gracefully: the next view is without it. It hears of that when it has left."""
    if not worker.leaving:
        worker.leaving = reason
        books.record(events.Notice(worker=worker.id, reason=reason))


def deadline(books: Books, worker: Worker, within_s: float) -> None:
    """Its machine goes then: it ends itself before, should it be there still. See `deadline`."""
    worker.goes_at = min(worker.goes_at, books.clock + within_s)
    remind(books, worker)


def remind(books: Books, worker: Worker) -> None:
    """It may not have heard of its deadline."""
    if worker.goes_at < math.inf:
        books.send(worker.id, m.Deadline(within_s=max(worker.goes_at - books.clock, 0.0)))
