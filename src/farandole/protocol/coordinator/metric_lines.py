"""Metrics lines: the lines of rank 0, of steps that another worker reports to have reached too.

Lines go to metrics.jsonl in order, each once; so one of a step far ahead would silence all that follow. Invariant: no
line is lost silently. Lines are numbered without gaps; what is missing, or beyond the bound on waiting lines, becomes
the event `lines lost`. Whether the values of an honest step are true, nothing here can tell.
Where one sender follows another, the reports of the new one confirm the waiting lines of the old one, up to its own
step. Then come its own lines, without those up to the newest written one. Waiting lines are bounded; honest workers
stay far below, since the other members report or are lost within the heartbeat timeout. A line is acknowledged a moment
before it is written. If the coordinator is killed in between, the worker still has it, since a worker forgets a line
only with the next acknowledgement.
Argument: docs/protocol.md, Metrics lines 1-4.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from farandole.platform.bounds import MAX_COUNT
from farandole.protocol import events
from farandole.protocol import messages as m
from farandole.protocol.coordinator.state import CoordinatorState, Log, Worker
from farandole.protocol.kept_lines import append
from farandole.protocol.reported_events import ALL

# --- metric lines -----------------------------------------------------------------------------------------------------

WAITING = 20 * m.MAX_LINES  # pending lines of one sender: twenty full heartbeats


def on_heartbeat(state: CoordinatorState, worker: Worker, beat: m.Heartbeat) -> None:
    """Record the step and the lines of a heartbeat.

    Lines count from rank 0 of a view in force, on its way in or out, and from the writer of the last checkpoint: if a
    rank 0 that leaves dies before it reports the switch, that writer has the same lines and sends them before it
    reports the save, and the run is not over before they have come. Lines from others are dropped. One exception: a
    heartbeat that left before its sender heard of a recovery. If the sender is in the new view, it is rank 0 there too,
    for recoveries keep the order; if not, another rank 0 has the same lines.

    Lines after the run's end are dropped: a worker sends all of its lines before it reports its end, and a step's line
    after the run's last one would tell readers that the run goes on.
    """
    if state.over:
        return
    if beat.view:  # without a view it is in no step
        note_step(state, worker, beat.step)
    _compare(state, state.logged_values.on_lines(worker.id, beat.logged, state.last_line))
    saves = state.ending is not None and state.ending.saver == worker.id
    if not saves and not any(view.members[:1] == (worker.id,) for view in state.views()):
        return
    waiting = state.unwritten_lines.setdefault(worker.id, deque())
    _drop_after(waiting, beat.step)
    for line in beat.lines:
        newest = (waiting[-1].step, waiting[-1].index) if waiting else state.last_line
        if newest < (line.step, line.index) and line.step <= beat.step:
            append(waiting, line, WAITING)
    _release(state, worker.id, _reach(state, worker.id))


def _drop_after(waiting: deque[m.Line], step: int) -> None:
    """Drop the lines of steps after `step`: the sender has not reached these steps."""
    while waiting and waiting[-1].step > step:
        waiting.pop()


def note_step(state: CoordinatorState, worker: Worker, step: int) -> None:
    """Record that `worker` is in `step`, which confirms the others' lines up to that step."""
    worker.step = step
    if not _counts(state, worker):
        return
    for sender in [sender for sender in state.unwritten_lines if sender != worker.id]:
        _release(state, sender, step)
        if sender not in state.workers:
            _give_up(state, sender, "are of steps that no other worker had reached when it was lost")


def release_lines(state: CoordinatorState) -> None:
    """Write the lines that are confirmed now that a worker may be gone."""
    for sender in [sender for sender in state.unwritten_lines if sender in state.workers]:
        _release(state, sender, _reach(state, sender))


def close(state: CoordinatorState) -> None:
    """Record all pending lines as lost at the end of the run."""
    for sender in [*state.unwritten_lines]:
        _give_up(state, sender, "are of steps that no other worker had reached when the run ended")


def _give_up(state: CoordinatorState, sender: str, reason: str) -> None:
    """Record the pending lines of `sender` as lost."""
    if waiting := state.unwritten_lines.pop(sender, None):
        state.record(
            events.LinesLostEvent(
                worker=sender, lines=_bounded(sum(each.missing or 1 for each in waiting)), reason=reason
            )
        )


def on_restored(state: CoordinatorState, step: int) -> None:
    """Continue from a checkpoint of `step`: lines of earlier steps that are not written are lost."""
    if 0 <= state.last_step_line < step - 1:
        first = state.last_step_line + 1
        steps = f"step {first}" if first == step - 1 else f"steps {first} to {step - 1}"
        reason = f"the lines of {steps}, and those logged after them, had not arrived when their workers were lost"
        state.record(events.LinesLostEvent(worker="", lines=_bounded(step - first), reason=reason))
    state.last_line = (step - 1, ALL)  # the steps from there on are new
    state.last_step_line = step - 1
    state.logged_values.clear()


def _compare(state: CoordinatorState, differences: Iterator[events.ValuesDifferEvent]) -> None:
    for event in differences:
        state.record(event)


def _reach(state: CoordinatorState, sender: str) -> int:
    """Return the furthest step that another worker has reported; without others, that of `sender`.

    A worker that has ended a step had the commit messages of all members, so all of them are in that step or beyond,
    and their next heartbeat, `Switched`, `Stopped` or `Finished` says so. A member that entered later has reported a
    later step.
    """
    others = [w.step for w in state.workers.values() if w.id != sender and _counts(state, w)]
    return max(others, default=state.workers[sender].step)


def _counts(state: CoordinatorState, worker: Worker) -> bool:
    """Return True if the worker is or was in a view with others."""
    return (state.view is not None and worker.id in state.view.members) or state.has_trained(worker.id)


def _release(state: CoordinatorState, sender: str, step: int) -> None:
    """Write the pending lines of `sender` up to `step`."""
    waiting = state.unwritten_lines[sender]
    while waiting and waiting[0].step <= step:
        line = waiting.popleft()
        before, state.last_line = state.last_line, (line.step, line.index)
        if line.missing:
            reason = "more lines came in a short time than are buffered"
            state.record(
                events.LinesLostEvent(
                    worker=sender, lines=line.missing, reason=reason, step=line.step, index=line.index
                )
            )
            continue
        if missing := _between(before, state.last_line):
            reason = f"no remaining worker has those between line {before[1]} of step {before[0]} and step {line.step}"
            state.record(events.LinesLostEvent(worker="", lines=missing, reason=reason))
        state.actions.append(Log(line))
        _compare(state, state.logged_values.written(line))
        if isinstance(line.fields, m.Metrics):
            state.last_step_line = line.step
            state.progress.step_took(line.fields.training_s)
    if not waiting:
        del state.unwritten_lines[sender]


def _between(one: tuple[int, int], other: tuple[int, int]) -> int:
    """Return at least how many lines are missing between two that are written one after the other.

    It is unknown how many lines were logged after the steps in between.
    """
    (step, index), (next_step, next_index) = one, other
    return _bounded(next_index - index - 1 if next_step == step else next_step - step - 1 + next_index)


def _bounded(lines: int) -> int:
    """Return a count that can be written: the counts that workers report may sum to more."""
    return min(lines, MAX_COUNT)
