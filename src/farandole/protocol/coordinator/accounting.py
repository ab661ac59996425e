"""The workers' time, as the coordinator keeps it and writes it down, so that it outlives the workers.

Invariant: the classes of a worker add up to the time from the start of its process until the run dismissed it. Nothing
else depends on these figures. They hold no wall time: a clock that jumps moves lines, never durations.
Reports are sums since the process began, by the worker's own monotonic clock. So a lost heartbeat loses nothing, nor
does a killed coordinator: the next one gets them whole. A run whose processes are all killed is known up to its newest
line. A restarted coordinator has not seen the first reports of workers; a reader of the lines has. The rates of the
links (`protocol/link_speed.py`) are of the newest reports only, and a restarted coordinator computes them from the next
ones.
Argument: docs/protocol.md, Time accounting 1-4.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from farandole.errors import ProtocolError, UsageError
from farandole.protocol import events
from farandole.protocol import messages as m
from farandole.protocol.coordinator.state import CoordinatorState, ReportedTime, Tracing, Worker
from farandole.protocol.events import SentBytes, WorkerTime
from farandole.protocol.messages import MOST_SPANS, Heartbeat, Traced
from farandole.protocol.values import SAID, LinkUse, TimeClass

# --- accounting -------------------------------------------------------------------------------------------------------

PERIOD_S, EACH_S = 10.0, 0.1  # the time between two lines, and its minimum per worker
EARLY_S = 86400.0  # how long a process may have run before its first report
MICRO = 1_000_000


def on_heartbeat(state: CoordinatorState, worker: Worker, beat: Heartbeat, now: float) -> None:
    """Record the times in a heartbeat of `worker`, unless they are impossible."""
    reported, record = beat.time_us, state.reported_times.get(worker.id)
    if len(reported) != len(SAID) or state.over:
        return
    if record is not None and record.session != worker.session:  # another process of that name
        _write(state, (), ended=(worker.id,), now=now)
        record = None
    if record is None:
        if worker.attempt > 1 or sum(reported) <= EARLY_S * MICRO:
            state.reported_times[worker.id] = ReportedTime(
                session=worker.session, host=worker.host, zone=worker.zone, pool=worker.pool, first_us=sum(reported),
                first_at=now, reported=reported, heard_at=now, step=beat.step if beat.view else -1,
            )  # fmt: skip
    elif _plausible(record, reported, now, late_s=state.settings.heartbeat_timeout_s):
        record.reported, record.heard_at, record.step = reported, now, beat.step if beat.view else record.step
    record = state.reported_times.get(worker.id)
    if record is not None and beat.links is not None and _is_possible(record, beat.links):
        record.links = beat.links
        state.links.take(worker.id, worker.host, beat.links, now)


def _is_possible(record: ReportedTime, links: Sequence[LinkUse]) -> bool:
    """Return True if each host is named once and is not the worker's own, and no sum has shrunk.

    The bytes themselves can't be checked: a worker that lies about them makes its own part of the bill wrong.
    """
    new = {use.host: use for use in links}
    return (
        len(new) == len(links)
        and record.host not in new
        and all(
            old.host in new
            and old.exchange_bytes <= new[old.host].exchange_bytes
            and old.state_bytes <= new[old.host].state_bytes
            for old in record.links or ()
        )
    )


def _plausible(record: ReportedTime, reported: tuple[int, ...], now: float, *, late_s: float) -> bool:
    """Return True if no class has shrunk, and their sum has not grown faster than the clock, with `late_s` allowed.

    A report beyond this is ignored and the one before stands: a liar gains only `lost`. Time before the first report is
    at most `EARLY_S`.
    """
    grown_us = sum(reported) - record.first_us
    shrinks = any(new < old for new, old in zip(reported, record.reported, strict=True))
    return not shrinks and grown_us <= (now - record.first_at + late_s) * MICRO


def tick(state: CoordinatorState, now: float) -> None:
    """Write the times that are due, and the last ones of removed workers. Call it a few times a second.

    Lines are rarer with many workers, so they grow no faster than with a hundred.
    """
    removed = tuple(worker for worker in state.reported_times if worker not in state.workers)
    due = now >= state.times_due
    if due:
        state.times_due = now + max(PERIOD_S, EACH_S * len(state.reported_times))
    if due or removed:
        _write(state, state.reported_times if due else (), ended=removed, now=now)


def close(state: CoordinatorState) -> None:
    """Write the last times of all workers at the end of the run."""
    _write(state, (), ended=tuple(state.reported_times), now=state.clock)


def _write(state: CoordinatorState, workers: Iterable[str], *, ended: tuple[str, ...], now: float) -> None:
    """Write the new times of `workers`, and the last times of `ended` workers, which are forgotten.

    For a worker that is gone the time since its last report is added, by the coordinator's monotonic clock: to `end` if
    it left gracefully or the run is over, else to `lost`.
    """
    times = state.reported_times
    new = [worker for worker in workers if worker not in ended and sum(times[worker].reported) > times[worker].written]
    if not new and not ended:
        return
    lines = {worker: _time(times[worker]) for worker in new}
    for worker in ended:
        record = times.pop(worker)
        state.links.forget(worker)
        rest: TimeClass = "end" if _left_gracefully(state, worker) else "lost"
        lines[worker] = _time(record, rest, max(now - record.heard_at, 0.0))
    for worker in new:
        times[worker].written = sum(times[worker].reported)
    state.record(events.TimeSpentEvent(workers=lines, ended=ended))


def _left_gracefully(state: CoordinatorState, worker: str) -> bool:
    """Return True if the worker has left gracefully, with exit code 0, or at the end of the run."""
    departed = state.departed.get(worker)
    return departed.code == 0 if departed else worker in state.workers and state.over is not None


def _time(record: ReportedTime, rest: TimeClass = "lost", rest_s: float = 0.0) -> WorkerTime:
    """Return the record of a worker's times, with `rest_s` seconds more in class `rest`."""
    spent = worker_time(record.reported, host=record.host, pool=record.pool, step=record.step, rest=rest, rest_s=rest_s)
    return msgspec.structs.replace(spent, zone=record.zone, sent=sent_bytes(record.links))


def sent_bytes(links: Sequence[LinkUse] | None) -> dict[str, SentBytes] | None:
    """Return the bytes that were sent to each other host; None if `links` is None, since they are unknown then."""
    if links is None:
        return None
    return {use.host: SentBytes(exchange=use.exchange_bytes, state=use.state_bytes) for use in links}


def worker_time(
    reported: Sequence[int], *, host: str, pool: str, step: int, rest: TimeClass = "lost", rest_s: float = 0.0
) -> WorkerTime:
    """Return the record of the `reported` times in microseconds, with `rest_s` seconds more in class `rest`."""
    seconds: dict[TimeClass, float] = {name: us / MICRO for name, us in zip(SAID, reported, strict=True) if us}
    if rest_s:
        seconds[rest] = round(seconds.get(rest, 0.0) + rest_s, 6)
    return WorkerTime(host=host, pool=pool, step=step, seconds=seconds)


# --- traces -----------------------------------------------------------------------------------------------------------
#
# A trace at the coordinator: which workers were asked for their next steps, and what has arrived. It decides nothing
# about the run. Invariants: one trace at a time, and what is kept is bounded.
# A trace is on while a worker owes its part and somebody still looks. Answers are in no durable state: a restarted
# coordinator knows none, and an answer to another number is ignored. Later joiners are not in the trace; a worker on a
# new connection is asked again and answers the same again. Each worker has an even part of `TOTAL`, but at least
# `LEAST`; one that sends more breaks the protocol. Answers are kept as bytes, a tenth of the objects.

LEASE_S = 10.0  # a trace is dropped after this time without a look
LOOKS_S = 0.5  # the longest time between two looks of a client that waits for a trace
TOTAL, LEAST = 500_000, 500  # spans and waits of all workers together; at least so many of each worker


def start_trace(state: CoordinatorState, steps: int, number: int, now: float) -> None:
    """Ask every member to trace its next `steps` steps. `number` is one that no other trace has had.

    Raises:
        UsageError: the run is ending, no worker trains, or another trace is in progress.
    """
    if state.over or state.ending:
        raise UsageError("the run is ending: no more steps follow")
    trace = state.tracing
    if trace is not None and (owed := trace_answers(state).owed) and now - trace.looked_at < LEASE_S:
        raise UsageError(
            f"another trace is in progress and waits for {', '.join(owed)}: only one is possible at a time, so try "
            f"again when it is done; a trace whose client is gone is dropped after {LEASE_S:g} s"
        )
    members = [worker for worker in state.members() if state.workers[worker].state != "finished"]
    if not members:
        raise UsageError(
            "no worker trains, so there are no steps to trace; `farandole status` shows what the run waits for"
        )
    most = max(LEAST, min(MOST_SPANS, TOTAL // (2 * len(members))))
    state.tracing = Tracing(number=number, steps=steps, most=most, looked_at=now, workers=tuple(members))
    for worker in members:
        repeat_trace(state, worker)


def repeat_trace(state: CoordinatorState, worker: str) -> None:
    """Send a worker the trace that it still owes its part of: it may not have received it."""
    trace = state.tracing
    if trace is not None and worker in trace_answers(state).owed:
        state.send(worker, m.Trace(number=trace.number, steps=trace.steps, most=trace.most))


def end_trace(state: CoordinatorState) -> None:
    """Ask the workers that owe their part for what they have so far."""
    trace = state.tracing
    if trace is not None and trace.steps:
        trace.steps = 0
        for worker in trace.workers:
            repeat_trace(state, worker)


def on_spans(state: CoordinatorState, worker: Worker, spans: m.Spans) -> None:
    """Record the part of a worker.

    Raises:
        ProtocolError: it sends more spans or waits than it may.
    """
    trace = state.tracing
    if trace is None or spans.number != trace.number or worker.id not in trace.workers:
        return
    if max(len(spans.spans), len(spans.waits)) > trace.most:
        raise ProtocolError(f"{worker.id} sends more than {trace.most} spans")
    trace.answers[worker.id] = msgspec.msgpack.encode(spans)


def trace_answers(state: CoordinatorState, now: float | None = None) -> Traced:
    """Return the progress of the newest trace. `now` is given for a client that waits for it."""
    trace = state.tracing
    if trace is None:
        return Traced()
    trace.looked_at = trace.looked_at if now is None else now
    present = [worker for worker in trace.workers if worker in state.workers]  # no ID is used twice
    return Traced(
        number=trace.number,
        steps=trace.steps,
        asked=trace.workers,
        answered=tuple(trace.answers),
        gone=tuple(w for w in trace.workers if w not in trace.answers and w not in present),
        owed=tuple(w for w in present if w not in trace.answers),
    )


def trace_pending(state: CoordinatorState, now: float) -> bool:
    """Return True if a client waits for the trace now; a run that is over should still give it the answers."""
    return state.tracing is not None and now - state.tracing.looked_at < LOOKS_S


def trace_answer(state: CoordinatorState, worker: str) -> bytes:
    """Return the answer of `worker` in the newest trace, encoded as `m.Spans`.

    Raises:
        UsageError: the worker has not answered.
    """
    if state.tracing is None or worker not in state.tracing.answers:
        raise UsageError(f"{worker!r} has not answered in the newest trace")
    return state.tracing.answers[worker]
