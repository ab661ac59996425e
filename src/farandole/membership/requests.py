"""What people and notices ask of a run: more workers, fewer, these ones not.

`wants` is what the run wants of each pool: `scale` sets it, `release` lowers it, a crash leaves it alone.
"""

from __future__ import annotations

import msgspec

from farandole.errors import UsageError
from farandole.membership import events, names
from farandole.membership.books import Books
from farandole.membership.records import Worker


def scale(books: Books, wanted: int, pool: str = "") -> None:
    """How many workers the run wants of a pool; without a name, of its own.

    Raises:
        UsageError: no such pool, or in all below the minimum or above the maximum.
    """
    if pool and pool not in books.pools:
        raise UsageError(f"scale --pool {pool}: no such pool; there are: {', '.join(books.pools) or 'none'}")
    s, mark = books.settings, names.mark(books, pool)
    before = books.wants.get(mark, 0)
    total = books.wanted - before + wanted
    with_others = "" if total == wanted else f"with other pools' {total - wanted} that is "
    if total < s.minimum:
        raise UsageError(
            f"scale {wanted}: {with_others}below the run's --min {s.minimum}; use `farandole stop` to end the run"
        )
    if s.maximum is not None and total > s.maximum:
        raise UsageError(f"scale {wanted}: {with_others}above the run's --max {s.maximum}")
    books.startup_failures, books.losses = 0, msgspec.structs.replace(books.losses, joiners=0)
    books.wants[mark] = wanted
    books.record(events.Scale(wanted=wanted, before=before))
    ours = [w for w in books.workers.values() if w.pool and names.mark(books, w.pool) == mark and not w.leaving]
    for worker in ours[wanted:]:  # the newest go first
        notice(books, worker, f"scaled to {wanted}")


def release(books: Books, name: str) -> list[str]:
    """Let a worker (its id) or a host (its name) go; what is wanted falls by what its pools had of it.

    Never below the minimum: the last to leave hands the state over to its replacement.

    Raises:
        UsageError: no such worker or host.
    """
    found = [w for w in books.workers.values() if name in (w.id, w.host) and not w.leaving]
    if not found:
        known = ", ".join(f"{w.id} on {w.host}" for w in books.workers.values()) or "none"
        raise UsageError(f"release {name}: no such worker or host; there are: {known}")
    for worker in found:
        mark = names.mark(books, worker.pool)
        if worker.pool and books.wants.get(mark) and books.wanted > books.settings.minimum:
            books.wants[mark] -= 1  # but who leaves last hands over to a replacement
        notice(books, worker, "released")
    return [w.id for w in found]


def notice(books: Books, worker: Worker, reason: str) -> None:
    """The worker is to leave gracefully: the next view is without it. It hears of that when it has left."""
    if not worker.leaving:
        worker.leaving = reason
        books.record(events.Notice(worker=worker.id, reason=reason))
