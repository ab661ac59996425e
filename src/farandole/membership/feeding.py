"""Workers whose host can't get them the data: a full disk, a store out of reach, a damaged copy. Who goes, and when.

Such a fault is the host's, and not the run's: on another host, or a while later, the same data is there. So a worker
that says `Unfed` goes as if it had died, but for the last one that holds the state. Who knows what when:

1. Who says so computes nothing any more. Its process stays until it is let go: its memory stands still, it answers
   stops, and it can save. It says so before its answer to any later stop, on one ordered connection, and again on each
   new one (`session`). So of those who have answered a stop it is known who can't be fed, also to a coordinator that
   has come back in between.
2. Its view is stopped, and it goes with the decision, not before: only the answers tell who holds the state. Its own
   counts for the fence (`reconnection`, 3), for it gives no word any more. What the others need of it is what they need
   of the dead, nothing (`recovery`); so they redo its shards, and the bits are the same.
3. It stays where no *heir* is left: another member of the newest view that holds the state, has answered, and has not
   said the same. Who is out of reach then, and given up, is none; nor is a leaver, which may be rounds behind. The run
   ends there, as by a script that fails on all, and the best of those who hold the state saves it. So no state is ever
   given up for a disk.
4. Where those who can't be fed are handing the state to joiners, as in a first view, the heirs are about to be there:
   the view is not stopped before one of them is, or somebody is lost. Taking the state over needs no shard of anybody.
   But who has not entered the joiners' view when it says so never does: then there is nothing to wait for.
5. Where the run ends anyway it is like any other: it may be the one that saves. Once others have finished, what they
   hold is the run's final state, and it is not waited for.
6. Who has no part yet costs nobody but itself. Before there is a view nothing is lost, but perhaps nobody can be fed,
   wherever: the run ends when as many in a row have said so as are wanted, and nobody else is there.
7. None of this counts in a row of losses. Those bound what would go on for ever, and this has a bound of its own: the
   pool leaves such a host alone, twice as long each time up to 10 min (`pool/placing`). So each bad host costs the
   others a recovery in that time, at most; and it is used again once it is well.

    due      whether the view is to be stopped for somebody
    leave    the answers are here: whoever can't be fed goes, or the run ends
    let_go   one who is not needed for anything goes
    hopeless nobody is there who could begin the run
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from farandole.membership import events
from farandole.membership.books import UNFED, Books
from farandole.membership.messages import Stopped
from farandole.membership.records import Ending

LOST = "its host can't get it the data"
REMEDY = (
    "this host can't get the run's data, and the others go on without this worker; see to what the error above names "
    "(room for the cache, the way to the store) before another one joins from here"
)


def due(books: Books) -> str:
    """Why the view is to be stopped now, "" if it is not."""
    if books.stopping or books.savers:
        return ""
    unfed = [worker for worker in books.participants() if books.workers[worker].unfed]
    if not unfed:
        return ""
    fed = [worker for worker in books.members() if not books.workers[worker].unfed]
    handed_on = books.unsynced.intersection(fed)
    if handed_on and handed_on.issuperset(fed) and books.unswitched.isdisjoint(unfed):  # see 4
        return ""
    return f"{unfed[0]}: {LOST}"


def leave(books: Books, reports: Mapping[str, Stopped], failed: Collection[str]) -> list[str]:
    """Of those who have answered a stop, whoever can't be fed goes: they are out of the books, and are returned.

    Nobody is where the run ends anyway, or does so now for want of an heir. `failed`: joiners that are refused.
    """
    unfed = [worker for worker in reports if books.workers[worker].unfed]
    views = {worker: report.view for worker, report in reports.items() if report.synced and report.view}
    emptied = any(not view.members for view in views.values())
    if not unfed or (books.ending and (books.ending.failed or emptied)):
        return []
    newest = max(views.values(), key=lambda view: view.number, default=None)
    heirs = {*views}.intersection(newest.members if newest else ()).difference(unfed, failed)
    if views and not heirs:
        _end(books, [worker for worker in unfed if worker in views])
        return []
    for worker in unfed:
        let_go(books, worker)
    return unfed


def _end(books: Books, unfed: list[str]) -> None:
    """A stop that was asked for keeps its exit code."""
    reason = f"no worker is left that can get the run's data: {_said(books, unfed)}"
    if books.ending is None:
        books.ending = Ending(code=1, reason=reason, failed=True)
    else:
        books.ending.reason, books.ending.failed = f"{books.ending.reason}; {reason}", True


def let_go(books: Books, worker: str) -> None:
    """It is told to exit, with a code of its own."""
    started = books.let_in(worker)
    gone = books.workers.pop(worker)
    books.unsynced.discard(worker)
    event = events.Lost if started else events.Left
    books.record(event(worker=worker, host=gone.host, reason=LOST))
    books.depart(gone, REMEDY, UNFED, started=started)


def hopeless(books: Books, newest: str) -> str:
    """Why the run can't begin, "" if it may. `newest` has just said that it can't be fed, and is in the books."""
    others = any(not worker.unfed for worker in books.workers.values())
    enough = min(max(books.wanted, 1), books.settings.startup_failures)
    if books.view or books.proposed or others or books.unfed < enough:
        return ""
    before = f" ({books.unfed} workers in a row)" if books.unfed > 1 else ""
    return f"no worker can get the run's data{before}: {_said(books, [newest])}"


def _said(books: Books, workers: list[str]) -> str:
    return "; ".join(f"{w} on {books.workers[w].host}: {books.workers[w].unfed}" for w in workers)
