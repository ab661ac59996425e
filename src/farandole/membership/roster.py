"""What pools act on: how many workers the run wants, and what has become of theirs."""

from __future__ import annotations

from farandole.membership.books import BARRED, EVICTED, Books
from farandole.membership.messages import Roster

OUT = (EVICTED, BARRED)


def of(books: Books) -> Roster:
    """In the run's names; see `names` for the part of one pool."""
    ends = books.ending or books.over or any(w.state == "finished" for w in books.workers.values())
    return Roster(
        wanted=0 if ends else books.wanted,
        losses=max(books.losses.count, books.losses.joiners),
        leaving=tuple(w.id for w in books.workers.values() if w.leaving),
        released=tuple(w for w, departed in books.departed.items() if departed.code not in OUT),
        evicted=tuple(w for w, departed in books.departed.items() if departed.code in OUT),
        over=books.over.code if books.over else -1,
        reason=books.over.reason if books.over else "",
        present=tuple(books.workers) if books.over else (),
    )
