"""The final summary of `farandole run`: outcome, time, cost and the place of the model; pauses and account table. Pure.

An unknown value is "unknown" or left out, never 0 and never a guess. Names and reasons come from other processes, so
the code that prints them must remove control characters, as the display does.
"""

from __future__ import annotations

import textwrap
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
from farandole.observe.text import COLUMNS, in_words, number, rate_words, traffic_words
from farandole.platform.output import one_line
from farandole.protocol import events
from farandole.protocol.coordinator.account import Account, AccountReader, WorkerAccount
from farandole.protocol.cost import GB, Cost, Traffic
from farandole.protocol.metrics import Line, LogLine, StepLine, parse_line
from farandole.protocol.values import CLASSES, MEANING, StepTime

# --- pauses -----------------------------------------------------------------------------------------------------------
#
# The pause of training at each view change, from a run's metrics.jsonl alone.
#
# Each step's metrics line carries the time at which the step ended on the last worker. The pause of a change is the
# longest gap between consecutive steps around the change, minus the run's median gap. "Around" means: gaps that overlap
# the time from the first sign of the change (the proposal of a reconfiguration, the first lost worker of a crash) to
# the end of the second step after the switch. First views are left out, since no worker trains before them. A gap
# excludes evaluations, `run.once`, the time between two starts of a run, and the time after the state was lost.
#
# For a million steps only their times are stored. The median is taken over `MEDIAN_OF` gaps at most, evenly spaced.

STEPS_AFTER = 2
MEDIAN_OF = 10_000


@dataclass(frozen=True, kw_only=True)
class Pause:
    """The pause of one view change, never negative.

    `kind` is join, leave or crash (a join and a leave in one view count as join). `words` describes the change.
    """

    kind: str
    view: int
    cause: str
    step: int
    pause_ms: float
    words: str


@dataclass(kw_only=True)
class _Change:
    """One view change. `longest_s`: the longest gap around it, None before the first step."""

    view: events.ViewEvent
    before: tuple[str, ...]
    kind: str
    since: float
    longest_s: float | None = None


def pauses(lines: Iterable[Line]) -> list[Pause]:
    """Returns the pause of each view change, in order. `lines` are the lines of one run's metrics.jsonl."""
    reader = Pauses()
    for line in lines:
        reader.take(line)
    return reader.result()


class Pauses:
    """Computes pauses. Call `take` with every line, oldest first; `found` returns the pauses at any time."""

    def __init__(self) -> None:
        self._starts = array("d")  # starts of the gaps between consecutive steps, Unix times
        self._ends = array("d")
        self._steps = array("q")  # the steps that end the gaps
        self._step, self._time = -1, 0.0
        self._changes: list[_Change] = []
        self._open: list[_Change] = []
        self._proposed: dict[int, float] = {}
        self._lost_at: float | None = None
        self._members: tuple[str, ...] = ()
        self._ends_of: dict[str, str] = {}  # the newest reason why a worker has left
        self._asked: dict[str, str] = {}  # why a worker was asked to leave

    def take(self, line: Line) -> None:
        match line:
            case StepLine():
                self._on_step(line)
            case events.ProposedEvent():
                self._proposed[line.view] = line.time
            case events.NoticeEvent():
                self._asked[line.worker] = line.reason
            case events.LostEvent() | events.LeftEvent() | events.DiedEvent():
                asked = self._asked.get(line.worker) if isinstance(line, events.LeftEvent) else None
                self._ends_of[line.worker] = asked or line.reason
                if isinstance(line, events.LostEvent) and line.worker in self._members and self._lost_at is None:
                    self._lost_at = line.time
            case events.RunStartedEvent() | events.OverEvent() | events.StateLostEvent():
                self._members = ()
                self._break()
            case events.ResumedEvent():  # a view follows the first one
                self._break()
            case events.ViewEvent():
                self._view(line)
            case _:
                pass

    def result(self) -> list[Pause]:
        """Returns the pause of each view change that has steps around it, in order."""
        if not self._ends:
            return []
        every = 1 + len(self._ends) // MEDIAN_OF
        usual_s = median(end - begin for begin, end in zip(self._starts[::every], self._ends[::every], strict=True))
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
        joined = [worker for worker in view.members if worker not in change.before]
        leavers = [worker for worker in change.before if worker not in view.members]
        at = f"at step {view.step}"
        stayed = f"{_count_workers(len(view.members) - len(joined))} continued"
        if change.kind == "crash":
            is_redo = view.outcome == "redo"
            if not leavers:
                return f"the view was stopped {at} ({view.cause}); {stayed}{', exchanging it again' if is_redo else ''}"
            losses = _and(f"{worker} {_ended(self._ends_of.get(worker, view.cause))}" for worker in leavers)
            part = f", recomputing {'its' if len(leavers) == 1 else 'their'} part" if is_redo else ""
            return f"{losses} {at}; {stayed}{part}"
        changes = [f"{_and(joined)} joined" if joined else "", f"{_and(leavers)} left" if leavers else ""]
        if not joined and not leavers:
            return f"{view.cause} {at}"
        reason = (
            f" ({self._ends_of[leavers[0]]})"
            if len(leavers) == 1 and not joined and leavers[0] in self._ends_of
            else ""
        )
        then = f"{_count_workers(len(view.members))} since" if joined else stayed
        return f"{' and '.join(filter(None, changes))} {at}{reason}; {then}"

    def _on_step(self, line: StepLine) -> None:
        before, self._step = self._step, line.step
        begin, self._time = self._time, line.time
        if line.step > before >= 0:  # the step goes back if the run restarts from a checkpoint
            self._starts.append(min(begin + line.evaluation_s + line.once_s, line.time))
            self._ends.append(line.time)
            self._steps.append(line.step)
            self._open = [change for change in self._open if not self._around(change, len(self._ends) - 1)]

    def _break(self) -> None:
        """Records that the next step does not follow the newest one: no gap and no change spans them."""
        self._step = -1
        self._open.clear()

    def _around(self, change: _Change, gap: int) -> bool:
        """Counts a gap if it is around the change. Returns True if it ends with the second step after the switch."""
        end = self._ends[gap]
        if end <= change.since:
            return False
        change.longest_s = max(end - self._starts[gap], change.longest_s or 0.0)
        return self._steps[gap] >= change.view.step + STEPS_AFTER

    def _view(self, view: events.ViewEvent) -> None:
        if self._members and view.members:
            crash = bool(view.outcome) or view.view not in self._proposed
            if crash:
                kind, since = "crash", view.time if self._lost_at is None else self._lost_at
            else:
                kind = "join" if set(view.members) - set(self._members) else "leave"
                since = self._proposed[view.view]
            change = _Change(view=view, before=self._members, kind=kind, since=since)
            self._changes.append(change)
            had = range(
                bisect_right(self._ends, since), len(self._ends)
            )  # lines of steps may come before the line of an event
            if not any(self._around(change, gap) for gap in had):
                self._open.append(change)
        self._members, self._lost_at = view.members, None


def _ended(reason: str) -> str:
    """Returns a predicate for a worker that has ended, such as "was killed"."""
    if reason.startswith("killed"):
        return f"was {reason}"
    return f"was lost ({reason})"


def _count_workers(count: int) -> str:
    named = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five", 6: "six"}
    return f"{named.get(count, count)} worker{'' if count == 1 else 's'}"


def _and(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


# --- lines ------------------------------------------------------------------------------------------------------------
#
# The common base of the classes that summarize a run from the lines of its metrics.jsonl. Pure.


class RunReader(ABC):
    """Reads the lines of a run. Call `take` with the complete lines, oldest first.

    Attributes:
        account, pauses: they get the same lines.
        began, ended: Unix times of the first and the newest line; None before the first line.
        away_s: seconds in which the run was not alive: from the last line of a start to the first line of the next.
        damaged: lines that were skipped.
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
        """Reads one complete line."""
        self.account.take(raw)
        line = parse_line(raw)
        if line is None:
            self.damaged += 1
            return
        self.pauses.take(line)
        if isinstance(line, LogLine):  # a log line has no time
            self._logged(line)
            return
        self.began = line.time if self.began is None else self.began
        before, self.ended = self.ended, line.time
        if isinstance(line, StepLine):
            self._step(line)
            return
        is_restart = isinstance(line, events.RunStartedEvent) or (self._over and isinstance(line, events.StartingEvent))
        if is_restart and before is not None:
            self.away_s += max(0.0, line.time - before)
            self._on_again(before)
        self._over = isinstance(line, events.OverEvent) or (self._over and not is_restart)
        self._event(line)

    @abstractmethod
    def _on_again(self, ended: float) -> None:
        """Handles a new start of the run; the previous start ended at `ended`, Unix time."""

    @abstractmethod
    def _step(self, line: StepLine) -> None: ...

    @abstractmethod
    def _logged(self, line: LogLine) -> None: ...

    @abstractmethod
    def _event(self, event: events.Event) -> None: ...


# --- course -----------------------------------------------------------------------------------------------------------
#
# The state of a run from its lines, for the summary at its end. Pure.
#
# Call `take` with the complete lines of metrics.jsonl, oldest first, also those of earlier sessions. A step
# that is repeated, after `resumed` or a lost state, counts once; the amount of repeated work is recorded. For a million
# steps only their numbers and sample counts are stored.

Save = events.SavedEvent | events.SavedElsewhereEvent | events.NotSavedEvent
NAMES = 100  # names of `run.log` that are stored, the first ones


class Course(RunReader):
    """The state of a run so far.

    Attributes, in addition to those of `RunReader`:
        past: outcome of the run.
        resumed: True if the run was started more than once.
        logged: newest numbers that the script logged.
        again: (steps, samples) that were repeated. lost: True if the state was lost and not replaced.
        steps: number of steps, also those whose lines had not arrived when the run ended.
        lines_lost: number of missing metrics lines.
        after: times after the last step of a script that has finished, else None.
        save: event of the last checkpoint, None if unknown. saved_step: step of the newest checkpoint.
    """

    def __init__(self) -> None:
        super().__init__()
        self.past = Past(run="")
        self.resumed = False
        self.logged: dict[str, int | float] = {}
        self.repeated = (0, 0)
        self.is_state_lost = False
        self.save: Save | None = None
        self.saved_step: int | None = None
        self._left_at = 0  # number of steps when all workers left
        self._steps = array("q")
        self._samples = array("q")
        self._times = {name: array("d") for name in StepTime.__struct_fields__}
        self.lines_lost = 0
        self.after: StepTime | None = None

    @property
    def steps(self) -> int:
        return max(self.past.steps, self._left_at)

    @property
    def samples(self) -> int | None:
        """Returns the number of samples in counted steps; None if a step's line is missing."""
        whole = bool(self._steps) and self._steps[0] == 0 and self._steps[-1] == len(self._steps) - 1
        return sum(self._samples) if whole else None

    @property
    def totals(self) -> StepTime:
        """Returns the sums over all counted steps whose lines exist."""
        return StepTime(**{name: sum(seconds) for name, seconds in self._times.items()})

    def throughput(self, seconds: float) -> float | None:
        """Returns the samples per second of the counted steps if they took `seconds`."""
        return sum(self._samples) / seconds if seconds > 0 else None

    def _on_again(self, ended: float) -> None:
        del ended
        self.resumed = True
        self.after = None

    def _step(self, line: StepLine) -> None:
        if self.past.code is not None:
            self.past = goes_on(self.past)
        self.past = with_step(self.past, line)
        self.is_state_lost = False
        self._cut(line.step)
        self._steps.append(line.step)
        self._samples.append(line.samples)
        for name, seconds in self._times.items():
            seconds.append(getattr(line, name))

    def _logged(self, line: LogLine) -> None:
        for name, value in line.fields.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                self.logged.pop(name, None)  # the newest value is not a number
            elif name in self.logged or len(self.logged) < NAMES:
                self.logged[name] = value

    def _event(self, event: events.Event) -> None:
        self.past = after(self.past, event)
        match event:
            case events.StartingEvent():
                self.save = None
            case events.ViewEvent(members=()):
                self._left_at = event.step
            case events.ResumedEvent(step=step):
                self.resumed = True
                self.after = None
                self._left_at = 0
                self.is_state_lost = False
                self.saved_step = max(step, 0)
                self._cut(max(step, 0))
                self.past = msgspec.structs.replace(self.past, steps=max(step, 0), checkpoint=event.path)
            case events.StateLostEvent():
                self.is_state_lost = True
            case events.CheckpointEvent(step=step):
                self.saved_step = step
            case events.LinesLostEvent(lines=lines):
                self.lines_lost += lines
            case events.FinishedEvent():
                self.after = StepTime(**{name: getattr(event, name) for name in StepTime.__struct_fields__})
            case events.SavedEvent() | events.SavedElsewhereEvent() | events.NotSavedEvent():
                self.save = event
                if isinstance(event, events.SavedEvent) and event.whole:
                    self.saved_step = None  # this checkpoint is the one at the end
            case _:
                pass

    def _cut(self, step: int) -> None:
        """Drops `step` and later steps from the counts."""
        if self._steps and step <= self._steps[-1]:
            at = bisect_left(self._steps, step)
            steps, samples = self.repeated
            self.repeated = steps + len(self._steps) - at, samples + sum(self._samples[at:])
            del self._steps[at:], self._samples[at:]
            for seconds in self._times.values():
                del seconds[at:]


# --- account table ----------------------------------------------------------------------------------------------------
#
# The account of a run as a table. Pure: it takes a value and returns a rich renderable.

UNKNOWN = "unknown"
CLASSES_SHOWN = 5  # in one table of the workers


def account_table(account: Account, *, workers: bool = False) -> Group:
    """Returns a few lines about the run, a line for each class of time and, if `workers`, one for each worker."""
    parts = [_head(account)]
    if account.seconds is not None:
        parts += [Text(), _classes(account)]
    if account.traffic.at_least_bytes:
        parts += [Text(), _hosts_table(account.traffic)]
    if workers and account.workers:
        parts += [part for table in _workers_tables(account.workers) for part in (Text(), table)]
    return Group(*parts)


def _head(account: Account) -> Table:
    at = UNKNOWN if account.as_of is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(account.as_of))
    hours = UNKNOWN if account.worker_hours is None else f"{account.worker_hours:.4g}"
    rows = [
        ("run", account.run),
        ("as of", f"{at}, {'over' if account.over else 'not recorded as over'}"),
        ("workers", f"{len(account.workers)}"),
        ("worker-hours", hours),
        ("goodput", UNKNOWN if account.goodput is None else f"{100 * account.goodput:.1f} %"),
        ("dollars", dollars(account.cost)),
        ("traffic", traffic_words(account.traffic)),
        ("silent", f"{', '.join(account.silent)}: their time is unknown" if account.silent else ""),
        ("damaged", f"{account.damaged} lines of metrics.jsonl were skipped" if account.damaged else ""),
        ("doubtful", f"{account.doubtful} impossible times were skipped" if account.doubtful else ""),
    ]
    head = Table.grid(padding=(0, 2))
    for name, value in rows:
        if value:
            head.add_row(Text(name, style="bold"), _text(value))
    return head


def priced(cost: Cost) -> bool:
    """Returns True if any price is known. If none is, output that the user did not request omits the cost."""
    return cost.dollars is not None or bool(cost.date) or cost.at_least > 0


def dollars(cost: Cost) -> str:
    """Returns the cost in dollars as text, or why it is unknown."""
    source = f", with prices of {cost.date}" if cost.date else ""
    if cost.dollars is not None:
        return f"{cost.dollars:.4g}{source}"
    if len(cost.unknown) == len(cost.hosts):
        return f"{UNKNOWN}: no price is known; give a price file with --prices"
    return f"{UNKNOWN}: at least {cost.at_least:.4g}{source}; the price of {', '.join(cost.unknown)} is unknown"


def _hosts_table(traffic: Traffic) -> Table:
    """Returns a table of the bytes that each host sent to others and received from them."""
    zones = any(each.zone for each in traffic.hosts)
    table = _table("host", *(["zone"] if zones else []), "GB sent", "GB received")
    for each in traffic.hosts:
        zone = [_text(each.zone)] if zones else []
        table.add_row(_text(each.host), *zone, f"{each.sent_bytes / GB:.4f}", f"{each.received_bytes / GB:.4f}")
    return table


def _classes(account: Account) -> Table:
    table = _table("class", "hours", "%", "")
    total_s = account.total_s or 1.0
    for name in CLASSES:
        seconds = (account.seconds or {}).get(name, 0.0)
        table.add_row(name, f"{seconds / 3600:.4f}", f"{100 * seconds / total_s:.1f}", Text(MEANING[name], style="dim"))
    return table


def _workers_tables(workers: tuple[WorkerAccount, ...]) -> Iterator[Table]:
    """Yields tables of each worker's time, in seconds, each with a few of the classes, so that it fits a terminal."""
    classes = [name for name in CLASSES if any(name in each.seconds for each in workers)]
    for first in range(0, max(len(classes), 1), CLASSES_SHOWN):
        shown = classes[first : first + CLASSES_SHOWN]
        table = _table("worker", *(["host", "seconds"] if first == 0 else []), *shown)
        for each in workers:
            head = [_text(each.host), f"{each.total_s:.1f}"] if first == 0 else []
            spent = (f"{each.seconds[name]:.1f}" if name in each.seconds else "" for name in shown)
            table.add_row(_text(each.worker), *head, *spent)
        yield table


def _table(*titles: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column, title in enumerate(titles):
        words = title in ("", "host")
        table.add_column(title, justify="left" if column == 0 or words else "right", no_wrap=not words, overflow="fold")
    return table


def _text(value: str) -> Text:
    return Text(one_line(value))


# --- summary ----------------------------------------------------------------------------------------------------------

SHOWN_BY_STATUS = ("outcome", "steps", "model", "damaged")
PAUSES = 12  # the longest pauses are shown
LOGGED = 12  # logged names that are shown
NAME, PAUSE = 14, 13  # width of a row's name, and of a pause's time
SHOWN_S = 0.001  # shorter times are not shown
EXTRA_PARTS = "evaluation, run.once and pauses"


def summary(
    course: Course, account: Account | None, over: events.OverEvent | None = None, incomplete: str = ""
) -> list[str]:
    """Returns the summary as lines of text.

    `over`: the final event from the coordinator, used if the file lacks it. `incomplete`: a note on checkpoints that
    were not written completely.
    """
    rows = [*_rows(course, account, over), *([("incomplete", incomplete)] if incomplete else [])]
    return ["", *(line for name, text in rows for line in _in_columns(name, one_line(text)))]


def details(course: Course, account: Account | None) -> list[str]:
    """Returns the summary without the rows that `farandole status` shows of a run that is over."""
    rows = (row for row in _rows(course, account, None) if row[0] not in SHOWN_BY_STATUS)
    return [line for name, text in rows for line in _in_columns(name, one_line(text))]


def _in_columns(name: str, text: str) -> list[str]:
    """Returns a row, in as many lines as it needs to fit a terminal. Only a longer word, such as a path, is wider."""
    return textwrap.wrap(
        text, COLUMNS, initial_indent=f"{name:<{NAME}}", subsequent_indent=" " * (NAME if name else NAME + PAUSE),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _rows(course: Course, account: Account | None, over: events.OverEvent | None) -> Iterator[tuple[str, str]]:
    past = course.past
    if past.code is None and over is not None:  # the folder was deleted, or its disk is full
        yield "outcome", f"{over.reason} (exit code {over.code})"
        yield "figures", _until(course)
    else:
        code = "" if past.code is None else f", exit code {past.code}"
        yield "outcome", f"{past.outcome} ({past.reason}{code})"
    if course.began is None or course.ended is None or account is None:
        return
    if not course.steps and not past.checkpoint and course.save is None:
        yield "steps", "0: nothing was trained"
        return
    if course.logged:
        shown = [f"{name} {number(value)}" for name, value in course.logged.items()]
        yield "logged", ", ".join(shown[:LOGGED]) + (f" and {len(shown) - LOGGED} more" if shown[LOGGED:] else "")
    since_s = max(0.0, course.ended - course.began)
    breaks = f"; {in_words(since_s)} since its first start" if course.resumed else ""
    yield "time", f"{in_words(max(0.0, since_s - course.away_s))}{breaks}"
    total = "" if past.total is None else f" of {past.total:,}"
    missing = f" in the first {past.steps:,}" if course.steps > past.steps else ""  # the newest lines did not arrive
    samples = "" if course.samples is None else f", {course.samples:,} samples{missing}"
    yield "steps", f"{course.steps:,}{total}{samples}"
    yield from _times_taken(course)
    yield "worker-hours", UNKNOWN if account.worker_hours is None else f"{account.worker_hours:.4g}"
    yield "goodput", UNKNOWN if account.goodput is None else f"{100 * account.goodput:.1f} %"
    if priced(account.cost):
        yield "dollars", dollars(account.cost)
    if account.traffic.at_least_bytes:
        yield "traffic", traffic_words(account.traffic)
    yield from _losses(course)
    yield from _changes(course.pauses.result())
    yield "model", _model(course)
    if course.lines_lost:
        yield "lines lost", f"{course.lines_lost:,} of metrics.jsonl or more; its events name them"
    if course.damaged:
        yield "damaged", f"{course.damaged:,} lines of metrics.jsonl were skipped"


def _times_taken(course: Course) -> Iterator[tuple[str, str]]:
    """Yields the time of the counted steps, the part that was not training, the time after them, and the throughput."""
    totals, after = course.totals, course.after
    apart_s = totals.evaluation_s + totals.once_s + totals.pause_s
    every, training = course.throughput(totals.seconds), course.throughput(totals.seconds - apart_s)
    if every is None:
        return
    parts = _times(("evaluation", totals.evaluation_s), ("run.once", totals.once_s), ("pauses", totals.pause_s))
    saved_s = course.save.seconds if isinstance(course.save, events.SavedEvent | events.SavedElsewhereEvent) else 0.0
    later_parts = _times(("after the last step", after.seconds if after else 0.0), ("saving", saved_s))
    took = _spent(totals.seconds) + (f" ({parts})" if parts else "")
    yield "steps took", ", ".join(filter(None, (took, later_parts)))
    without = f", {rate_words(training)} without {EXTRA_PARTS}" if parts and training is not None else ""
    yield "throughput", f"{rate_words(every)} samples/s{without}"


def _times(*times: tuple[str, float]) -> str:
    return ", ".join(f"{name} {_spent(seconds)}" for name, seconds in times if seconds >= SHOWN_S)


def _spent(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 60 else in_words(seconds)


def _until(course: Course) -> str:
    if course.began is None:
        return f"{UNKNOWN}: metrics.jsonl can't be read"
    return "metrics.jsonl lacks the end of the run; the figures cover the part before"


def _losses(course: Course) -> Iterator[tuple[str, str]]:
    steps, samples = course.repeated
    if course.is_state_lost:
        yield "lost", "the state in the workers; the steps after the newest checkpoint must be repeated"
    elif steps:
        count = "1 step" if steps == 1 else f"{steps:,} steps"
        yield "taken again", f"{count} with {samples:,} samples: the run resumed from an earlier step"
    elif course.samples is not None and _is_complete(course):
        yield "samples lost", "0"


def _is_complete(course: Course) -> bool:
    """Returns True if the final model contains all training of the run."""
    whole = isinstance(course.save, events.SavedEvent | events.SavedElsewhereEvent) and course.save.whole
    return course.past.outcome == "finished" or whole


def _changes(view_changes: list[Pause]) -> Iterator[tuple[str, str]]:
    """Yields the longest pauses, in the order in which they happened."""
    if not view_changes:
        return
    yield "view changes", f"{len(view_changes)}; the longest step within two of each, beyond the median step:"
    longest = sorted(sorted(view_changes, key=lambda pause: -pause.pause_ms)[:PAUSES], key=view_changes.index)
    for pause in longest:
        yield "", f"{pause.pause_ms:8.1f} ms  {pause.words}"
    if len(view_changes) > PAUSES:
        rest_ms = sum(pause.pause_ms for pause in view_changes) - sum(pause.pause_ms for pause in longest)
        yield "", f"{rest_ms:8.1f} ms  for {len(view_changes) - PAUSES:,} shorter ones"


def _model(course: Course) -> str:
    path, save = course.past.checkpoint, course.save
    newest = "" if course.past.finite else " (a state that is NOT FINITE)"
    newest = path and f"{path}{newest}"
    match save:
        case events.SavedElsewhereEvent(host=host, path=place):
            return f"not in the run's store, but on {host}: {place}"
        case events.SavedEvent(path=place, whole=False):
            older = f"; the newest checkpoint is {newest}" if newest else ""
            return f"{place}, a partial state from which no run can resume{older}"
        case events.NotSavedEvent(reason=reason):
            return f"{newest}; later steps are not saved: {reason}" if newest else f"not saved: {reason}"
        case _:
            pass
    if not newest:
        return "not saved"
    after = course.steps - course.saved_step if course.saved_step is not None else 0
    return newest + (f"; {after:,} step{'' if after == 1 else 's'} after it are not saved" if after > 0 else "")
