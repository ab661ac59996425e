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

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from farandole.errors import ProtocolError
from farandole.protocol import events
from farandole.protocol import messages as m
from farandole.protocol.coordinator import disputes, failures, shutdown, state, verdicts
from farandole.protocol.coordinator.state import CoordinatorState, Ending, IssuedView, Shared, Stopping
from farandole.protocol.coordinator.verdicts import Verdict
from farandole.protocol.difference import differing
from farandole.protocol.messages import Stopped
from farandole.protocol.view import Lineage, View

# --- recovery ---------------------------------------------------------------------------------------------------------
#
# What happens to the round in hand when a view is stopped: the decision, as a pure function.
#
# Who knows what when:
#
# 1. A worker that has answered Stop neither ends its round nor switches views until it is told how to go on. So the
#    reports describe a state that stands still; workers that died need not be considered, whatever they did last.
# 2. A control word is sent only by a holder of every reduced bucket, and a round ends only with all words (R1).
#    So if anyone, dead or alive, has ended round r, every survivor holds round r. Hence the survivors' rounds differ by
#    at most one, and a survivor that is behind holds the round that it has not ended: it *commits* it.
# 3. A view is applied only when all words of a round named it (R2), so if any survivor has applied view v+1, every
#    member of both views has v+1's connections standing, and a member of v that is not in v+1 is a leaver whose
#    part is done: everything that it computed is in a round that all survivors hold.
# 4. If all survivors are in round r and all hold it, they commit it. If one does not, all *redo* its exchange from
#    their retained partial sums: the tree's order makes the redone sum equal, bit for bit, to the lost one.
# 5. The shards of a round in hand are dealt by its *lineage*: the first tuple of workers got the round's shards by
#    the plan, in the shares of the view in which the round began, and each later tuple, a subset of the one before,
#    inherits what the missing held. Coordinators issue recovery views one after the other, so the lineages of the
#    survivors are prefixes of one another, and the longest keeps everything that anyone may have computed. If nobody
#    who lives has begun the round under the newest view, nothing of it is computed, and the survivors are dealt it
#    anew.
#
# That holds of honest reports. Which ones are no such reports is found before: `issued` and `plausible`.


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the survivors go on, the rounds after this one by `shares`.

    `dismissed` are leavers whose switch had been agreed; `unsynced` had no state yet.
    """

    members: tuple[str, ...]
    group: int
    shares: tuple[int, ...]
    round: int
    commit: bool
    lineage: Lineage
    dismissed: tuple[str, ...]
    unsynced: tuple[str, ...]


def decide(reports: Mapping[str, Stopped], *, again: bool = False) -> Outcome:
    """The survivors' way on, where at least one of them holds the state.

    `reports`: their answers, of views that were issued, no two of which contradict each other (`issued`, `plausible`).
    `again`: what all hold is not to be committed, since somebody has seen that the replicas differ in it.
    """
    synced = {worker: report for worker, report in reports.items() if report.synced}
    newest = max((report.view for report in synced.values() if report.view), key=lambda view: view.number)
    survivors = tuple(w for w in newest.members if w in synced)
    dismissed = tuple(w for w in synced if w not in newest.members)
    if not survivors:  # only leavers are left who had done their part: one of them takes the run up again
        dismissed = tuple(sorted(dismissed, key=lambda w: -synced[w].round))
        survivors, dismissed = dismissed[:1], dismissed[1:]
    last = max(synced[w].round for w in survivors)
    at_last = [synced[w] for w in survivors if synced[w].round == last]
    commit = not again and len(at_last) == len(survivors) and all(report.holds for report in at_last)
    lineages = [report.lineage for report in at_last if report.view == newest]
    longest = max(lineages, key=lambda lineage: len(lineage.sets), default=None)
    lineage = newest.lineage(survivors)  # dealt anew
    if longest and not commit:
        lineage = Lineage(sets=(*longest.sets, survivors), shares=longest.shares)
    return Outcome(
        members=survivors,
        group=newest.group,
        shares=newest.shares_of(survivors),
        round=last,
        commit=commit,
        lineage=lineage,
        dismissed=dismissed,
        unsynced=tuple(w for w in reports if w not in synced),
    )


# --- decision ---------------------------------------------------------------------------------------------------------
#
# What follows from a stop, once everyone within reach has answered and the others can be done without.
#
# if_ready   evict whose report can't be true (`plausible`) and who can't share a view (`suspicion`); then
#            `recovery.decide`
# resume     -> Resume, or Demoted for who had no state yet, or Goodbye for who had already left
# save       ... where the run is on its way out: whoever is furthest has the state of a whole step
# start over ... where nobody who held the state is left


def recover_if_ready(books: CoordinatorState) -> None:
    """Decide once everyone within reach has answered and the others can be done without."""
    stop = books.stopping
    if stop is None or any(worker not in stop.overdue for worker in stop.waiting):
        return
    reports = _in_order(books, stop)
    heard = {worker: report for worker, report in reports.items() if worker not in stop.expelled}
    out = disputes.outvoted(
        heard, books.proposed, disputes.benefits_used_up(books, heard), stop.apart if len(stop.apart) > 1 else ()
    )
    for each in out:
        del reports[each.worker]
    if not _fenced(books, stop, reports):
        if not stop.told:
            stop.told = True
            missing = sorted(stop.waiting)
            books.record(events.OutOfReachEvent(workers=tuple(missing), reason="they may train on: waiting for them"))
        return
    for worker, why in {**stop.overdue, **stop.expelled}.items():
        if worker in books.workers and (worker in stop.expelled or worker not in stop.reports):
            books.evict(worker, why)
            reports.pop(worker, None)
    for each in out:
        if each.worker in books.workers:
            _outvote(books, each)
    _decide(books, stop, reports)


def _in_order(books: CoordinatorState, stop: Stopping) -> dict[str, m.Stopped]:
    """The answers, the longest-standing worker's first."""
    ranks = {worker: rank for rank, worker in enumerate(books.participants())}
    answered = sorted((w for w in stop.reports if w in books.workers), key=lambda w: ranks.get(w, len(ranks)))
    return {worker: stop.reports[worker] for worker in answered}


def _outvote(books: CoordinatorState, out: disputes.Outvoted) -> None:
    """Its report can't be true with the others'. Against one it may be an honest one that goes."""
    other, *more = out.others
    if more:
        books.ban(out.worker)
    else:
        disputes.give_benefit(books, other)
    books.evict(out.worker, f"{' and '.join(out.others)} say otherwise: {out.reason}")


def _fenced(books: CoordinatorState, stop: Stopping, reports: dict[str, m.Stopped]) -> bool:
    """Whether nobody can go on in the newest view that those who have answered know of, or in a newer one.

    See `reconnection`, 3. A leaver that has answered knows of a view without holding anybody up in it.
    """
    known = [report.view for report in reports.values() if report.synced and report.view]
    newest = max((view.number for view in known), default=0)
    synced = {worker for worker, report in reports.items() if report.synced}
    settled = {*stop.reports, *books.dead}
    open_ = [view for view in (*known, *books.views()) if view.number >= newest and view.members]
    return all(
        synced.intersection(view.members) or settled.issuperset(w for w in view.members if w in books.workers)
        for view in open_
    )


def _decide(books: CoordinatorState, stop: Stopping, reports: dict[str, m.Stopped]) -> None:
    synced = {worker for worker, report in reports.items() if report.synced}
    unheard = bool(stop.failed) and len(stop.apart) < disputes.majority(len(synced))
    if unheard:  # more hold the state than was known: who sees it in the round that is done again says so again
        stop.failed.clear()
    difference = differing(reports)
    if difference is not None:
        books.differ(difference)
    for worker in _convicted(books, stop, tuple(reports), synced):
        del reports[worker]
        synced.discard(worker)
    for worker in failures.leavers_for_data(books, reports, stop.failed):
        del reports[worker]
        synced.discard(worker)
    verdict = _judge(books, stop, reports, synced)
    books.stopping = books.proposed = books.previous = None
    state.keep_issued(books, [report.view for report in reports.values()])
    books.unsynced, books.unswitched, books.first_calls = set(), set(), {}
    for worker in synced:
        if books.workers[worker].state != "finished":
            books.workers[worker].state = "member"
    emptied = any(view is not None and not view.members for view in (reports[worker].view for worker in synced))
    holders = {worker: reports[worker] for worker in reports if worker in synced}
    if books.ending and (books.ending.failed or emptied):  # whoever is furthest has the state of a whole step
        if not books.ending.apart and (dispute := disputes.disputed(books, holders)):
            told, message = dispute
            disputes.on_replicas_differ(
                books, message.workers, f"at step {message.step}", told[0] if len(told) == 1 else ""
            )
        hung = failures.hung_workers(books)
        books.savers = sorted(synced, key=lambda w: (-reports[w].round, w in hung, w))
        shutdown.ask_to_save(books)
    elif synced:
        disputed = unheard or verdict.again is not None or disputes.disputed(books, holders) is not None
        _resume(books, stop, reports, decide(reports, again=disputed), verdict)
    else:
        _start_over(books, stop, reports)


def _convicted(books: CoordinatorState, stop: Stopping, answered: tuple[str, ...], synced: set[str]) -> list[str]:
    """Those who can't share a view with others: they are out."""
    confirmed = disputes.witnesses(books, stop.stalls, answered)
    spent = disputes.benefits_used_up(books, answered)
    out = disputes.convict(tuple(stop.accusations), answered, synced, confirmed, spent)
    for each in out:
        if each.alone and (each.others[0], each.worker) in stop.accusations:
            disputes.give_benefit(books, each.others[0])
        (accuser, accused), why = next((pair, why) for pair, why in stop.accusations.items() if each.worker in pair)
        if each.alone and accused not in stop.stalls:
            why += f" ({accuser} says so of {accused}, and nobody else can tell which of the two is at fault)"
        books.evict(each.worker, why)
    return [each.worker for each in out]


def _judge(books: CoordinatorState, stop: Stopping, reports: dict[str, m.Stopped], synced: set[str]) -> Verdict:
    """What they have found of one shard, where it differs, and joiners whose replica does: who is wrong is out."""
    verdict = verdicts.judge({worker: reports[worker] for worker in reports if worker in synced}, stop.failed)
    verdicts.record_verdict(books, verdict)
    for worker in (*verdict.refused, *verdict.wrong):
        del reports[worker]
        synced.discard(worker)
    return verdict


def _resume(
    books: CoordinatorState, stop: Stopping, reports: dict[str, m.Stopped], outcome: Outcome, verdict: Verdict
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
    books.issued.append(IssuedView(view=view, round=entered, lineage=None if outcome.commit else lineage))
    resume = m.Resume(view=view, round=outcome.round, commit=outcome.commit, lineage=lineage)
    for worker in view.members:
        books.send(worker, resume)
    books.view_began = max(reports[w].step for w in view.members)
    disputes.drop_stale_reports(books)
    books.record(events.ViewEvent(view=view.number, members=view.members, round=outcome.round, step=books.view_began,
        cause=stop.cause, outcome="commit" if outcome.commit else "redo"))  # fmt: skip
    shutdown.appoint_saver(books)


def _start_over(books: CoordinatorState, stop: Stopping, reports: dict[str, m.Stopped]) -> None:
    """Nobody who held the state is left: the next first view begins again."""
    if books.view is not None and books.view.members:  # the empty one's workers have done their part
        books.record(events.StateLostEvent(reason=f"no worker that held the state is left ({stop.cause})"))
        books.last_line, books.not_finite, books.corroborations = (-1, 0), -1, {}
        books.waiting.clear()
        failures.on_all_lost(books, stop.cause)
    books.view, books.saver = None, ""
    for worker in reports:
        _demote(books, worker)
    if books.ending:
        shutdown.ask_to_save(books)


def _demote(books: CoordinatorState, worker: str) -> None:
    demoted = books.workers[worker]
    demoted.state, demoted.saves, demoted.step = "ready", False, -1
    books.send(worker, m.Demoted())


# --- unplanned --------------------------------------------------------------------------------------------------------

FIRST_STEP = 10  # stall limits that a worker may take for the first step in which it computes


def continue_without(books: CoordinatorState, worker: str, cause: str, *, participant: bool) -> None:
    """What follows from `worker` not being there any more: a participant's end stops the view."""
    if books.savers:
        if worker in books.savers:
            books.savers.remove(worker)
            shutdown.ask_to_save(books)
    elif books.stopping:
        books.stopping.waiting.discard(worker)
        books.stopping.reports.pop(worker, None)
        recover_if_ready(books)
    elif participant and not books.everyone_finished():
        stop_view(books, f"{worker}: {cause}")


def stop_view(books: CoordinatorState, cause: str) -> None:
    books.stops += 1
    participants = books.participants()
    books.stopping = Stopping(number=books.stops, waiting=set(participants), cause=cause)
    message = m.Stop(stop=books.stops)
    for worker in participants:
        books.send(worker, message)
    recover_if_ready(books)


def stop_for_failure(books: CoordinatorState, reason: str) -> None:
    """Nobody trains on: the run ends with what the newest whole step has left."""
    books.ending = Ending(code=1, reason=reason, failed=True)
    if books.view is None:
        shutdown.end(books)
    elif books.stopping is None:
        stop_view(books, reason)


def on_shared_report(books: CoordinatorState, workers: list[str], message: Shared) -> None:
    """What everyone has seen, as enough of them say (`testimony`)."""
    if isinstance(message, m.Differs):
        on_differs(books, workers, message)
    elif isinstance(message, m.ShardsDiffer):
        on_shards_differ(books, workers, message)
    else:
        on_not_finite(books, workers[0], message)


def on_not_finite(books: CoordinatorState, worker: str, message: m.NotFinite) -> None:
    """A step's loss is not finite: an event, for the first of all who say so.

    With `stop_on_nan` none of them goes on: each holds the state as of that step's beginning, and waits.
    """
    if not books.has_part(worker):
        return
    if message.step > books.not_finite:
        books.not_finite = message.step
        books.record(events.NotFiniteEvent(worker=worker, step=message.step, loss=message.loss))
    if books.settings.stop_on_nan and not books.savers and not (books.ending and books.ending.failed):
        stop_for_failure(books, f"the loss of step {message.step} is {message.loss}, and --stop-on-nan was asked for")


def on_suspect(books: CoordinatorState, worker: str, message: m.Suspect) -> None:
    """`worker` has lost its connection to a peer, in any of the views that workers may still be in."""
    if books.savers or message.peer not in books.workers or _is_warming_up(books, message):
        return
    if not disputes.may_accuse(books, worker, message.view, message.peer) or disputes.denied(books, message):
        return
    if message.waited_s and disputes.waited_for(books, message.peer, message.view) != message.peer:
        return
    reason = f"{message.reason}: waited for it for {message.waited_s} s" if message.waited_s else message.reason
    if books.stopping is None:
        if message.view not in [view.number for view in books.views()]:
            return
        if message.waited_s:  # its heartbeats may well come
            books.send(message.peer, m.Stacks(reason=f"{worker} reports this worker: {reason}"))
        stop_view(books, f"{worker} reports {message.peer}: {reason}")
    if books.stopping is not None:
        books.stopping.accusations[(worker, message.peer)] = reason
        if message.waited_s:
            books.stopping.stalls.add(message.peer)
        if message.peer in books.stopping.waiting and not books.workers[message.peer].connected:
            expel_if_overdue(books, message.peer, f"its connection closed, and {worker} has lost it too: {reason}")


def _is_warming_up(books: CoordinatorState, message: m.Suspect) -> bool:
    """Whether the peer is waited for in the first step that it computes, and may still be compiling.

    Who waits says so again with each heartbeat: once it has waited for too long even for that, it is believed.
    """
    limit = FIRST_STEP * books.settings.stall_s
    return 0 < message.waited_s <= limit and not books.workers[message.peer].computed


def on_held_up(books: CoordinatorState, worker: str, beat: m.Heartbeat) -> None:
    """`worker` has waited for a peer for too long, and may be waited for by it: they can't reach each other then.

    Either of them alone may be what a third one, or its own work, holds up: that is for the stall limit.
    """
    peer = books.workers.get(beat.waits_for)
    if (
        peer is None
        or books.stopping
        or books.over
        or (peer.heartbeat.waits_for, peer.heartbeat.view) != (worker, beat.view)
    ):
        return
    for one, other in ((worker, peer.id), (peer.id, worker)):
        reason = f"{one} and {other} wait for each other: nothing gets through between them"
        on_suspect(books, one, m.Suspect(view=beat.view, peer=other, reason=reason))


def expel_if_overdue(books: CoordinatorState, worker: str, why: str) -> None:
    """A participant is out of reach, dead or not: it is not waited for if it is safe to go on without it."""
    if books.stopping is None:
        stop_view(books, f"{worker}: {why}")
    if books.stopping is not None and worker in books.workers:
        books.stopping.overdue[worker] = why
        recover_if_ready(books)


def expel(books: CoordinatorState, worker: str, why: str) -> None:
    """A participant has to go, whatever it answers; it is kept in the books until the decision, which asks for it."""
    if books.stopping is None:
        stop_view(books, f"{worker}: {why}")
    if books.stopping is not None:
        books.stopping.expelled[worker] = why
        books.record(events.ExpelledEvent(worker=worker, reason=why))


def on_differs(books: CoordinatorState, workers: list[str], message: m.Differs) -> None:
    """The words of a round say that the replicas differ, and nobody can end it; not even a run that ends anyway."""
    known = books.ending is not None and books.ending.apart
    if books.settings.bits == "any":
        return  # where they may, only who is mistaken says so
    if books.savers or known or not any(books.has_part(worker) for worker in workers):
        return
    if verdicts.on_trial(books, message):
        if books.stopping is None:
            stop_view(books, "a joiner's replica differs")
        if books.stopping is not None:
            books.stopping.failed |= dict.fromkeys(message.workers, message.step)
    else:
        disputes.on_replicas_differ(
            books, message.workers, f"at step {message.step}", told=workers[0] if len(workers) == 1 else ""
        )
        if books.stopping is None:
            stop_view(books, "the replicas differ")
    if books.stopping is not None:
        books.stopping.apart |= set(workers)


def on_shards_differ(books: CoordinatorState, workers: list[str], message: m.ShardsDiffer) -> None:
    """The words of a round say that two have found different things of one shard, and nobody can end it."""
    if books.stopping is None and not books.savers and any(books.has_part(worker) for worker in workers):
        stop_view(books, f"two workers have found different things of one shard in step {message.step}")


def on_stopped(books: CoordinatorState, worker: str, report: m.Stopped) -> None:
    """An answer to the stop.

    Raises:
        ProtocolError: it names what was never issued.
    """
    now = books.stopping
    if now and report.stop == now.number and worker in now.waiting:
        if why := state.issued_denial(books, worker, report):
            raise ProtocolError(why)
        now.waiting.discard(worker)
        now.overdue.pop(worker, None)
        now.reports[worker] = report
        if report.synced:
            failures.note_progress(books, worker, report.step)
        recover_if_ready(books)
