"""How long training stood still at each change of the view, from a run's metrics.jsonl alone.

Between two steps the last worker's metrics line carries the time at which the step ended. A change costs what the
longest gap between consecutive steps around it has beyond the run's median gap. Around it means: gaps that touch the
time from its first sign (the proposal of a planned change, the first loss of a crash) to the end of the second step
after the switch. First views are left out: before them nobody trains. Evaluations and `run.once`, what lies between two
starts of a run, or between the loss of the state and what follows, are no part of a gap between two steps.

Of a million steps the times are kept, and no more; the median is that of `MEDIAN_OF` gaps at most, evenly chosen.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from farandole.membership import events
from farandole.membership.metrics import Line, StepLine

STEPS_AFTER = 2
MEDIAN_OF = 10_000


@dataclass(frozen=True, kw_only=True)
class Pause:
    """`kind` is join, leave or crash (a join and a leave in one view count as join). Never negative."""

    kind: str
    view: int
    cause: str
    step: int
    pause_ms: float


@dataclass(kw_only=True)
class _Change:
    """`longest_s`: the gap around it, None where no step has been taken yet."""

    view: events.View
    kind: str
    since: float
    longest_s: float | None = None


def pauses(lines: Iterable[Line]) -> list[Pause]:
    """One for each change of a view in force, in order. `lines` are those of one run's metrics.jsonl."""
    found = Pauses()
    for line in lines:
        found.take(line)
    return found.found()


class Pauses:
    """`take` every line, oldest first, and ask for what is `found` at any time."""

    def __init__(self) -> None:
        self._begins = array("d")  # of gaps between a step and one that follows it, Unix times
        self._ends = array("d")
        self._steps = array("q")  # those that end with them
        self._step, self._time = -1, 0.0
        self._changes: list[_Change] = []
        self._open: list[_Change] = []
        self._proposed: dict[int, float] = {}
        self._lost: float | None = None
        self._members: tuple[str, ...] = ()

    def take(self, line: Line) -> None:
        match line:
            case StepLine():
                self._took(line)
            case events.Proposed():
                self._proposed[line.view] = line.time
            case events.Lost() if line.worker in self._members:
                self._lost = line.time if self._lost is None else self._lost
            case events.RunStarted() | events.Over() | events.StateLost():
                self._members = ()
                self._break()
            case events.Resumed():  # follows the first view
                self._break()
            case events.View():
                self._view(line)
            case _:
                pass

    def found(self) -> list[Pause]:
        """One for each change of a view in force around which steps were taken, in order."""
        if not self._ends:
            return []
        every = 1 + len(self._ends) // MEDIAN_OF
        usual_s = median(end - begin for begin, end in zip(self._begins[::every], self._ends[::every], strict=True))
        return [
            Pause(
                kind=change.kind, view=change.view.view, cause=change.view.cause, step=change.view.step,
                pause_ms=max(0.0, (change.longest_s - usual_s) * 1000),
            )
            for change in self._changes
            if change.longest_s is not None
        ]  # fmt: skip

    def _took(self, line: StepLine) -> None:
        before, self._step = self._step, line.step
        begin, self._time = self._time, line.time
        if line.step > before >= 0:  # a run that starts over goes back
            self._begins.append(min(begin + line.evaluation_s + line.once_s, line.time))
            self._ends.append(line.time)
            self._steps.append(line.step)
            self._open = [change for change in self._open if not self._around(change, len(self._ends) - 1)]

    def _break(self) -> None:
        """The next step does not follow the newest one: no gap lies between them, and no change is around both."""
        self._step = -1
        self._open.clear()

    def _around(self, change: _Change, gap: int) -> bool:
        """Count that gap, if it is around the change. Whether it ends with the second step after the switch."""
        end = self._ends[gap]
        if end <= change.since:
            return False
        change.longest_s = max(end - self._begins[gap], change.longest_s or 0.0)
        return self._steps[gap] >= change.view.step + STEPS_AFTER

    def _view(self, view: events.View) -> None:
        if self._members and view.members:
            crash = bool(view.outcome) or view.view not in self._proposed
            if crash:
                kind, since = "crash", view.time if self._lost is None else self._lost
            else:
                kind = "join" if set(view.members) - set(self._members) else "leave"
                since = self._proposed[view.view]
            change = _Change(view=view, kind=kind, since=since)
            self._changes.append(change)
            had = range(bisect_right(self._ends, since), len(self._ends))  # lines of steps may come before an event's
            if not any(self._around(change, gap) for gap in had):
                self._open.append(change)
        self._members, self._lost = view.members, None
