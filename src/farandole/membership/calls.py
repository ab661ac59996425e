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
   while a worker waits, or are said again on every new connection: nothing is lost for good, not even with a
   coordinator.
5. Those who are lost, or in views that were given up, count no more: what they did alone may be done anew, otherwise.

The run ends then, like one whose script has failed: what one of them computes without the others is not what was asked
for. Whoever holds the state of a whole step saves it.

    began      a heartbeat: this worker has begun a round
    switched   a worker goes on with a step in another view
    finished   a worker's script has ended
    compare    the answers to a stop
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from farandole.membership import messages as m
from farandole.membership.books import Books
from farandole.membership.records import Ending, Finish
from farandole.membership.values import Call

KEPT = 4  # rounds; members are at most one apart


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Two workers, and how their scripts differ, in words."""

    workers: tuple[str, str]
    reason: str


def began(books: Books, worker: str, beat: m.Heartbeat) -> Difference | None:
    """A heartbeat. What is heard while a stop is outstanding will be heard again."""
    call, round_ = beat.call, beat.round
    if not call.number or _is_late(books) or not _in_a_view(books, worker, beat.view):
        return None
    first, other = books.begun.get(round_, (worker, call))
    if first == worker or first not in books.workers:
        _keep(books, round_, worker, call)
    elif other.number != call.number:
        return _calls_differ(first, other, worker, call)
    return _went_on(books, worker, round_, call.doing)


def switched(books: Books, worker: str, message: m.Switched) -> Difference | None:
    """It goes on with a step in another view than it was in."""
    return None if _is_late(books) else _went_on(books, worker, message.round, f"step {message.step}")


def finished(books: Books, worker: str, message: m.Finished) -> Difference | None:
    """A worker's script has ended."""
    if not message.view:
        return None  # it has never been in a view: it holds nobody up
    mine, known = Finish(worker=worker, round=message.round, step=message.step), books.finish
    if known is None or known.worker not in books.workers:
        books.finish = known = mine
    if _is_late(books):
        return None
    if known.round != mine.round:
        early, late = sorted((known, mine), key=lambda finish: finish.round)
        return _ended_early(early, late.worker, f"step {late.step}")
    if books.view and worker in books.unswitched and message.view < books.view.number:
        before = books.previous.members if books.previous else ()
        others = [w for w in (*books.view.members, *before) if w not in books.unswitched]
        return _ended_early(mine, others[0] if others else "the others", "the next step")
    for round_, (other, call) in books.begun.items():
        if round_ >= mine.round and other in books.workers and other != worker:
            return _ended_early(mine, other, call.doing)
    return None


def compare(reports: Mapping[str, m.Stopped]) -> Difference | None:
    """Of those that answered a stop, two that have called different things in one round, if there are such."""
    first: dict[int, str] = {}
    for worker, report in reports.items():
        if report.level and report.call.number:
            other = first.setdefault(report.round, worker)
            if reports[other].call.number != report.call.number:
                return _calls_differ(other, reports[other].call, worker, report.call)
    return None


def note(books: Books, difference: Difference) -> None:
    """The run ends because of it. A run that was on its way out keeps its own reason and code."""
    books.record("calls differ", workers=list(difference.workers), reason=difference.reason)
    books.ending = books.ending or Ending(code=1, reason=difference.reason, failed=True)
    books.ending.failed = True


def _went_on(books: Books, worker: str, round_: int, doing: str) -> Difference | None:
    finish = books.finish
    if finish is None or finish.worker not in books.workers or worker == finish.worker or round_ < finish.round:
        return None
    return _ended_early(finish, worker, doing)


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


def _calls_differ(one: str, ones: Call, other: str, others: Call) -> Difference:
    return Difference(
        workers=(one, other),
        reason=(
            f"the scripts of {one} and {other} go different ways: {one} called {ones.doing}, {other} {others.doing}; "
            f"all workers have to call it, at the same place, not under `if run.is_leader` or what else differs"
        ),
    )


def _ended_early(early: Finish, other: str, doing: str) -> Difference:
    return Difference(
        workers=(early.worker, other),
        reason=(
            f"the script of {early.worker} ended after step {early.step}, that of {other} goes on with {doing}; "
            f"all workers have to end after the same step: decide it by what is equal on all of them, such as step.loss"
        ),
    )
