"""How long training stood still at each change of the view, from a run's metrics.jsonl alone.

Between two steps the last worker's metrics line carries the time at which the step ended. A change costs what the
longest gap between consecutive steps around it has beyond the run's median gap. Around it means: gaps that touch the
time from its first sign (the proposal of a planned change, the first loss of a crash) to the end of the second step
after the switch. First views are left out: before them nobody trains.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from farandole.membership import events
from farandole.membership.metrics import Line, StepLine

STEPS_AFTER = 2


@dataclass(frozen=True, kw_only=True)
class Pause:
    """`kind` is join, leave or crash (a join and a leave in one view count as join). Never negative."""

    kind: str
    view: int
    cause: str
    step: int
    pause_ms: float


@dataclass
class _Change:
    view: events.View
    kind: str
    since: float


def pauses(lines: Iterable[Line]) -> list[Pause]:
    """One for each change of a view in force, in order. `lines` are those of one run's metrics.jsonl."""
    lines = list(lines)
    steps = [line for line in lines if isinstance(line, StepLine)]
    gaps = [(a, b) for a, b in pairwise(steps) if b.step > a.step]  # a run that starts over goes back
    if not gaps:
        return []
    usual_s = median(b.time - a.time for a, b in gaps)
    found: list[Pause] = []
    for change in _changes(lines):
        last = change.view.step + STEPS_AFTER
        ends = (line.time for line in steps if line.step >= last and line.time > change.since)
        until = next(ends, math.inf)
        around = [b.time - a.time for a, b in gaps if b.time > change.since and a.time < until]
        if around:
            found.append(
                Pause(
                    kind=change.kind,
                    view=change.view.view,
                    cause=change.view.cause,
                    step=change.view.step,
                    pause_ms=max(0.0, (max(around) - usual_s) * 1000),
                )
            )
    return found


def _changes(lines: list[Line]) -> list[_Change]:
    """The views that replaced another one that had members, each with its first sign."""
    proposed: dict[int, float] = {}
    lost: float | None = None
    before: tuple[str, ...] = ()
    found: list[_Change] = []
    for line in lines:
        match line:
            case events.Proposed():
                proposed[line.view] = line.time
            case events.Lost() if line.worker in before:
                lost = line.time if lost is None else lost
            case events.StateLost():
                before = ()
            case events.View():
                if before and line.members:
                    if line.outcome or line.view not in proposed:
                        found.append(_Change(line, "crash", line.time if lost is None else lost))
                    else:
                        kind = "join" if set(line.members) - set(before) else "leave"
                        found.append(_Change(line, kind, proposed[line.view]))
                before, lost = line.members, None
            case _:
                pass
    return found
