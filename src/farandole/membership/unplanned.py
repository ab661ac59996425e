"""Unplanned changes: a view is stopped, everyone who lives reports, and one answer says how the round goes on.

    stop       -> Stop to every participant: from their answers on, nothing moves
    suspect    a peer's accusation stops the view too; both sides of a broken pair may well be alive
    stopped    -> the answers, until everyone has given one or has been lost
    decide     convict and evict who can't share a view, then `recovery.decide`
    resume     -> Resume, or Demoted for who had no state yet, or Goodbye for who had already left

A loss meanwhile takes the lost worker out of the stop in progress; it starts no second one.
"""

from __future__ import annotations

from farandole.errors import ProtocolError
from farandole.membership import ending, recovery
from farandole.membership import messages as m
from farandole.membership.books import Books
from farandole.membership.records import Stopping
from farandole.membership.view import View


def without(books: Books, worker: str, cause: str, *, participant: bool) -> None:
    """What follows from `worker` not being there any more: a participant's end stops the view."""
    if books.savers:
        if worker in books.savers:
            books.savers.remove(worker)
            ending.save(books)
    elif books.stopping:
        books.stopping.waiting.discard(worker)
        books.stopping.reports.pop(worker, None)
        _decide_when_all_reported(books)
    elif participant and not books.everyone_finished():
        stop(books, f"{worker}: {cause}")


def stop(books: Books, cause: str) -> None:
    books.stops += 1
    participants = books.participants()
    books.stopping = Stopping(number=books.stops, waiting=set(participants), cause=cause)
    for worker in participants:
        books.send(worker, m.Stop(stop=books.stops))
    _decide_when_all_reported(books)


def suspect(books: Books, worker: str, message: m.Suspect) -> None:
    """`worker` has lost its connection to a peer, in any of the views that workers may still be in."""
    if books.savers or message.peer not in books.workers:
        return
    if books.stopping is None:
        if message.view not in [view.number for view in books.views()]:
            return
        stop(books, f"{worker} reports {message.peer}: {message.reason}")
    if books.stopping is not None:
        books.stopping.accusations[(worker, message.peer)] = message.reason


def stopped(books: Books, worker: str, report: m.Stopped) -> None:
    now = books.stopping
    known = [view.number for view in books.views()]
    if now and report.stop == now.number and report.level and report.view not in known:
        raise ProtocolError(f"it says that it holds the state in view {report.view}; the views are {known}")
    if now and report.stop == now.number and worker in now.waiting:
        now.waiting.discard(worker)
        now.reports[worker] = report
        _decide_when_all_reported(books)


def _decide_when_all_reported(books: Books) -> None:
    stop = books.stopping
    if stop is None or stop.waiting:
        return
    reports = {worker: stop.reports[worker] for worker in books.participants()}
    level = {worker for worker, report in reports.items() if report.level}
    for worker in recovery.convict(stop.accusations, tuple(reports), level):
        reason = next(reason for pair, reason in stop.accusations.items() if worker in pair)
        books.evict(worker, reason)
        del reports[worker]
        level.discard(worker)
    views = {view.number: view for view in books.views()}
    books.stopping = books.proposed = books.previous = None
    books.unlevel = set()
    emptied = any(not views[reports[worker].view].members for worker in level)
    if books.ending and (books.ending.failed or emptied):  # whoever is furthest has the state of a whole step
        books.savers = sorted(level, key=lambda w: (-reports[w].round, w))
        ending.save(books)
    elif level:
        _resume(books, stop, reports, recovery.decide(reports, views))
    else:
        _start_over(books, stop, reports)


def _resume(books: Books, stop: Stopping, reports: dict[str, m.Stopped], outcome: recovery.Outcome) -> None:
    view = books.view = View(number=books.next_number(), members=outcome.members, group=outcome.group)
    for worker in outcome.behind:
        books.evict(worker, "it does not hold a round that others have ended")
    for worker in outcome.dismissed:
        books.dismiss(worker, "left gracefully")
    for worker in outcome.unlevel:
        _demote(books, worker)
    resume = m.Resume(view=view, round=outcome.round, commit=outcome.commit, lineage=outcome.lineage)
    for worker in view.members:
        known = books.workers[worker]
        known.state = "finished" if known.state == "finished" else "member"
        known.switched = view.number
        books.send(worker, resume)
    books.record(
        "view", view=view.number, members=list(view.members), round=outcome.round,
        step=max(reports[w].step for w in view.members), cause=stop.cause,
        outcome="commit" if outcome.commit else "redo",
    )  # fmt: skip


def _start_over(books: Books, stop: Stopping, reports: dict[str, m.Stopped]) -> None:
    """Nobody who held the state is left: the next first view begins again."""
    if books.view is not None:
        books.record("state lost", reason=f"no worker that held the state is left ({stop.cause})")
        books.last_line = (-1, 0)
    books.view = None
    for worker in reports:
        _demote(books, worker)
    if books.ending:
        ending.save(books)


def _demote(books: Books, worker: str) -> None:
    books.workers[worker].state = "ready"
    books.send(worker, m.Demoted())
