"""Losses that repeat themselves: a run that dies for ever at the same place, joiners that die as soon as they are in.

A worker that dies is replaced, and where all have died the next ones begin with the newest checkpoint. That is right
for accidents, and goes round in circles where the script, the data or the host is the cause. What tells them apart:

1. Accidents don't wait for a step. So a loss counts if nobody has got beyond the step of the last one that counted;
   whoever gets beyond sets the count to nothing. `FATAL` in a row without a new furthest step end the run.
2. What counts is everyone's loss, whatever brought it about, and that of one member while others live if its process
   ended by its own doing. SIGKILL is not that: it may be a person, a spot market or the kernel. If memory is what the
   step lacks, the survivors inherit it and die as well, until it is everyone's loss. Who had notice or was evicted was
   asked to go.
3. One cause may strike many within moments. So losses within `TOGETHER_S` of the one that counted are the same loss,
   if who is lost was there then: one that takes everybody is counted once, not once a worker, and so with joiners. Who
   has come since was not struck by it, however soon it dies: a replacement may take less than that to start and die.
4. The furthest step is known from heartbeats, Switched and Stopped, so it may be a heartbeat old where nobody was left
   to report. Where steps are much shorter than that it may seem to grow although the run dies in the same place; but
   that place does not move, so it can't seem so for ever.
5. A joiner that dies in the first `TRIAL` steps after it has entered costs the others a recovery and no more: they
   have progress in between, and the first rule never speaks. `FATAL` of those in a row, none surviving among them, and
   no more are started: what kills them is where they come from. `farandole scale` begins to count anew.
6. A joiner that is refused costs the others the same recovery, and the script that made it unlike the run makes its
   replacement so. So a refusal counts in the row of rule 5. Two things are different. An accident may take several at
   once, but it refuses nobody: refusals are counted one by one. A proof fails in the first step, a digest perhaps 300
   steps later: a refusal counts however long the joiner was in. Before there is a view the row ends the run, which
   could never begin. Numerics that differ when a worker asks in are its host's: the pool leaves that host alone, and
   other hosts may well have what the run needs; they count as any end before the first step does.
7. The rows of 5 and 6 are about replacements, so they count workers of pools. Nobody replaces a guest: its end counts
   in neither, and a guest that survives says nothing of what the pools start.

8. A worker that dies before it is let in gets to no step, so none of this counts it. As many in a row of one pool as
   the settings say, none of that pool's joining in between, and that pool starts no more: a broken image of one pool
   says nothing of the others. The run's own pool is the one that a run can't begin without, so it ends a run that has
   no view. Another pool ends it only where fewer than the minimum would be wanted of all of them. `farandole scale`
   begins to count anew.

All of it is in the journal, but for when the last loss that counted was, and who was there: to a coordinator that
comes back, the next one is a new one. Who goes because its host can't get it the data is in none of these rows
(`feeding`, 7).
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
from farandole.protocol.failure_detector import SHORT, SLOW
from farandole.protocol.messages import MICRO_BATCH, UPDATES, Stopped

# --- losses -----------------------------------------------------------------------------------------------------------

FATAL = 5  # losses without progress, or joiners, in a row
TOGETHER_S = 2.0
TRIAL = 10  # steps
# by what was found to differ; each names what a script does to be unlike the run
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
    """A member is in `step`, as it says. Where there are three or more, another has to be about as far."""
    state.steps[worker] = max(step, state.steps.get(worker, -1))
    members = state.members()
    said = sorted(state.steps.get(member, -1) for member in members)
    if len(members) >= disputes.MANY:
        step = min(step, said[-2] + 1)
    state.reached = max(state.reached, step)
    if state.crash_loop.count and step > state.crash_loop.step:
        state.crash_loop = msgspec.structs.replace(state.crash_loop, count=0)


def on_worker_death(state: CoordinatorState, worker: str, reason: str, *, entered: int) -> None:
    """The process of `worker`, who had been let in, and was not asked to go, has ended. `entered`: the step in which it
    did, as a joiner of a pool; -1 for one of the first, and for guests.
    """
    if state.ending or state.over:
        return
    state.crash_loop = msgspec.structs.replace(state.crash_loop, reason=reason)
    if reason not in NOT_ITS_OWN:
        _count(state, [worker], reason)
    if entered >= 0:
        _joiner_ended(state, worker, reason, entered)


def on_wrong_worker(state: CoordinatorState, worker: str, reason: str, *, entered: int) -> None:
    """... and the others had gone on without it before anybody knew of what it died."""
    if reason not in NOT_ITS_OWN:
        state.record(events.DiedEvent(worker=worker, reason=reason))
    on_worker_death(state, worker, reason, entered=entered)


def on_all_lost(state: CoordinatorState, cause: str) -> None:
    """Nobody is left of the view who holds the state: the next ones begin behind the step in hand."""
    assert state.view is not None
    if not state.ending:
        _count(state, state.view.members, state.crash_loop.reason or cause)
    state.reached, state.steps = -1, {}


def on_startup_failure(state: CoordinatorState, worker: str, pool: str) -> None:
    """`worker` has died before it was let in, as the next one may: its pool must not try for ever. See 8."""
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
        state.ending = Ending(code=1, reason=reason, failed=True)
        shutdown.end(state)
    else:
        _no_replacements(state, reason)


def on_joined(state: CoordinatorState, workers: Collection[str]) -> None:
    """`workers` are in the view, with its state: their pools' next start that fails is the first of a row."""
    for worker in workers:
        if (known := state.workers.get(worker)) and known.pool:
            state.startup_failures.pop(scaling.pool_mark(state, known.pool), None)


def on_refused(state: CoordinatorState, worker: Worker, reason: str) -> None:
    """`worker` is not let in, or is put out as a joiner that is unlike the run, for `reason`. See 6."""
    if not worker.pool or state.ending or state.over:
        return
    _in_a_row(state, worker.entered if worker.entered >= 0 else state.reached, 1, refused=1)
    if state.crash_loop.joiners < FATAL:
        return
    likely = next((cause for found, cause in LIKELY.items() if found in reason), ANY)
    sentence = f"{_row(state.crash_loop)} ({reason}); the likely cause is {likely}"
    if state.view is None:
        state.ending = Ending(code=1, reason=sentence, failed=True)
        shutdown.end(state)
    else:
        _no_replacements(state, sentence)


def _strike(state: CoordinatorState, workers: Collection[str]) -> Strike:
    """That of now, which took `workers`."""
    return Strike(at=state.clock, present=frozenset([*workers, *state.workers, *state.departed]))


def _together(state: CoordinatorState, strike: Strike, workers: Collection[str]) -> bool:
    """Whether `workers`, who are lost now, may be lost to what has struck then."""
    return state.clock - strike.at < TOGETHER_S and not strike.present.isdisjoint(workers)


def _count(state: CoordinatorState, workers: Collection[str], reason: str) -> None:
    known, step = state.crash_loop, max(state.crash_loop.step, state.reached)
    count = known.count if known.count and _together(state, state.strike, workers) else known.count + 1
    if count != known.count:
        state.strike = _strike(state, workers)
    state.crash_loop = msgspec.structs.replace(known, count=count, step=step)
    if count >= FATAL:
        why = reason.removeprefix("killed by ")
        sentence = f"died {count} times at step {step} ({why}), and never got further; see the workers' log files"
        state.ending = Ending(code=1, reason=sentence, failed=True)


def _joiner_ended(state: CoordinatorState, worker: str, reason: str, entered: int) -> None:
    if state.reached - entered > TRIAL:
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
    """The row of joiners as a sentence."""
    died = f"died within {TRIAL} steps of entering"
    if not losses.refusals:
        return f"{losses.joiners} joiners in a row {died}"
    if losses.refusals == losses.joiners:
        return f"{losses.joiners} joiners in a row were refused"
    return f"{losses.joiners} joiners in a row {died}, or were refused ({losses.refusals} of them)"


def _in_a_row(state: CoordinatorState, entered: int, more: int, *, refused: int = 0) -> None:
    """Count `more` joiners into the row; a pool's worker that has survived since it began ends the row before."""
    known = state.crash_loop
    joined = [state.workers[w].entered for w in state.participants() if state.workers[w].pool]
    survived = any(known.since <= step < state.reached - TRIAL for step in joined if step >= 0)
    joiners = 1 if survived or not known.joiners else known.joiners + more
    anew = survived or not known.joiners
    state.crash_loop = msgspec.structs.replace(
        known,
        joiners=joiners,
        refusals=refused if anew else known.refusals + refused,
        since=entered if joiners == 1 else known.since,
    )


def _no_more_of(state: CoordinatorState, worker: str, pool: str, reason: str) -> None:
    """`pool`, whose `worker` has just died, keeps those who are there. The run goes on if enough are wanted."""
    mark, before = scaling.pool_mark(state, pool), state.wanted
    wanted = scaling.targets(state).get(mark, 0)
    there = sum(1 for w in state.workers.values() if w.pool == pool and w.id != worker and not w.leaving)
    left = min(there, wanted)
    scaling.fix_target(state, mark, left, left)  # of what pools share, the others are asked for the rest
    reason = f"{reason}; pool {pool} starts no more"
    begun = any(map(state.let_in, state.workers))
    if before >= state.settings.minimum > state.wanted and not begun:
        few = f"{state.wanted} of at least {state.settings.minimum} workers can come"
        state.ending = Ending(code=1, reason=f"{reason}, and {few}", failed=True)
        if state.view is None:
            shutdown.end(state)
    else:
        state.record(events.NoReplacementsEvent(wanted=state.wanted, reason=reason))


def _no_replacements(state: CoordinatorState, reason: str) -> None:
    """The run goes on with those who are there, if they are enough."""
    assert state.view is not None
    members = [state.workers[w] for w in state.view.members if w in state.workers]
    if len(members) < state.settings.minimum:
        few = f"{len(members)} of at least {state.settings.minimum} workers are left"
        state.ending = Ending(code=1, reason=f"{reason}, and {few}", failed=True)
        return
    state.fixed_targets = dict.fromkeys((scaling.pool_mark(state, pool.name) for pool in state.settings.pools), 0)
    state.fixed_targets |= Counter(scaling.pool_mark(state, worker.pool) for worker in members if worker.pool)
    state.shared_target = 0
    state.record(events.NoReplacementsEvent(wanted=state.wanted, reason=reason))


# --- feeding ----------------------------------------------------------------------------------------------------------
#
# Workers whose host can't get them the data: a full disk, a store out of reach, a damaged copy. Who goes, and when.
#
# Such a fault is the host's, and not the run's: on another host, or a while later, the same data is there. So a worker
# that says `Unfed` goes as if it had died, but for the last one that holds the state. Who knows what when:
#
# 1. Who says so computes nothing any more. Its process stays until it is let go: its memory stands still, it answers
#    stops, and it can save. It says so before its answer to any later stop, on one ordered connection, and again on
#    each new one (`session`). So of those who have answered a stop it is known who can't be fed, also to a
#    coordinator that has come back in between.
# 2. Its view is stopped, and it goes with the decision, not before: only the answers tell who holds the state. Its
#    own counts for the fence (`reconnection`, 3), for it gives no word any more. What the others need of it is what
#    they need of the dead, nothing (`recovery`); so they redo its shards, and the bits are the same.
# 3. It stays where no *heir* is left: another member of the newest view that holds the state, has answered, and has
#    not said the same. Who is out of reach then, and given up, is none; nor is a leaver, which may be rounds behind.
#    The run ends there, as by a script that fails on all, and the best of those who hold the state saves it. So no
#    state is ever given up for a disk.
# 4. Where those who can't be fed are handing the state to joiners, as in a first view, the heirs are about to be
#    there: the view is not stopped before one of them is, or somebody is lost. Taking the state over needs no shard
#    of anybody. But who has not entered the joiners' view when it says so never does: then there is nothing to wait
#    for.
# 5. Where the run ends anyway it is like any other: it may be the one that saves. Once others have finished, what they
#    hold is the run's final state, and it is not waited for.
# 6. Who has no part yet costs nobody but itself. Before there is a view nothing is lost, but perhaps nobody can be fed,
#    wherever: the run ends when as many in a row have said so as are wanted, and nobody else is there.
# 7. None of this counts in a row of losses. Those bound what would go on for ever, and this has a bound of its own: the
#    pool leaves such a host alone, twice as long each time up to 10 min (`pool/placing`). So each bad host costs the
#    others a recovery in that time, at most; and it is used again once it is well.
#
#     due      whether the view is to be stopped for somebody
#     leave    the answers are here: whoever can't be fed goes, or the run ends
#     let_go   one who is not needed for anything goes
#     hopeless nobody is there who could begin the run

LOST = "its host can't get it the data"
REMEDY = (
    "this host can't get the run's data, and the others go on without this worker; see to what the error above names "
    "(room for the cache, the way to the store) before another one joins from here"
)


def stop_for_data(state: CoordinatorState) -> str:
    """Why the view is to be stopped now, "" if it is not."""
    if state.stopping or state.savers:
        return ""
    unfed = [worker for worker in state.participants() if state.workers[worker].data_unavailable]
    if not unfed:
        return ""
    fed = [worker for worker in state.members() if not state.workers[worker].data_unavailable]
    handed_on = state.unsynced.intersection(fed)
    if handed_on and handed_on.issuperset(fed) and state.unswitched.isdisjoint(unfed):  # see 4
        return ""
    return f"{unfed[0]}: {LOST}"


def leavers_for_data(state: CoordinatorState, reports: Mapping[str, Stopped], failed: Collection[str]) -> list[str]:
    """Of those who have answered a stop, whoever can't be fed goes: they are out of the state, and are returned.

    Nobody is where the run ends anyway, or does so now for want of an heir. `failed`: joiners that are refused.
    """
    unfed = [worker for worker in reports if state.workers[worker].data_unavailable]
    views = {worker: report.view for worker, report in reports.items() if report.synced and report.view}
    emptied = any(not view.members for view in views.values())
    if not unfed or (state.ending and (state.ending.failed or emptied)):
        return []
    newest = max(views.values(), key=lambda view: view.number, default=None)
    heirs = {*views}.intersection(newest.members if newest else ()).difference(unfed, failed)
    if views and not heirs:
        _end(state, [worker for worker in unfed if worker in views])
        return []
    for worker in unfed:
        release_without_data(state, worker)
    return unfed


def _end(state: CoordinatorState, unfed: list[str]) -> None:
    """A stop that was asked for keeps its exit code."""
    reason = f"no worker is left that can get the run's data: {_said(state, unfed)}"
    if state.ending is None:
        state.ending = Ending(code=1, reason=reason, failed=True)
    else:
        state.ending.reason, state.ending.failed = f"{state.ending.reason}; {reason}", True


def release_without_data(state: CoordinatorState, worker: str) -> None:
    """It is told to exit, with a code of its own."""
    started = state.let_in(worker)
    gone = state.workers.pop(worker)
    state.unsynced.discard(worker)
    event = events.LostEvent if started else events.LeftEvent
    state.record(event(worker=worker, host=gone.host, reason=LOST))
    state.record_departure(gone, REMEDY, EXIT_DATA_UNAVAILABLE, started=started)


def no_data_anywhere(state: CoordinatorState, newest: str) -> str:
    """Why the run can't begin, "" if it may. `newest` has just said that it can't be fed, and is in the state."""
    others = any(not worker.data_unavailable for worker in state.workers.values())
    enough = min(max(state.wanted, 1), state.settings.startup_failures)
    if state.view or state.proposed or others or state.data_failures < enough:
        return ""
    before = f" ({state.data_failures} workers in a row)" if state.data_failures > 1 else ""
    return f"no worker can get the run's data{before}: {_said(state, [newest])}"


def _said(state: CoordinatorState, workers: list[str]) -> str:
    return "; ".join(f"{w} on {state.workers[w].host}: {state.workers[w].data_unavailable}" for w in workers)


# --- standstill -------------------------------------------------------------------------------------------------------
#
# Standing still: heartbeats come, and the training does not move.
#
# Whoever keeps its peers waiting is reported by them. But the last or only member has no peers, and where the script
# hangs in all of them nobody waits for anybody. So the coordinator looks as well:
#
# 1. Anything counts as moving that a heartbeat tells: a round, a step, a shard computed, of anybody in the view. So
#    evaluations and steps of many shards move, and a compilation, a validation in the loop body or a hang do not.
# 2. Nothing has moved for `standstill_s`, or for `SLOW` median steps if that is longer: that is an event, and again
#    after twice as long, and so on. It names the members that do not say of themselves that they wait for others.
#    Nobody is evicted for it: it may be honest work, and without that member there may be no state left.
# 3. They are asked for the stacks of their threads. The connection's thread writes them, whatever the others do.
# 4. A planned stop needs the step in hand to end (R2), which it does not if somebody hangs in it. So where nothing has
#    moved for `stop_s` since it was asked for, or for `SHORT` median steps, it becomes an unplanned one: the view is
#    stopped, which the connections' threads answer, and whoever holds the state of a whole step saves it, those first
#    who do not hang. What makes that safe on a worker that does is argued in `worker/hung.py`.
# 5. The last checkpoint is watched alike: who has been at it for long is named, and asked for its stacks.
# 6. Is everyone between two steps, by what the heartbeats say, then what could be saved is of neither, and nothing
#    could go on from it. It may be a validation that ends: so that takes `PATIENCE` times as long.

PATIENCE = 10


def watch_for_stalls(state: CoordinatorState, now: float) -> None:
    """The clock's part."""
    still, settings = state.progress, state.settings
    busy = state.stopping or state.savers or state.over
    if state.ending and not state.ending.failed and not busy and (state.view or state.proposed):
        _cut_short(state, state.ending, now)
    if state.savers and state.ending and state.ending.saver:
        _watch_saver(state, state.ending.saver, now)
        return
    if busy or state.view is None or not state.view.members:
        still.moved(None)
        return
    if still.since is None:
        still.moved(now)
        still.forget(state.view.members)
    if still.due(now, settings.standstill_s):
        told = f"step {state.reached} has stood for {still.stands(now):.0f} s"
        _stalled(state, hung_workers(state), told, now)
        ask_for_stacks(state, told)


def _watch_saver(state: CoordinatorState, saver: str, now: float) -> None:
    """The run's end waits for the last checkpoint, which a store that hangs may never take."""
    still = state.progress
    if still.saver != saver:
        still.saver = saver
        still.moved(now)
    if still.due(now, state.settings.standstill_s):
        told = f"{saver} has been at the last checkpoint for {still.stands(now):.0f} s"
        _stalled(state, (saver,), told, now)
        state.send(saver, m.Stacks(reason=told))


def _stalled(state: CoordinatorState, workers: tuple[str, ...], reason: str, now: float) -> None:
    seconds = round(state.progress.stands(now), 1)
    state.record(events.StalledEvent(step=state.reached, seconds=seconds, workers=workers, reason=reason))


def hung_workers(state: CoordinatorState) -> tuple[str, ...]:
    """The members that do not say of themselves that they wait for others."""
    known = [state.workers[w] for w in (state.view.members if state.view else ()) if w in state.workers]
    return tuple(w.id for w in known if not w.heartbeat.idle and w.state != "finished")


def stalled_s(state: CoordinatorState, now: float) -> float | None:
    """For how long the training has stood still, if that is longer than it should."""
    still = state.progress
    stands = still.stands(now)
    return stands if stands > still.limit(state.settings.standstill_s, SLOW) else None


def ask_for_stacks(state: CoordinatorState, reason: str) -> None:
    for worker in hung_workers(state):
        state.send(worker, m.Stacks(reason=reason))


def _cut_short(state: CoordinatorState, asked: Ending, now: float) -> None:
    still = state.progress
    stands = now - state.ending_at
    limit = still.limit(state.settings.stop_s, SHORT)
    if state.view is not None:
        stands = min(stands, still.stands(now))
        whole = any(state.workers[w].heartbeat.state_complete for w in state.view.members if w in state.workers)
        limit *= 1 if whole else PATIENCE
    if stands <= limit:
        return
    names = hung_workers(state)
    told = f"step {state.reached} has not ended for {math.floor(stands)} s"
    state.record(events.CutShortEvent(step=state.reached, workers=names, reason=told))
    ask_for_stacks(state, told)
    who = f"{', '.join(names)} hung in step {state.reached}" if names else told
    where = ", ".join(f"logs/{name}.log" for name in names)
    stacks = f" (its stacks: {where})" if names else ""
    state.ending = Ending(code=asked.code, reason=f"{asked.reason}; {who}{stacks}", failed=True)
