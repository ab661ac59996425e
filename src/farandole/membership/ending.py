"""The end of a run: its script has run through, it was stopped, or it failed.

After a stop (the empty view is in force) or a failure (the view was stopped and not resumed) nobody trains any more,
and the best placed worker writes the last checkpoint; if it dies or can't, the next one does. A script that fails on
everyone between two steps leaves nobody with the state of a whole step: what it has left is saved then, and called so.
Replicas that differ are compared first (`replicas`), and what is saved of them is called so too.
"""

from __future__ import annotations

from farandole.membership import messages as m
from farandole.membership import replicas
from farandole.membership.books import Books
from farandole.membership.difference import outliers
from farandole.membership.records import Ending


def save(books: Books) -> None:
    """Ask the first of `savers`, unless it has been asked; without any, the run is over."""
    assert books.ending is not None
    if books.ending.apart and not replicas.compared(books):
        return
    if not books.savers and books.between:
        books.savers = [worker for worker in books.between if worker in books.workers]
        books.between, books.ending.saver, books.ending.between = [], "", True
    if not books.savers:
        books.record("not saved", reason="no worker is left that holds the state of a whole step")
        end(books)
    elif books.ending.saver != books.savers[0]:
        books.ending.saver = books.savers[0]
        ask(books)


def returned(books: Books, worker: str) -> None:
    """One of `savers` is back: it may not have heard what it was asked."""
    assert books.ending is not None
    if books.ending.apart and not books.ending.compared:
        replicas.ask(books, worker)
    elif books.ending.saver == worker:
        ask(books)


def ask(books: Books) -> None:
    """The one that is to save."""
    assert books.ending is not None
    books.send(books.ending.saver, m.End(save=True, reason=books.ending.reason, between=books.ending.between))


def answered(books: Books, worker: str, message: m.Saved | m.Digests) -> None:
    """One of `savers` has done what it was asked."""
    if isinstance(message, m.Saved):
        saved(books, worker, message)
    elif worker in books.savers and worker in books.asked:
        books.digests[worker] = message
        save(books)


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
        books.record("saved", worker=worker, path=message.path, whole=not books.ending.between)
        end(books)


def finish(books: Books) -> None:
    """Every member's script has run to its end."""
    prints = {w.id: w.fingerprint for w in books.workers.values() if w.state == "finished"}
    equal = len(set(prints.values())) == 1
    books.record("finished", fingerprint=" != ".join(sorted(set(prints.values()))), equal=equal)
    if not equal:
        replicas.differ(books, outliers(replicas.by_standing(books, prints)), "after the last step")
        books.savers, books.stopping, books.proposed = list(prints), None, None
        save(books)
        return
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
