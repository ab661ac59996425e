"""Unplanned changes: a view is stopped, everyone who lives reports, and one answer says how the round goes on.

    stop       -> Stop to every participant: from their answers on, nothing moves
    break_off  the view is stopped for good: the script failed, or its loss is not finite and the run is to end then
    suspect    a peer's accusation stops the view too; both sides of a broken pair may well be alive
    held_up    two that have waited for each other for too long are a broken pair, which no connection has told yet
    stopped    -> the answers, until everyone has given one or has been lost; then follows the `decision`

A loss meanwhile takes the lost worker out of the stop in progress; it starts no second one.

A worker's first step may take long: it compiles. Its peers don't know whether it is in that one, for they may have
joined later; the coordinator does, from the heartbeats, and leaves what they say about it aside for `FIRST_STEP` times
the stall limit. Nothing is lost thereby: who goes on waiting says it again, with the time that it has waited.
"""

from __future__ import annotations

from farandole.errors import ProtocolError
from farandole.membership import (
    decision,
    ending,
    events,
    issued,
    losses,
    replicas,
    suspicion,
    verdicts,
)
from farandole.membership import messages as m
from farandole.membership.books import Books
from farandole.membership.records import Ending, Shared, Stopping

FIRST_STEP = 10  # stall limits that a worker may take for the first step in which it computes


def without(books: Books, worker: str, cause: str, *, participant: bool) -> None:
    """What follows from `worker` not being there any more: a participant's end stops the view."""
    if books.savers:
        if worker in books.savers:
            books.savers.remove(worker)
            ending.save(books)
    elif books.stopping:
        books.stopping.waiting.discard(worker)
        books.stopping.reports.pop(worker, None)
        decision.if_ready(books)
    elif participant and not books.everyone_finished():
        stop(books, f"{worker}: {cause}")


def stop(books: Books, cause: str) -> None:
    books.stops += 1
    participants = books.participants()
    books.stopping = Stopping(number=books.stops, waiting=set(participants), cause=cause)
    message = m.Stop(stop=books.stops)
    for worker in participants:
        books.send(worker, message)
    decision.if_ready(books)


def break_off(books: Books, reason: str) -> None:
    """Nobody trains on: the run ends with what the newest whole step has left."""
    books.ending = Ending(code=1, reason=reason, failed=True)
    if books.view is None:
        ending.end(books)
    elif books.stopping is None:
        stop(books, reason)


def seen(books: Books, workers: list[str], message: Shared) -> None:
    """What everyone has seen, as enough of them say (`testimony`)."""
    if isinstance(message, m.Differs):
        differs(books, workers, message)
    elif isinstance(message, m.Unlike):
        unlike(books, workers, message)
    else:
        not_finite(books, workers[0], message)


def not_finite(books: Books, worker: str, message: m.NotFinite) -> None:
    """A step's loss is not finite: an event, for the first of all who say so.

    With `stop_on_nan` none of them goes on: each holds the state as of that step's beginning, and waits.
    """
    if not books.has_part(worker):
        return
    if message.step > books.not_finite:
        books.not_finite = message.step
        books.record(events.NotFinite(worker=worker, step=message.step, loss=message.loss))
    if books.settings.stop_on_nan and not books.savers and not (books.ending and books.ending.failed):
        break_off(books, f"the loss of step {message.step} is {message.loss}, and --stop-on-nan was asked for")


def suspect(books: Books, worker: str, message: m.Suspect) -> None:
    """`worker` has lost its connection to a peer, in any of the views that workers may still be in."""
    if books.savers or message.peer not in books.workers or _is_warming_up(books, message):
        return
    if not suspicion.may_accuse(books, worker, message.view, message.peer) or suspicion.denied(books, message):
        return
    if message.waited_s and suspicion.waited_for(books, message.peer, message.view) != message.peer:
        return
    reason = f"{message.reason}: waited for it for {message.waited_s} s" if message.waited_s else message.reason
    if books.stopping is None:
        if message.view not in [view.number for view in books.views()]:
            return
        if message.waited_s:  # its heartbeats may well come
            books.send(message.peer, m.Stacks(reason=f"{worker} reports this worker: {reason}"))
        stop(books, f"{worker} reports {message.peer}: {reason}")
    if books.stopping is not None:
        books.stopping.accusations[(worker, message.peer)] = reason
        if message.waited_s:
            books.stopping.stalls.add(message.peer)
        if message.peer in books.stopping.waiting and not books.workers[message.peer].connected:
            overdue(books, message.peer, f"its connection closed, and {worker} has lost it too: {reason}")


def _is_warming_up(books: Books, message: m.Suspect) -> bool:
    """Whether the peer is waited for in the first step that it computes, and may still be compiling.

    Who waits says so again with each heartbeat: once it has waited for too long even for that, it is believed.
    """
    limit = FIRST_STEP * books.settings.stall_s
    return 0 < message.waited_s <= limit and not books.workers[message.peer].computed


def held_up(books: Books, worker: str, beat: m.Heartbeat) -> None:
    """`worker` has waited for a peer for too long, and may be waited for by it: they can't reach each other then.

    Either of them alone may be what a third one, or its own work, holds up: that is for the stall limit.
    """
    peer = books.workers.get(beat.waits_for)
    if peer is None or books.stopping or books.over or (peer.beat.waits_for, peer.beat.view) != (worker, beat.view):
        return
    for one, other in ((worker, peer.id), (peer.id, worker)):
        reason = f"{one} and {other} wait for each other: nothing gets through between them"
        suspect(books, one, m.Suspect(view=beat.view, peer=other, reason=reason))


def overdue(books: Books, worker: str, why: str) -> None:
    """A participant is out of reach, dead or not: it is not waited for if it is safe to go on without it."""
    if books.stopping is None:
        stop(books, f"{worker}: {why}")
    if books.stopping is not None and worker in books.workers:
        books.stopping.overdue[worker] = why
        decision.if_ready(books)


def expel(books: Books, worker: str, why: str) -> None:
    """A participant has to go, whatever it answers; it is kept in the books until the decision, which asks for it."""
    if books.stopping is None:
        stop(books, f"{worker}: {why}")
    if books.stopping is not None:
        books.stopping.expelled[worker] = why
        books.record(events.Expelled(worker=worker, reason=why))


def differs(books: Books, workers: list[str], message: m.Differs) -> None:
    """The words of a round say that the replicas differ, and nobody can end it; not even a run that ends anyway."""
    known = books.ending is not None and books.ending.apart
    if books.settings.bits == "any":
        return  # where they may, only who is mistaken says so
    if books.savers or known or not any(books.has_part(worker) for worker in workers):
        return
    if verdicts.on_trial(books, message):
        if books.stopping is None:
            stop(books, "a joiner's replica differs")
        if books.stopping is not None:
            books.stopping.failed |= dict.fromkeys(message.workers, message.step)
    else:
        replicas.differ(books, message.workers, f"at step {message.step}", told=workers[0] if len(workers) == 1 else "")
        if books.stopping is None:
            stop(books, "the replicas differ")
    if books.stopping is not None:
        books.stopping.apart |= set(workers)


def unlike(books: Books, workers: list[str], message: m.Unlike) -> None:
    """The words of a round say that two have found different things of one shard, and nobody can end it."""
    if books.stopping is None and not books.savers and any(books.has_part(worker) for worker in workers):
        stop(books, f"two workers have found different things of one shard in step {message.step}")


def stopped(books: Books, worker: str, report: m.Stopped) -> None:
    """An answer to the stop.

    Raises:
        ProtocolError: it names what was never issued.
    """
    now = books.stopping
    if now and report.stop == now.number and worker in now.waiting:
        if why := issued.denied(books, worker, report):
            raise ProtocolError(why)
        now.waiting.discard(worker)
        now.overdue.pop(worker, None)
        now.reports[worker] = report
        if report.synced:
            losses.reached(books, worker, report.step)
        decision.if_ready(books)
