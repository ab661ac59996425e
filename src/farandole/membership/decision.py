"""What follows from a stop, once everyone within reach has answered and the others can be done without.

if_ready   evict whose report can't be true (`plausible`) and who can't share a view (`suspicion`); then
           `recovery.decide`
resume     -> Resume, or Demoted for who had no state yet, or Goodbye for who had already left
save       ... where the run is on its way out: whoever is furthest has the state of a whole step
start over ... where nobody who held the state is left
"""

from __future__ import annotations

import msgspec

from farandole.membership import (
    ending,
    events,
    feeding,
    issued,
    losses,
    plausible,
    recovery,
    replicas,
    saving,
    standstill,
    suspicion,
    testimony,
    verdicts,
)
from farandole.membership import messages as m
from farandole.membership.books import Books
from farandole.membership.difference import differing
from farandole.membership.issued import Issued
from farandole.membership.records import Stopping
from farandole.membership.verdicts import Verdict
from farandole.membership.view import View


def if_ready(books: Books) -> None:
    """Decide once everyone within reach has answered and the others can be done without."""
    stop = books.stopping
    if stop is None or any(worker not in stop.overdue for worker in stop.waiting):
        return
    reports = _in_order(books, stop)
    heard = {worker: report for worker, report in reports.items() if worker not in stop.expelled}
    out = plausible.outvoted(
        heard, books.proposed, suspicion.spent(books, heard), stop.apart if len(stop.apart) > 1 else ()
    )
    for each in out:
        del reports[each.worker]
    if not _fenced(books, stop, reports):
        if not stop.told:
            stop.told = True
            missing = sorted(stop.waiting)
            books.record(events.OutOfReach(workers=tuple(missing), reason="they may train on: waiting for them"))
        return
    for worker, why in {**stop.overdue, **stop.expelled}.items():
        if worker in books.workers and (worker in stop.expelled or worker not in stop.reports):
            books.evict(worker, why)
            reports.pop(worker, None)
    for each in out:
        if each.worker in books.workers:
            _outvote(books, each)
    _decide(books, stop, reports)


def _in_order(books: Books, stop: Stopping) -> dict[str, m.Stopped]:
    """The answers, the longest-standing worker's first."""
    ranks = {worker: rank for rank, worker in enumerate(books.participants())}
    answered = sorted((w for w in stop.reports if w in books.workers), key=lambda w: ranks.get(w, len(ranks)))
    return {worker: stop.reports[worker] for worker in answered}


def _outvote(books: Books, out: plausible.Outvoted) -> None:
    """Its report can't be true with the others'. Against one it may be an honest one that goes."""
    other, *more = out.others
    if more:
        books.bar(out.worker)
    else:
        suspicion.benefits(books, other)
    books.evict(out.worker, f"{' and '.join(out.others)} say otherwise: {out.reason}")


def _fenced(books: Books, stop: Stopping, reports: dict[str, m.Stopped]) -> bool:
    """Whether nobody can go on in the newest view that those who have answered know of, or in a newer one.

    See `reconnection`, 3. A leaver that has answered knows of a view without holding anybody up in it.
    """
    known = [report.view for report in reports.values() if report.synced and report.view]
    newest = max((view.number for view in known), default=0)
    synced = {worker for worker, report in reports.items() if report.synced}
    settled = {*stop.reports, *books.gone}
    open_ = [view for view in (*known, *books.views()) if view.number >= newest and view.members]
    return all(
        synced.intersection(view.members) or settled.issuperset(w for w in view.members if w in books.workers)
        for view in open_
    )


def _decide(books: Books, stop: Stopping, reports: dict[str, m.Stopped]) -> None:
    synced = {worker for worker, report in reports.items() if report.synced}
    unheard = bool(stop.failed) and len(stop.apart) < testimony.enough(len(synced))
    if unheard:  # more hold the state than was known: who sees it in the round that is done again says so again
        stop.failed.clear()
    difference = differing(reports)
    if difference is not None:
        books.differ(difference)
    for worker in _convicted(books, stop, tuple(reports), synced):
        del reports[worker]
        synced.discard(worker)
    for worker in feeding.leave(books, reports, stop.failed):
        del reports[worker]
        synced.discard(worker)
    verdict = _judge(books, stop, reports, synced)
    books.stopping = books.proposed = books.previous = None
    issued.keep(books, [report.view for report in reports.values()])
    books.unsynced, books.unswitched, books.begun = set(), set(), {}
    for worker in synced:
        if books.workers[worker].state != "finished":
            books.workers[worker].state = "member"
    emptied = any(view is not None and not view.members for view in (reports[worker].view for worker in synced))
    holders = {worker: reports[worker] for worker in reports if worker in synced}
    if books.ending and (books.ending.failed or emptied):  # whoever is furthest has the state of a whole step
        if not books.ending.apart and (dispute := testimony.disputed(books, holders)):
            told, message = dispute
            replicas.differ(books, message.workers, f"at step {message.step}", told[0] if len(told) == 1 else "")
        hung = standstill.hung(books)
        books.savers = sorted(synced, key=lambda w: (-reports[w].round, w in hung, w))
        ending.save(books)
    elif synced:
        disputed = unheard or verdict.again is not None or testimony.disputed(books, holders) is not None
        _resume(books, stop, reports, recovery.decide(reports, again=disputed), verdict)
    else:
        _start_over(books, stop, reports)


def _convicted(books: Books, stop: Stopping, answered: tuple[str, ...], synced: set[str]) -> list[str]:
    """Those who can't share a view with others: they are out."""
    confirmed = suspicion.witnesses(books, stop.stalls, answered)
    spent = suspicion.spent(books, answered)
    out = suspicion.convict(tuple(stop.accusations), answered, synced, confirmed, spent)
    for each in out:
        if each.alone and (each.others[0], each.worker) in stop.accusations:
            suspicion.benefits(books, each.others[0])
        (accuser, accused), why = next((pair, why) for pair, why in stop.accusations.items() if each.worker in pair)
        if each.alone and accused not in stop.stalls:
            why += f" ({accuser} says so of {accused}, and nobody else can tell which of the two is at fault)"
        books.evict(each.worker, why)
    return [each.worker for each in out]


def _judge(books: Books, stop: Stopping, reports: dict[str, m.Stopped], synced: set[str]) -> Verdict:
    """What they have found of one shard, where it differs, and joiners whose replica does: who is wrong is out."""
    verdict = verdicts.of({worker: reports[worker] for worker in reports if worker in synced}, stop.failed)
    verdicts.told(books, verdict)
    for worker in (*verdict.refused, *verdict.wrong):
        del reports[worker]
        synced.discard(worker)
    return verdict


def _resume(
    books: Books, stop: Stopping, reports: dict[str, m.Stopped], outcome: recovery.Outcome, verdict: Verdict
) -> None:
    view = books.view = View(
        number=books.next_number(), members=outcome.members, group=outcome.group, shares=outcome.shares,
        hosts=books.hosts_of(outcome.members),
        unproven=verdicts.unproven({w: reports[w] for w in outcome.members}, commit=outcome.commit),
        undecided=any(set(outcome.members) <= set(pair) for pair in verdict.undecided),
    )  # fmt: skip
    lineage = msgspec.structs.replace(outcome.lineage, again=None if outcome.commit else verdict.again)
    for worker in outcome.dismissed:
        books.dismiss(worker, "left gracefully")
    for worker in outcome.unsynced:
        _demote(books, worker)
    entered = outcome.round + 1 if outcome.commit else outcome.round
    books.issued.append(Issued(view=view, round=entered, lineage=None if outcome.commit else lineage))
    resume = m.Resume(view=view, round=outcome.round, commit=outcome.commit, lineage=lineage)
    for worker in view.members:
        books.send(worker, resume)
    books.began = max(reports[w].step for w in view.members)
    testimony.stale(books)
    books.record(events.View(view=view.number, members=view.members, round=outcome.round, step=books.began,
        cause=stop.cause, outcome="commit" if outcome.commit else "redo"))  # fmt: skip
    saving.appoint(books)


def _start_over(books: Books, stop: Stopping, reports: dict[str, m.Stopped]) -> None:
    """Nobody who held the state is left: the next first view begins again."""
    if books.view is not None and books.view.members:  # the empty one's workers have done their part
        books.record(events.StateLost(reason=f"no worker that held the state is left ({stop.cause})"))
        books.last_line, books.not_finite, books.claims = (-1, 0), -1, {}
        books.waiting.clear()
        losses.everyone(books, stop.cause)
    books.view, books.saver = None, ""
    for worker in reports:
        _demote(books, worker)
    if books.ending:
        ending.save(books)


def _demote(books: Books, worker: str) -> None:
    demoted = books.workers[worker]
    demoted.state, demoted.saves, demoted.step = "ready", False, -1
    books.send(worker, m.Demoted())
