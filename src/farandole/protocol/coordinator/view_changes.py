"""Reconfiguration: planned views for joins, leaves, the end of the run and other shares, agreed by commit message (R2).

    next_view    the view that is due, when nothing is outstanding
    next_group   ... the same members over new connections, before the numbers of views wrap in the tags of messages
    next_shares  ... the same members with other shares, when nothing else is due
    propose      every member prepares it; the commit messages agree on it without the coordinator
    on_switched  the first report puts the view in force; the last one closes the proposal, and leaving workers may go
    on_synced    the last joiner holds the state: the next view may be planned

A loss of any member concerned, at any point, is a recovery: the proposal is given up. New connections alone are
optional: members go on over the old ones meanwhile.
See docs/protocol.md, Reconfiguration.
"""

from __future__ import annotations

import msgspec

from farandole.protocol import events
from farandole.protocol import messages as m
from farandole.protocol.coordinator import disputes, failures, recovery, shutdown
from farandole.protocol.coordinator.state import (
    WHOLE,
    CoordinatorState,
    Ending,
    IssuedView,
    Removal,
    Worker,
    drop_other_views,
    stragglers,
)
from farandole.protocol.difference import Difference, Finish, calls_differ, ended_early
from farandole.protocol.values import Call, doing_step
from farandole.protocol.view import View

# --- same calls -------------------------------------------------------------------------------------------------------
#
# What the workers' scripts call (a step, an evaluation, the script's end) is the same everywhere. Otherwise peers would
# exchange messages of other sizes than expected, and Gloo would end the process. Two members that call different things
# in one round are a fact that no delay changes: the run ends like one whose script has failed.
# They have different scripts, or one that takes two branches: equal scripts make the same call in each round, repeated
# or not, in any view. Reports come in any order, also old ones, and each is compared with what is known of the others.
# They ride on heartbeats, which continue while a worker waits, or are repeated on each new connection, so none is lost
# for good. A worker that has ended a call round has compared the numbers itself.
# Argument: docs/protocol.md, Same calls 1-6.
#
#     on_round_begun   a heartbeat: this worker has begun a round
#     call_switched    a worker goes on with a step in another view
#     on_finished      a worker's script has ended

KEPT_ROUNDS = 4  # rounds whose first calls are remembered; members are at most one round apart


def on_round_begun(state: CoordinatorState, worker: str, beat: m.Heartbeat) -> None:
    """Compare the call in a heartbeat with those of the others.

    A heartbeat that arrives during a stop is ignored: later ones repeat the call.
    """
    _end(state, _began(state, worker, beat))


def call_switched(state: CoordinatorState, worker: str, message: m.Switched) -> None:
    """Compare the script of `worker`, which goes on with a step in another view, with scripts that have ended."""
    if not _is_late(state):
        _end(state, _went_on(state, worker, message.round, doing_step(message.step)))


def on_finished(state: CoordinatorState, worker: Worker, message: m.Finished) -> None:
    """Handle the end of the script of `worker`."""
    worker.state, worker.fingerprint, worker.after = "finished", message.fingerprint, message.after
    if message.view:  # else it has never been in a view, and no worker waits for it
        _end(state, _finished(state, worker.id, message))


def in_a_step(state: CoordinatorState) -> bool:
    """Return True if the newest reported round is a training step, or if no round was reported yet."""
    newest = max(state.first_calls, default=None)
    return newest is None or state.first_calls[newest][1].doing.startswith("step ")


def _began(state: CoordinatorState, worker: str, beat: m.Heartbeat) -> Difference | None:
    """Return the difference between the call in this heartbeat and the calls of the others, None if there is none."""
    call, round_ = beat.call, beat.round
    if not call.number or _is_late(state) or not _in_a_view(state, worker, beat.view):
        return None
    before = state.previous.number if state.view and state.previous else 0
    if beat.view == before and ((difference := _behind(state, worker, beat)) or state.stopping):
        return difference
    first, other = state.first_calls.get(round_, (worker, call))
    if first == worker or first not in state.workers:
        _remember_first_call(state, round_, worker, call)
    elif other.number != call.number:
        return calls_differ(first, other, worker, call)
    return _went_on(state, worker, round_, call.doing)


def _behind(state: CoordinatorState, worker: str, beat: m.Heartbeat) -> Difference | None:
    """Compare the call of `worker` in the previous view with those of the workers that have switched.

    Example: w1 reports that it switched to view 8 in round 10, where it begins a training step. If w2 begins round 10
    in view 7, it has another script: with a training step it would switch too. Round 11 can't begin in view 7 at all,
    since round 10 of view 7 does not end without the commit message of w1.

    See docs/protocol.md, Same calls 5.
    """
    for other, round_ in state.switches.items():
        if round_ == beat.round:
            return calls_differ(other, Call(doing="the next step"), worker, beat.call)
        if round_ == state.switch_round < beat.round:
            state.ban(worker)
            recovery.expel(
                state,
                worker,
                f"it reports round {beat.round} in the view before, but others switched in round {round_}, which "
                "needs their commit messages",
            )
            return None
        if round_ < beat.round:  # no worker could begin this round without `other`: two that report it are right
            state.ahead.setdefault(other, set()).add(worker)
            if len(state.ahead[other]) > 1 and other in state.workers:
                state.ban(other)
                recovery.expel(
                    state,
                    other,
                    f"it reports that it switched in round {round_}, but others are beyond it in the "
                    "view before, which needs its commit message",
                )
                return None
    return None


def _finished(state: CoordinatorState, worker: str, message: m.Finished) -> Difference | None:
    """Return the difference between the end of this script and the others, None if there is none."""
    own_finish = Finish(worker=worker, round=message.round, step=message.step)
    state.workers[worker].finish, state.any_finish = own_finish, True
    if _is_late(state):
        return None
    for finish in _other_finishes(state, worker):
        if finish.round != own_finish.round:
            early, late = sorted((finish, own_finish), key=lambda each: each.round)
            return ended_early(early, late.worker, doing_step(late.step))
    if state.view and worker in state.unswitched and message.view < state.view.number:
        return ended_early(own_finish, _switched(state), "the next step")
    for round_, (other, call) in state.first_calls.items():
        if round_ >= own_finish.round and other in state.workers and other != worker:
            return ended_early(own_finish, other, call.doing)
    return None


def _other_finishes(state: CoordinatorState, worker: str) -> list[Finish]:
    """Return the ends of the scripts of the other workers. See docs/protocol.md, Same calls 6.

    A worker reports the end of its script once on each connection. So each one is kept as long as its worker is in the
    run. If only the first were kept, no end would be known when that worker is lost.
    """
    if not state.any_finish:  # this is asked for with each heartbeat
        return []
    return [other.finish for other in state.workers.values() if other.finish is not None and other.id != worker]


def _end(state: CoordinatorState, difference: Difference | None) -> None:
    """End the run if there is a difference."""
    if difference is not None:
        state.differ(difference)
        recovery.stop_view(state, difference.reason)


def _went_on(state: CoordinatorState, worker: str, round_: int, doing: str) -> Difference | None:
    """Return the difference if `worker` is in a round in which the script of another worker had already ended."""
    finish = next((finish for finish in _other_finishes(state, worker) if finish.round <= round_), None)
    return None if finish is None else ended_early(finish, worker, doing)


def _switched(state: CoordinatorState) -> str:
    """Return a worker that has switched to the view in force, or has left by it."""
    concerned = [worker for view in (state.view, state.previous) if view for worker in view.members]
    return next((worker for worker in concerned if worker not in state.unswitched), "another")


def _is_late(state: CoordinatorState) -> bool:
    """Return True if no worker trains any more, or a stop is in progress."""
    failed = state.ending is not None and state.ending.failed
    return state.over is not None or state.stopping is not None or bool(state.savers) or failed


def _in_a_view(state: CoordinatorState, worker: str, number: int) -> bool:
    """Return True if `worker` is a member of the view `number`, and that view may be in use."""
    return any(view.number == number and worker in view.members for view in state.views())


def _remember_first_call(state: CoordinatorState, round_: int, worker: str, call: Call) -> None:
    """Record the first call of `round_`, and forget rounds that are too old."""
    state.first_calls[round_] = (worker, call)
    for old in [each for each in state.first_calls if each <= round_ - KEPT_ROUNDS]:
        del state.first_calls[old]


# --- planned ----------------------------------------------------------------------------------------------------------

REGROUP_S = 600.0  # the time between two tries to replace the connections of the members


def plan(state: CoordinatorState, now: float) -> None:
    """Propose the next view if one is due and nothing is outstanding. Remove candidates that want to leave."""
    for candidate in [w for w in state.workers.values() if w.leaving and w.state in ("starting", "ready")]:
        if not state.is_waited_for(candidate.id):
            state.remove(candidate.id, Removal.LEFT, candidate.leaving)
    finished = any(w.state == "finished" for w in state.workers.values())
    if _regrouping_failed(state, now):
        recovery.stop_view(state, "the members could not make new connections")
    if state.stopping or state.proposed or state.savers or state.unsynced or finished:
        return
    if not all(state.workers[w].connected for w in state.participants()):
        return  # its return or its loss stops the view in any case
    due = next_view(state) or next_group(state, now) or next_shares(state)
    if due is not None:
        propose(state, *due, now)


def next_view(state: CoordinatorState) -> tuple[View, str] | None:
    """Return the view that is due and the reason for it; None if there is nothing to change.

    Leaving workers leave only while a worker that holds the state stays. If all members leave, joiners enter first (if
    necessary above the maximum, for that one view). A run that is ending goes to the empty view. If no member can save
    the last checkpoint and a ready worker can, that worker joins in a view before.
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
                zones=state.zones_of(members),
                unchecked=(helper,),
            ), f"{helper} joins to save the checkpoint: no member reaches the store"
        return View(number=number, members=(), group=view.group), state.ending.reason
    ready = [w.id for w in state.workers.values() if w.state == "ready" and w.connected and not w.leaving]
    if state.clock < state.meet_at:
        ready = []  # an unauthenticated peer was in the last connections: see `on_peer_not_authenticated`
    maximum = state.settings.maximum
    if view is None:
        if len(ready[:maximum]) < state.settings.minimum:
            return None
        first = shutdown.founders(state, ready)[:maximum]
        if not first:
            _give_up(state)
            return None
        number = state.next_number()
        return View(
            number=number,
            members=first,
            joining=first[1:],
            group=number,
            hosts=state.hosts_of(first),
            zones=state.zones_of(first),
            unchecked=first,
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
        zones=state.zones_of(members),
        unchecked=(*disputes.carried(state, stay), *joiners),
    ), ", ".join(causes)


def _give_up(state: CoordinatorState) -> None:
    """End the run if no worker can ever begin a first view."""
    if why := shutdown.no_way_to_save(state):
        state.ending = Ending(code=1, reason=why, failed=True)
        shutdown.end(state)


def next_group(state: CoordinatorState, now: float) -> tuple[View, str] | None:
    """Return the view in force with new connections once its connections have served many views, and the reason."""
    view = state.view
    if view is None or view.size < 2 or state.ending or now < max(state.regroup_at, state.meet_at):
        return None
    if state.number + 1 - view.group < state.settings.views_per_group:
        return None
    state.regroup_at = now + REGROUP_S
    number = state.next_number()
    unchecked = disputes.carried(state, view.members)
    return msgspec.structs.replace(
        view, number=number, joining=(), group=number, unchecked=unchecked
    ), "new connections"


def _regrouping_failed(state: CoordinatorState, now: float) -> bool:
    """Return True if the new connections among the same members are not ready within the time limit."""
    view = state.proposed
    if view is None or view.joining or view.group != view.number or state.view is view or state.stopping:
        return False
    return now - state.proposed_at > state.settings.prepare_timeout_s


def next_shares(state: CoordinatorState) -> tuple[View, str] | None:
    """Return the view in force with shares that match the speeds better, and the reason; None if none are due."""
    view = state.view
    if view is None or state.ending or not state.settings.by_speed:
        return None
    shares = state.speeds.due(view)
    if shares is None:
        return None
    slow = stragglers(state.speeds.relative())
    cause = ", ".join(f"{worker} at {speed:.2f} of the fastest's speed" for worker, speed in slow.items())
    unchecked = disputes.carried(state, view.members)
    view = msgspec.structs.replace(view, number=state.next_number(), joining=(), shares=shares, unchecked=unchecked)
    return view, cause or "the workers are about equally fast"


def propose(state: CoordinatorState, view: View, cause: str, now: float) -> None:
    """Send the proposed view to all participants."""
    state.proposed, state.proposed_at, state.cause = view, now, cause
    state.issued.append(IssuedView(view=view))
    state.record(events.ProposedEvent(view=view.number, members=view.members, cause=cause))
    message = m.Propose(view=view, newest=m.Newest() if state.view else state.newest)
    for worker in state.participants():
        state.send(worker, message)


def on_publish(state: CoordinatorState, worker: str, message: m.Publish) -> None:
    """Forward a member's address to the other members of the proposed view, or to the one that it names."""
    view = state.proposed
    if view and view.group == message.group and worker in view.members:
        for peer in view.members:
            if peer != worker and peer in state.workers and message.to in ("", peer):
                state.send(peer, m.Published(group=message.group, key=message.key, value=message.value))


def on_switched(state: CoordinatorState, worker: Worker, message: m.Switched) -> None:
    """Handle the report that `worker` has switched to a view.

    It is ignored during a stop: the answers to the stop contain the same.
    """
    call_switched(state, worker.id, message)
    view = state.proposed
    if state.stopping or view is None or message.view != view.number:
        return
    if state.view is not view:
        _in_force(state, view, worker, message)
    _compare_rounds(state, view, worker, message)
    if state.stopping or state.proposed is not view:
        return  # one of them is expelled: the leaving workers must stay to answer the stop
    state.unswitched.discard(worker.id)
    if state.unswitched:
        return
    before = state.previous.members if state.previous else ()
    concerned = state.participants()
    state.proposed = state.previous = None
    drop_other_views(state, [view])
    if not view.members:
        state.savers = [w for w in before if w in concerned]
        assert state.ending is not None
        state.ending.stored = False  # they may have gone on since a worker saved for the previous coordinator
        shutdown.ask_to_save(state)
        return
    for leaver in [w for w in before if w not in view.members]:
        state.remove(leaver, Removal.LEFT, "left gracefully")


def _compare_rounds(state: CoordinatorState, view: View, worker: Worker, message: m.Switched) -> None:
    """Expel each worker that reports another switching round than the one that counts (`disputes.agreed_round`).

    Honest workers report the same (R2).
    """
    state.switches[worker.id] = message.round
    if state.switch_round < 0:
        state.switch_round = disputes.agreed_round(state.switches, state.participants())
    for odd in [w for w, round_ in state.switches.items() if round_ != state.switch_round >= 0 and w in state.workers]:
        state.ban(odd)
        recovery.expel(
            state, odd, f"it reports that it switched to view {view.number} in round {state.switches[odd]}, "
            f"but others report round {state.switch_round}",
        )  # fmt: skip


def _in_force(state: CoordinatorState, view: View, worker: Worker, message: m.Switched) -> None:
    """Put `view` in force, on the first report that a worker has switched to it."""
    before = state.view
    state.previous, state.view, state.switch_round = before, view, -1
    state.switches, state.ahead = {}, {}
    state.unsynced = set(view.joining)
    state.unswitched = set(state.participants())
    unchanged = before is not None and view.members == before.members
    reassigned = unchanged and before is not None and view.shares != before.shares
    state.data_failures = 0
    if not view.joining and not unchanged:
        failures.on_joined(state, view.members)
    failures.note_progress(state, worker.id, message.step)
    for member in view.members:
        state.workers[member].state = "member"
    if before is None:
        state.first_founder = view.members[0]
    for joiner in view.joining if before else ():
        state.workers[joiner].entered = message.step
    if view.group == view.number:
        state.unauthenticated_tries = 0
    state.view_began = message.step
    state.record(events.ViewEvent(view=view.number, members=view.members, round=message.round, step=message.step,
        cause=state.cause))  # fmt: skip
    shutdown.appoint_saver(state)
    if reassigned:
        shares = dict(zip(view.members, view.shares or (WHOLE,) * view.size, strict=True))
        state.record(events.SharesEvent(view=view.number, step=message.step, shares=shares, reason=state.cause))


def mark_holder(state: CoordinatorState, worker: Worker) -> None:
    """Record that a participant holds the state, in whichever view: the end of its script concerns the run."""
    state.unsynced.discard(worker.id)
    if worker.state != "finished":
        worker.state = "member"


def on_synced(state: CoordinatorState, worker: str, message: m.Synced) -> None:
    """Record that a joiner holds the state. During a stop its view may be newer than the one in force."""
    if state.stopping and worker in state.stopping.unanswered:
        mark_holder(state, state.workers[worker])
    elif state.view and message.view == state.view.number:
        state.unsynced.discard(worker)
        if not state.unsynced:
            failures.on_joined(state, state.view.joining)
            shutdown.appoint_saver(state)


def late_members(state: CoordinatorState, now: float) -> list[str]:
    """Return the joiners that delay a proposed view beyond its time limit.

    These are the joiners that are not prepared, or all joiners if only members are not. In a first view they are all
    the members that are not prepared.
    """
    view = state.proposed
    if view is None or state.stopping or now - state.proposed_at <= state.settings.prepare_timeout_s:
        return []
    slow = [w for w in view.members if w in state.workers and state.workers[w].prepared < view.number]
    if not slow or state.view is None:
        return slow
    return [w for w in slow if w in view.joining] or list(view.joining)


# --- unplanned removals -----------------------------------------------------------------------------------------------
#
# How workers leave other than by a planned view: evicted (alive or not, the run goes on without it as soon as that is
# safe); its process has ended, for certain; its machine goes before it could leave (`Lapsed`); its script has failed
# (`ScriptFailed`); its host can't get it the data (`DataUnavailable`). A worker whose script has ended before it was
# admitted is not waited for. One that has a part in the view leaves it by a recovery.
# See docs/protocol.md: How a worker goes, Recovery, Preemption deadline, Data unavailable.
#
# All ways in which a worker goes, planned ones too: exit code (of a live process), events, and where it is decided. The
# events `left`, `lost` and `refused` are recorded once the worker is out of the records; `notice`, `expelled` and
# `unfed` before, when that is decided but not yet safe. After exit code 3 an external process may come back, as a new
# worker; any other process does not come back. An evicted or banned worker may be alive: nobody asks it.
#
#     leaves gracefully        0  notice, left           `scaling.request_leave`, `next_view`, `on_switched`
#     its deadline comes first 0  notice, lost           `Session.watch`: it saves; `remove_late_leaver`
#     dies                     -  lost                   `coordinator.on_process_exit` and `Coordinator.on_disconnect`:
#                                                        its process has ended and its connection is closed
#     is evicted               3  lost; expelled before, where it goes whatever it answers
#                                                        `reconnection.on_silence`, `late_members`, `disputes.convict`
#     is banned                5  lost; before it perhaps expelled or computes wrong
#                                                        it broke the protocol (`Coordinator.ban_and_remove`),
#                                                        contradicts several (`disputes.outvoted`) or computes wrong
#                                                        results (`disputes.judge`); others compute wrong shards again
#     is refused               1  refused                differs from the run when it asks (`admission.on_ready`), or in
#                                                        its first steps (`disputes.judge`)
#     its host lacks the data  6  unfed, then lost or left
#                                                        `failures.leavers_for_data`; the host is left alone for a while
#     its lease is over        4  lost, if there is a coordinator
#                                                        `Session.watch`: it saves; `reconnection.on_silence`
#     returns, state unknown   3  none                   `Coordinator.hello`; it saves, and nobody waits for it
#     its view is withdrawn    -  none                   `recovery._withdraw_view`; it stays, and is a candidate again
#     its script fails         1  failed                 `on_script_failed`: the state of a whole step is saved and the
#                                                        run ends; before it is a member only this worker goes
#     the run ends                over                   `shutdown.end`


def remove(state: CoordinatorState, worker_id: str, cause: Removal, reason: str, code: int = 0) -> None:
    """Take a worker out of the run, and stop the view if the worker was a participant.

    An evicted participant stays in the state until it is safe to go on without it. One eviction may cause others, so
    nothing happens if an evicted worker is out already, or if the run is over. A worker that left exits with `code`.
    """
    if cause is Removal.EVICTED:
        if worker_id not in state.workers or state.over:
            return
        if not state.savers and state.is_waited_for(worker_id):
            recovery.expel(state, worker_id, reason)
            state.close_evicted(worker_id, reason)
            state.workers[worker_id].connected = False
            recovery.mark_overdue(state, worker_id, reason)
            return
    worker, member = state.workers[worker_id], state.has_trained(worker_id)
    participant = cause is not Removal.EVICTED and worker_id in state.participants()
    state.remove(worker_id, cause, reason, code)
    if cause is Removal.DIED and member and not worker.leaving and worker.state != "finished":
        failures.count_death(state, worker_id, reason, entered=worker.entered if worker.pool else -1)
    _without(state, worker_id, reason, participant=participant)


def remove_late_leaver(state: CoordinatorState, worker: Worker) -> None:
    """Remove a leaving worker whose preemption deadline came before it could leave; its process exits by itself."""
    reason = f"its preemption deadline came before it could leave ({worker.leaving})"
    state.mark_dead(worker.id, reason)
    remove(state, worker.id, Removal.DIED, reason)


def on_script_end(state: CoordinatorState, worker: Worker, message: m.ScriptFailed | m.DataUnavailable) -> None:
    """Handle a script that failed, or a host that cannot get the data."""
    if isinstance(message, m.ScriptFailed):
        on_script_failed(state, worker, message)
    else:
        on_data_unavailable(state, worker, message.reason)


def on_script_failed(state: CoordinatorState, worker: Worker, message: m.ScriptFailed) -> None:
    """Handle a script that raised: it ends the run in a member, and removes a worker that is not yet a member."""
    state.record(events.FailedEvent(worker=worker.id, host=worker.host, traceback=message.traceback))
    if state.savers or (state.ending and state.ending.failed):
        if state.deadline is not None and worker.state != "finished":
            shutdown.give_up(state, f"the script failed on {worker.id}", code=1)
        return  # the others fail in the same way: the first one counts
    if state.affects_only_itself(worker):
        remove(state, worker.id, Removal.LEFT, "its script failed before it became a member", 1)
        return
    recovery.stop_for_failure(state, f"the script failed on {worker.id}", message.code)


def on_data_unavailable(state: CoordinatorState, worker: Worker, reason: str) -> None:
    """Handle a worker whose host cannot get the data.

    A participant is removed after its view has been stopped. A worker that may be needed to save is not removed.
    """
    if worker.data_unavailable:
        return
    worker.data_unavailable = reason or "no reason reported"
    state.record(events.UnfedEvent(worker=worker.id, host=worker.host, reason=worker.data_unavailable))
    if state.deadline is not None and worker.state != "finished":  # others hold the final state
        failures.release_without_data(state, worker.id)
        _without(state, worker.id, failures.LOST, participant=True)
    elif not state.is_waited_for(worker.id) and not state.ending:
        state.data_failures += state.view is None and bool(worker.pool)
        why = failures.no_data_anywhere(state, worker.id)
        failures.release_without_data(state, worker.id)
        if why:
            state.ending = Ending(code=1, reason=why, failed=True)
            shutdown.end(state)


def _without(state: CoordinatorState, worker: str, reason: str, *, participant: bool) -> None:
    """Go on after `worker` was taken out of the state."""
    state.unsynced.discard(worker)
    if not state.over:
        recovery.continue_without(state, worker, reason, participant=participant)


# --- unauthenticated peers --------------------------------------------------------------------------------------------
#
# A peer that fails authentication in the connections of a proposed view: the member drops the new connections, reports
# `PeerNotAuthenticated`, and never says that it is prepared. The view is given up at once, not at its time limit:
# members go on, joiners stay candidates, and another view is proposed, with a number, group and key of its own, after a
# wait that doubles up to `LONGEST_S`. Neither the peer nor the reporter is blamed; an event names the address between
# them. So an attacker that always gets in between, or a member that always reports this, keeps joiners out, and costs
# the others one stop in `LONGEST_S`. Leaving, and changes without new connections, do not wait.
# Argument: docs/protocol.md, Reconfiguration.

SHORTEST_S = 1.0
LONGEST_S = 300.0
DOUBLINGS = 9  # enough to reach LONGEST_S


def on_peer_not_authenticated(state: CoordinatorState, worker: str, message: m.PeerNotAuthenticated) -> None:
    """Give the proposed view up because an unauthenticated peer was in its connections; see above."""
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
    recovery.stop_view(state, f"an unauthenticated peer at {message.address}, between {worker} and the others")
