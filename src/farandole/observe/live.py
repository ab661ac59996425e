"""The live display of `farandole run`, `attach` and `top`: events, the output of workers, and progress.

On a terminal a few lines of figures stay at the bottom, and everything else scrolls above them. In a file or a pipe it
is plain lines: one for each event, and every two seconds a row of a progress table. Text of users and workers is shown
as plain text, never read as markup; control sequences stay in the log files. There is no drawing thread: the caller
that adds a line also draws it, and redraws the figures every `REFRESH_S` seconds at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from farandole.checkpoint.store import incomplete_here, step_of
from farandole.control.client import subscribe
from farandole.control.run_folder import CHECKPOINTS, HIDDEN_LOG_PREFIX, LOGS, METRICS, Tail
from farandole.control.status import RATE_STEPS, Status, samples_per_s
from farandole.control.ticket import Ticket
from farandole.errors import CoordinatorUnreachable, FarandoleError
from farandole.observe import text as gauges
from farandole.observe.summary import Course, summary
from farandole.observe.tables import workers_table
from farandole.observe.text import Flow, Presence, ProgressRows, SameOutput, describe, not_promised, number, time_text
from farandole.platform.files import open_regular
from farandole.platform.output import one_line, plain
from farandole.platform.process import up_to
from farandole.protocol import events
from farandole.protocol.coordinator.account import Account
from farandole.protocol.coordinator.state import WHOLE, stragglers
from farandole.protocol.cost import Prices
from farandole.protocol.events import OverEvent
from farandole.protocol.messages import Hello, Note
from farandole.protocol.metrics import Line, LogLine, StepLine, parse_line, time_of

# --- display ----------------------------------------------------------------------------------------------------------

PROGRESS_EVERY_S = 2.0
REFRESH_S = 0.25
LOGGED_PART = 0.05  # the part of the output limits that `run.log` lines get
QUIET = (
    events.ProposedEvent,
    events.ReadyEvent,
    events.TimeSpentEvent,
    events.PricedEvent,
    events.RunStartedEvent,
)  # not shown: a view event follows and reports the same, or users need no action
ENDS = (
    events.FailedEvent,
    events.FinishedEvent,
    events.SavedEvent,
    events.SavedElsewhereEvent,
    events.NotSavedEvent,
    events.StateLostEvent,
    events.OverEvent,
)  # after one of these no further step may come, so the newest step is shown before it


def open_display(stream: TextIO) -> Display:
    """Returns a live display for a terminal, a plain one for any other stream."""
    console = Console(file=stream)
    live = stream.isatty() and not console.is_dumb_terminal
    return LiveDisplay(console) if live else PlainDisplay(stream)


class Display(ABC):
    """A display, used as a context manager from one thread. The caller updates `wanted` and `account`.

    Invariant: the times that are shown never go backwards, although lines of several hosts' clocks come, some of them
    late. No time is after the present time of this process.

    `clock` measures intervals; `time_of_day` returns the seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.wanted = 0
        self.account: Account | None = None
        self.presence = Presence()
        self._clock = clock
        self.time_of_day: Callable[[], float] = time.time
        self._newest = 0.0  # the newest time of a line, in seconds since the epoch
        self._logged = Flow("run.log", METRICS)
        self._slow: dict[str, float] = {}  # speed of stragglers, by the current shares
        self._steps: deque[StepLine] = deque(maxlen=RATE_STEPS)
        self._same = SameOutput()

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def from_now(self, status: Status) -> None:
        """Starts the display in the middle of a run, from its `status`."""
        self.wanted = status.wanted
        self.presence = Presence(status)

    def line(self, line: Line) -> None:
        """Shows a line of metrics.jsonl: an event, a step or a logged value."""
        self._newest = max(self._newest, min(time_of(line), self.time_of_day()))
        if isinstance(line, StepLine):
            self._steps.append(line)
            self._log()
            self.progress(line)
            return
        if isinstance(line, LogLine):
            self._log(f"{self._at}  {describe(line)}".encode(errors="replace"))
            return
        self.presence.take(line)
        if isinstance(line, events.ViewEvent):
            self._slow = {worker: speed for worker, speed in self._slow.items() if worker in line.members}
        if isinstance(line, events.SharesEvent):
            self._slow = stragglers({worker: share / WHOLE for worker, share in line.shares.items()})
        if isinstance(line, events.OverEvent):
            self._show_parts((), *self._logged.end())
        if isinstance(line, ENDS) or (isinstance(line, events.ViewEvent) and not line.members):
            self.progressed()
        if not isinstance(line, QUIET):
            self.show(f"{self._at}  {describe(line)}")
        self.refresh()

    def output(self, worker: str, text: str) -> None:
        """Shows a line that a worker printed."""
        self.outputs([(worker, text)])

    def outputs(self, lines: Sequence[tuple[str, str]]) -> None:
        """Shows (worker, line) pairs; "" marks a note of farandole. One call for many lines is much cheaper.

        A line that several workers print is shown once: each runs the same script.
        """
        now = self._clock()
        if new := [(worker, text) for worker, text in lines if not worker or self._same.is_new(worker, text, now)]:
            self.show("\n".join(f"{worker} | {text}" if worker else text for worker, text in new))

    def summary(self, lines: Sequence[str]) -> None:
        """Shows the final summary."""
        self.show("\n".join(lines))

    @property
    def _at(self) -> str:
        """The time of day of the newest line, as text."""
        return time_text(self._newest or self.time_of_day())

    @property
    def people(self) -> str:
        """Returns the workers, those that join and leave, and stragglers, as text."""
        presence = self.presence
        size = len(presence.members) if presence.is_known or not self._steps else self._steps[-1].workers
        parts = [
            gauges.workers(size, self.wanted, presence.coming, presence.going),
            *(f"{worker} at {speed:.2f} of the fastest's speed" for worker, speed in self._slow.items()),
        ]
        return one_line(", ".join(parts))

    def show(self, text: str) -> None:
        """Shows text that may come from other processes, without control characters."""
        self._put(plain(text))

    def _log(self, *lines: bytes) -> None:
        """Shows `run.log` lines within limits: a script may log at each of a thousand steps a second."""
        self._show_parts(*self._logged.take(lines, self._clock(), part=LOGGED_PART))

    def _show_parts(self, first: Sequence[bytes], note: str, then: Sequence[bytes]) -> None:
        if lines := [*map(bytes.decode, first), *([note] if note else []), *map(bytes.decode, then)]:
            self.show("\n".join(lines))

    @abstractmethod
    def _put(self, text: str) -> None: ...

    @abstractmethod
    def progress(self, line: StepLine) -> None:
        """Shows that a step has ended."""

    @abstractmethod
    def progressed(self) -> None:
        """Shows the newest step, after which none may come."""

    def refresh(self) -> None:
        """Redraws the figures, which may have changed."""
        return

    @abstractmethod
    def close(self) -> None: ...


class PlainDisplay(Display):
    """A display of plain lines of text."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._stream = stream
        self._next_at = 0.0
        self._rows = ProgressRows()
        self._late: StepLine | None = None  # the newest step, if no row shows it yet

    def _put(self, text: str) -> None:
        self._rows.passed(1 + text.count("\n"))
        self._print(text)

    def progress(self, line: StepLine) -> None:
        self._late = line
        now = self._clock()
        if now >= self._next_at:
            self._next_at = now + PROGRESS_EVERY_S
            self.progressed()

    def progressed(self) -> None:
        line, self._late = self._late, None
        if line is not None:
            self._print("\n".join(self._rows.rows(line, self._at, self.wanted, samples_per_s(self._steps))))

    def close(self) -> None:
        return

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class LiveDisplay(Display):
    """A display with figures at the bottom of a terminal, and everything else above them."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._next_at = 0.0
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Display:
        self._live.start()
        return self

    def _put(self, text: str) -> None:
        self._live.console.print(Text(text), soft_wrap=True)

    def progress(self, line: StepLine) -> None:
        del line
        self.refresh()

    def progressed(self) -> None:
        self._next_at = 0.0
        self.refresh()

    def refresh(self) -> None:
        now = self._clock()
        if now >= self._next_at and self._live.is_started:
            self._next_at = now + REFRESH_S
            self._live.update(self._figures(), refresh=True)

    def _figures(self) -> Group:
        last = self._steps[-1] if self._steps else None
        rate = samples_per_s(self._steps, time.time())
        words = (gauges.training(last, None, rate), self.people, gauges.cost(self.account))
        lines = [Text(line, no_wrap=True, overflow="ellipsis") for line in words if line]
        return Group(*([gauges.progress(last.step + 1, last.total, last.epoch, self._steps)] if last else []), *lines)

    def close(self) -> None:
        self._live.stop()


# --- written ----------------------------------------------------------------------------------------------------------
#
# Reads the metrics.jsonl of a live run incrementally.
#
# The summary figures of a run come from this file, not from the coordinator's stream: an observer that connects late,
# or again after a coordinator's death, gets only the newest lines.


class Written:
    """The contents of a run's metrics.jsonl so far.

    Attributes:
        course: the state of the run, from the lines so far.
        checkpoints: the folder or URL of the run's checkpoints.
    """

    def __init__(self, folder: Path, prices: Prices, checkpoints: str = "") -> None:
        """`checkpoints` is the folder or URL of the run's checkpoints; "" means its run folder."""
        self.course = Course()
        self._run = folder.resolve().name
        self._prices = prices
        self.checkpoints = checkpoints or str(folder / CHECKPOINTS)
        self._tail = Tail(folder / METRICS)

    def read_on(self) -> bool:
        """Reads some of the new lines. Returns True if there may be more. A file that can't be read counts as empty."""
        try:
            lines = self._tail.lines()
        except (OSError, FarandoleError):
            return False
        for line in lines:
            self.course.take(line)
        return bool(lines)

    def account(self) -> Account | None:
        """Returns the account of the run, or None if no line was read yet."""
        return None if self.course.began is None else self.course.account.account(self._run, self._prices)


# --- follow -----------------------------------------------------------------------------------------------------------
#
# Follows the workers' log files and returns their new lines, at a rate that people can read.
#
# Only complete lines are returned; text without a newline waits until `flush`. Of a line that a progress bar overwrites
# (carriage returns) only the last state is shown. Undecodable bytes are replaced, so reading never fails on content.
#
# Reading never falls behind. Each call reads to the end of every file. If a file has more than `READ_BYTES` new bytes,
# the lines before the last `READ_BYTES` are only counted (up to `COUNT_BYTES`). `Flow` in `text.py` selects the lines
# that are shown from the rest. At most `LONGEST` characters of a line are kept.

READ_BYTES = 1024 * 1024  # per file and call
COUNT_BYTES = 32 * READ_BYTES
LONGEST = 10_000  # characters of a line
_MAX_LINE_BYTES = 4 * LONGEST + 4  # 4 per character at most, and one character more to detect a longer line
_HIDDEN_PREFIX = HIDDEN_LOG_PREFIX.encode()


class _Log:
    """One log file. `passed` and `unread`: lines and bytes that the last `look` skipped."""

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        self.file: BinaryIO = open_regular(path)
        self.flow = Flow(path.stem)
        self.remainder = b""
        self.lines: list[bytes] = []
        self.passed = self.unread = 0

    def look(self) -> None:
        """Reads to the present end of the file."""
        self.passed, self.unread = 0, 0
        behind = os.fstat(self.file.fileno()).st_size - self.file.tell() - READ_BYTES
        if behind > 0:
            self._pass_over(behind)
        *whole, remainder = (self.remainder + (self.file.read(READ_BYTES) or b"")).split(b"\n")
        if behind > 0 and whole:  # the end of a line whose beginning was skipped
            self.passed += 1
            del whole[0]
        self.remainder = remainder[remainder.rstrip(b"\r").rfind(b"\r") + 1 :][:_MAX_LINE_BYTES]
        self.lines = [line for line in whole if not line.startswith(_HIDDEN_PREFIX)]

    def _pass_over(self, size: int) -> None:
        self.remainder = b""
        counted = min(size, COUNT_BYTES)
        self.unread = size - counted
        self.file.seek(self.unread, os.SEEK_CUR)
        while counted > 0 and (data := self.file.read(min(counted, READ_BYTES))):
            self.passed += data.count(b"\n")
            counted -= len(data)


class Follower:
    """Follows the log files in a folder. Use it as a context manager, and call `lines()` periodically.

    Lines that exist at construction are not returned.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._logs: dict[Path, _Log] = {}
        for path in folder.glob("*.log"):
            with contextlib.suppress(OSError):  # not a file: the next call tries again
                self._logs[path] = _Log(path)
                self._logs[path].file.seek(0, os.SEEK_END)

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *error: object) -> None:
        for log in self._logs.values():
            log.file.close()

    def lines(self) -> list[tuple[str, str]]:
        """Returns new (name, line) pairs, in order within each file.

        The name is the file's without `.log`, or "" for a note on lines that are not shown.
        """
        for path in sorted(self._folder.glob("*.log")):
            if path not in self._logs:
                try:
                    self._logs[path] = _Log(path)
                except OSError:  # just removed, or no free descriptor: the next call tries again
                    continue
        logs = [self._logs[path] for path in sorted(self._logs)]
        for log in logs:
            log.look()
        part, now = 1 / max(1, sum(bool(log.lines) for log in logs)), self._clock()
        pairs: list[tuple[str, str]] = []
        for log in logs:
            first, note, then = log.flow.take(log.lines, now, part=part, passed=log.passed, unread=log.unread)
            log.lines = []
            pairs += _pairs(log.name, first, note, then)
        return pairs

    def flush(self) -> list[tuple[str, str]]:
        """Returns all remaining lines, also unfinished ones. Call it when the writers have ended."""
        pairs = self.lines()
        for log in self._logs.values():
            pairs += _pairs(log.name, (), *log.flow.end())
            if log.remainder and not log.remainder.startswith(_HIDDEN_PREFIX):
                pairs.append((log.name, _shown(log.remainder)))
            log.remainder = b""
        return pairs


def _pairs(name: str, first: Sequence[bytes], note: str, then: Sequence[bytes]) -> list[tuple[str, str]]:
    notes = [("", note)] if note else []
    return [*((name, _shown(line)) for line in first), *notes, *((name, _shown(line)) for line in then)]


def _shown(line: bytes) -> str:
    text = line.rstrip(b"\r").rpartition(b"\r")[2][:_MAX_LINE_BYTES].decode(errors="replace")
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… the rest of this line is only in its log"


# --- live -------------------------------------------------------------------------------------------------------------
#
# Shows a live run on a display: its events and steps, across coordinator restarts, the output of its workers, and
# summary figures.

WRITTEN_S = 2.0  # for the `over` event to be written
WATCH_S = 0.2  # between two attempts to reach a coordinator that does not answer
GONE_S = 5.0  # without a coordinator and without a lock on the folder, until the run counts as killed
RELAY_S = 0.1  # between two reads of the workers' log files
TICK_S = 1.0  # between two refreshes of the display when nothing happens
FIGURES_S = 5.0  # least time between two summaries of metrics.jsonl,
FIGURES_PART = 0.02  # and the largest part of the time that they may take


async def show_lines(
    ticket: Ticket, display: Display, on_line: Callable[[Line], None], is_locked: Callable[[], bool] = lambda: True,
    gone_s: float = GONE_S,
) -> None:  # fmt: skip
    """Shows events and steps until the run is over, each line once. `on_line` is called with each line.

    Raises:
        CoordinatorUnreachable: the run was killed: no coordinator has answered for `gone_s`, and `is_locked` returns
            False, which means that no `farandole run` holds the run's folder.
    """
    newest, since = 0.0, time.monotonic()
    while True:
        try:
            async with subscribe(ticket, Hello(kind="observer", pid=os.getpid())) as subscription:
                skip_shown, since = newest > 0, math.inf
                while (message := await subscription.receive()) is not None:
                    line = parse_line(message.line) if isinstance(message, Note) else None
                    if line is None or (skip_shown and time_of(line) <= newest):
                        continue
                    skip_shown = False
                    newest = max(newest, time_of(line))
                    display.line(line)
                    on_line(line)
                    if isinstance(line, OverEvent):
                        return
        except CoordinatorUnreachable:
            if time.monotonic() - since > gone_s and not is_locked():
                raise
        since = min(since, time.monotonic())
        await asyncio.sleep(WATCH_S)


async def show_output(folder: Path, display: Display, ended: asyncio.Event) -> None:
    """Shows the workers' output from the log files in the run's folder. Shows the rest once `ended` is set."""
    with Follower(folder / LOGS) as follower:
        while not ended.is_set():
            display.outputs(follower.lines())
            await up_to(RELAY_S, ended)
        display.outputs(follower.flush())


async def keep_figures(written: Written, display: Display) -> None:
    """Updates the account of the run, and refreshes the display. Never returns."""
    next_sum_at = 0.0
    while True:
        if (began := time.monotonic()) >= next_sum_at:
            await _catch_up(written)
            summing = time.monotonic()
            display.account = written.account()
            next_sum_at = began + max(FIGURES_S, (time.monotonic() - summing) / FIGURES_PART)
        display.refresh()
        await asyncio.sleep(TICK_S)


async def sum_up(written: Written, display: Display, over: OverEvent | None) -> None:
    """Shows the summary of a run that is over or was killed. Waits up to `WRITTEN_S` for its last lines."""
    until = time.monotonic() + WRITTEN_S
    await _catch_up(written)
    while over is not None and written.course.past.code is None and time.monotonic() < until:
        await asyncio.sleep(WATCH_S)
        await _catch_up(written)
    newest = step_of(written.course.past.checkpoint)
    incomplete = incomplete_here(written.checkpoints, after=-1 if newest is None else newest)
    display.summary(summary(written.course, written.account(), over, incomplete))


async def _catch_up(written: Written) -> None:
    """Reads all new lines, in parts, so that other tasks can run in between."""
    while written.read_on():
        await asyncio.sleep(0)


# --- top --------------------------------------------------------------------------------------------------------------
#
# The screens of `farandole top`: one run in detail, or several runs with one line each. They take values and return a
# rich renderable. Unknown values are not shown.

EVENTS = 12  # events on the screen


class Recent(Display):
    """A display that only stores the newest events and steps of a run."""

    def __init__(self) -> None:
        super().__init__()
        self.events: deque[str] = deque(maxlen=EVENTS)

    @property
    def steps(self) -> Sequence[StepLine]:
        return tuple(self._steps)

    def _put(self, text: str) -> None:
        self.events.append(text)

    def progress(self, line: StepLine) -> None:
        del line

    def progressed(self) -> None:
        return

    def close(self) -> None:
        return


def picture(status: Status, recent: Recent, note: str = "") -> Group:
    """Returns the screen of one run. `note`: a message about the screen itself."""
    head = Table.grid(padding=(0, 2))
    head.add_row(_text(status.run, "bold"), _text(_state(status)), _text(_view(status)))
    parts: list[Text | Table] = [head, gauges.progress(status.step, status.total, status.epoch, recent.steps)]
    last = recent.steps[-1] if recent.steps else None
    lines = gauges.training(last, status.loss, status.samples_per_s), gauges.cost(status.account)
    parts += [Text(line) for line in lines if line]
    if note:
        parts.append(_text(note, "bold"))
    if status.workers:
        parts += [Text(), workers_table(status)]
    if recent.events:
        parts += [Text(), *(Text(one_line(event), no_wrap=True, overflow="ellipsis") for event in recent.events)]
    return Group(*parts)


def list_picture(runs: Mapping[str, Status | None]) -> Table:
    """Returns a table of several runs, by the names of their folders. A status of None means: no answer now."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("run", "state", "step", "epoch", "workers", "samples/s", "loss"):
        is_text = title in ("run", "state")
        table.add_column(title, justify="left" if is_text else "right", no_wrap=not is_text)
    for name, status in runs.items():
        if status is None:
            table.add_row(_text(name), "no answer")
            continue
        rate = "" if status.samples_per_s is None else gauges.rate_words(status.samples_per_s)
        loss = "" if status.loss is None else number(status.loss)
        workers = f"{status.view.size} of {status.wanted}"
        table.add_row(
            _text(name),
            _text(_state(status)),
            gauges.step_words(status.step, status.total),
            str(status.epoch),
            workers,
            rate,
            loss,
        )
    return table


def _state(status: Status) -> str:
    if status.stalled is not None:
        peers = f", waiting for {', '.join(status.stalled.workers)}" if status.stalled.workers else ""
        return f"stalled for {status.stalled.seconds:.0f} s{peers}"
    return f"{status.state}: {status.reason}" if status.reason else status.state


def _view(status: Status) -> str:
    coming = [worker.id for worker in status.workers if worker.state in ("starting", "ready")]
    going = [worker.id for worker in status.workers if worker.state == "leaving"]
    parts = [
        gauges.workers(status.view.size, status.wanted, coming, going),
        "" if status.unpromised is None else f"results {not_promised(status.unpromised)}",
    ]
    return ", ".join(part for part in parts if part)


def _text(value: str, style: str = "") -> Text:
    """Returns plain text: no markup, no control characters."""
    return Text(one_line(value), style=style)
