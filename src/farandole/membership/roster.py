"""What a pool acts on: how many workers the run wants of it, and what has become of those that it has started."""

from __future__ import annotations

from collections.abc import Iterable

from farandole.membership import names, requests
from farandole.membership.books import BARRED, EVICTED, UNFED, Books
from farandole.membership.messages import Roster

OUT = (EVICTED, BARRED)


def of(books: Books, pool: str = "") -> Roster:
    """That pool's; without a name, that of the run's own."""
    pool = pool or (books.pools[0] if books.pools else "")
    mark = names.mark(books, pool)

    def own(workers: Iterable[str]) -> tuple[str, ...]:
        return tuple(w for w in workers if not pool or names.owns(books, pool, w))

    ends = books.ending or books.over or any(w.state == "finished" for w in books.workers.values())
    return Roster(
        mark=mark,
        wanted=0 if ends else requests.targets(books).get(mark, 0),
        losses=max(books.losses.count, books.losses.joiners),
        leaving=own(w.id for w in books.workers.values() if w.leaving),
        released=own(w for w, departed in books.departed.items() if departed.code not in OUT),
        evicted=own(w for w, departed in books.departed.items() if departed.code in OUT),
        unfed=own(w for w, departed in books.departed.items() if departed.code == UNFED),
        wrong_hosts=tuple(sorted(books.wrong_hosts)),
        over=books.over.code if books.over else -1,
        reason=books.over.reason if books.over else "",
        present=own(books.workers) if books.over else (),
    )
