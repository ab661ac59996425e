"""What `farandole run` says last: what came of the run, what it took and cost, and where the model is. Pure.

What is not known is "unknown", or not there; never 0, and never a guess. Names and reasons come from others: whoever
shows this filters it, as the display does.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median

import msgspec
from rich.console import Group
from rich.table import Table
from rich.text import Text

from farandole.observe.past import Past, after, goes_on, with_step
from farandole.observe.text import in_words, number, rate_words
from farandole.platform.output import one_line
from farandole.protocol import events
from farandole.protocol.coordinator.account import Account, AccountReader, WorkerAccount
from farandole.protocol.cost import Cost
from farandole.protocol.metrics import Line, LogLine, StepLine, parse_line
from farandole.protocol.values import CLASSES, MEANING, StepTime

# --- pauses -----------------------------------------------------------------------------------------------------------
#
# How long training stood still at each change of the view, from a run's metrics.jsonl alone.
#
# Between two steps the last worker's metrics line carries the time at which the step ended. A change costs what the
# longest gap between consecutive steps around it has beyond the run's median gap. Around it means: gaps that touch
# the time from its first sign (the proposal of a planned change, the first loss of a crash) to the end of the second
# step after the switch. First views are left out: before them nobody trains. Evaluations and `run.once`, what lies
# between two starts of a run, or between the loss of the state and what follows, are no part of a gap between two
# steps.
#
# Of a million steps the times are kept, and no more; the median is that of `MEDIAN_OF` gaps at most, evenly chosen.

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

    view: events.ViewEvent
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
            case events.ProposedEvent():
                self._proposed[line.view] = line.time
            case events.LostEvent() | events.LeftEvent() | events.DiedEvent():
                self._ends_of[line.worker] = line.reason
                if isinstance(line, events.LostEvent) and line.worker in self._members and self._lost is None:
                    self._lost = line.time
            case events.RunStartedEvent() | events.OverEvent() | events.StateLostEvent():
                self._members = ()
                self._break()
            case events.ResumedEvent():  # follows the first view
                self._break()
            case events.ViewEvent():
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
        stayed = f"{_count_workers(len(view.members) - len(came))} went on"
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
        then = f"{_count_workers(len(view.members))} since" if came else stayed
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

    def _view(self, view: events.ViewEvent) -> None:
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


def _count_workers(count: int) -> str:
    named = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five", 6: "six"}
    return f"{named.get(count, count)} worker{'' if count == 1 else 's'}"


def _and(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


# --- lines ------------------------------------------------------------------------------------------------------------
#
# What everybody does who sums up a run from the lines of its metrics.jsonl. Pure.


class RunReader(ABC):
    """`take` the whole lines, oldest first.

    Attributes:
        account, pauses: fed as this is.
        began, ended: Unix times of the first and the newest line, None: there is none.
        away_s: between them, in which the run was not on: from the last line of a start to the first of the next.
        damaged: lines that were passed over.
    """

    def __init__(self) -> None:
        self.account = AccountReader()
        self.pauses = Pauses()
        self.began: float | None = None
        self.ended: float | None = None
        self.away_s = 0.0
        self.damaged = 0
        self._over = False

    def take(self, raw: bytes) -> None:
        """A whole line."""
        self.account.take(raw)
        line = parse_line(raw)
        if line is None:
            self.damaged += 1
            return
        self.pauses.take(line)
        if isinstance(line, LogLine):  # which has no time
            self._logged(line)
            return
        self.began = line.time if self.began is None else self.began
        before, self.ended = self.ended, line.time
        if isinstance(line, StepLine):
            self._step(line)
            return
        again = isinstance(line, events.RunStartedEvent) or (self._over and isinstance(line, events.StartingEvent))
        if again and before is not None:
            self.away_s += max(0.0, line.time - before)
            self._on_again(before)
        self._over = isinstance(line, events.OverEvent) or (self._over and not again)
        self._event(line)

    @abstractmethod
    def _on_again(self, ended: float) -> None:
        """The run has been started once more; its start before ended then, Unix time."""

    @abstractmethod
    def _step(self, line: StepLine) -> None: ...

    @abstractmethod
    def _logged(self, line: LogLine) -> None: ...

    @abstractmethod
    def _event(self, event: events.Event) -> None: ...


# --- course -----------------------------------------------------------------------------------------------------------
#
# What a run has come to, from its lines: what the summary at its end says. Pure.
#
# `take` the whole lines of metrics.jsonl, oldest first: those of earlier sessions of a resumed run are part of it.
# What is taken a second time, after `resumed` or a lost state, counts once, and how much that was is kept. Of a
# million steps the numbers and sample counts are kept, and nothing else.

Save = events.SavedEvent | events.SavedElsewhereEvent | events.NotSavedEvent
NAMES = 100  # given to `run.log`, the first ones


class Course(RunReader):
    """Attributes, beside those of `Lines`:
    past: how it stands.
    resumed: it has been on before.
    logged: the newest of what the script has logged as numbers.
    again: (steps, samples) that were taken once more. lost: the state is, and nothing has come in its place.
    steps: that were taken, also those whose lines were still to come when the run ended.
    lines_lost: of metrics, that are missing.
    after: what followed the last step of a script that has run to its end, else None.
    save: what became of the last checkpoint, None: nothing has said it. saved_step: that of the newest one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.past = Past(run="")
        self.resumed = False
        self.logged: dict[str, int | float] = {}
        self.again = (0, 0)
        self.lost = False
        self.save: Save | None = None
        self.saved_step: int | None = None
        self._left = 0  # steps that had been taken when everyone left
        self._steps = array("q")
        self._samples = array("q")
        self._times = {name: array("d") for name in StepTime.__struct_fields__}
        self.lines_lost = 0
        self.after: StepTime | None = None

    @property
    def steps(self) -> int:
        return max(self.past.steps, self._left)

    @property
    def samples(self) -> int | None:
        """In steps that count; None where a step's line is missing."""
        whole = bool(self._steps) and self._steps[0] == 0 and self._steps[-1] == len(self._steps) - 1
        return sum(self._samples) if whole else None

    @property
    def took(self) -> StepTime:
        """All steps that count and whose lines are there."""
        return StepTime(**{name: sum(seconds) for name, seconds in self._times.items()})

    def throughput(self, seconds: float) -> float | None:
        """Samples a second of these steps, if they had taken that long."""
        return sum(self._samples) / seconds if seconds > 0 else None

    def _on_again(self, ended: float) -> None:
        del ended
        self.resumed = True
        self.after = None

    def _step(self, line: StepLine) -> None:
        if self.past.code is not None:
            self.past = goes_on(self.past)
        self.past = with_step(self.past, line)
        self.lost = False
        self._cut(line.step)
        self._steps.append(line.step)
        self._samples.append(line.samples)
        for name, seconds in self._times.items():
            seconds.append(getattr(line, name))

    def _logged(self, line: LogLine) -> None:
        for name, value in line.fields.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                self.logged.pop(name, None)  # the newest is no number
            elif name in self.logged or len(self.logged) < NAMES:
                self.logged[name] = value

    def _event(self, event: events.Event) -> None:
        self.past = after(self.past, event)
        match event:
            case events.StartingEvent():
                self.save = None
            case events.ViewEvent(members=()):
                self._left = event.step
            case events.ResumedEvent(step=step):
                self.resumed = True
                self.after = None
                self._left = 0
                self.lost = False
                self.saved_step = max(step, 0)
                self._cut(max(step, 0))
                self.past = msgspec.structs.replace(self.past, steps=max(step, 0), checkpoint=event.path)
            case events.StateLostEvent():
                self.lost = True
            case events.CheckpointEvent(step=step):
                self.saved_step = step
            case events.LinesLostEvent(lines=lines):
                self.lines_lost += lines
            case events.FinishedEvent():
                self.after = StepTime(**{name: getattr(event, name) for name in StepTime.__struct_fields__})
            case events.SavedEvent() | events.SavedElsewhereEvent() | events.NotSavedEvent():
                self.save = event
                if isinstance(event, events.SavedEvent) and event.whole:
                    self.saved_step = None  # it is that of the end
            case _:
                pass

    def _cut(self, step: int) -> None:
        """Of `step` and later ones what was taken does not count any more."""
        if self._steps and step <= self._steps[-1]:
            at = bisect_left(self._steps, step)
            steps, samples = self.again
            self.again = steps + len(self._steps) - at, samples + sum(self._samples[at:])
            del self._steps[at:], self._samples[at:]
            for seconds in self._times.values():
                del seconds[at:]


# --- account table ----------------------------------------------------------------------------------------------------
#
# The account of a run as people read it. Pure: a value in, something that rich prints out.

UNKNOWN = "unknown"


def account_table(account: Account, *, workers: bool = False) -> Group:
    """In two parts: the run in a few lines, then a line for each class of time; and for each of the `workers`."""
    parts = [_head(account)]
    if account.seconds is not None:
        parts += [Text(), _classes(account)]
    if workers and account.workers:
        parts += [Text(), _workers_table(account.workers)]
    return Group(*parts)


def _head(account: Account) -> Table:
    at = UNKNOWN if account.as_of is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(account.as_of))
    hours = UNKNOWN if account.worker_hours is None else f"{account.worker_hours:.4g}"
    rows = [
        ("run", account.run),
        ("as of", f"{at}, {'over' if account.over else 'nothing says that it is over'}"),
        ("workers", f"{len(account.workers)}"),
        ("worker-hours", hours),
        ("goodput", UNKNOWN if account.goodput is None else f"{100 * account.goodput:.1f} %"),
        ("dollars", dollars(account.cost)),
        ("silent", f"{', '.join(account.silent)}: nothing is known of their time" if account.silent else ""),
        ("damaged", f"{account.damaged} lines of metrics.jsonl are passed over" if account.damaged else ""),
        ("doubtful", f"{account.doubtful} times that can't be are passed over" if account.doubtful else ""),
    ]
    head = Table.grid(padding=(0, 2))
    for name, value in rows:
        if value:
            head.add_row(Text(name, style="bold"), _text(value))
    return head


def priced(cost: Cost) -> bool:
    """Whether anybody has said a price: without, nothing is said of dollars where nobody has asked."""
    return cost.dollars is not None or bool(cost.date) or cost.at_least > 0


def dollars(cost: Cost) -> str:
    """Or why they are not known."""
    of = f", with prices of {cost.date}" if cost.date else ""
    if cost.dollars is not None:
        return f"{cost.dollars:.4g}{of}"
    if len(cost.unknown) == len(cost.hosts):
        return f"{UNKNOWN}: no price is known; name a file of prices with --prices"
    return f"{UNKNOWN}: at least {cost.at_least:.4g}{of}, and the price of {', '.join(cost.unknown)} is not known"


def _classes(account: Account) -> Table:
    table = _table("class", "hours", "%", "")
    total_s = account.total_s or 1.0
    for name in CLASSES:
        seconds = (account.seconds or {}).get(name, 0.0)
        table.add_row(name, f"{seconds / 3600:.4f}", f"{100 * seconds / total_s:.1f}", Text(MEANING[name], style="dim"))
    return table


def _workers_table(workers: tuple[WorkerAccount, ...]) -> Table:
    """In seconds."""
    there = [name for name in CLASSES if any(name in each.seconds for each in workers)]
    table = _table("worker", "host", "seconds", *there)
    for each in workers:
        spent = (f"{each.seconds[name]:.1f}" if name in each.seconds else "" for name in there)
        table.add_row(_text(each.worker), _text(each.host), f"{each.total_s:.1f}", *spent)
    return table


def _table(*titles: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column, title in enumerate(titles):
        table.add_column(title, justify="left" if column == 0 or title in ("", "host") else "right")
    return table


def _text(value: str) -> Text:
    return Text(one_line(value))


# --- summary ----------------------------------------------------------------------------------------------------------

PAUSES = 12  # shown, the longest
LOGGED = 12  # names
SHOWN_S = 0.001  # of time, at least
APART = "evaluation, run.once and pauses"


def summary(
    course: Course, account: Account | None, over: events.OverEvent | None = None, incomplete: str = ""
) -> list[str]:
    """Lines of text. `over`: as the coordinator has told it, whatever has been written down. `incomplete`: a word on
    checkpoints that were not written to their end.
    """
    rows = [*_rows(course, account, over), *([("incomplete", incomplete)] if incomplete else [])]
    return ["", *(f"{name:<14}{one_line(text)}".rstrip() for name, text in rows)]


def _rows(course: Course, account: Account | None, over: events.OverEvent | None) -> Iterator[tuple[str, str]]:
    past = course.past
    if past.code is None and over is not None:  # the folder is gone, or its disk is full
        yield "outcome", f"{over.reason} (exit code {over.code})"
        yield "figures", _until(course)
    else:
        code = "" if past.code is None else f", exit code {past.code}"
        yield "outcome", f"{past.outcome} ({past.reason}{code})"
    if course.began is None or course.ended is None or account is None:
        return
    if course.logged:
        shown = [f"{name} {number(value)}" for name, value in course.logged.items()]
        yield "logged", ", ".join(shown[:LOGGED]) + (f" and {len(shown) - LOGGED} more" if shown[LOGGED:] else "")
    since_s = max(0.0, course.ended - course.began)
    breaks = f"; {in_words(since_s)} since it first began" if course.resumed else ""
    yield "time", f"{in_words(max(0.0, since_s - course.away_s))}{breaks}"
    total = "" if past.total is None else f" of {past.total:,}"
    missing = f" in the first {past.steps:,}" if course.steps > past.steps else ""  # the newest lines did not come
    samples = "" if course.samples is None else f", {course.samples:,} samples{missing}"
    yield "steps", f"{course.steps:,}{total}{samples}"
    yield from _took(course)
    yield "worker-hours", UNKNOWN if account.worker_hours is None else f"{account.worker_hours:.4g}"
    yield "goodput", UNKNOWN if account.goodput is None else f"{100 * account.goodput:.1f} %"
    if priced(account.cost):
        yield "dollars", dollars(account.cost)
    yield from _lost(course)
    yield from _changes(course.pauses.found())
    yield "model", _model(course)
    if course.lines_lost:
        yield "lines lost", f"{course.lines_lost:,} of metrics.jsonl, at least; its events say which"
    if course.damaged:
        yield "damaged", f"{course.damaged:,} lines of metrics.jsonl are passed over"


def _took(course: Course) -> Iterator[tuple[str, str]]:
    """The time of the steps that count, what of it was not training, and what followed them; and their throughput."""
    took, after = course.took, course.after
    apart_s = took.evaluation_s + took.once_s + took.pause_s
    every, training = course.throughput(took.seconds), course.throughput(took.seconds - apart_s)
    if every is None:
        return
    apart = _times(("evaluation", took.evaluation_s), ("run.once", took.once_s), ("pauses", took.pause_s))
    saved_s = course.save.seconds if isinstance(course.save, events.SavedEvent | events.SavedElsewhereEvent) else 0.0
    rest = _times(("after the last one", after.seconds if after else 0.0), ("saving", saved_s))
    yield "steps took", ", ".join(filter(None, (_spent(took.seconds) + (f" ({apart})" if apart else ""), rest)))
    without = f", {rate_words(training)} without {APART}" if apart and training is not None else ""
    yield "throughput", f"{rate_words(every)} samples/s{without}"


def _times(*times: tuple[str, float]) -> str:
    return ", ".join(f"{name} {_spent(seconds)}" for name, seconds in times if seconds >= SHOWN_S)


def _spent(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 60 else in_words(seconds)


def _until(course: Course) -> str:
    if course.began is None:
        return f"{UNKNOWN}: metrics.jsonl can't be read"
    return "metrics.jsonl ends before the run did; these are those up to there"


def _lost(course: Course) -> Iterator[tuple[str, str]]:
    steps, samples = course.again
    if course.lost:
        yield "lost", "the state that the workers held; what came after the newest checkpoint is to be taken again"
    elif steps:
        what = "1 step" if steps == 1 else f"{steps:,} steps"
        yield "taken again", f"{what} with {samples:,} samples: the run went on from before them"
    elif course.samples is not None and _kept(course):
        yield "samples lost", "0"


def _kept(course: Course) -> bool:
    """All that was trained is in what the run has come to."""
    whole = isinstance(course.save, events.SavedEvent | events.SavedElsewhereEvent) and course.save.whole
    return course.past.outcome == "finished" or whole


def _changes(found: list[Pause]) -> Iterator[tuple[str, str]]:
    """The longest, in the order in which they were."""
    if not found:
        return
    yield "view changes", f"{len(found)}, for which the training stood:"
    longest = sorted(sorted(found, key=lambda pause: -pause.pause_ms)[:PAUSES], key=found.index)
    for pause in longest:
        yield "", f"{pause.pause_ms:8.1f} ms  {pause.words}"
    if len(found) > PAUSES:
        rest_ms = sum(pause.pause_ms for pause in found) - sum(pause.pause_ms for pause in longest)
        yield "", f"{rest_ms:8.1f} ms  for {len(found) - PAUSES:,} shorter ones"


def _model(course: Course) -> str:
    path, save = course.past.checkpoint, course.save
    newest = "" if course.past.finite else " (a state that is NOT FINITE)"
    newest = path and f"{path}{newest}"
    match save:
        case events.SavedElsewhereEvent(host=host, path=there):
            return f"not in the run's store, but on {host}: {there}"
        case events.SavedEvent(path=there, whole=False):
            older = f"; the newest of those is {newest}" if newest else ""
            return f"{there}, which is no checkpoint to go on from{older}"
        case events.NotSavedEvent(reason=reason):
            return f"{newest}; what came after it is not saved: {reason}" if newest else f"not saved: {reason}"
        case _:
            pass
    if not newest:
        return "not saved"
    after = course.steps - course.saved_step if course.saved_step is not None else 0
    return newest + (f"; {after:,} step{'' if after == 1 else 's'} after it are not saved" if after > 0 else "")
