"""What the workers' scripts call, and that it is the same everywhere: a step, an evaluation, the script's end.

A script that calls something on one worker only (`if run.is_leader: run.evaluate(...)`) would have its peers exchange
messages of other sizes than it expects, which Gloo answers by ending the process. What keeps that from happening, and
the workers from waiting for each other for ever:

1. A *purpose* is part of every message's tag: a training step's, or anything else's. So messages of the one never
   meet those of the other, and whoever waits for them waits.
2. A round whose sizes do not follow from the steps before (every evaluation's, and a step's for which other parameters
   train than in the last one) comes after a *call round*: words alone, which are of one size, under the second
   purpose. A word carries the number of what its sender has called and of the sizes that come of it. A worker ends a
   round only if all words carry its own number. So whoever posts a message of such sizes knows that all others expect
   the same ones.
3. A call round that is held everywhere is committed like any other when its view is stopped (R1), by workers that have
   not compared anything. So the reports carry the calls too, and the decision comes after their comparison: if anyone
   has ended the round, all who hold it have called the same.
4. Where calls differ, the round does not end. Which round a worker is in, and what it has called there, are facts that
   no delay changes: rounds go in lockstep (R1), so workers that do the same call the same in each round, redone or
   not, in whatever view. So two members that say different things of one round have different scripts, or one script
   that goes two ways, and so have one that has ended before round r and another that has begun r. Messages come in any
   order, old ones too; each is compared with what is known of the others. All of them ride on heartbeats, which go on
   while a worker waits, or are said again on every new connection: nothing is lost for good, even if a coordinator is.
5. The same holds of a view that took effect in round r: nobody whose script goes the same way begins r in the one
   before, which a call other than a step may do. Nor can anybody begin a later one there, as r does not end without a
   word of who has gone on. So one that says it has, and two others are beyond r, has said a wrong r.
6. Those who are lost, or in views that were given up, count no more: what they did alone may be done anew, otherwise.

The run ends then, like one whose script has failed: what one of them computes without the others is not what was asked
for. Whoever holds the state of a whole step saves it.

    began      a heartbeat: this worker has begun a round
    switched   a worker goes on with a step in another view
    finished   a worker's script has ended
    differing  (`difference`) the answers to a stop
"""

from __future__ import annotations

from farandole.membership import messages as m
from farandole.membership import unplanned
from farandole.membership.books import Books
from farandole.membership.difference import Difference, Finish, calls_differ, ended_early
from farandole.membership.records import Worker
from farandole.membership.values import Call

KEPT = 4  # rounds; members are at most one apart


def began(books: Books, worker: str, beat: m.Heartbeat) -> None:
    """A heartbeat. What is heard while a stop is outstanding will be heard again."""
    _end(books, _began(books, worker, beat))


def switched(books: Books, worker: str, message: m.Switched) -> None:
    """It goes on with a step in another view than it was in."""
    if not _is_late(books):
        _end(books, _went_on(books, worker, message.round, f"step {message.step}"))


def finished(books: Books, worker: Worker, message: m.Finished) -> None:
    """A worker's script has ended."""
    worker.state, worker.fingerprint, worker.after = "finished", message.fingerprint, message.after
    if message.view:  # else it has never been in one, and holds nobody up
        _end(books, _finished(books, worker.id, message))


def in_a_step(books: Books) -> bool:
    """Whether the newest round that was heard of is a training step, as far as was said."""
    newest = max(books.begun, default=None)
    return newest is None or books.begun[newest][1].doing.startswith("step ")


def _began(books: Books, worker: str, beat: m.Heartbeat) -> Difference | None:
    call, round_ = beat.call, beat.round
    if not call.number or _is_late(books) or not _in_a_view(books, worker, beat.view):
        return None
    before = books.previous.number if books.view and books.previous else 0
    if beat.view == before and (difference := _behind(books, worker, beat)):
        return difference
    first, other = books.begun.get(round_, (worker, call))
    if first == worker or first not in books.workers:
        _keep(books, round_, worker, call)
    elif other.number != call.number:
        return calls_differ(first, other, worker, call)
    return _went_on(books, worker, round_, call.doing)


def _behind(books: Books, worker: str, beat: m.Heartbeat) -> Difference | None:
    """In the view before: whether it does something else there than those who have gone on. See 5."""
    for other, round_ in books.switches.items():
        if round_ == beat.round or round_ == books.applied < beat.round:
            return calls_differ(other, Call(doing="the next step"), worker, beat.call)
        if round_ < beat.round:  # which nobody could have begun without it: two who have are right
            books.beyond.setdefault(other, set()).add(worker)
            if len(books.beyond[other]) > 1 and other in books.workers:
                books.bar(other)
                unplanned.expel(
                    books, other, f"it says that it has gone on since round {round_}, in which it was needed"
                )
                return None
    return None


def _finished(books: Books, worker: str, message: m.Finished) -> Difference | None:
    mine, known = Finish(worker=worker, round=message.round, step=message.step), books.finish
    if known is None or known.worker not in books.workers:
        books.finish = known = mine
    if _is_late(books):
        return None
    if known.round != mine.round:
        early, late = sorted((known, mine), key=lambda finish: finish.round)
        return ended_early(early, late.worker, f"step {late.step}")
    if books.view and worker in books.unswitched and message.view < books.view.number:
        return ended_early(mine, _switched(books), "the next step")
    for round_, (other, call) in books.begun.items():
        if round_ >= mine.round and other in books.workers and other != worker:
            return ended_early(mine, other, call.doing)
    return None


def _end(books: Books, difference: Difference | None) -> None:
    if difference is not None:
        books.differ(difference)
        unplanned.stop(books, difference.reason)


def _went_on(books: Books, worker: str, round_: int, doing: str) -> Difference | None:
    finish = books.finish
    if finish is None or finish.worker not in books.workers or worker == finish.worker or round_ < finish.round:
        return None
    return ended_early(finish, worker, doing)


def _switched(books: Books) -> str:
    """One of those who go on in the view in force, or have left with it."""
    concerned = [worker for view in (books.view, books.previous) if view for worker in view.members]
    return next((worker for worker in concerned if worker not in books.unswitched), "another")


def _is_late(books: Books) -> bool:
    """Whether nobody trains any more, or all are asked where they stand."""
    failed = books.ending is not None and books.ending.failed
    return books.over is not None or books.stopping is not None or bool(books.savers) or failed


def _in_a_view(books: Books, worker: str, number: int) -> bool:
    return any(view.number == number and worker in view.members for view in books.views())


def _keep(books: Books, round_: int, worker: str, call: Call) -> None:
    books.begun[round_] = (worker, call)
    for old in [each for each in books.begun if each <= round_ - KEPT]:
        del books.begun[old]
