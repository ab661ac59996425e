"""What `farandole status` tells of a run that is over, from the lines of its metrics.jsonl.

Pure: whole lines in, a value out. A folder may hold several sessions of a run, one after the other; what counts is
the newest that has trained. One without an `over` event was cut off: nobody was left to write it. Of a million
steps' lines only the newest one that is whole is looked at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from farandole.observe.text import not_promised
from farandole.protocol import events
from farandole.protocol.metrics import Line, StepLine, parse_line

_EVENT = b'{"event":'  # how such a line begins
_KEPT = 100  # steps' lines, of which the newest that is not damaged counts


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """`outcome`: finished, stopped, failed, or cut off; then there is no exit `code`.

    `steps` are those taken, of `total`. `bits`: since when they are not promised, "" where they are. `fingerprint` is
    that of the final state, "" where there is none or the states differ. `checkpoint` is the newest one's path,
    `finite` whether its state is. `incomplete`: a word on later ones that were not written to their end. `damaged`
    lines are passed over.
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
    incomplete: str = ""
    damaged: int = 0


def past(run: str, lines: Iterable[bytes]) -> Past:
    """`lines` are the whole lines of metrics.jsonl, oldest first."""
    found, damaged, steps = Past(run=run), 0, deque[bytes](maxlen=_KEPT)
    for line in lines:
        if not line.startswith(_EVENT):
            steps.append(line)
            found = goes_on(found) if found.code is not None else found
            continue
        event = parse_line(line)
        if event is None:
            damaged += 1
            continue
        if isinstance(event, events.ResumedEvent) and event.path:  # what is read below may be of steps not taken again
            steps.clear()
            found = msgspec.structs.replace(found, steps=event.step)
        found = after(found, event)
    while steps:
        step = parse_line(steps.pop())
        if isinstance(step, StepLine):
            found = with_step(found, step)
            break
        damaged += 1
    return msgspec.structs.replace(found, damaged=damaged)


def goes_on(found: Past) -> Past:
    """A new session: how the one before ended does not count any more."""
    return Past(run=found.run, steps=found.steps, bits=found.bits, checkpoint=found.checkpoint, finite=found.finite)


def after(found: Past, line: Line) -> Past:
    """What the next line makes of it; those of steps go to `with_step`."""
    match line:
        case events.ViewEvent() | events.ResumedEvent() if found.code is not None or found.fingerprint:
            return goes_on(found)
        case events.RunStartedEvent():  # it may find that nothing is left to train: what is there stays
            unknown = Past(run=found.run)
            return msgspec.structs.replace(found, outcome=unknown.outcome, code=None, reason=unknown.reason)
        case events.FinishedEvent():
            fingerprint = line.fingerprint if line.equal else ""
            return msgspec.structs.replace(found, outcome="finished", fingerprint=fingerprint)
        case events.CheckpointEvent() | events.SavedEvent(whole=True):
            return msgspec.structs.replace(found, checkpoint=line.path, finite=line.finite)
        case events.BitsNotPromisedEvent() if not found.bits:
            return msgspec.structs.replace(found, bits=not_promised(line.step))
        case events.NothingLeftEvent():
            return msgspec.structs.replace(found, outcome="finished")
        case events.OverEvent(code=code):
            outcome = "failed" if code == 1 else "finished" if found.outcome == "finished" else "stopped"
            return msgspec.structs.replace(found, outcome=outcome, code=code, reason=line.reason)
        case _:
            return found


def with_step(found: Past, step: StepLine) -> Past:
    return msgspec.structs.replace(found, steps=step.step + 1, total=step.total, epoch=step.epoch, loss=step.loss)
