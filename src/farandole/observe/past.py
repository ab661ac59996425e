"""The outcome of a run that is over, from the lines of its metrics.jsonl; `farandole status` shows it. Pure.

A folder may hold several sessions of a run, one after the other. The newest session that has trained counts. A session
without an `over` event was cut off: all its processes were killed. Of the lines of steps only the newest undamaged one
is parsed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from farandole.observe.text import describe, not_promised, time_text
from farandole.protocol import events
from farandole.protocol.metrics import Line, StepLine, parse_line
from farandole.protocol.values import FAILURES

_EVENT = b'{"event":'  # beginning of the line of an event
_STEP_LINES = 100  # lines of steps; the newest undamaged one counts
_DEPARTURES = tuple(f'{_EVENT.decode()}"{name}"'.encode() for name in ("left", "lost", "died"))
DEPARTURES = 6  # of them are shown


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a run.

    Attributes:
        outcome: finished, stopped, failed, or cut off. A run that was cut off has no exit `code`.
        steps: number of steps taken, of `total`.
        bits: the step after which results are not reproducible, as text; "" if all are.
        fingerprint: fingerprint of the final state; "" if there is none or the workers' states differ.
        checkpoint: path of the newest checkpoint. `finite`: True if its state is finite.
        again: number of steps after it, which a run that continues takes again.
        incomplete: a note on later checkpoints that were not written completely.
        damaged: number of lines that were skipped.
    """

    run: str
    state: str = "over"
    outcome: str = "cut off"
    code: int | None = None
    reason: str = "nothing records its end: its processes were killed"
    steps: int = 0
    total: int | None = None
    epoch: int = 0
    loss: float | None = None
    bits: str = ""
    fingerprint: str = ""
    checkpoint: str = ""
    finite: bool = True
    again: int = 0
    incomplete: str = ""
    damaged: int = 0


def past(run: str, lines: Iterable[bytes]) -> Past:
    """Returns the outcome of a run. `lines` are the complete lines of metrics.jsonl, oldest first."""
    result, damaged, steps = Past(run=run), 0, deque[bytes](maxlen=_STEP_LINES)
    for line in lines:
        if not line.startswith(_EVENT):
            steps.append(line)
            result = goes_on(result) if result.code is not None else result
            continue
        event = parse_line(line)
        if event is None:
            damaged += 1
            continue
        if (
            isinstance(event, events.ResumedEvent) and event.path
        ):  # the lines so far may be of steps that are not repeated
            steps.clear()
            result = msgspec.structs.replace(result, steps=event.step)
        result = after(result, event)
    while steps:
        step = parse_line(steps.pop())
        if isinstance(step, StepLine):
            result = with_step(result, step)
            break
        damaged += 1
    return msgspec.structs.replace(result, damaged=damaged)


def goes_on(before: Past) -> Past:
    """Returns the state at the start of a new session, without the end of the previous one."""
    return Past(
        run=before.run, steps=before.steps, bits=before.bits, checkpoint=before.checkpoint, finite=before.finite
    )


def after(before: Past, line: Line) -> Past:
    """Returns the state after an event. `with_step` handles the lines of steps."""
    match line:
        case events.ViewEvent() | events.ResumedEvent() if before.code is not None or before.fingerprint:
            return goes_on(before)
        case events.RunStartedEvent():  # the run may have nothing left to train, so the steps and checkpoint stay
            unknown = Past(run=before.run)
            return msgspec.structs.replace(before, outcome=unknown.outcome, code=None, reason=unknown.reason)
        case events.FinishedEvent():
            fingerprint = line.fingerprint if line.equal else ""
            return msgspec.structs.replace(before, outcome="finished", fingerprint=fingerprint)
        case events.CheckpointEvent() | events.SavedEvent(whole=True):
            return msgspec.structs.replace(before, checkpoint=line.path, finite=line.finite)
        case events.BitsNotPromisedEvent() if not before.bits:
            return msgspec.structs.replace(before, bits=not_promised(line.step))
        case events.NothingLeftEvent():
            return msgspec.structs.replace(before, outcome="finished")
        case events.OverEvent(code=code):
            outcome = "failed" if code in FAILURES else "finished" if before.outcome == "finished" else "stopped"
            return msgspec.structs.replace(before, outcome=outcome, code=code, reason=line.reason)
        case _:
            return before


def with_step(before: Past, step: StepLine) -> Past:
    return msgspec.structs.replace(before, steps=step.step + 1, total=step.total, epoch=step.epoch, loss=step.loss)


def departures(lines: Iterable[bytes]) -> list[str]:
    """Returns the newest departures of workers, each with its time of day and its reason. `lines`: as of `past`."""
    newest = deque((line for line in lines if line.startswith(_DEPARTURES)), maxlen=DEPARTURES)
    return [
        f"{time_text(event.time)}  {describe(event)}"
        for event in map(parse_line, newest)
        if isinstance(event, events.LeftEvent | events.LostEvent | events.DiedEvent)
    ]
