"""The workers' time, as the coordinator keeps it and writes it down, so that it outlives the workers.

Invariant: the classes of a worker add up to the time from the start of its process until the run dismissed it. Nothing
else depends on these figures. They hold no wall time: a clock that jumps moves lines, never durations.
Argument: docs/protocol.md, Time accounting 1-4.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from farandole.errors import ProtocolError, UsageError
from farandole.protocol import events
from farandole.protocol import messages as m
from farandole.protocol.coordinator.state import CoordinatorState, ReportedTime, Tracing, Worker
from farandole.protocol.events import WorkerTime
from farandole.protocol.messages import MOST_SPANS, Heartbeat, Traced
from farandole.protocol.values import SAID, TimeClass

# --- accounting -------------------------------------------------------------------------------------------------------

PERIOD_S, EACH_S = 10.0, 0.1  # between two lines; at least so long for each worker
EARLY_S = 86400.0  # that a process may have lasted before its first word
MICRO = 1_000_000


def on_heartbeat(state: CoordinatorState, worker: Worker, beat: Heartbeat, now: float) -> None:
    """A heartbeat of `worker`."""
    said, known = beat.time_us, state.reported_times.get(worker.id)
    if len(said) != len(SAID) or state.over:
        return
    if known is not None and known.session != worker.session:  # another process of that name
        _write(state, (), ended=(worker.id,), now=now)
        known = None
    if known is None:
        if worker.attempt > 1 or sum(said) <= EARLY_S * MICRO:
            state.reported_times[worker.id] = ReportedTime(
                session=worker.session, host=worker.host, pool=worker.pool, first_us=sum(said), first_at=now,
                reported=said, heard_at=now, step=beat.step if beat.view else -1,
            )  # fmt: skip
    elif _plausible(known, said, now, late_s=state.settings.heartbeat_timeout_s):
        known.reported, known.heard_at, known.step = said, now, beat.step if beat.view else known.step


def _plausible(known: ReportedTime, said: tuple[int, ...], now: float, *, late_s: float) -> bool:
    grown_us = sum(said) - known.first_us
    shrinks = any(new < old for new, old in zip(said, known.reported, strict=True))
    return not shrinks and grown_us <= (now - known.first_at + late_s) * MICRO


def tick(state: CoordinatorState, now: float) -> None:
    """Call a few times a second."""
    gone = tuple(worker for worker in state.reported_times if worker not in state.workers)
    due = now >= state.times_due
    if due:
        state.times_due = now + max(PERIOD_S, EACH_S * len(state.reported_times))
    if due or gone:
        _write(state, state.reported_times if due else (), ended=gone, now=now)


def close(state: CoordinatorState) -> None:
    """The run is over: nobody's time is the run's any more."""
    _write(state, (), ended=tuple(state.reported_times), now=state.clock)


def _write(state: CoordinatorState, workers: Iterable[str], *, ended: tuple[str, ...], now: float) -> None:
    told = state.reported_times
    new = [worker for worker in workers if worker not in ended and sum(told[worker].reported) > told[worker].written]
    if not new and not ended:
        return
    lines = {worker: _time(told[worker]) for worker in new}
    for worker in ended:
        known = told.pop(worker)
        rest: TimeClass = "end" if _in_order(state, worker) else "lost"
        lines[worker] = _time(known, rest, max(now - known.heard_at, 0.0))
    for worker in new:
        told[worker].written = sum(told[worker].reported)
    state.record(events.TimeSpentEvent(workers=lines, ended=ended))


def _in_order(state: CoordinatorState, worker: str) -> bool:
    """Whether it is gone as it should."""
    departed = state.departed.get(worker)
    return departed.code == 0 if departed else worker in state.workers and state.over is not None


def _time(known: ReportedTime, rest: TimeClass = "lost", rest_s: float = 0.0) -> WorkerTime:
    return worker_time(known.reported, host=known.host, pool=known.pool, step=known.step, rest=rest, rest_s=rest_s)


def worker_time(
    said: Sequence[int], *, host: str, pool: str, step: int, rest: TimeClass = "lost", rest_s: float = 0.0
) -> WorkerTime:
    """What a worker has said of its time, in microseconds, and `rest_s` more."""
    seconds: dict[TimeClass, float] = {name: us / MICRO for name, us in zip(SAID, said, strict=True) if us}
    if rest_s:
        seconds[rest] = round(seconds.get(rest, 0.0) + rest_s, 6)
    return WorkerTime(host=host, pool=pool, step=step, seconds=seconds)


# --- traces -----------------------------------------------------------------------------------------------------------
#
# A trace at the coordinator: which workers were asked for their next steps, and what has arrived. It decides nothing
# about the run. Invariants: one trace at a time, and what is kept is bounded.
# Argument: docs/protocol.md, Traces 1-3.

LEASE_S = 10.0
LOOKS_S = 0.5  # at least so often who waits for a trace looks
TOTAL, LEAST = 500_000, 500


def start_trace(state: CoordinatorState, steps: int, number: int, now: float) -> None:
    """Have every member tell of its next `steps` steps. `number`: one that no other trace has had.

    Raises:
        UsageError: it can't be done now.
    """
    if state.over or state.ending:
        raise UsageError("the run is ending: there are no steps to come")
    on = state.tracing
    if on is not None and (owed := trace_answers(state).owed) and now - on.looked_at < LEASE_S:
        raise UsageError(
            f"another trace is on, and waits for {', '.join(owed)}: one at a time, so ask again when it is done; one "
            f"that nobody looks at any more is dropped after {LEASE_S:g} s"
        )
    members = [worker for worker in state.members() if state.workers[worker].state != "finished"]
    if not members:
        raise UsageError("nobody trains: there are no steps to trace; `farandole status` says what the run waits for")
    most = max(LEAST, min(MOST_SPANS, TOTAL // (2 * len(members))))
    state.tracing = Tracing(number=number, steps=steps, most=most, looked_at=now, workers=tuple(members))
    for worker in members:
        repeat_trace(state, worker)


def repeat_trace(state: CoordinatorState, worker: str) -> None:
    """It may not have heard of a trace to which it owes its part."""
    on = state.tracing
    if on is not None and worker in trace_answers(state).owed:
        state.send(worker, m.Trace(number=on.number, steps=on.steps, most=on.most))


def end_trace(state: CoordinatorState) -> None:
    """Whoever owes its part is to tell what it has so far: nobody waits for more, or the run ends."""
    on = state.tracing
    if on is not None and on.steps:
        on.steps = 0
        for worker in on.workers:
            repeat_trace(state, worker)


def on_spans(state: CoordinatorState, worker: Worker, spans: m.Spans) -> None:
    """Its part. Raises ProtocolError where it says more than it may."""
    on = state.tracing
    if on is None or spans.number != on.number or worker.id not in on.workers:
        return
    if max(len(spans.spans), len(spans.waits)) > on.most:
        raise ProtocolError(f"{worker.id} tells of more than {on.most} spans")
    on.answers[worker.id] = msgspec.msgpack.encode(spans)


def trace_answers(state: CoordinatorState, now: float | None = None) -> Traced:
    """How far it is. `now`: for somebody who waits for it."""
    on = state.tracing
    if on is None:
        return Traced()
    on.looked_at = on.looked_at if now is None else now
    there = [worker for worker in on.workers if worker in state.workers]  # nobody gets a name that another has had
    return Traced(
        number=on.number,
        steps=on.steps,
        asked=on.workers,
        answered=tuple(on.answers),
        gone=tuple(w for w in on.workers if w not in on.answers and w not in there),
        owed=tuple(w for w in there if w not in on.answers),
    )


def trace_pending(state: CoordinatorState, now: float) -> bool:
    """Somebody waits for it just now, and should get what is there before a run that is over is out of reach."""
    return state.tracing is not None and now - state.tracing.looked_at < LOOKS_S


def trace_answer(state: CoordinatorState, worker: str) -> bytes:
    """What that worker has said, as it is on the wire.

    Raises:
        UsageError: nothing.
    """
    if state.tracing is None or worker not in state.tracing.answers:
        raise UsageError(f"{worker!r} has said nothing in the newest trace")
    return state.tracing.answers[worker]
