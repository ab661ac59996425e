"""Recovery: a view is stopped, every live participant reports, and one answer says how the round goes on.

    stop_view          -> Stop to every participant: from their answers on, nothing moves
    stop_for_failure   the view is stopped for good: the script failed, or a loss is not finite and the run ends for it
    on_suspect         a peer's accusation stops the view too; both sides of a broken pair may well be alive
    on_blocked         two that have waited too long for each other are a broken pair that no connection has reported
    on_stopped         -> the answers, until every participant has answered or is lost; then follows the decision

A loss meanwhile removes the lost worker from the stop in progress; it starts no second one. In the first step that a
worker computes, which compiles, accusations of it count only after `FIRST_STEP` times the stall limit.
Argument: docs/protocol.md, Recovery.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from farandole.errors import ProtocolError
from farandole.protocol import events
from farandole.protocol import messages as m
from farandole.protocol.coordinator import disputes, failures, shutdown
from farandole.protocol.coordinator.disputes import Verdict
from farandole.protocol.coordinator.state import (
    CoordinatorState,
    Ending,
    IssuedView,
    Removal,
    Shared,
    Stopping,
    drop_other_views,
    issued_denial,
)
from farandole.protocol.difference import differing
from farandole.protocol.messages import Stopped
from farandole.protocol.view import Lineage, View

# --- recovery ---------------------------------------------------------------------------------------------------------
#
# What happens to the current round when a view is stopped: the decision, as a pure function of honest reports.
# Invariant: survivors are at most one round apart. One that is behind commits; if all are in one round, they commit it
# if all hold it, and else redo its all-reduce from their partial sums, which gives the same bits. The longest lineage
# keeps everything that was computed. False reports are found before (`issued_denial` in state.py, `outvoted` in
# disputes.py).
# Argument: docs/protocol.md, Recovery 1-5.


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The decision of how the survivors go on; the rounds after this one use `shares`.

    `dismissed` are leaving workers whose switch was already agreed. `unsynced` are joiners without the state.
    """

    members: tuple[str, ...]
    group: int
    shares: tuple[int, ...]
    round: int
    commit: bool
    lineage: Lineage
    dismissed: tuple[str, ...]
    unsynced: tuple[str, ...]


def decide(reports: Mapping[str, Stopped], *, must_redo: bool = False) -> Outcome:
    """Return how the survivors go on, if at least one of them holds the state.

    `reports` are their answers. They name issued views only, and no two contradict each other (see
    `state.issued_denial` and `disputes.outvoted`). With `must_redo` the round is not committed even if all hold it,
    since a worker has seen that replicas or results of a shard differ in it, or shards are checked again.
    """
    synced = {worker: report for worker, report in reports.items() if report.synced}
    newest = max((report.view for report in synced.values() if report.view), key=lambda view: view.number)
    survivors = tuple(w for w in newest.members if w in synced)
    dismissed = tuple(w for w in synced if w not in newest.members)
    if not survivors:  # only leaving workers remain, whose part was done: one of them continues the run
        dismissed = tuple(sorted(dismissed, key=lambda w: -synced[w].round))
        survivors, dismissed = dismissed[:1], dismissed[1:]
    last = max(synced[w].round for w in survivors)
    at_last = [synced[w] for w in survivors if synced[w].round == last]
    commit = not must_redo and len(at_last) == len(survivors) and all(report.has_result for report in at_last)
    lineages = [report.lineage for report in at_last if report.view == newest]
    longest = max(lineages, key=lambda lineage: len(lineage.sets), default=None)
    lineage = newest.lineage(survivors)  # of the round after a commit, or if only a leaving worker switched to it
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
# What follows from a stop, once all within reach have answered and the view is fenced (docs/protocol.md, Reconnection
# and the lease 3).
#
#     recover_if_ready   removes workers whose report can't be true and workers that can't share a view
#                        (docs/protocol.md, Disputes); then `decide`
#     _resume            -> Resume, or ViewWithdrawn for a worker without the state, or Goodbye for one that had left
#     ask_to_save        ... where the run is ending: a worker that is furthest has the state of a whole step
#     _start_over        ... where no holder of the state is left


def recover_if_ready(state: CoordinatorState) -> None:
    """Decide the stop once all reachable workers have answered, if it is safe to go on without the others."""
    stop = state.stopping
    if stop is None or any(worker not in stop.overdue for worker in stop.unanswered):
        return
    reports = _in_order(state, stop)
    believed = {worker: report for worker, report in reports.items() if worker not in stop.expelled}
    outvoted = disputes.outvoted(believed, state.proposed, disputes.benefits_used_up(state, believed))
    for each in outvoted:
        del reports[each.worker]
    if not _fenced(state, stop, reports):
        if not stop.unfenced_reported:
            stop.unfenced_reported = True
            missing = sorted(stop.unanswered)
            state.record(events.OutOfReachEvent(workers=tuple(missing), reason="they may still train: waiting"))
        return
    for worker, why in {**stop.overdue, **stop.expelled}.items():
        if worker in state.workers and (worker in stop.expelled or worker not in stop.reports):
            state.remove(worker, Removal.EVICTED, why)
            reports.pop(worker, None)
    for each in outvoted:
        if each.worker in state.workers:
            _outvote(state, each)
    _decide(state, stop, reports)


def _in_order(state: CoordinatorState, stop: Stopping) -> dict[str, m.Stopped]:
    """Return the answers, that of the longest-standing worker first."""
    ranks = {worker: rank for rank, worker in enumerate(state.participants())}
    answered = sorted((w for w in stop.reports if w in state.workers), key=lambda w: ranks.get(w, len(ranks)))
    return {worker: stop.reports[worker] for worker in answered}


def _outvote(state: CoordinatorState, outvoted: disputes.Outvoted) -> None:
    """Evict a worker whose report contradicts others.

    If it contradicts several, it is banned too. If it contradicts one only, it may be the honest one of the two.
    """
    other, *more = outvoted.others
    if more:
        state.ban(outvoted.worker)
    else:
        disputes.give_benefit(state, other)
    state.remove(
        outvoted.worker, Removal.EVICTED, f"contradicted by {' and '.join(outvoted.others)}: {outvoted.reason}"
    )


def _fenced(state: CoordinatorState, stop: Stopping, reports: dict[str, m.Stopped]) -> bool:
    """Return True if the newest view that the answers name, and each newer one, can only end the round in progress.

    That is so for a view of which a holder of the state has answered, or of which all members have answered or are
    dead. See docs/protocol.md, Reconnection and the lease 3. A leaving worker that has answered fences no view: it is
    no member of the newest one.
    """
    reported = [report.view for report in reports.values() if report.synced and report.view]
    newest = max((view.number for view in reported), default=0)
    synced = {worker for worker, report in reports.items() if report.synced}
    answered_or_dead = {*stop.reports, *state.dead}
    open_ = [view for view in (*reported, *state.views()) if view.number >= newest and view.members]
    return all(
        synced.intersection(view.members) or answered_or_dead.issuperset(w for w in view.members if w in state.workers)
        for view in open_
    )


def _decide(state: CoordinatorState, stop: Stopping, reports: dict[str, m.Stopped]) -> None:
    """Remove who must go, then resume, save the last checkpoint or start over."""
    synced = {worker for worker, report in reports.items() if report.synced}
    unconfirmed = _unconfirmed(stop, len(synced))
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
    drop_other_views(state, [report.view for report in reports.values()])
    state.unsynced, state.unswitched, state.first_calls = set(), set(), {}
    for worker in synced:
        if state.workers[worker].state != "finished":
            state.workers[worker].state = "member"
    emptied = any(view is not None and not view.members for view in (reports[worker].view for worker in synced))
    holders = {worker: reports[worker] for worker in reports if worker in synced}
    dispute = unconfirmed or disputes.disputed(state, holders)
    if state.ending and (state.ending.failed or emptied):  # the furthest worker has the state of a whole step
        if not state.ending.replicas_differ and dispute is not None:
            reporters, message = dispute
            disputes.on_replicas_differ(
                state, message.workers, f"at step {message.step}", reporters[0] if len(reporters) == 1 else ""
            )
        hung = failures.hung_workers(state)
        state.savers = sorted(synced, key=lambda w: (-reports[w].round, w in hung, w))
        shutdown.ask_to_save(state)
    elif synced:
        must_redo = dispute is not None or verdict.rechecks is not None
        _resume(state, stop, reports, decide(reports, must_redo=must_redo), verdict)
    else:
        _start_over(state, stop, reports)


def _unconfirmed(stop: Stopping, holders: int) -> tuple[list[str], m.Differs] | None:
    """Take a report that the replicas differ back, with its reporters, if they are too few for so many `holders`.

    More workers hold the state than was known when it was believed. If the round is redone, they see the difference
    again. See docs/protocol.md, Corroboration 7.
    """
    if not stop.failed or len(stop.difference_reporters) >= disputes.majority(holders):
        return None
    message = m.Differs(step=max(stop.failed.values()), workers=tuple(stop.failed))
    stop.failed.clear()
    return sorted(stop.difference_reporters), message


def _convicted(state: CoordinatorState, stop: Stopping, answered: tuple[str, ...], synced: set[str]) -> list[str]:
    """Evict the workers that cannot share a view with others, and return them."""
    confirmed = disputes.witnesses(state, stop.stalls, answered)
    spent = disputes.benefits_used_up(state, answered)
    convictions = disputes.convict(tuple(stop.accusations), answered, synced, confirmed, spent)
    for each in convictions:
        others = set(each.others)
        if each.alone and (each.others[0], each.worker) in stop.accusations:
            disputes.give_benefit(state, each.others[0])
        against = {pair: why for pair, why in stop.accusations.items() if each.worker in pair and set(pair) & others}
        accuser, accused = next(iter(against))
        why = "; ".join(dict.fromkeys(against.values()))
        if each.alone and accused not in stop.stalls:
            why += f" (reported by {accuser} of {accused}; no third worker can confirm which of the two is at fault)"
        state.remove(each.worker, Removal.EVICTED, why)
    return [each.worker for each in convictions]


def _judge(state: CoordinatorState, stop: Stopping, reports: dict[str, m.Stopped], synced: set[str]) -> Verdict:
    """Remove the workers with wrong results of a shard, and the joiners whose replica differs."""
    verdict = disputes.judge({worker: reports[worker] for worker in reports if worker in synced}, stop.failed)
    _carry_out(state, verdict)
    for worker in (*verdict.refused, *verdict.wrong):
        del reports[worker]
        synced.discard(worker)
    return verdict


def _carry_out(state: CoordinatorState, verdict: Verdict) -> None:
    """Remove the refused and the wrong workers. If it is unknown which one is wrong, the run may end."""
    for worker, why in verdict.refused.items():
        removed = state.workers.pop(worker)
        state.record(events.RefusedEvent(worker=worker, host=removed.host, reason=why))
        state.send(worker, m.JoinRefused(reason=why))
        state.dismiss(removed, why, 1, started=False, refused=True)
        failures.on_refused(state, removed, why)
    for worker, why in verdict.wrong.items():
        host = state.workers[worker].host
        state.record(events.ComputesWrongEvent(worker=worker, host=host, reason=why))
        state.wrong_hosts.add(host)
        state.ban(worker)
        state.remove(worker, Removal.EVICTED, f"it computes wrong results: {why}")
    for workers, what in verdict.undecided.items():
        reason = f"the results of {' and '.join(workers)} differ, first in {what}, and it is unknown which are right"
        state.record(events.UndecidedEvent(workers=workers, reason=reason))
        if state.settings.stop_undecided and state.ending is None:
            state.ending = Ending(code=1, reason=reason, failed=True)


def _resume(
    state: CoordinatorState, stop: Stopping, reports: dict[str, m.Stopped], outcome: Outcome, verdict: Verdict
) -> None:
    """Issue the next view, and send it to its members."""
    view = state.view = View(
        number=state.next_number(), members=outcome.members, group=outcome.group, shares=outcome.shares,
        hosts=state.hosts_of(outcome.members), zones=state.zones_of(outcome.members),
        unchecked=disputes.unchecked({w: reports[w] for w in outcome.members}, commit=outcome.commit),
        undecided=any(set(outcome.members) <= set(pair) for pair in verdict.undecided),
    )  # fmt: skip
    lineage = msgspec.structs.replace(outcome.lineage, rechecks=None if outcome.commit else verdict.rechecks)
    for worker in outcome.dismissed:
        state.remove(worker, Removal.LEFT, "left gracefully")
    for worker in outcome.unsynced:
        _withdraw_view(state, worker)
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
    """Begin again from a checkpoint with the next first view: no worker that held the state is left.

    All that is known of the lost steps is forgotten. A coordinator that replaces one killed while the first view was
    proposed knows from answers alone that there was a state (`CoordinatorState.reached`).
    """
    known = state.view is not None and bool(state.view.members)  # the workers of the empty view have done their part
    heard = state.view is None and state.reached >= 0  # by the answer of a holder: it is the only sign after a restart
    if known or heard:
        state.record(events.StateLostEvent(reason=f"no worker that held the state is left ({stop.cause})"))
        state.last_line, state.not_finite, state.corroborations = (-1, 0), -1, {}
        state.unwritten_lines.clear()
        state.logged_values.clear()
        failures.on_all_lost(state, stop.cause)
    state.view, state.saver = None, ""
    for worker in reports:
        _withdraw_view(state, worker)
    if state.ending:
        shutdown.ask_to_save(state)


def _withdraw_view(state: CoordinatorState, worker: str) -> None:
    """Make a participant a candidate again."""
    demoted = state.workers[worker]
    demoted.state, demoted.saves, demoted.step, demoted.finish = "ready", False, -1, None
    state.send(worker, m.ViewWithdrawn())


# --- stop -------------------------------------------------------------------------------------------------------------

FIRST_STEP = 10  # a worker may take this many stall limits for the first step in which it computes


def continue_without(state: CoordinatorState, worker: str, cause: str, *, participant: bool) -> None:
    """Go on after `worker` was removed: save by the next one, decide the stop, or stop the view of a participant."""
    if state.savers:
        if worker in state.savers:
            state.savers.remove(worker)
            shutdown.ask_to_save(state)
    elif state.stopping:
        state.stopping.unanswered.discard(worker)
        state.stopping.reports.pop(worker, None)
        recover_if_ready(state)
    elif participant and not state.everyone_finished():
        stop_view(state, f"{worker}: {cause}")


def stop_view(state: CoordinatorState, cause: str) -> None:
    """Ask all participants to stop and to report where they are."""
    state.stops += 1
    participants = state.participants()
    state.stopping = Stopping(number=state.stops, unanswered=set(participants), cause=cause)
    message = m.Stop(stop=state.stops)
    for worker in participants:
        state.send(worker, message)
    recover_if_ready(state)


def stop_for_failure(state: CoordinatorState, reason: str, code: int = 1) -> None:
    """End the run with the state of the newest whole step."""
    if state.view is None:
        shutdown.fail_before_view(state, reason, code)
        return
    state.ending = Ending(code=code, reason=reason, failed=True)
    if state.stopping is None:
        stop_view(state, reason)


def on_shared_report(state: CoordinatorState, workers: list[str], message: Shared) -> None:
    """Handle a fact that all holders of the state see, once enough of them report it (see `disputes.corroborate`)."""
    if isinstance(message, m.Differs):
        on_differs(state, workers, message)
    elif isinstance(message, m.ShardsDiffer):
        on_shards_differ(state, workers, message)
    else:
        on_not_finite(state, workers[0], message)


def on_not_finite(state: CoordinatorState, worker: str, message: m.NotFinite) -> None:
    """Record that the loss of a step is not finite, for the first worker that reports it.

    With `stop_on_nan` the run ends. No worker goes on: each holds the state of the beginning of that step, and waits.
    """
    if not state.is_waited_for(worker):
        return
    if message.step > state.not_finite:
        state.not_finite = message.step
        state.record(events.NotFiniteEvent(worker=worker, step=message.step, loss=message.loss))
    if state.settings.stop_on_nan and not state.savers and not (state.ending and state.ending.failed):
        stop_for_failure(state, f"the loss of step {message.step} is {message.loss}, and --stop-on-nan is set")


def on_suspect(state: CoordinatorState, worker: str, message: m.Suspect) -> None:
    """Handle an accusation: `worker` lost its connection to a peer, or waited too long for it.

    It may concern any view that workers may still be in.
    """
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
        if message.waited_s:  # the peer may still send heartbeats
            state.send(message.peer, m.Stacks(reason=f"{worker} reports this worker: {reason}"))
        stop_view(state, f"{worker} reports {message.peer}: {reason}")
    if state.stopping is not None:
        state.stopping.accusations[(worker, message.peer)] = reason
        if message.waited_s:
            state.stopping.stalls.add(message.peer)
        if message.peer in state.stopping.unanswered and not state.workers[message.peer].connected:
            mark_overdue(state, message.peer, f"its connection closed, and {worker} has lost it too: {reason}")


def _is_warming_up(state: CoordinatorState, message: m.Suspect) -> bool:
    """Return True if the peer may still be compiling, since it has not computed a step yet.

    The accuser can't know that, because it may have joined later; the coordinator knows it from heartbeats. A report
    that the accuser waits is believed after `FIRST_STEP` stall limits. Nothing is lost before: the accuser reports
    again, with the time that it has waited. A broken connection counts at once.
    """
    limit = FIRST_STEP * state.settings.stall_s
    return 0 < message.waited_s <= limit and not state.workers[message.peer].computed


def on_blocked(state: CoordinatorState, worker: str, beat: m.Heartbeat) -> None:
    """Accuse both if `worker` and a peer have waited too long for each other: they cannot reach each other.

    If only one of them waits, a third worker or its own work may be the cause: the stall limit handles that.
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
        reason = f"{one} and {other} wait for each other: no data gets through between them"
        on_suspect(state, one, m.Suspect(view=beat.view, peer=other, reason=reason))


def mark_overdue(state: CoordinatorState, worker: str, why: str) -> None:
    """Go on without an unreachable participant as soon as that is safe; it may be alive or dead."""
    if state.stopping is None:
        stop_view(state, f"{worker}: {why}")
    if state.stopping is not None and worker in state.workers:
        state.stopping.overdue[worker] = why
        recover_if_ready(state)


def expel(state: CoordinatorState, worker: str, why: str) -> None:
    """Mark a participant for removal, whatever it answers. It stays in the state until the decision."""
    if state.stopping is None:
        stop_view(state, f"{worker}: {why}")
    if state.stopping is not None:
        state.stopping.expelled[worker] = why
        state.record(events.ExpelledEvent(worker=worker, reason=why))


def on_differs(state: CoordinatorState, workers: list[str], message: m.Differs) -> None:
    """Handle replicas that differ: the commit messages of a round show it, and no worker can end that round.

    A joiner on trial is removed. Otherwise the run ends; this also applies to a run that is ending for another reason.
    """
    handled = state.ending is not None and state.ending.replicas_differ
    if state.settings.bits == "any":
        return  # replicas may differ: only a faulty worker reports it
    if state.savers or handled or not any(state.is_waited_for(worker) for worker in workers):
        return
    if disputes.on_trial(state, message):
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
        state.stopping.difference_reporters |= set(workers)


def on_shards_differ(state: CoordinatorState, workers: list[str], message: m.ShardsDiffer) -> None:
    """Stop the view because two workers have different results of one shard, and no worker can end that round."""
    if state.stopping is None and not state.savers and any(state.is_waited_for(worker) for worker in workers):
        stop_view(state, f"two workers have different results of one shard in step {message.step}")


def on_stopped(state: CoordinatorState, worker: str, report: m.Stopped) -> None:
    """Handle an answer to the stop.

    Raises:
        ProtocolError: no honest worker can have sent it (see `state.issued_denial`).
    """
    stop = state.stopping
    if stop and report.stop == stop.number and worker in stop.unanswered:
        if why := issued_denial(state, worker, report):
            raise ProtocolError(why)
        stop.unanswered.discard(worker)
        stop.overdue.pop(worker, None)
        stop.reports[worker] = report
        if report.synced and report.view is not None:
            state.workers[worker].last_answer = report.view.number, report.round
            failures.note_progress(state, worker, report.step)
        recover_if_ready(state)
