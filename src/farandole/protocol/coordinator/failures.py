"""Faults that do not go away by a restart: crash loops, workers without data, training that stands still.

A crash loop is a run that always dies at the same place, or joiners that die as soon as they enter. A loss counts only
if nobody has got beyond the step of the last counted one; `FATAL` in a row end the run, or the start of replacements.
All counts are in the journal, except when the last counted loss was and who was there: for a restarted coordinator the
next loss is a new one. Workers that leave for lack of data count in no row.
Argument: docs/protocol.md, Crash loops 1-8.

This module counts deaths and ends the run for them. What the view does without a dead worker is decided in
`view_changes.remove` and `recovery.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping

import msgspec

from farandole.protocol import events
from farandole.protocol import messages as m
from farandole.protocol.coordinator import disputes, scaling, shutdown
from farandole.protocol.coordinator.state import (
    EXIT_DATA_UNAVAILABLE,
    EXIT_EVICTED,
    CoordinatorState,
    CrashLoop,
    Ending,
    Strike,
    Worker,
)
from farandole.protocol.failure_detector import STALL_STEPS, STOP_STEPS
from farandole.protocol.messages import MICRO_BATCH, UPDATES, Stopped

# --- losses -----------------------------------------------------------------------------------------------------------

FATAL = 5  # losses without progress in a row, or joiners lost in a row
TOGETHER_S = 2.0  # losses within this time may have one cause
JOINER_TRIAL_STEPS = 10  # steps after its entry in which the death of a joiner counts in the row of joiners
# the likely causes in a script, by what differs
LIKELY = {
    MICRO_BATCH: "a generator of the data set's own, or data that was drawn before farandole.join()",
    UPDATES: "a scheduler, or another object that changes the optimizer, that was not replicated",
}
ANY = (
    "a data set's own generator, a scheduler or a training mode that was not replicated, or data that was drawn before "
    "farandole.join()"
)
NOT_ITS_OWN = (
    "killed by signal 9", "killed by signal 15", f"exited with code {EXIT_EVICTED}",
    f"exited with code {EXIT_DATA_UNAVAILABLE}",
)  # fmt: skip


def note_progress(state: CoordinatorState, worker: str, step: int) -> None:
    """Record that a member reports `step`. With three or more members, another must be about as far.

    The step comes from heartbeats, `Switched` and `Stopped`, so it may be one heartbeat old if nobody was left to
    report. With much shorter steps it may seem to grow although the run dies at one place. That place does not move, so
    this can't last for ever.
    """
    state.steps[worker] = max(step, state.steps.get(worker, -1))
    if step > state.reached:  # once a step, and not with each heartbeat: it looks at all members
        members = state.members()
        if len(members) >= disputes.MANY:
            step = min(step, sorted(state.steps.get(member, -1) for member in members)[-2] + 1)
        state.reached = max(state.reached, step)
    if state.crash_loop.count and step > state.crash_loop.step:
        state.crash_loop = msgspec.structs.replace(state.crash_loop, count=0)


def count_death(state: CoordinatorState, worker: str, reason: str, *, entered: int) -> None:
    """Count the death of `worker`, which was a member and was not asked to leave.

    It counts as a loss if the process ended by its own doing. SIGKILL may be a person, a spot market or the kernel. If
    the step lacks memory, the survivors inherit that and die too, until it is everyone's loss. Workers with a notice
    and evicted ones were asked to go.

    `entered` is the step in which it entered as a joiner of a pool; -1 for founders and external workers.
    """
    if state.ending or state.over:
        return
    state.crash_loop = msgspec.structs.replace(state.crash_loop, reason=reason)
    if reason not in NOT_ITS_OWN:
        _count(state, [worker], reason)
    if entered >= 0:
        _joiner_ended(state, worker, reason, entered)


def count_late_known_death(state: CoordinatorState, worker: str, reason: str, *, entered: int) -> None:
    """Count the death of `worker` when its cause becomes known after the others have gone on without it."""
    if reason not in NOT_ITS_OWN:
        state.record(events.DiedEvent(worker=worker, reason=reason))
    count_death(state, worker, reason, entered=entered)


def on_all_lost(state: CoordinatorState, cause: str) -> None:
    """Count the loss of all workers that held the state: the next ones begin with an earlier step."""
    if not state.ending:
        _count(state, state.view.members if state.view else (), state.crash_loop.reason or cause)
    state.reached, state.steps = -1, {}


def on_startup_failure(state: CoordinatorState, worker: str, pool: str) -> None:
    """Count a death of `worker` before it was a member. Its pool must not try for ever.

    Such a worker reaches no step, so no other count includes it. A broken image of one pool says nothing about other
    pools. The run's own pool is needed to begin, so it ends a run that has no view. Another pool ends the run only if
    all pools together would be asked for fewer than the minimum. A join from the pool resets its count, and so does
    `farandole scale`.

    See docs/protocol.md, Crash loops 8.
    """
    if state.ending or state.over:
        return
    mark = scaling.pool_mark(state, pool)
    count = state.startup_failures[mark] = state.startup_failures.get(mark, 0) + 1
    if count < state.settings.startup_failures:
        return
    reason = f"{count} workers in a row died before they could join; see their log files"
    if mark:
        _no_more_of(state, worker, pool, reason)
    elif state.view is None:
        shutdown.fail_before_view(state, reason)
    else:
        _no_replacements(state, reason)


def on_joined(state: CoordinatorState, workers: Collection[str]) -> None:
    """Reset the start failures of the pools of `workers`, which are in the view and hold its state."""
    for worker in workers:
        if (record := state.workers.get(worker)) and record.pool:
            state.startup_failures.pop(scaling.pool_mark(state, record.pool), None)


def on_refused(state: CoordinatorState, worker: Worker, reason: str) -> None:
    """Count the refusal of `worker` as a candidate, or as a joiner that differs from the run.

    A refused joiner costs the others the same recovery as one that dies, and its replacement runs the same script.
    Refusals count one by one: an accident may take several workers at once but refuses nobody. They count however long
    the joiner was in: an admission check fails in the first step, a digest perhaps 300 steps later. Before the first
    view the row ends the run, which could never begin. Different numerics at the request to join belong to the host:
    its pool leaves it alone, others may have what the run needs, and it counts as any end before the first step.

    See docs/protocol.md, Crash loops 6.
    """
    if not worker.pool or state.ending or state.over:
        return
    _in_a_row(state, worker.entered if worker.entered >= 0 else state.reached, 1, refused=1)
    if state.crash_loop.joiners < FATAL:
        return
    likely = next((cause for part, cause in LIKELY.items() if part in reason), ANY)
    sentence = f"{_row(state.crash_loop)} ({reason}); the likely cause is {likely}"
    if state.view is None:
        shutdown.fail_before_view(state, sentence)
    else:
        _no_replacements(state, sentence)


def _strike(state: CoordinatorState, workers: Collection[str]) -> Strike:
    """Return a strike at the present time that took `workers`."""
    return Strike(at=state.clock, present=frozenset([*workers, *state.workers, *state.departed]))


def _together(state: CoordinatorState, strike: Strike, workers: Collection[str]) -> bool:
    """Return True if the present loss of `workers` may have the same cause as `strike`.

    One event that takes everybody counts once, not once a worker; the same goes for joiners. A worker that came later
    was not struck by it, however soon it dies: a replacement may start and die in less than `TOGETHER_S`.
    """
    return state.clock - strike.at < TOGETHER_S and not strike.present.isdisjoint(workers)


def _count(state: CoordinatorState, workers: Collection[str], reason: str) -> None:
    """Count a loss, and end the run after `FATAL` losses without progress."""
    losses, step = state.crash_loop, max(state.crash_loop.step, state.reached)
    count = losses.count if losses.count and _together(state, state.strike, workers) else losses.count + 1
    if count != losses.count:
        state.strike = _strike(state, workers)
    state.crash_loop = msgspec.structs.replace(losses, count=count, step=step)
    if count >= FATAL:
        why = reason.removeprefix("killed by ")
        sentence = f"died {count} times at step {step} ({why}) and never got further; see the workers' log files"
        state.ending = Ending(code=1, reason=sentence, failed=True)


def _joiner_ended(state: CoordinatorState, worker: str, reason: str, entered: int) -> None:
    """Count the death of a joiner if it happens within `JOINER_TRIAL_STEPS` of its entry.

    Such a death costs the others a recovery and no more: they progress in between, so it never counts as a loss without
    progress. Five in a row with no surviving joiner among them: something in their pool kills them. `farandole scale`
    restarts the count. External workers are not counted: nobody replaces them, and their survival says nothing about
    pools.
    """
    if state.reached - entered > JOINER_TRIAL_STEPS:
        state.crash_loop = msgspec.structs.replace(state.crash_loop, joiners=0)
        return
    together = _together(state, state.joiner_strike, [worker])
    if not together:
        state.joiner_strike = _strike(state, [worker])
    _in_a_row(state, entered, 0 if together else 1)
    if state.crash_loop.joiners >= FATAL:
        why = reason.removeprefix("killed by ")
        _no_replacements(state, f"{_row(state.crash_loop)} ({why})")


def _row(losses: CrashLoop) -> str:
    """Return a description of the joiners in a row."""
    died = f"died within {JOINER_TRIAL_STEPS} steps of entering"
    if not losses.refusals:
        return f"{losses.joiners} joiners in a row {died}"
    if losses.refusals == losses.joiners:
        return f"{losses.joiners} joiners in a row were refused"
    return f"{losses.joiners} joiners in a row {died}, or were refused ({losses.refusals} of them)"


def _in_a_row(state: CoordinatorState, entered: int, more: int, *, refused: int = 0) -> None:
    """Add `more` joiners to the row. The row restarts if a pool's worker has survived since it began."""
    losses = state.crash_loop
    joined = [state.workers[w].entered for w in state.participants() if state.workers[w].pool]
    survived = any(losses.since <= step < state.reached - JOINER_TRIAL_STEPS for step in joined if step >= 0)
    joiners = 1 if survived or not losses.joiners else losses.joiners + more
    anew = survived or not losses.joiners
    state.crash_loop = msgspec.structs.replace(
        losses,
        joiners=joiners,
        refusals=refused if anew else losses.refusals + refused,
        since=entered if joiners == 1 else losses.since,
    )


def _no_more_of(state: CoordinatorState, worker: str, pool: str, reason: str) -> None:
    """Stop replacements in `pool`, whose `worker` has just died. The run goes on if enough workers are still wanted."""
    mark, before = scaling.pool_mark(state, pool), state.wanted
    wanted = scaling.targets(state).get(mark, 0)
    present = sum(1 for w in state.workers.values() if w.pool == pool and w.id != worker and not w.leaving)
    target = min(present, wanted)
    scaling.fix_target(state, mark, target, target)  # the other pools get the rest of the shared target
    reason = f"{reason}; pool {pool} starts no more workers"
    begun = any(map(state.has_trained, state.workers))
    if before >= state.settings.minimum > state.wanted and not begun:
        shortage = f"only {state.wanted} of at least {state.settings.minimum} workers can start"
        if state.view is None:
            shutdown.fail_before_view(state, f"{reason}, and {shortage}")
        else:
            state.ending = Ending(code=1, reason=f"{reason}, and {shortage}", failed=True)
    else:
        state.record(events.NoReplacementsEvent(wanted=state.wanted, reason=reason))


def _no_replacements(state: CoordinatorState, reason: str) -> None:
    """Stop replacements in all pools. The run goes on with the present members if they are enough."""
    assert state.view is not None
    members = [state.workers[w] for w in state.view.members if w in state.workers]
    if len(members) < state.settings.minimum:
        shortage = f"only {len(members)} of at least {state.settings.minimum} workers remain"
        state.ending = Ending(code=1, reason=f"{reason}, and {shortage}", failed=True)
        return
    state.fixed_targets = dict.fromkeys((scaling.pool_mark(state, pool.name) for pool in state.settings.pools), 0)
    state.fixed_targets |= Counter(scaling.pool_mark(state, worker.pool) for worker in members if worker.pool)
    state.shared_target = 0
    state.record(events.NoReplacementsEvent(wanted=state.wanted, reason=reason))


# --- data unavailable -------------------------------------------------------------------------------------------------
#
# Workers whose host can't get them the data: a full disk, an unreachable store, a damaged copy. That is the host's
# fault, so such a worker leaves as if it had died. Invariant: the last holder of the state never leaves for it; there
# the run ends, saved.
# Such a worker computes nothing any more; its memory stands still. It reports before its answer to any later stop, on
# one ordered connection, and again on each new one, so a coordinator that was restarted in between knows it too. The
# others need of it what they need of a dead worker, nothing. Where the run ends anyway, it is like any other and may be
# the one that saves. After others have finished, what they hold is the final state, and it is not waited for. A bad
# host costs the others at most one recovery in the time for which its pool leaves it alone (twice as long each time, up
# to 10 min), and is used again once it is well.
# Argument: docs/protocol.md, Data unavailable 1-7.
#
#     stop_for_data           whether the view is to be stopped for such a worker
#     leavers_for_data        the answers are here: workers without data leave, or the run ends
#     release_without_data    a worker that is not needed for anything leaves
#     no_data_anywhere        nobody is there that could begin the run

LOST = "its host cannot get the data"
REMEDY = (
    "this host cannot get the run's data, and the others go on without this worker; fix what the error above names "
    "(space for the cache, the network path to the store) before another worker joins from here"
)


def stop_for_data(state: CoordinatorState) -> str:
    """Return the reason to stop the view now because a participant cannot get the data, "" if there is none.

    If those without data are sending the state to joiners, as in a first view, heirs are about to exist: the view is
    not stopped before one does, or a worker is lost. Loading the state needs no data. But a worker that has not entered
    the joiners' view when it reports never will: then there is nothing to wait for.
    """
    if state.stopping or state.savers:
        return ""
    without_data = [worker for worker in state.participants() if state.workers[worker].data_unavailable]
    if not without_data:
        return ""
    with_data = [worker for worker in state.members() if not state.workers[worker].data_unavailable]
    handed_on = state.unsynced.intersection(with_data)
    # See docs/protocol.md, Data unavailable 4
    if handed_on and handed_on.issuperset(with_data) and state.unswitched.isdisjoint(without_data):
        return ""
    return f"{without_data[0]}: {LOST}"


def leavers_for_data(state: CoordinatorState, reports: Mapping[str, Stopped], failed: Collection[str]) -> list[str]:
    """Remove the workers that have answered a stop and cannot get the data, and return them.

    An heir is another synced member of the newest view that has answered and has data. A worker out of reach that was
    given up is no heir; nor is a leaving one, which may be rounds behind.

    No worker is removed if the run ends, which it also does if no other worker can take the state over. `failed` are
    joiners that are refused.
    """
    without_data = [worker for worker in reports if state.workers[worker].data_unavailable]
    views = {worker: report.view for worker, report in reports.items() if report.synced and report.view}
    emptied = any(not view.members for view in views.values())
    if not without_data or (state.ending and (state.ending.failed or emptied)):
        return []
    newest = max(views.values(), key=lambda view: view.number, default=None)
    heirs = {*views}.intersection(newest.members if newest else ()).difference(without_data, failed)
    if views and not heirs:
        _end(state, [worker for worker in without_data if worker in views])
        return []
    for worker in without_data:
        release_without_data(state, worker)
    return without_data


def _end(state: CoordinatorState, without_data: list[str]) -> None:
    """Fail the run because no worker can get the data. A requested end of the run keeps its exit code."""
    reason = f"no worker remains that can get the run's data: {_reasons(state, without_data)}"
    if state.ending is None:
        state.ending = Ending(code=1, reason=reason, failed=True)
    else:
        state.ending.reason, state.ending.failed = f"{state.ending.reason}; {reason}", True
    state.record(events.StoppingEvent(reason=reason))  # the journal must hold the ending before a worker hears of it


def release_without_data(state: CoordinatorState, worker: str) -> None:
    """Take out a worker that cannot get the data. It exits with its own code."""
    started = state.has_trained(worker)
    removed = state.workers.pop(worker)
    state.unsynced.discard(worker)
    event = events.LostEvent if started else events.LeftEvent
    state.record(event(worker=worker, host=removed.host, reason=LOST))
    state.dismiss(removed, REMEDY, EXIT_DATA_UNAVAILABLE, started=started)


def no_data_anywhere(state: CoordinatorState, newest: str) -> str:
    """Return why the run cannot begin, "" if it can. `newest` has just reported that it cannot get the data.

    Before the first view nothing is lost, and a worker without a part costs only itself. But perhaps no host has the
    data: the run ends when as many in a row as are wanted have reported so, and no other worker is there.
    """
    others = any(not worker.data_unavailable for worker in state.workers.values())
    enough = min(max(state.wanted, 1), state.settings.startup_failures)
    if state.view or state.proposed or others or state.data_failures < enough:
        return ""
    before = f" ({state.data_failures} workers in a row)" if state.data_failures > 1 else ""
    return f"no worker can get the run's data{before}: {_reasons(state, [newest])}"


def _reasons(state: CoordinatorState, workers: list[str]) -> str:
    """Return each worker with its host and the reason that it reports."""
    return "; ".join(f"{w} on {state.workers[w].host}: {state.workers[w].data_unavailable}" for w in workers)


# --- stalls -----------------------------------------------------------------------------------------------------------
#
# Heartbeats come, and the training does not move. An event names the members that do not wait for others, and asks them
# for the stacks of their threads. Nobody is evicted for it. A requested end of the run becomes a recovery if
# the current step does not end.
# Evaluations and steps of many shards make progress; a compilation, a validation in the loop body or a hang does not.
# The event is repeated after twice the time, and so on. The connection's thread writes the stacks, whatever the other
# threads do. It also answers the stop of that recovery, and a holder of a whole step's state saves it, first those that
# do not hang. If all are between two steps by their heartbeats, what could be saved belongs to neither step, and
# nothing could go on from it. It may be a validation that ends.
# Argument: docs/protocol.md, Stalls 1-6.

BETWEEN_STEPS_FACTOR = 10  # times as long before the requested end of a run between two steps is cut short


def watch_for_stalls(state: CoordinatorState, now: float) -> None:
    """Check whether the training, the end of the run or the last checkpoint makes no progress. Called at every tick."""
    progress, settings = state.progress, state.settings
    busy = state.stopping or state.savers or state.over
    if state.ending and not state.ending.failed and not busy and (state.view or state.proposed):
        _cut_short(state, state.ending, now)
    if state.savers and state.ending and state.ending.saver:
        _watch_saver(state, state.ending.saver, now)
        return
    if busy or state.view is None or not state.view.members:
        progress.moved(None)
        return
    if progress.since is None:
        progress.moved(now)
        progress.forget(state.view.members)
    if progress.due(now, settings.standstill_s):
        reason = f"step {state.reached} has made no progress for {progress.unchanged_s(now):.0f} s"
        _stalled(state, hung_workers(state), reason, now)
        ask_for_stacks(state, reason)


def _watch_saver(state: CoordinatorState, saver: str, now: float) -> None:
    """Check the last checkpoint, which the end of the run waits for: a store may hang and never take it."""
    progress = state.progress
    if progress.saver != saver:
        progress.saver = saver
        progress.moved(now)
    if progress.due(now, state.settings.standstill_s):
        reason = f"{saver} has been writing the last checkpoint for {progress.unchanged_s(now):.0f} s"
        _stalled(state, (saver,), reason, now)
        state.send(saver, m.Stacks(reason=reason))


def _stalled(state: CoordinatorState, workers: tuple[str, ...], reason: str, now: float) -> None:
    """Record that `workers` make no progress."""
    seconds = round(state.progress.unchanged_s(now), 1)
    state.record(events.StalledEvent(step=state.reached, seconds=seconds, workers=workers, reason=reason))


def hung_workers(state: CoordinatorState) -> tuple[str, ...]:
    """Return the members that do not report that they wait for others."""
    members = [state.workers[w] for w in (state.view.members if state.view else ()) if w in state.workers]
    return tuple(w.id for w in members if not w.heartbeat.waits_for_peers and w.state != "finished")


def stalled_s(state: CoordinatorState, now: float) -> float | None:
    """Return for how many seconds the training has made no progress; None if that is within the limit."""
    progress = state.progress
    stalled = progress.unchanged_s(now)
    return stalled if stalled > progress.limit(state.settings.standstill_s, STALL_STEPS) else None


def ask_for_stacks(state: CoordinatorState, reason: str) -> None:
    """Ask the members that do not wait for others for the stacks of their threads."""
    for worker in hung_workers(state):
        state.send(worker, m.Stacks(reason=reason))


def _cut_short(state: CoordinatorState, ending: Ending, now: float) -> None:
    """Turn a planned end of the run into a failure if the current step does not end within the limit."""
    progress = state.progress
    stands = now - state.ending_at
    limit = progress.limit(state.settings.stop_s, STOP_STEPS)
    if state.view is not None:
        stands = min(stands, progress.unchanged_s(now))
        at_step_start = any(state.workers[w].heartbeat.at_step_start for w in state.view.members if w in state.workers)
        limit *= 1 if at_step_start else BETWEEN_STEPS_FACTOR
    if stands <= limit:
        return
    names = hung_workers(state)
    overdue = f"step {state.reached} has not ended for {math.floor(stands)} s"
    state.record(events.CutShortEvent(step=state.reached, workers=names, reason=overdue))
    ask_for_stacks(state, overdue)
    cause = f"{', '.join(names)} hung in step {state.reached}" if names else overdue
    where = ", ".join(f"logs/{name}.log" for name in names)
    stacks = f" (its stacks: {where})" if names else ""
    state.ending = Ending(code=ending.code, reason=f"{ending.reason}; {cause}{stacks}", failed=True)
