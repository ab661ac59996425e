"""What this run's coordinators have issued, and that a report can only be of it.

A report steers the recovery: it names the view to go on from, the round, and how its shards are dealt. So what it names
must be known here. Who knows what when:

1. A worker is in a view that a coordinator has told it, whole, by `Propose` or `Resume`, and alters nothing of it. Both
   go out after the books that have the view in `issued` are kept (`reconnection`, 6 and 7), on a full disk in their
   copy in memory. So whatever an honest worker names is in `issued` of this coordinator and of each that follows.
2. Which ones may be named? All that are outstanding, and older ones too: a worker whose connection broke before it
   heard Resume stands where it stood, be it for several decisions. So a view is kept for as long as a report that a
   decision was made of has named it, and everything older is dropped only once all have switched to one view. Who holds
   no state may be in any: it was sent out of a view once that others have left since, and has not heard it. Nothing
   follows from it.
3. How a round's shards are dealt is a function of the view and the round: by the view; or as Resume has said, in the
   round that it has said it for. A view that came by Resume is entered in that round and no earlier one.
4. In one view its round never goes back, so its own newest heartbeat is a bound; heartbeats and reports of a worker
   come in order, and while it is stopped nothing moves.

An honest worker never breaks one of these, however late its messages are, and each can be told from one worker's own
words. So whoever breaks one is put out, without anybody else being asked; its report is not looked at any further.
Nobody is believed or blamed here for what others say: that is for `plausible`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from farandole.membership.messages import Stopped
from farandole.membership.view import Lineage, View

if TYPE_CHECKING:
    from farandole.membership.books import Books


class Issued(msgspec.Struct, frozen=True, kw_only=True):
    """A view; and of one that came by Resume the round in which it is entered, with how that one's shards are dealt."""

    view: View
    round: int = 0
    lineage: Lineage | None = None

    def deals(self, round_: int) -> tuple[Lineage, ...]:
        """How the shards of `round_` may be dealt under this view; its first round's go to those who hold the state."""
        if self.lineage is not None and round_ == self.round:
            return (self.lineage,)
        return tuple(self.view.lineage(workers) for workers in (self.view.members, self.view.synced))


def keep(books: Books, named: Iterable[View | None]) -> None:
    """Of what was issued, `named` is where workers still are, or may be."""
    views = list(named)
    books.issued = [issued for issued in books.issued if issued.view in views]


def views(books: Books) -> list[View]:
    """All that somebody may be in, or be about to enter."""
    return [issued.view for issued in books.issued]


def denied(books: Books, worker: str, report: Stopped) -> str:
    """Why no honest worker can have said this, in words; "" if one can."""
    view = report.view
    if not report.synced:
        return ""
    if view is None:
        return "it says that it holds the state, and is in no view"
    known = next((issued for issued in books.issued if issued.view == view), None)
    if known is None:
        return f"it says that it is in view {view.number} of {len(view.members)}, which was never issued"
    beat = books.workers[worker].beat
    earliest = max(known.round, beat.round if beat.view == view.number else 0)
    if report.round < earliest:
        return f"it says that it is in round {report.round} of view {view.number}, and it was in round {earliest}"
    if report.lineage not in known.deals(report.round):
        return f"it says that the shards of round {report.round} in view {view.number} are dealt as nobody dealt them"
    return ""
