"""Reconfiguration: planned views for joins, leaves, an orderly end and other shares, agreed on in band (R2).

    next_view    the view that is due, when nothing is outstanding
    next_group   ... the same members over new connections, before the numbers of views wrap in the tags of messages
    next_shares  ... the same members with other shares, when nothing else is due
    propose      every member prepares it; the commit messages agree on it without the coordinator
    on_switched  the first report puts the view in force; the last one closes the proposal, and draining workers may go
    on_synced    the last joiner holds the state: the next view may be planned

A loss of any member concerned, at any point, is a recovery: the proposal is given up. New connections alone are
optional: members go on over the old ones meanwhile.
See docs/protocol.md, Reconfiguration.
"""

from __future__ import annotations

import msgspec

from farandole.protocol import events
from farandole.protocol import messages as m
from farandole.protocol.coordinator import disputes, failures, recovery, shutdown, verdicts
from farandole.protocol.coordinator.state import (
    WHOLE,
    CoordinatorState,
    Ending,
    IssuedView,
    Worker,
    keep_issued,
    stragglers,
)
from farandole.protocol.difference import Difference, Finish, calls_differ, ended_early
from farandole.protocol.values import Call
from farandole.protocol.view import View

# --- same calls -------------------------------------------------------------------------------------------------------
#
# What the workers' scripts call (a step, an evaluation, the script's end) is the same everywhere. Otherwise peers would
# exchange messages of other sizes than expected, and Gloo would end the process. Two members that call different things
# in one round are a fact that no delay changes: the run ends like one whose script has failed.
# Argument: docs/protocol.md, Same calls 1-6.
#
#     on_round_begun   a heartbeat: this worker has begun a round
#     call_switched    a worker goes on with a step in another view
#     on_finished      a worker's script has ended

KEPT = 4  # rounds; members are at most one apart


def on_round_begun(state: CoordinatorState, worker: str, beat: m.Heartbeat) -> None:
    """A heartbeat. What is heard while a stop is outstanding will be heard again."""
    _end(state, _began(state, worker, beat))


def call_switched(state: CoordinatorState, worker: str, message: m.Switched) -> None:
    """It goes on with a step in another view than it was in."""
    if not _is_late(state):
        _end(state, _went_on(state, worker, message.round, f"step {message.step}"))


def on_finished(state: CoordinatorState, worker: Worker, message: m.Finished) -> None:
    """A worker's script has ended."""
    worker.state, worker.fingerprint, worker.after = "finished", message.fingerprint, message.after
    if message.view:  # else it has never been in one, and holds nobody up
        _end(state, _finished(state, worker.id, message))


def in_a_step(state: CoordinatorState) -> bool:
    """Whether the newest round that was heard of is a training step, as far as was said."""
    newest = max(state.first_calls, default=None)
    return newest is None or state.first_calls[newest][1].doing.startswith("step ")


def _began(state: CoordinatorState, worker: str, beat: m.Heartbeat) -> Difference | None:
    call, round_ = beat.call, beat.round
    if not call.number or _is_late(state) or not _in_a_view(state, worker, beat.view):
        return None
    before = state.previous.number if state.view and state.previous else 0
    if beat.view == before and (difference := _behind(state, worker, beat)):
        return difference
    first, other = state.first_calls.get(round_, (worker, call))
    if first == worker or first not in state.workers:
        _keep(state, round_, worker, call)
    elif other.number != call.number:
        return calls_differ(first, other, worker, call)
    return _went_on(state, worker, round_, call.doing)


def _behind(state: CoordinatorState, worker: str, beat: m.Heartbeat) -> Difference | None:
    """In the view before: whether it does something else there than those who have gone on. See 5."""
    for other, round_ in state.switches.items():
        if round_ == beat.round or round_ == state.applied_round < beat.round:
            return calls_differ(other, Call(doing="the next step"), worker, beat.call)
        if round_ < beat.round:  # which nobody could have begun without it: two who have are right
            state.ahead.setdefault(other, set()).add(worker)
            if len(state.ahead[other]) > 1 and other in state.workers:
                state.ban(other)
                recovery.expel(
                    state, other, f"it says that it has gone on since round {round_}, in which it was needed"
                )
                return None
    return None


def _finished(state: CoordinatorState, worker: str, message: m.Finished) -> Difference | None:
    mine, known = Finish(worker=worker, round=message.round, step=message.step), state.first_finish
    if known is None or known.worker not in state.workers:
        state.first_finish = known = mine
    if _is_late(state):
        return None
    if known.round != mine.round:
        early, late = sorted((known, mine), key=lambda finish: finish.round)
        return ended_early(early, late.worker, f"step {late.step}")
    if state.view and worker in state.unswitched and message.view < state.view.number:
        return ended_early(mine, _switched(state), "the next step")
    for round_, (other, call) in state.first_calls.items():
        if round_ >= mine.round and other in state.workers and other != worker:
            return ended_early(mine, other, call.doing)
    return None


def _end(state: CoordinatorState, difference: Difference | None) -> None:
    if difference is not None:
        state.differ(difference)
        recovery.stop_view(state, difference.reason)


def _went_on(state: CoordinatorState, worker: str, round_: int, doing: str) -> Difference | None:
    finish = state.first_finish
    if finish is None or finish.worker not in state.workers or worker == finish.worker or round_ < finish.round:
        return None
    return ended_early(finish, worker, doing)


def _switched(state: CoordinatorState) -> str:
    """One of those who go on in the view in force, or have left with it."""
    concerned = [worker for view in (state.view, state.previous) if view for worker in view.members]
    return next((worker for worker in concerned if worker not in state.unswitched), "another")


def _is_late(state: CoordinatorState) -> bool:
    """Whether nobody trains any more, or all are asked where they stand."""
    failed = state.ending is not None and state.ending.failed
    return state.over is not None or state.stopping is not None or bool(state.savers) or failed


def _in_a_view(state: CoordinatorState, worker: str, number: int) -> bool:
    return any(view.number == number and worker in view.members for view in state.views())


def _keep(state: CoordinatorState, round_: int, worker: str, call: Call) -> None:
    state.first_calls[round_] = (worker, call)
    for old in [each for each in state.first_calls if each <= round_ - KEPT]:
        del state.first_calls[old]


# --- planned ----------------------------------------------------------------------------------------------------------

REGROUP_S = 600.0  # between two tries to connect the members anew


def plan(state: CoordinatorState, now: float) -> None:
    """Propose the next view if one is due and nothing is outstanding; candidates that want to leave go at once."""
    for gone in [w for w in state.workers.values() if w.leaving and w.state in ("starting", "ready")]:
        if not state.has_part(gone.id):
            state.dismiss(gone.id, gone.leaving)
    finished = any(w.state == "finished" for w in state.workers.values())
    if _comes_to_nothing(state, now):
        recovery.stop_view(state, "the members could not be connected anew")
    if state.stopping or state.proposed or state.savers or state.unsynced or finished:
        return
    if not all(state.workers[w].connected for w in state.participants()):
        return  # its return or its loss stops the view anyway
    due = next_view(state) or next_group(state, now) or next_shares(state)
    if due is not None:
        propose(state, *due, now)


def next_view(state: CoordinatorState) -> tuple[View, str] | None:
    """The view that is due and why; None when there is nothing to change.

    Leavers leave only while somebody who holds the state stays; if everyone is leaving, joiners enter first (for that
    one view above the maximum, if need be). A run on its way out goes to the empty view; if no member could save there
    and somebody who is ready can, by way of a view with that one.
    """
    view = state.view
    if state.ending:
        if view is None or not view.members or state.ending.failed:
            return None
        number = state.next_number()
        if helper := shutdown.helper(state):
            members = (*view.members, helper)
            return View(
                number=number,
                members=members,
                joining=(helper,),
                group=number,
                hosts=state.hosts_of(members),
                unproven=(helper,),
            ), f"{helper} joins, to save: no member reaches the store"
        return View(number=number, members=(), group=view.group), state.ending.reason
    ready = [w.id for w in state.workers.values() if w.state == "ready" and w.connected and not w.leaving]
    if state.clock < state.meet_at:
        ready = []  # a stranger was in the last connections: see `strangers`
    maximum = state.settings.maximum
    if view is None:
        if len(ready[:maximum]) < state.settings.minimum:
            return None
        first = shutdown.founders(state, ready)[:maximum]
        if not first:
            _give_up(state)
            return None
        number = state.next_number()
        hosts = state.hosts_of(first)
        return View(
            number=number, members=first, joining=first[1:], group=number, hosts=hosts, unproven=first
        ), "first view"
    leavers = [w for w in view.members if state.workers[w].leaving]
    room = len(ready) if maximum is None else maximum - len(view.members) + len(leavers)
    joiners = tuple(ready[: max(room, 0)])
    if len(leavers) == len(view.members):
        leavers = []
    if not joiners and not leavers:
        return None
    stay = tuple(w for w in view.members if w not in leavers)
    causes = [f"{w} joins" for w in joiners] + [f"{w} leaves ({state.workers[w].leaving})" for w in leavers]
    number = state.next_number()
    group = number if joiners else view.group
    shares = view.shares_of(stay)
    if shares:  # a joiner counts as the median until it has been measured
        shares = (*shares, *(sorted(shares)[len(shares) // 2] for _ in joiners))
    members = (*stay, *joiners)
    return View(
        number=number,
        members=members,
        joining=joiners,
        group=group,
        shares=shares,
        hosts=state.hosts_of(members),
        unproven=(*verdicts.carried(state, stay), *joiners),
    ), ", ".join(causes)


def _give_up(state: CoordinatorState) -> None:
    """Nobody may begin a first view: the run ends if nobody ever will."""
    if why := shutdown.no_way_to_save(state):
        state.ending = Ending(code=1, reason=why, failed=True)
        shutdown.end(state)


def next_group(state: CoordinatorState, now: float) -> tuple[View, str] | None:
    """The view in force over connections of its own, when those that it uses have served many views."""
    view = state.view
    if view is None or view.size < 2 or state.ending or now < max(state.regroup_at, state.meet_at):
        return None
    if state.number + 1 - view.group < state.settings.views_per_group:
        return None
    state.regroup_at = now + REGROUP_S
    number = state.next_number()
    unproven = verdicts.carried(state, view.members)
    return msgspec.structs.replace(view, number=number, joining=(), group=number, unproven=unproven), "new connections"


def _comes_to_nothing(state: CoordinatorState, now: float) -> bool:
    view = state.proposed
    if view is None or view.joining or view.group != view.number or state.view is view or state.stopping:
        return False
    return now - state.proposed_at > state.settings.prepare_timeout_s


def next_shares(state: CoordinatorState) -> tuple[View, str] | None:
    """The view in force with shares that suit the speeds better (`speeds`), and why; None if they do as they are."""
    view = state.view
    if view is None or state.ending or not state.settings.by_speed:
        return None
    shares = state.speeds.due(view)
    if shares is None:
        return None
    slow = stragglers(state.speeds.relative())
    cause = ", ".join(f"{worker} at {speed:.2f} of the fastest's speed" for worker, speed in slow.items())
    unproven = verdicts.carried(state, view.members)
    view = msgspec.structs.replace(view, number=state.next_number(), joining=(), shares=shares, unproven=unproven)
    return view, cause or "the workers are about equally fast"


def propose(state: CoordinatorState, view: View, cause: str, now: float) -> None:
    state.proposed, state.proposed_at, state.cause = view, now, cause
    state.issued.append(IssuedView(view=view))
    state.record(events.ProposedEvent(view=view.number, members=view.members, cause=cause))
    message = m.Propose(view=view, newest=m.Newest() if state.view else state.newest)
    for worker in state.participants():
        state.send(worker, message)


def on_publish(state: CoordinatorState, worker: str, message: m.Publish) -> None:
    """A member of the proposed view tells the others, or the one it names, how to connect to it."""
    view = state.proposed
    if view and view.group == message.group and worker in view.members:
        for peer in view.members:
            if peer != worker and peer in state.workers and message.to in ("", peer):
                state.send(peer, m.Published(group=message.group, key=message.key, value=message.value))


def on_switched(state: CoordinatorState, worker: Worker, message: m.Switched) -> None:
    """The worker goes on in a view. While a stop is outstanding, the reports say the same."""
    call_switched(state, worker.id, message)
    view = state.proposed
    if state.stopping or view is None or message.view != view.number:
        return
    if state.view is not view:
        _in_force(state, view, worker, message)
    _compare_rounds(state, view, worker, message)
    if state.stopping or state.proposed is not view:
        return  # one of them is expelled: all who were to leave are still there to answer
    state.unswitched.discard(worker.id)
    if state.unswitched:
        return
    before = state.previous.members if state.previous else ()
    concerned = state.participants()
    state.proposed = state.previous = None
    keep_issued(state, [view])
    if not view.members:
        state.savers = [w for w in before if w in concerned]
        shutdown.ask_to_save(state)
        return
    for leaver in [w for w in before if w not in view.members]:
        state.dismiss(leaver, "left gracefully")


def _compare_rounds(state: CoordinatorState, view: View, worker: Worker, message: m.Switched) -> None:
    """All say the same (R2): who does not is put out, if two others do."""
    state.switches[worker.id] = message.round
    if state.applied_round < 0:
        state.applied_round = disputes.agreed_round(state.switches, len(state.participants()))
    for odd in [w for w, said in state.switches.items() if said != state.applied_round >= 0 and w in state.workers]:
        state.ban(odd)
        recovery.expel(
            state, odd, f"it says that view {view.number} took effect in round {state.switches[odd]}, "
            f"and others in round {state.applied_round}",
        )  # fmt: skip


def _in_force(state: CoordinatorState, view: View, worker: Worker, message: m.Switched) -> None:
    before = state.view
    state.previous, state.view, state.applied_round = before, view, -1
    state.switches, state.ahead = {}, {}
    state.unsynced = set(view.joining)
    state.unswitched = set(state.participants())
    unchanged = before is not None and view.members == before.members
    dealt_anew = unchanged and before is not None and view.shares != before.shares
    state.data_failures = 0
    if not view.joining and not unchanged:
        failures.on_joined(state, view.members)
    failures.note_progress(state, worker.id, message.step)
    for member in view.members:
        state.workers[member].state = "member"
    if before is None:
        state.founder = view.members[0]
    for joiner in view.joining if before else ():
        state.workers[joiner].entered = message.step
    if view.group == view.number:
        state.unauthenticated_tries = 0
    state.view_began = message.step
    state.record(events.ViewEvent(view=view.number, members=view.members, round=message.round, step=message.step,
        cause=state.cause))  # fmt: skip
    shutdown.appoint_saver(state)
    if dealt_anew:
        shares = dict(zip(view.members, view.shares or (WHOLE,) * view.size, strict=True))
        state.record(events.SharesEvent(view=view.number, step=message.step, shares=shares, reason=state.cause))


def on_synced(state: CoordinatorState, worker: str, message: m.Synced) -> None:
    if state.view and message.view == state.view.number:
        state.unsynced.discard(worker)
        if not state.unsynced:
            failures.on_joined(state, state.view.joining)
            shutdown.appoint_saver(state)


def late_members(state: CoordinatorState, now: float) -> list[str]:
    """Joiners who hold up a proposed view beyond its limit: those not connected, or all where only members are not.

    Of a first view anyone may be to blame.
    """
    view = state.proposed
    if view is None or state.stopping or now - state.proposed_at <= state.settings.prepare_timeout_s:
        return []
    slow = [w for w in view.members if w in state.workers and state.workers[w].prepared < view.number]
    if not slow or state.view is None:
        return slow
    return [w for w in slow if w in view.joining] or list(view.joining)


# --- departures -------------------------------------------------------------------------------------------------------
#
# How workers leave other than by a planned view: evicted (alive or not, the run goes on without it as soon as that is
# safe); its process has ended, for certain; its machine goes before it could leave (`Lapsed`); its script has failed
# (`ScriptFailed`); its host can't get it the data (`DataUnavailable`). A worker whose script has ended before it was
# admitted is not waited for. One that has a part in the view leaves it by a recovery.
# See docs/protocol.md: Recovery, Preemption deadline, Data unavailable.


def evict(state: CoordinatorState, worker: str, reason: str) -> None:
    """One eviction may bring others about: the worker may be out already."""
    if worker not in state.workers or state.over:
        return
    if state.savers or not state.has_part(worker):
        state.evict(worker, reason)
        _without(state, worker, reason, participant=False)
        return
    recovery.expel(state, worker, reason)  # it stays in the state until it is safe to go on without it
    state.close_evicted(worker, reason)
    state.workers[worker].connected = False
    recovery.expel_if_overdue(state, worker, reason)


def lost(state: CoordinatorState, gone: Worker, reason: str) -> None:
    participant, member = gone.id in state.participants(), state.let_in(gone.id)
    del state.workers[gone.id]
    state.record(events.LostEvent(worker=gone.id, host=gone.host, reason=reason))
    if member and not gone.leaving and gone.state != "finished":
        failures.on_worker_death(state, gone.id, reason, entered=gone.entered if gone.pool else -1)
    _without(state, gone.id, reason, participant=participant)


def lapsed(state: CoordinatorState, worker: Worker) -> None:
    """It makes no progress any more; its process ends by itself."""
    reason = f"its time was over before it could leave ({worker.leaving})"
    state.mark_dead(worker.id, reason)
    lost(state, worker, reason)


def excuse(state: CoordinatorState, worker: Worker, reason: str, code: int) -> None:
    participant = worker.id in state.participants()
    state.dismiss(worker.id, reason, code=code)
    _without(state, worker.id, reason, participant=participant)


def on_script_end(state: CoordinatorState, worker: Worker, message: m.ScriptFailed | m.DataUnavailable) -> None:
    """Its script has ended before its end."""
    if isinstance(message, m.ScriptFailed):
        on_script_failed(state, worker, message.traceback)
    else:
        on_data_unavailable(state, worker, message.reason)


def on_script_failed(state: CoordinatorState, worker: Worker, traceback: str) -> None:
    """In a member it ends the run; in one that was not yet let in, only its own part."""
    state.record(events.FailedEvent(worker=worker.id, host=worker.host, traceback=traceback))
    if state.savers or (state.ending and state.ending.failed):
        if state.deadline is not None and worker.state != "finished":
            shutdown.give_up(state, f"the script failed on {worker.id}", code=1)
        return  # others fail alike: the first one counts
    if state.stands_alone(worker):
        excuse(state, worker, "its script failed before it was let in", 1)
        return
    recovery.stop_for_failure(state, f"the script failed on {worker.id}")


def on_data_unavailable(state: CoordinatorState, worker: Worker, reason: str) -> None:
    """Who has a part in a view goes when that has been stopped, and nobody who may be needed to save goes at all."""
    if worker.data_unavailable:
        return
    worker.data_unavailable = reason or "it does not say why"
    state.record(events.UnfedEvent(worker=worker.id, host=worker.host, reason=worker.data_unavailable))
    if state.deadline is not None and worker.state != "finished":  # others hold the final state
        failures.release_without_data(state, worker.id)
        _without(state, worker.id, failures.LOST, participant=True)
    elif not state.has_part(worker.id) and not state.ending:
        state.data_failures += state.view is None and bool(worker.pool)
        why = failures.no_data_anywhere(state, worker.id)
        failures.release_without_data(state, worker.id)
        if why:
            state.ending = Ending(code=1, reason=why, failed=True)
            shutdown.end(state)


def _without(state: CoordinatorState, worker: str, reason: str, *, participant: bool) -> None:
    state.unsynced.discard(worker)
    if not state.over:
        recovery.continue_without(state, worker, reason, participant=participant)


# --- unauthenticated peers --------------------------------------------------------------------------------------------
#
# A peer that fails authentication in the connections of a proposed view: the view is given up at once, and another one
# proposed, with a number, group and key of its own, after a wait that doubles up to `LONGEST_S`. Neither the peer nor
# the reporter is blamed. Leaving, and changes without new connections, do not wait.
# Argument: docs/protocol.md, Reconfiguration.

SHORTEST_S = 1.0
LONGEST_S = 300.0
DOUBLINGS = 9  # more than it takes to get there


def on_unproved_peer(state: CoordinatorState, worker: str, message: m.PeerUnproved) -> None:
    view = state.proposed
    if (
        view is None
        or state.stopping
        or message.view != view.number
        or view.group != view.number
        or worker not in view.members
    ):
        return
    again_s = min(SHORTEST_S * 2 ** min(state.unauthenticated_tries, DOUBLINGS), LONGEST_S)
    state.unauthenticated_tries += 1
    state.meet_at = state.clock + again_s
    state.record(events.StrangerInGroupEvent(worker=worker, peer=message.peer, address=message.address,
        view=view.number, again_s=again_s))  # fmt: skip
    recovery.stop_view(state, f"strangers at {message.address}, between {worker} and the others")
