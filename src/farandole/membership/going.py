"""How workers go, other than by the run's own plan: evicted, lost, excused.

    evict    alive or not, the run goes on without it, as soon as that is safe
    lost     its process has ended, for certain
    lapsed   its machine goes, and its time was over before it could leave (`deadline`)
    excuse   it was not let in yet, and its script has ended: nobody has to wait for it
    failed   its script has raised
    unfed    its host can't get it the data (`feeding`)
    ends     ... in whichever of these two ways, as it says

Whoever had a part in the view leaves it by an unplanned change.
"""

from __future__ import annotations

from farandole.membership import ending, events, feeding, losses, unplanned
from farandole.membership import messages as m
from farandole.membership.books import Books
from farandole.membership.records import Ending, Worker


def evict(books: Books, worker: str, reason: str) -> None:
    """One eviction may bring others about: the worker may be out already."""
    if worker not in books.workers or books.over:
        return
    if books.savers or not books.has_part(worker):
        books.evict(worker, reason)
        _without(books, worker, reason, participant=False)
        return
    unplanned.expel(books, worker, reason)  # it stays in the books until it is safe to go on without it
    books.turn_out(worker, reason)
    books.workers[worker].connected = False
    unplanned.overdue(books, worker, reason)


def lost(books: Books, gone: Worker, reason: str) -> None:
    participant, member = gone.id in books.participants(), books.let_in(gone.id)
    del books.workers[gone.id]
    books.record(events.Lost(worker=gone.id, host=gone.host, reason=reason))
    if member and not gone.leaving and gone.state != "finished":
        losses.ended(books, gone.id, reason, entered=gone.entered if gone.pool else -1)
    _without(books, gone.id, reason, participant=participant)


def lapsed(books: Books, worker: Worker) -> None:
    """It makes no progress any more; its process ends by itself."""
    reason = f"its time was over before it could leave ({worker.leaving})"
    books.forget(worker.id, reason)
    lost(books, worker, reason)


def excuse(books: Books, worker: Worker, reason: str, code: int) -> None:
    participant = worker.id in books.participants()
    books.dismiss(worker.id, reason, code=code)
    _without(books, worker.id, reason, participant=participant)


def ends(books: Books, worker: Worker, message: m.Failed | m.Unfed) -> None:
    """Its script has ended before its end."""
    if isinstance(message, m.Failed):
        failed(books, worker, message.traceback)
    else:
        unfed(books, worker, message.reason)


def failed(books: Books, worker: Worker, traceback: str) -> None:
    """In a member it ends the run; in one that was not yet let in, only its own part."""
    books.record(events.Failed(worker=worker.id, host=worker.host, traceback=traceback))
    if books.savers or (books.ending and books.ending.failed):
        if books.deadline is not None and worker.state != "finished":
            ending.give_up(books, f"the script failed on {worker.id}", code=1)
        return  # others fail alike: the first one counts
    if books.stands_alone(worker):
        excuse(books, worker, "its script failed before it was let in", 1)
        return
    unplanned.break_off(books, f"the script failed on {worker.id}")


def unfed(books: Books, worker: Worker, reason: str) -> None:
    """Who has a part in a view goes when that has been stopped, and nobody who may be needed to save goes at all."""
    if worker.unfed:
        return
    worker.unfed = reason or "it does not say why"
    books.record(events.Unfed(worker=worker.id, host=worker.host, reason=worker.unfed))
    if books.deadline is not None and worker.state != "finished":  # others hold the final state
        feeding.let_go(books, worker.id)
        _without(books, worker.id, feeding.LOST, participant=True)
    elif not books.has_part(worker.id) and not books.ending:
        books.unfed += books.view is None and bool(worker.pool)
        why = feeding.hopeless(books, worker.id)
        feeding.let_go(books, worker.id)
        if why:
            books.ending = Ending(code=1, reason=why, failed=True)
            ending.end(books)


def _without(books: Books, worker: str, reason: str, *, participant: bool) -> None:
    books.unsynced.discard(worker)
    if not books.over:
        unplanned.without(books, worker, reason, participant=participant)
