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

from collections.abc import Sequence

from farandole.errors import ProtocolError
from farandole.protocol import events, reported_events
from farandole.protocol import messages as m
from farandole.protocol.coordinator import accounting, disputes, metric_lines
from farandole.protocol.coordinator import metric_lines as last_resort
from farandole.protocol.coordinator.state import CoordinatorState, Ending, Worker
from farandole.protocol.difference import outliers

# --- saving -----------------------------------------------------------------------------------------------------------
#
# Who writes the run's checkpoints, and who may begin a first view.
#
# The run's store, a folder or a URL, may be another place, or none, on another machine, and a checkpoint that is
# written there is lost to the run. So a worker that asks in says whether it *reaches* the store: whether it finds
# there the mark that `farandole run` has left, and can write beside it (`checkpoint/reach.py`). What follows, and who
# knows what when:
#
# 1. While the run trains, one member writes: the first in rank order that holds the state and reaches the store. It
#    stays until it is no member any more or fails. It alone is told, and the one before (`Saver`). Nothing is agreed
#    on, since nothing can go wrong: two that write the same step write under different names; a message that was lost
#    is lost with its connection, and whoever comes back, or is lost, brings about a view, for which it is said again.
# 2. One that fails (no descriptors, no space) is followed by the next that has not failed since the newest success, and
#    that one tries at once; if all have, by the one whose failure is the oldest, when a checkpoint is next due. So a
#    place that is full for everybody is tried by one after the other, once a period, and a try is never missed for a
#    worker's own trouble.
# 3. The last checkpoint is written by one who reaches the store, if there is one. If no member does and somebody who
#    is ready does, that one is let in before a stop, for it to get the state. If nobody does, one who holds the state
#    writes it where it is; but that is not in the run's store, and so the run does not end well.
# 4. Whoever begins a first view must reach the store, and find there the newest checkpoint that is known to be in it,
#    or a newer one. Known is what was there when the run was started, and each one that was written since by who
#    reaches the store; it is in the journal. It goes out with the proposal, the worker compares before it adopts the
#    view, and if it finds less it says so (`Short`): the proposal is given up as by a loss, and that worker counts as
#    one that does not reach the store. One that is there and damaged counts as found: it is passed over and told.
# 5. If nobody is there who may begin, those who are there wait, and an event says so. But workers of the run's own pool
#    are where the run's folder is: if one of them does not reach the store, none will, and the run ends.
#
#     appoint   the view has changed: who writes from now on
#     heard     a checkpoint was written, or was not, or was gone on from
#     best      who is to write the last one
#     helper    who has to join before the run stops, so that somebody can
#     first     the members of a first view
#     hopeless  why there can't be any
#     short     one that was to begin it finds too little


def appoint_saver(books: CoordinatorState) -> None:
    """See 1. Call it when the view has changed, or somebody in it has got the state."""
    able = _able(books)
    if books.saver not in able:
        books.saver = able[0] if able else ""
    _tell(books, at_once=False)


def on_checkpoint(books: CoordinatorState, worker: Worker, message: m.Checkpointed | m.Restored) -> None:
    """What has become of a checkpoint, and what follows: see 2 and 4."""
    for event in reported_events.events_of(worker.id, message):
        books.record(event)
    if not books.let_in(worker.id):
        return  # nothing that it says counts yet
    if isinstance(message, m.Restored):
        if worker.id != books.founder:
            return
        books.newest = m.Newest(step=message.step, path=message.path)
        last_resort.on_restored(books, message.step)
    elif not message.late:
        books.tries += 1
        if message.error:
            _failed(books, worker.id)
            return
        books.succeeded = books.tries
        likely = worker.id == books.saver or message.step <= books.reached
        if worker.reaches and likely and message.step >= books.newest.step:
            books.newest = m.Newest(step=message.step, path=message.path)


def _failed(books: CoordinatorState, worker: str) -> None:
    """Another one tries, if there is one."""
    books.failed[worker] = books.tries
    able = _able(books)
    if worker != books.saver or not able:
        return
    books.saver = min(able, key=lambda w: _failure(books, w))
    fresh = _failure(books, books.saver) == 0
    if books.saver != worker:
        books.record(events.SaverEvent(worker=books.saver, before=worker, at_once=fresh))
    _tell(books, at_once=fresh)


def best_saver(books: CoordinatorState, savers: Sequence[str]) -> str:
    """See 3. `savers` hold the state, the best placed first."""
    return min(savers, key=lambda w: (not books.workers[w].reaches, _failure(books, w)))


def helper(books: CoordinatorState) -> str:
    """See 3. "" where nobody needs to, or nobody can."""
    assert books.view is not None
    if any(books.workers[w].reaches for w in books.view.members if w in books.workers):
        return ""
    ready = [w for w in books.workers.values() if w.state == "ready" and w.connected and not w.leaving]
    return next((w.id for w in ready if w.reaches), "")


def founders(books: CoordinatorState, ready: Sequence[str]) -> tuple[str, ...]:
    """See 4. Those who are ready, the one that begins with the state first; nobody where nobody may begin."""
    leader = next((worker for worker in ready if books.workers[worker].reaches), None)
    if leader is None:
        why = books.workers[ready[0]].unreached
        reason = f"nobody who is ready reaches {_place(books)}; waiting for one that does ({why})"
        _once(books, events.NoLeaderEvent(reason=reason))
        return ()
    books.reported_once.discard(events.NoLeaderEvent)
    return (leader, *(worker for worker in ready if worker != leader))


def no_way_to_save(books: CoordinatorState) -> str:
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


def on_cannot_start(books: CoordinatorState, worker: Worker, message: m.CannotStart) -> bool:
    """See 4. Whether that worker was to begin a first view."""
    view = books.proposed
    if books.view or books.stopping or view is None or view.number != message.view or worker.id not in view.synced:
        return False
    worker.unreached = message.reason
    books.record(events.ShortEvent(worker=worker.id, host=worker.host, reason=message.reason))
    return True


def _able(books: CoordinatorState) -> list[str]:
    """Members that could write, in rank order."""
    members = books.view.members if books.view else ()
    there = [w for w in members if w in books.workers and w not in books.unsynced]
    able = [w for w in there if books.workers[w].reaches]
    if there and not able:
        why = books.workers[there[0]].unreached
        _once(books, events.NoSaverEvent(reason=f"none of the workers reaches {_place(books)} ({why})"))
    elif able:
        books.reported_once.discard(events.NoSaverEvent)
    return able


def _failure(books: CoordinatorState, worker: str) -> int:
    """The number of its newest failure since the newest success, 0 for none."""
    number = books.failed.get(worker, 0)
    return number if number > books.succeeded else 0


def _tell(books: CoordinatorState, *, at_once: bool) -> None:
    message = m.Saver(worker=books.saver, at_once=at_once)
    for name in books.view.members if books.view else ():
        worker = books.workers.get(name)
        if worker is None or not worker.connected:
            continue
        mine = name == books.saver
        if worker.saves is not mine or (mine and at_once):
            worker.saves = mine
            books.send(name, message)


def _place(books: CoordinatorState) -> str:
    where = books.settings.checkpoints.url or "the run's folder of checkpoints"
    newest = books.newest
    return f"{where} (the newest is {newest.path})" if newest.path else where


def _once(books: CoordinatorState, event: events.Event) -> None:
    if type(event) not in books.reported_once:
        books.reported_once.add(type(event))
        books.record(event)


# --- ending -----------------------------------------------------------------------------------------------------------


def advance(books: CoordinatorState, now: float) -> bool:
    """Do what is due of the end; False if nothing is."""
    stops = books.ending is not None and not books.stopping
    if books.ending is not None:
        accounting.end_trace(books)
    if books.everyone_finished() and not (books.savers and books.deadline is None):
        finish(books)
    elif books.deadline is not None:
        if now >= books.deadline:
            expire(books)
    elif stops and not books.view and not books.proposed:
        end(books)  # nobody holds a state
    elif stops and not books.savers and not books.proposed and _some_finished(books):
        set_deadline(books, now)
    else:
        return False
    return True


def is_between_steps(books: CoordinatorState) -> bool:
    """Whether the end can't wait for the step in hand: that of a failure, or of a stop in which some have finished, who
    will not switch to the empty view any more.
    """
    if books.ending is None or books.stopping or books.savers or books.deadline is not None:
        return False
    return books.ending.failed or (books.proposed is not None and _some_finished(books))


def _some_finished(books: CoordinatorState) -> bool:
    return any(books.workers[w].state == "finished" for w in books.members())


def ask_to_save(books: CoordinatorState) -> None:
    """Ask the best of `savers`, unless one has been asked; without any, the run is over."""
    assert books.ending is not None
    if books.ending.apart and not disputes.compare_when_complete(books):
        return
    if not books.savers and books.between:
        books.savers = [worker for worker in books.between if worker in books.workers]
        books.between, books.ending.saver, books.ending.between = [], "", True
    if not books.savers:
        if books.deadline is not None and books.view is not None:
            return  # somebody who has not finished yet may have more luck
        _lose(books)
    elif books.ending.saver not in books.savers:
        books.ending.saver = best_saver(books, books.savers)
        ask_next_saver(books)


def on_return(books: CoordinatorState, worker: str) -> None:
    """One of `savers` is back: it may not have heard what it was asked."""
    assert books.ending is not None
    if books.ending.apart and not books.ending.compared:
        disputes.ask_for_digests(books, worker)
    elif books.ending.saver == worker:
        ask_next_saver(books)


def ask_next_saver(books: CoordinatorState) -> None:
    """The one that is to save."""
    assert books.ending is not None
    if not books.ending.stored:
        books.send(books.ending.saver, m.End(save=True, reason=books.ending.reason, between=books.ending.between))


def on_answer(books: CoordinatorState, worker: str, message: m.Saved | m.Digests) -> None:
    """One of `savers` has done what it was asked."""
    if isinstance(message, m.Saved):
        on_saved(books, worker, message)
    elif worker in books.savers and worker in books.digests_wanted:
        books.digests[worker] = message
        ask_to_save(books)


def on_saved(books: CoordinatorState, worker: str, message: m.Saved) -> None:
    if not books.ending or books.ending.stored or books.ending.saver != worker or worker not in books.savers:
        return
    if message.error:
        books.savers.remove(worker)
        books.ending.saver = ""  # should it be one of them again, when others have finished, it is asked again
        if message.between:
            books.between.append(worker)
        else:
            books.record(events.NotSavedEvent(worker=worker, reason=message.error))
        ask_to_save(books)
    else:
        path, whole, finite = message.path, not books.ending.between, message.finite
        took = {"seconds": message.seconds} if message.seconds else {}
        host = books.workers[worker].host
        if books.workers[worker].reaches:
            books.record(events.SavedEvent(worker=worker, path=path, whole=whole, finite=finite, **took))
        else:
            books.record(
                events.SavedElsewhereEvent(worker=worker, host=host, path=path, whole=whole, finite=finite, **took)
            )
            books.ending.code = books.ending.code or 1
            books.ending.reason += f"; its last checkpoint is NOT in the run's store, but on {host}: {message.path}"
        books.ending.stored = True
        if books.deadline is None:
            end(books)


def finish(books: CoordinatorState) -> None:
    """Every member's script has run to its end."""
    prints = {w.id: w.fingerprint for w in books.workers.values() if w.state == "finished"}
    after = books.workers[next(iter(books.members()))].after.written()
    equal = len(set(prints.values())) == 1
    if not (books.ending and books.ending.finished):  # by the coordinator before this one
        books.record(events.FinishedEvent(fingerprint=" != ".join(sorted(set(prints.values()))), equal=equal, **after))
    if not equal and books.settings.bits != "any":
        disputes.on_replicas_differ(books, outliers(disputes.by_standing(books, prints)), "after the last step")
    books.ending = books.ending or Ending(code=0, reason="the script has run to its end", failed=False)
    books.ending.finished, books.deadline = True, None
    books.stopping = books.proposed = books.previous = None
    if books.ending.stored:
        end(books)
    else:
        books.savers = list(dict.fromkeys((*books.savers, *books.members())))
        ask_to_save(books)


def set_deadline(books: CoordinatorState, now: float) -> None:
    """The run is to stop, and some have finished."""
    assert books.ending is not None
    books.deadline = now + books.settings.end_s
    books.proposed = books.previous = None
    books.savers = [worker for worker in books.members() if books.workers[worker].state == "finished"]
    ask_to_save(books)


def expire(books: CoordinatorState) -> None:
    """Those who have not finished are not waited for any more."""
    hung = [worker for worker in books.members() if books.workers[worker].state != "finished"]
    for worker in hung:
        reason = f"its script has not ended within {books.settings.end_s:g} s of the stop, and others' had"
        books.record(events.HungEvent(worker=worker, host=books.workers[worker].host, reason=reason))
    give_up(books, f"{', '.join(hung)} hung after the last step")


def give_up(books: CoordinatorState, why: str, code: int | None = None) -> None:
    """The run ends once the final state is saved, whatever becomes of those who have not finished."""
    assert books.ending is not None
    books.deadline = None
    books.ending.reason = f"{books.ending.reason}; {why}"
    books.ending.code = books.ending.code if code is None else code
    if books.ending.stored:
        end(books)
    elif not books.savers:
        _lose(books)


def _lose(books: CoordinatorState) -> None:
    assert books.ending is not None
    books.record(events.NotSavedEvent(reason="no worker is left that holds the state of a whole step"))
    if books.ending.code == 0:
        books.ending.code, books.ending.reason = 1, f"{books.ending.reason}, but its state could not be saved"
    end(books)


def end(books: CoordinatorState) -> None:
    assert books.ending is not None
    books.over = books.ending
    books.savers = []
    books.stopping = None
    metric_lines.close(books)
    accounting.close(books)
    books.record(events.OverEvent(code=books.over.code, reason=books.over.reason))
    for worker in books.workers:
        books.send(worker, m.Goodbye(reason=books.over.reason, code=books.over.code))


def on_nothing_left(books: CoordinatorState, worker: Worker, message: m.Restored) -> None:
    """The first view has nothing to train: the script asks for no more than the checkpoint has.

    Raises:
        ProtocolError: there is a view, or the worker is in none that is proposed.
    """
    if books.view is not None or worker.state != "ready":
        raise ProtocolError("Restored(done) from a worker that has no first view to begin")
    reason = f"nothing is left to train: {message.path} is at the end of what the script asks for"
    books.ending = books.ending or Ending(code=0, reason=reason, failed=False)
    end(books)
