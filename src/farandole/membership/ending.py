"""The end of a run: its script has run through, it was stopped, or it failed.

After a stop (the empty view is in force), a failure (the view was stopped and not resumed) or the script's own end
nobody trains any more, and the best placed worker writes the last checkpoint; if it dies or can't, the next one does.
A script that fails on everyone between two steps leaves nobody with the state of a whole step: what it has left is
saved then, and called so. Replicas that differ are compared first (`replicas`), and what is saved of them is called so
too. A run that was to be saved and is not does not end with exit code 0.

The script's own end. Who knows what when: a worker says Finished after its last round has ended, so by R1 every
survivor holds that round, and nobody needs anything more of those who have finished, nor they of the others. What a
finished worker holds is the run's final state, with what the script did after its loop. So

    finish   all members who live have finished, and hold the same: the first of them saves, then the run is over
    hurry    a stop is asked for, and some have finished: no view can be agreed on any more. One of those saves at once;
             the others get `end_s` to end as well
    expire   they have not: they are named, and not waited for

A coordinator that was killed in between finds in its books that all had finished, or that the state is saved; the
workers say Finished again, and it goes on from there.
"""

from __future__ import annotations

from farandole.errors import ProtocolError
from farandole.membership import accounting, events, metric_lines, replicas, saving, tracing
from farandole.membership import messages as m
from farandole.membership.books import Books
from farandole.membership.difference import outliers
from farandole.membership.records import Ending, Worker


def settle(books: Books, now: float) -> bool:
    """Do what is due of the end; False if nothing is."""
    stops = books.ending is not None and not books.stopping
    if books.ending is not None:
        tracing.end(books)
    if books.everyone_finished() and not (books.savers and books.deadline is None):
        finish(books)
    elif books.deadline is not None:
        if now >= books.deadline:
            expire(books)
    elif stops and not books.view and not books.proposed:
        end(books)  # nobody holds a state
    elif stops and not books.savers and not books.proposed and _some_finished(books):
        hurry(books, now)
    else:
        return False
    return True


def comes_between(books: Books) -> bool:
    """Whether the end can't wait for the step in hand: that of a failure, or of a stop in which some have finished, who
    will not switch to the empty view any more.
    """
    if books.ending is None or books.stopping or books.savers or books.deadline is not None:
        return False
    return books.ending.failed or (books.proposed is not None and _some_finished(books))


def _some_finished(books: Books) -> bool:
    return any(books.workers[w].state == "finished" for w in books.members())


def save(books: Books) -> None:
    """Ask the best of `savers`, unless one has been asked; without any, the run is over."""
    assert books.ending is not None
    if books.ending.apart and not replicas.compared(books):
        return
    if not books.savers and books.between:
        books.savers = [worker for worker in books.between if worker in books.workers]
        books.between, books.ending.saver, books.ending.between = [], "", True
    if not books.savers:
        if books.deadline is not None and books.view is not None:
            return  # somebody who has not finished yet may have more luck
        _lose(books)
    elif books.ending.saver not in books.savers:
        books.ending.saver = saving.best(books, books.savers)
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
    if not books.ending.stored:
        books.send(books.ending.saver, m.End(save=True, reason=books.ending.reason, between=books.ending.between))


def answered(books: Books, worker: str, message: m.Saved | m.Digests) -> None:
    """One of `savers` has done what it was asked."""
    if isinstance(message, m.Saved):
        saved(books, worker, message)
    elif worker in books.savers and worker in books.asked:
        books.digests[worker] = message
        save(books)


def saved(books: Books, worker: str, message: m.Saved) -> None:
    if not books.ending or books.ending.stored or books.ending.saver != worker or worker not in books.savers:
        return
    if message.error:
        books.savers.remove(worker)
        books.ending.saver = ""  # should it be one of them again, when others have finished, it is asked again
        if message.between:
            books.between.append(worker)
        else:
            books.record(events.NotSaved(worker=worker, reason=message.error))
        save(books)
    else:
        path, whole, finite = message.path, not books.ending.between, message.finite
        took = {"seconds": message.seconds} if message.seconds else {}
        host = books.workers[worker].host
        if books.workers[worker].reaches:
            books.record(events.Saved(worker=worker, path=path, whole=whole, finite=finite, **took))
        else:
            books.record(events.SavedElsewhere(worker=worker, host=host, path=path, whole=whole, finite=finite, **took))
            books.ending.code = books.ending.code or 1
            books.ending.reason += f"; its last checkpoint is NOT in the run's store, but on {host}: {message.path}"
        books.ending.stored = True
        if books.deadline is None:
            end(books)


def finish(books: Books) -> None:
    """Every member's script has run to its end."""
    prints = {w.id: w.fingerprint for w in books.workers.values() if w.state == "finished"}
    after = books.workers[next(iter(books.members()))].after.written()
    equal = len(set(prints.values())) == 1
    if not (books.ending and books.ending.finished):  # by the coordinator before this one
        books.record(events.Finished(fingerprint=" != ".join(sorted(set(prints.values()))), equal=equal, **after))
    if not equal and books.settings.bits != "any":
        replicas.differ(books, outliers(replicas.by_standing(books, prints)), "after the last step")
    books.ending = books.ending or Ending(code=0, reason="the script has run to its end", failed=False)
    books.ending.finished, books.deadline = True, None
    books.stopping = books.proposed = books.previous = None
    if books.ending.stored:
        end(books)
    else:
        books.savers = list(dict.fromkeys((*books.savers, *books.members())))
        save(books)


def hurry(books: Books, now: float) -> None:
    """The run is to stop, and some have finished."""
    assert books.ending is not None
    books.deadline = now + books.settings.end_s
    books.proposed = books.previous = None
    books.savers = [worker for worker in books.members() if books.workers[worker].state == "finished"]
    save(books)


def expire(books: Books) -> None:
    """Those who have not finished are not waited for any more."""
    hung = [worker for worker in books.members() if books.workers[worker].state != "finished"]
    for worker in hung:
        reason = f"its script has not ended within {books.settings.end_s:g} s of the stop, and others' had"
        books.record(events.Hung(worker=worker, host=books.workers[worker].host, reason=reason))
    give_up(books, f"{', '.join(hung)} hung after the last step")


def give_up(books: Books, why: str, code: int | None = None) -> None:
    """The run ends once the final state is saved, whatever becomes of those who have not finished."""
    assert books.ending is not None
    books.deadline = None
    books.ending.reason = f"{books.ending.reason}; {why}"
    books.ending.code = books.ending.code if code is None else code
    if books.ending.stored:
        end(books)
    elif not books.savers:
        _lose(books)


def _lose(books: Books) -> None:
    assert books.ending is not None
    books.record(events.NotSaved(reason="no worker is left that holds the state of a whole step"))
    if books.ending.code == 0:
        books.ending.code, books.ending.reason = 1, f"{books.ending.reason}, but its state could not be saved"
    end(books)


def end(books: Books) -> None:
    assert books.ending is not None
    books.over = books.ending
    books.savers = []
    books.stopping = None
    metric_lines.close(books)
    accounting.close(books)
    books.record(events.Over(code=books.over.code, reason=books.over.reason))
    for worker in books.workers:
        books.send(worker, m.Goodbye(reason=books.over.reason, code=books.over.code))


def nothing_left(books: Books, worker: Worker, message: m.Restored) -> None:
    """The first view has nothing to train: the script asks for no more than the checkpoint has.

    Raises:
        ProtocolError: there is a view, or the worker is in none that is proposed.
    """
    if books.view is not None or worker.state != "ready":
        raise ProtocolError("Restored(done) from a worker that has no first view to begin")
    reason = f"nothing is left to train: {message.path} is at the end of what the script asks for"
    books.ending = books.ending or Ending(code=0, reason=reason, failed=False)
    end(books)
