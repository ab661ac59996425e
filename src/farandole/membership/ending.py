"""The end of a run: its script has run through, it was stopped, or it failed.

After a stop (the empty view is in force) or a failure (the view was stopped and not resumed) nobody trains any more,
and the best placed worker writes the last checkpoint; if it dies or can't, the next one does. A script that fails on
everyone between two steps leaves nobody with the state of a whole step: what it has left is saved then, and called so.
"""

from __future__ import annotations

from farandole.membership import messages as m
from farandole.membership import saving
from farandole.membership.books import Books
from farandole.membership.records import Ending


def save(books: Books) -> None:
    """Ask the best of `savers`, unless one has been asked; without any, the run is over."""
    assert books.ending is not None
    if not books.savers and books.between:
        books.savers = [worker for worker in books.between if worker in books.workers]
        books.between, books.ending.saver, books.ending.between = [], "", True
    if not books.savers:
        books.record("not saved", reason="no worker is left that holds the state of a whole step")
        end(books)
    elif books.ending.saver not in books.savers:
        books.ending.saver = saving.best(books, books.savers)
        ask(books)


def ask(books: Books) -> None:
    """The one that is to save; it may have come back without having heard it."""
    assert books.ending is not None
    books.send(books.ending.saver, m.End(save=True, reason=books.ending.reason, between=books.ending.between))


def saved(books: Books, worker: str, message: m.Saved) -> None:
    if not books.ending or books.ending.saver != worker or worker not in books.savers:
        return
    if message.error:
        books.savers.remove(worker)
        if message.between:
            books.between.append(worker)
        else:
            books.record("not saved", worker=worker, reason=message.error)
        save(books)
    else:
        whole, host = not books.ending.between, books.workers[worker].host
        if books.workers[worker].reaches:
            books.record("saved", worker=worker, path=message.path, whole=whole)
        else:
            books.record("saved elsewhere", worker=worker, host=host, path=message.path, whole=whole)
            books.ending.code = books.ending.code or 1
            books.ending.reason += f"; its last checkpoint is NOT in the run's store, but on {host}: {message.path}"
        end(books)


def finish(books: Books) -> None:
    """Every member's script has run to its end."""
    prints = {w.fingerprint for w in books.workers.values() if w.state == "finished"}
    books.record("finished", fingerprint=" != ".join(sorted(prints)), equal=len(prints) == 1)
    books.ending = books.ending or Ending(code=0, reason="the script has run to its end", failed=False)
    end(books)


def end(books: Books) -> None:
    assert books.ending is not None
    books.over = books.ending
    books.savers = []
    books.stopping = None
    books.record("over", code=books.over.code, reason=books.over.reason)
    for worker in books.workers:
        books.send(worker, m.Goodbye(reason=books.over.reason, code=books.over.code))
