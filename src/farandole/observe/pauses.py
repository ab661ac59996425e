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
    """`kind` is join, leave or crash (a join and a leave in one view count as join). Never negative. `words`: what
    happened, as a sentence.
    """

    kind: str
    view: int
    cause: str
    step: int
    pause_ms: float
    words: str


@dataclass(kw_only=True)
class _Change:
    """`longest_s`: the gap around it, None where no step has been taken yet."""

    view: events.View
    before: tuple[str, ...]
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
        self._ends_of: dict[str, str] = {}  # why workers that are gone are, the newest word

    def take(self, line: Line) -> None:
        match line:
            case StepLine():
                self._took(line)
            case events.Proposed():
                self._proposed[line.view] = line.time
            case events.Lost() | events.Left() | events.Died():
                self._ends_of[line.worker] = line.reason
                if isinstance(line, events.Lost) and line.worker in self._members and self._lost is None:
                    self._lost = line.time
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
                pause_ms=max(0.0, (change.longest_s - usual_s) * 1000), words=self._words(change),
            )
            for change in self._changes
            if change.longest_s is not None
        ]  # fmt: skip

    def _words(self, change: _Change) -> str:
        view = change.view
        came = [worker for worker in view.members if worker not in change.before]
        gone = [worker for worker in change.before if worker not in view.members]
        at = f"at step {view.step}"
        stayed = f"{_workers(len(view.members) - len(came))} went on"
        if change.kind == "crash":
            again = view.outcome == "redo"
            if not gone:
                return f"the view was stopped {at} ({view.cause}); {stayed}{', exchanging it again' if again else ''}"
            lost = _and(f"{worker} {_ended(self._ends_of.get(worker, view.cause))}" for worker in gone)
            part = f", recomputing {'its' if len(gone) == 1 else 'their'} part" if again else ""
            return f"{lost} {at}; {stayed}{part}"
        said = [f"{_and(came)} joined" if came else "", f"{_and(gone)} left" if gone else ""]
        if not came and not gone:
            return f"{view.cause} {at}"
        reason = f" ({self._ends_of[gone[0]]})" if len(gone) == 1 and not came and gone[0] in self._ends_of else ""
        then = f"{_workers(len(view.members))} since" if came else stayed
        return f"{' and '.join(filter(None, said))} {at}{reason}; {then}"

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
            change = _Change(view=view, before=self._members, kind=kind, since=since)
            self._changes.append(change)
            had = range(bisect_right(self._ends, since), len(self._ends))  # lines of steps may come before an event's
            if not any(self._around(change, gap) for gap in had):
                self._open.append(change)
        self._members, self._lost = view.members, None


def _ended(reason: str) -> str:
    """What has become of a worker, as a predicate."""
    if reason.startswith("killed"):
        return f"was {reason}" if reason != "killed by signal 9" else "was killed"
    return f"was lost ({reason})"


def _workers(count: int) -> str:
    named = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five", 6: "six"}
    return f"{named.get(count, count)} worker{'' if count == 1 else 's'}"


def _and(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
