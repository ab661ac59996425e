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
from farandole.protocol.coordinator import disputes, failures, shutdown, verdicts
from farandole.protocol.coordinator.state import (
    CoordinatorState,
    Ending,
    IssuedView,
    Shared,
    Stopping,
    issued_denial,
    keep_issued,
)
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


def recover_if_ready(state: CoordinatorState) -> None:
    """Decide once everyone within reach has answered and the others can be done without."""
    stop = state.stopping
    if stop is None or any(worker not in stop.overdue for worker in stop.waiting):
        return
    reports = _in_order(state, stop)
    heard = {worker: report for worker, report in reports.items() if worker not in stop.expelled}
    out = disputes.outvoted(
        heard, state.proposed, disputes.benefits_used_up(state, heard), stop.apart if len(stop.apart) > 1 else ()
    )
    for each in out:
        del reports[each.worker]
    if not _fenced(state, stop, reports):
        if not stop.told:
            stop.told = True
            missing = sorted(stop.waiting)
            state.record(events.OutOfReachEvent(workers=tuple(missing), reason="they may train on: waiting for them"))
        return
    for worker, why in {**stop.overdue, **stop.expelled}.items():
        if worker in state.workers and (worker in stop.expelled or worker not in stop.reports):
            state.evict(worker, why)
            reports.pop(worker, None)
    for each in out:
        if each.worker in state.workers:
            _outvote(state, each)
    _decide(state, stop, reports)


def _in_order(state: CoordinatorState, stop: Stopping) -> dict[str, m.Stopped]:
    """The answers, the longest-standing worker's first."""
    ranks = {worker: rank for rank, worker in enumerate(state.participants())}
    answered = sorted((w for w in stop.reports if w in state.workers), key=lambda w: ranks.get(w, len(ranks)))
    return {worker: stop.reports[worker] for worker in answered}


def _outvote(state: CoordinatorState, out: disputes.Outvoted) -> None:
    """Its report can't be true with the others'. Against one it may be an honest one that goes."""
    other, *more = out.others
    if more:
        state.ban(out.worker)
    else:
        disputes.give_benefit(state, other)
    state.evict(out.worker, f"{' and '.join(out.others)} say otherwise: {out.reason}")


def _fenced(state: CoordinatorState, stop: Stopping, reports: dict[str, m.Stopped]) -> bool:
    """Whether nobody can go on in the newest view that those who have answered know of, or in a newer one.

    See `reconnection`, 3. A leaver that has answered knows of a view without holding anybody up in it.
    """
    known = [report.view for report in reports.values() if report.synced and report.view]
    newest = max((view.number for view in known), default=0)
    synced = {worker for worker, report in reports.items() if report.synced}
    settled = {*stop.reports, *state.dead}
    open_ = [view for view in (*known, *state.views()) if view.number >= newest and view.members]
    return all(
        synced.intersection(view.members) or settled.issuperset(w for w in view.members if w in state.workers)
        for view in open_
    )


def _decide(state: CoordinatorState, stop: Stopping, reports: dict[str, m.Stopped]) -> None:
    synced = {worker for worker, report in reports.items() if report.synced}
    unheard = bool(stop.failed) and len(stop.apart) < disputes.majority(len(synced))
    if unheard:  # more hold the state than was known: who sees it in the round that is done again says so again
        stop.failed.clear()
    difference = differing(reports)
    if difference is not None:
        state.differ(difference)
    for worker in _convicted(state, stop, tuple(reports), synced):
        del reports[worker]
        synced.discard(worker)
    for worker in failures.leavers_for_data(state, reports, stop.failed):
        del reports[worker]
        synced.discard(worker)
    verdict = _judge(state, stop, reports, synced)
    state.stopping = state.proposed = state.previous = None
    keep_issued(state, [report.view for report in reports.values()])
    state.unsynced, state.unswitched, state.first_calls = set(), set(), {}
    for worker in synced:
        if state.workers[worker].state != "finished":
            state.workers[worker].state = "member"
    emptied = any(view is not None and not view.members for view in (reports[worker].view for worker in synced))
    holders = {worker: reports[worker] for worker in reports if worker in synced}
    if state.ending and (state.ending.failed or emptied):  # whoever is furthest has the state of a whole step
        if not state.ending.apart and (dispute := disputes.disputed(state, holders)):
            told, message = dispute
            disputes.on_replicas_differ(
                state, message.workers, f"at step {message.step}", told[0] if len(told) == 1 else ""
            )
        hung = failures.hung_workers(state)
        state.savers = sorted(synced, key=lambda w: (-reports[w].round, w in hung, w))
        shutdown.ask_to_save(state)
    elif synced:
        disputed = unheard or verdict.again is not None or disputes.disputed(state, holders) is not None
        _resume(state, stop, reports, decide(reports, again=disputed), verdict)
    else:
        _start_over(state, stop, reports)


def _convicted(state: CoordinatorState, stop: Stopping, answered: tuple[str, ...], synced: set[str]) -> list[str]:
    """Those who can't share a view with others: they are out."""
    confirmed = disputes.witnesses(state, stop.stalls, answered)
    spent = disputes.benefits_used_up(state, answered)
    out = disputes.convict(tuple(stop.accusations), answered, synced, confirmed, spent)
    for each in out:
        if each.alone and (each.others[0], each.worker) in stop.accusations:
            disputes.give_benefit(state, each.others[0])
        (accuser, accused), why = next((pair, why) for pair, why in stop.accusations.items() if each.worker in pair)
        if each.alone and accused not in stop.stalls:
            why += f" ({accuser} says so of {accused}, and nobody else can tell which of the two is at fault)"
        state.evict(each.worker, why)
    return [each.worker for each in out]


def _judge(state: CoordinatorState, stop: Stopping, reports: dict[str, m.Stopped], synced: set[str]) -> Verdict:
    """What they have found of one shard, where it differs, and joiners whose replica does: who is wrong is out."""
    verdict = verdicts.judge({worker: reports[worker] for worker in reports if worker in synced}, stop.failed)
    verdicts.record_verdict(state, verdict)
    for worker in (*verdict.refused, *verdict.wrong):
        del reports[worker]
        synced.discard(worker)
    return verdict


def _resume(
    state: CoordinatorState, stop: Stopping, reports: dict[str, m.Stopped], outcome: Outcome, verdict: Verdict
) -> None:
    view = state.view = View(
        number=state.next_number(), members=outcome.members, group=outcome.group, shares=outcome.shares,
        hosts=state.hosts_of(outcome.members),
        unproven=verdicts.unproven({w: reports[w] for w in outcome.members}, commit=outcome.commit),
        undecided=any(set(outcome.members) <= set(pair) for pair in verdict.undecided),
    )  # fmt: skip
    lineage = msgspec.structs.replace(outcome.lineage, again=None if outcome.commit else verdict.again)
    for worker in outcome.dismissed:
        state.dismiss(worker, "left gracefully")
    for worker in outcome.unsynced:
        _demote(state, worker)
    entered = outcome.round + 1 if outcome.commit else outcome.round
    state.issued.append(IssuedView(view=view, round=entered, lineage=None if outcome.commit else lineage))
    resume = m.Resume(view=view, round=outcome.round, commit=outcome.commit, lineage=lineage)
    for worker in view.members:
        state.send(worker, resume)
    state.view_began = max(reports[w].step for w in view.members)
    disputes.drop_stale_reports(state)
    state.record(events.ViewEvent(view=view.number, members=view.members, round=outcome.round, step=state.view_began,
        cause=stop.cause, outcome="commit" if outcome.commit else "redo"))  # fmt: skip
    shutdown.appoint_saver(state)


def _start_over(state: CoordinatorState, stop: Stopping, reports: dict[str, m.Stopped]) -> None:
    """Nobody who held the state is left: the next first view begins again."""
    if state.view is not None and state.view.members:  # the empty one's workers have done their part
        state.record(events.StateLostEvent(reason=f"no worker that held the state is left ({stop.cause})"))
        state.last_line, state.not_finite, state.corroborations = (-1, 0), -1, {}
        state.waiting.clear()
        failures.on_all_lost(state, stop.cause)
    state.view, state.saver = None, ""
    for worker in reports:
        _demote(state, worker)
    if state.ending:
        shutdown.ask_to_save(state)


def _demote(state: CoordinatorState, worker: str) -> None:
    demoted = state.workers[worker]
    demoted.state, demoted.saves, demoted.step = "ready", False, -1
    state.send(worker, m.Demoted())


# --- unplanned --------------------------------------------------------------------------------------------------------

FIRST_STEP = 10  # stall limits that a worker may take for the first step in which it computes


def continue_without(state: CoordinatorState, worker: str, cause: str, *, participant: bool) -> None:
    """What follows from `worker` not being there any more: a participant's end stops the view."""
    if state.savers:
        if worker in state.savers:
            state.savers.remove(worker)
            shutdown.ask_to_save(state)
    elif state.stopping:
        state.stopping.waiting.discard(worker)
        state.stopping.reports.pop(worker, None)
        recover_if_ready(state)
    elif participant and not state.everyone_finished():
        stop_view(state, f"{worker}: {cause}")


def stop_view(state: CoordinatorState, cause: str) -> None:
    state.stops += 1
    participants = state.participants()
    state.stopping = Stopping(number=state.stops, waiting=set(participants), cause=cause)
    message = m.Stop(stop=state.stops)
    for worker in participants:
        state.send(worker, message)
    recover_if_ready(state)


def stop_for_failure(state: CoordinatorState, reason: str) -> None:
    """Nobody trains on: the run ends with what the newest whole step has left."""
    state.ending = Ending(code=1, reason=reason, failed=True)
    if state.view is None:
        shutdown.end(state)
    elif state.stopping is None:
        stop_view(state, reason)


def on_shared_report(state: CoordinatorState, workers: list[str], message: Shared) -> None:
    """What everyone has seen, as enough of them say (`testimony`)."""
    if isinstance(message, m.Differs):
        on_differs(state, workers, message)
    elif isinstance(message, m.ShardsDiffer):
        on_shards_differ(state, workers, message)
    else:
        on_not_finite(state, workers[0], message)


def on_not_finite(state: CoordinatorState, worker: str, message: m.NotFinite) -> None:
    """A step's loss is not finite: an event, for the first of all who say so.

    With `stop_on_nan` none of them goes on: each holds the state as of that step's beginning, and waits.
    """
    if not state.has_part(worker):
        return
    if message.step > state.not_finite:
        state.not_finite = message.step
        state.record(events.NotFiniteEvent(worker=worker, step=message.step, loss=message.loss))
    if state.settings.stop_on_nan and not state.savers and not (state.ending and state.ending.failed):
        stop_for_failure(state, f"the loss of step {message.step} is {message.loss}, and --stop-on-nan was asked for")


def on_suspect(state: CoordinatorState, worker: str, message: m.Suspect) -> None:
    """`worker` has lost its connection to a peer, in any of the views that workers may still be in."""
    if state.savers or message.peer not in state.workers or _is_warming_up(state, message):
        return
    if not disputes.may_accuse(state, worker, message.view, message.peer) or disputes.denied(state, message):
        return
    if message.waited_s and disputes.waited_for(state, message.peer, message.view) != message.peer:
        return
    reason = f"{message.reason}: waited for it for {message.waited_s} s" if message.waited_s else message.reason
    if state.stopping is None:
        if message.view not in [view.number for view in state.views()]:
            return
        if message.waited_s:  # its heartbeats may well come
            state.send(message.peer, m.Stacks(reason=f"{worker} reports this worker: {reason}"))
        stop_view(state, f"{worker} reports {message.peer}: {reason}")
    if state.stopping is not None:
        state.stopping.accusations[(worker, message.peer)] = reason
        if message.waited_s:
            state.stopping.stalls.add(message.peer)
        if message.peer in state.stopping.waiting and not state.workers[message.peer].connected:
            expel_if_overdue(state, message.peer, f"its connection closed, and {worker} has lost it too: {reason}")


def _is_warming_up(state: CoordinatorState, message: m.Suspect) -> bool:
    """Whether the peer is waited for in the first step that it computes, and may still be compiling.

    Who waits says so again with each heartbeat: once it has waited for too long even for that, it is believed.
    """
    limit = FIRST_STEP * state.settings.stall_s
    return 0 < message.waited_s <= limit and not state.workers[message.peer].computed


def on_held_up(state: CoordinatorState, worker: str, beat: m.Heartbeat) -> None:
    """`worker` has waited for a peer for too long, and may be waited for by it: they can't reach each other then.

    Either of them alone may be what a third one, or its own work, holds up: that is for the stall limit.
    """
    peer = state.workers.get(beat.blocked_on)
    if (
        peer is None
        or state.stopping
        or state.over
        or (peer.heartbeat.blocked_on, peer.heartbeat.view) != (worker, beat.view)
    ):
        return
    for one, other in ((worker, peer.id), (peer.id, worker)):
        reason = f"{one} and {other} wait for each other: nothing gets through between them"
        on_suspect(state, one, m.Suspect(view=beat.view, peer=other, reason=reason))


def expel_if_overdue(state: CoordinatorState, worker: str, why: str) -> None:
    """A participant is out of reach, dead or not: it is not waited for if it is safe to go on without it."""
    if state.stopping is None:
        stop_view(state, f"{worker}: {why}")
    if state.stopping is not None and worker in state.workers:
        state.stopping.overdue[worker] = why
        recover_if_ready(state)


def expel(state: CoordinatorState, worker: str, why: str) -> None:
    """A participant has to go, whatever it answers; it is kept in the state until the decision, which asks for it."""
    if state.stopping is None:
        stop_view(state, f"{worker}: {why}")
    if state.stopping is not None:
        state.stopping.expelled[worker] = why
        state.record(events.ExpelledEvent(worker=worker, reason=why))


def on_differs(state: CoordinatorState, workers: list[str], message: m.Differs) -> None:
    """The words of a round say that the replicas differ, and nobody can end it; not even a run that ends anyway."""
    known = state.ending is not None and state.ending.apart
    if state.settings.bits == "any":
        return  # where they may, only who is mistaken says so
    if state.savers or known or not any(state.has_part(worker) for worker in workers):
        return
    if verdicts.on_trial(state, message):
        if state.stopping is None:
            stop_view(state, "a joiner's replica differs")
        if state.stopping is not None:
            state.stopping.failed |= dict.fromkeys(message.workers, message.step)
    else:
        disputes.on_replicas_differ(
            state, message.workers, f"at step {message.step}", told=workers[0] if len(workers) == 1 else ""
        )
        if state.stopping is None:
            stop_view(state, "the replicas differ")
    if state.stopping is not None:
        state.stopping.apart |= set(workers)


def on_shards_differ(state: CoordinatorState, workers: list[str], message: m.ShardsDiffer) -> None:
    """The words of a round say that two have found different things of one shard, and nobody can end it."""
    if state.stopping is None and not state.savers and any(state.has_part(worker) for worker in workers):
        stop_view(state, f"two workers have found different things of one shard in step {message.step}")


def on_stopped(state: CoordinatorState, worker: str, report: m.Stopped) -> None:
    """An answer to the stop.

    Raises:
        ProtocolError: it names what was never issued.
    """
    now = state.stopping
    if now and report.stop == now.number and worker in now.waiting:
        if why := issued_denial(state, worker, report):
            raise ProtocolError(why)
        now.waiting.discard(worker)
        now.overdue.pop(worker, None)
        now.reports[worker] = report
        if report.synced:
            failures.note_progress(state, worker, report.step)
        recover_if_ready(state)
