"""What people and notices ask of a run: more workers, fewer, these ones not.

`wanted` is what the run wants from its pool: `scale` sets it, `release` lowers it, a crash leaves it alone.
"""

from __future__ import annotations

import msgspec

from farandole.errors import UsageError
from farandole.membership import events
from farandole.membership.books import Books
from farandole.membership.records import Worker


def scale(books: Books, wanted: int) -> None:
    """How many workers the run wants from its pool.

    Raises:
        UsageError: below the minimum or above the maximum.
    """
    s = books.settings
    if wanted < s.minimum:
        raise UsageError(f"scale {wanted}: below the run's --min {s.minimum}; use `farandole stop` to end the run")
    if s.maximum is not None and wanted > s.maximum:
        raise UsageError(f"scale {wanted}: above the run's --max {s.maximum}")
    books.startup_failures, books.losses = 0, msgspec.structs.replace(books.losses, joiners=0)
    before, books.wanted = books.wanted, wanted
    books.record(events.Scale(wanted=wanted, before=before))
    ours = [w for w in books.workers.values() if w.pool and not w.leaving]
    for worker in ours[wanted:]:  # the newest go first
        notice(books, worker, f"scaled to {wanted}")


def release(books: Books, name: str) -> list[str]:
    """Let a worker (its id) or a host (its name) go; `wanted` falls by what the pool had of it.

    Never below the minimum: the last to leave hands the state over to its replacement.

    Raises:
        UsageError: no such worker or host.
    """
    found = [w for w in books.workers.values() if name in (w.id, w.host) and not w.leaving]
    if not found:
        known = ", ".join(f"{w.id} on {w.host}" for w in books.workers.values()) or "none"
        raise UsageError(f"release {name}: no such worker or host; there are: {known}")
    for worker in found:
        books.wanted -= 1 if worker.pool else 0
        notice(books, worker, "released")
    books.wanted = max(books.wanted, books.settings.minimum)  # who leaves last hands over to a replacement
    return [w.id for w in found]


def notice(books: Books, worker: Worker, reason: str) -> None:
    """The worker is to leave gracefully: the next view is without it. It hears of that when it has left."""
    if not worker.leaving:
        worker.leaving = reason
        books.record(events.Notice(worker=worker.id, reason=reason))
