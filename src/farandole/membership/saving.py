"""Who writes the run's checkpoints, and who may begin a first view.

The run's store, a folder or a URL, may be another place, or none, on another machine, and a checkpoint that is written
there is lost to the run. So a worker that asks in says whether it *reaches* the store: whether it finds there the mark
that `farandole run` has left, and can write beside it (`checkpoint/reach.py`). What follows, and who knows what when:

1. While the run trains, one member writes: the first in rank order that holds the state and reaches the store. It
   stays until it is no member any more or fails. It alone is told, and the one before (`Saver`). Nothing is agreed on,
   since nothing can go wrong: two that write the same step write under different names; a message that was lost is
   lost with its connection, and whoever comes back, or is lost, brings about a view, for which it is said again.
2. One that fails (no descriptors, no space) is followed by the next that has not failed since the newest success, and
   that one tries at once; if all have, by the one whose failure is the oldest, when a checkpoint is next due. So a
   place that is full for everybody is tried by one after the other, once a period, and a try is never missed for a
   worker's own trouble.
3. The last checkpoint is written by one who reaches the store, if there is one. If no member does and somebody who is
   ready does, that one is let in before a stop, for it to get the state. If nobody does, one who holds the state writes
   it where it is; but that is not in the run's store, and so the run does not end well.
4. Whoever begins a first view must reach the store, and find there the newest checkpoint that is known to be in it, or
   a newer one. Known is what was there when the run was started, and each one that was written since by who reaches the
   store; it is in the journal. It goes out with the proposal, the worker compares before it adopts the view, and if it
   finds less it says so (`Short`): the proposal is given up as by a loss, and that worker counts as one that does not
   reach the store. One that is there and damaged counts as found: it is passed over and told.
5. If nobody is there who may begin, those who are there wait, and an event says so. But workers of the run's own pool
   are where the run's folder is: if one of them does not reach the store, none will, and the run ends.

    appoint   the view has changed: who writes from now on
    heard     a checkpoint was written, or was not, or was gone on from
    best      who is to write the last one
    helper    who has to join before the run stops, so that somebody can
    first     the members of a first view
    hopeless  why there can't be any
    short     one that was to begin it finds too little
"""

from __future__ import annotations

from collections.abc import Sequence

from farandole.membership import events, last_resort, metric_lines
from farandole.membership import messages as m
from farandole.membership.books import Books
from farandole.membership.records import Worker


def appoint(books: Books) -> None:
    """See 1. Call it when the view has changed, or somebody in it has got the state."""
    able = _able(books)
    if books.saver not in able:
        books.saver = able[0] if able else ""
    _tell(books, at_once=False)


def heard(books: Books, worker: Worker, message: m.Checkpointed | m.Restored) -> None:
    """What has become of a checkpoint, and what follows: see 2 and 4."""
    for event in last_resort.told(worker.id, message):
        books.record(event)
    if not books.let_in(worker.id):
        return  # nothing that it says counts yet
    if isinstance(message, m.Restored):
        if worker.id != books.founder:
            return
        books.newest = m.Newest(step=message.step, path=message.path)
        metric_lines.restored(books, message.step)
    elif not message.late:
        books.tries += 1
        if message.error:
            _failed(books, worker.id)
            return
        books.succeeded = books.tries
        likely = worker.id == books.saver or message.step <= books.reached
        if worker.reaches and likely and message.step >= books.newest.step:
            books.newest = m.Newest(step=message.step, path=message.path)


def _failed(books: Books, worker: str) -> None:
    """Another one tries, if there is one."""
    books.failed[worker] = books.tries
    able = _able(books)
    if worker != books.saver or not able:
        return
    books.saver = min(able, key=lambda w: _failure(books, w))
    fresh = _failure(books, books.saver) == 0
    if books.saver != worker:
        books.record(events.Saver(worker=books.saver, before=worker, at_once=fresh))
    _tell(books, at_once=fresh)


def best(books: Books, savers: Sequence[str]) -> str:
    """See 3. `savers` hold the state, the best placed first."""
    return min(savers, key=lambda w: (not books.workers[w].reaches, _failure(books, w)))


def helper(books: Books) -> str:
    """See 3. "" where nobody needs to, or nobody can."""
    assert books.view is not None
    if any(books.workers[w].reaches for w in books.view.members if w in books.workers):
        return ""
    ready = [w for w in books.workers.values() if w.state == "ready" and w.connected and not w.leaving]
    return next((w.id for w in ready if w.reaches), "")


def first(books: Books, ready: Sequence[str]) -> tuple[str, ...]:
    """See 4. Those who are ready, the one that begins with the state first; nobody where nobody may begin."""
    leader = next((worker for worker in ready if books.workers[worker].reaches), None)
    if leader is None:
        why = books.workers[ready[0]].unreached
        reason = f"nobody who is ready reaches {_place(books)}; waiting for one that does ({why})"
        _once(books, events.NoLeader(reason=reason))
        return ()
    books.told.discard(events.NoLeader)
    return (leader, *(worker for worker in ready if worker != leader))


def hopeless(books: Books) -> str:
    """See 5. Why the run can't begin; "" while it may."""
    if any(w.reaches for w in books.workers.values()):  # also one that is still starting
        return ""
    ours = [w for w in books.workers.values() if w.pool]
    if not ours:
        return ""
    return (
        f"{ours[0].id} can't reach {_place(books)}: {ours[0].unreached}; see that it is there and can be written to, "
        f"and start the run again on its folder, or begin again with another --folder"
    )


def short(books: Books, worker: Worker, message: m.Short) -> bool:
    """See 4. Whether that worker was to begin a first view."""
    view = books.proposed
    if books.view or books.stopping or view is None or view.number != message.view or worker.id not in view.synced:
        return False
    worker.unreached = message.reason
    books.record(events.Short(worker=worker.id, host=worker.host, reason=message.reason))
    return True


def _able(books: Books) -> list[str]:
    """Members that could write, in rank order."""
    members = books.view.members if books.view else ()
    there = [w for w in members if w in books.workers and w not in books.unsynced]
    able = [w for w in there if books.workers[w].reaches]
    if there and not able:
        why = books.workers[there[0]].unreached
        _once(books, events.NoSaver(reason=f"none of the workers reaches {_place(books)} ({why})"))
    elif able:
        books.told.discard(events.NoSaver)
    return able


def _failure(books: Books, worker: str) -> int:
    """The number of its newest failure since the newest success, 0 for none."""
    number = books.failed.get(worker, 0)
    return number if number > books.succeeded else 0


def _tell(books: Books, *, at_once: bool) -> None:
    message = m.Saver(worker=books.saver, at_once=at_once)
    for name in books.view.members if books.view else ():
        worker = books.workers.get(name)
        if worker is None or not worker.connected:
            continue
        mine = name == books.saver
        if worker.saves is not mine or (mine and at_once):
            worker.saves = mine
            books.send(name, message)


def _place(books: Books) -> str:
    where = books.settings.checkpoints.url or "the run's folder of checkpoints"
    newest = books.newest
    return f"{where} (the newest is {newest.path})" if newest.path else where


def _once(books: Books, event: events.Event) -> None:
    if type(event) not in books.told:
        books.told.add(type(event))
        books.record(event)
