"""What `farandole run` shows while it runs: events as they happen, the workers' own output, and how far training is.

On a terminal a few lines of figures stay at the bottom, and everything else scrolls above them. Elsewhere (a file, a
pipe) it is plain lines: one for each event, and every two seconds a row of a table about the progress. Text of users
and workers is shown as plain text, never read as markup; control sequences stay in the log files. No thread draws
anything: who tells something draws it, the figures every `REFRESH_S` at most.
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
from farandole.control.run_folder import ASIDE, CHECKPOINTS, LOGS, METRICS, Tail
from farandole.control.status import RATE_STEPS, Status, samples_per_s
from farandole.control.ticket import Ticket
from farandole.errors import CoordinatorUnreachable, FarandoleError
from farandole.observe import text as gauges
from farandole.observe.summary import Course, summary
from farandole.observe.tables import workers_table
from farandole.observe.text import Flow, Presence, ProgressRows, clock, describe, not_promised, number
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
LOGGED_PART = 0.05  # of the lines that workers may print, for those of `run.log`
QUIET = (
    events.ProposedEvent,
    events.ReadyEvent,
    events.TimeSpentEvent,
    events.PricedEvent,
    events.RunStartedEvent,
)  # the view that follows says it, or nothing has happened


def open_display(stream: TextIO) -> Display:
    """The display that suits `stream`."""
    console = Console(file=stream)
    live = stream.isatty() and not console.is_dumb_terminal
    return LiveDisplay(console) if live else PlainDisplay(stream)


class Display(ABC):
    """A context manager; everything is called from one thread. `wanted` and `account` are the caller's to keep."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.wanted = 0
        self.account: Account | None = None
        self.presence = Presence()
        self._clock = clock
        self._logged = Flow("run.log", METRICS)
        self._slow: dict[str, float] = {}  # by the shares in force
        self._steps: deque[StepLine] = deque(maxlen=RATE_STEPS)

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def from_now(self, status: Status) -> None:
        """The run has been on for a while; it is as `status` says."""
        self.wanted = status.wanted
        self.presence = Presence(status)

    def line(self, line: Line) -> None:
        """A line of metrics.jsonl: an event or a step."""
        if isinstance(line, StepLine):
            self._steps.append(line)
            self._log()
            self.progress(line)
            return
        if isinstance(line, LogLine):
            self._log(f"{clock(line)}  {describe(line)}".encode(errors="replace"))
            return
        self.presence.take(line)
        if isinstance(line, events.ViewEvent):
            self._slow = {worker: speed for worker, speed in self._slow.items() if worker in line.members}
        if isinstance(line, events.SharesEvent):
            self._slow = stragglers({worker: share / WHOLE for worker, share in line.shares.items()})
        if isinstance(line, events.OverEvent):
            self._say((), *self._logged.end())
            self.progressed()
        if not isinstance(line, QUIET):
            self.show(f"{clock(line)}  {describe(line)}")
        self.refresh()

    def output(self, worker: str, text: str) -> None:
        """A line that a worker printed."""
        self.outputs([(worker, text)])

    def outputs(self, lines: Sequence[tuple[str, str]]) -> None:
        """Many at once, which is much cheaper: each its worker's, or, of "", one of ours."""
        if lines:
            self.show("\n".join(f"{worker} | {text}" if worker else text for worker, text in lines))

    def summary(self, lines: Sequence[str]) -> None:
        """The last words."""
        self.show("\n".join(lines))

    @property
    def people(self) -> str:
        """Workers, who of them comes and goes, and stragglers, in words."""
        there = self.presence
        size = len(there.members) if there.known or not self._steps else self._steps[-1].workers
        parts = [
            gauges.workers(size, self.wanted, there.coming, there.going),
            *(f"{worker} at {speed:.2f} of the speed" for worker, speed in self._slow.items()),
        ]
        return one_line(", ".join(parts))

    def show(self, text: str) -> None:
        """Others may have put anything into it."""
        self._put(plain(text))

    def _log(self, *lines: bytes) -> None:
        """What the script logs: it may do so at each of a thousand steps a second."""
        self._say(*self._logged.take(lines, self._clock(), part=LOGGED_PART))

    def _say(self, first: Sequence[bytes], word: str, then: Sequence[bytes]) -> None:
        if lines := [*map(bytes.decode, first), *([word] if word else []), *map(bytes.decode, then)]:
            self.show("\n".join(lines))

    @abstractmethod
    def _put(self, text: str) -> None: ...

    @abstractmethod
    def progress(self, line: StepLine) -> None:
        """A step has ended."""

    def progressed(self) -> None:
        """No more steps will come."""
        return

    def refresh(self) -> None:
        """Something may have changed."""
        return

    @abstractmethod
    def close(self) -> None: ...


class PlainDisplay(Display):
    """Lines of text."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._stream = stream
        self._due = 0.0
        self._rows = ProgressRows()
        self._late: StepLine | None = None  # the newest, where it has no row

    def _put(self, text: str) -> None:
        self._rows.passed(1 + text.count("\n"))
        self._print(text)

    def progress(self, line: StepLine) -> None:
        self._late = line
        now = self._clock()
        if now >= self._due:
            self._due = now + PROGRESS_EVERY_S
            self.progressed()

    def progressed(self) -> None:
        line, self._late = self._late, None
        if line is not None:
            self._print("\n".join(self._rows.of(line, self.wanted, samples_per_s(self._steps))))

    def close(self) -> None:
        return

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class LiveDisplay(Display):
    """Figures at the bottom of a terminal, everything else above them."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._due = 0.0
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Display:
        self._live.start()
        return self

    def _put(self, text: str) -> None:
        self._live.console.print(Text(text), soft_wrap=True)

    def progress(self, line: StepLine) -> None:
        del line
        self.refresh()

    def refresh(self) -> None:
        now = self._clock()
        if now >= self._due and self._live.is_started:
            self._due = now + REFRESH_S
            self._live.update(self._figures(), refresh=True)

    def _figures(self) -> Group:
        last = self._steps[-1] if self._steps else None
        rate = samples_per_s(self._steps, time.time())
        words = (gauges.training(last, None, rate), self.people, gauges.cost(self.account))
        lines = [Text(line, no_wrap=True, overflow="ellipsis") for line in words if line]
        return Group(*([gauges.progress(last.step, last.total, last.epoch, self._steps)] if last else []), *lines)

    def close(self) -> None:
        self._live.stop()


# --- written ----------------------------------------------------------------------------------------------------------
#
# What a live run has written down so far, as it grows: the lines of its metrics.jsonl, read on from where one was.
#
# Figures that sum up a run come from there and not from what the coordinator tells its watchers, of which who comes
# late, or connects again after a coordinator's death, has only the newest lines.


class Written:
    """Attributes: course: what the lines so far say. checkpoints: the place of the run's."""

    def __init__(self, folder: Path, prices: Prices, checkpoints: str = "") -> None:
        """`checkpoints`: where the run's are, "" for its folder."""
        self.course = Course()
        self._run = folder.resolve().name
        self._prices = prices
        self.checkpoints = checkpoints or str(folder / CHECKPOINTS)
        self._tail = Tail(folder / METRICS)

    def read_on(self) -> bool:
        """A part of what is new; whether there may be more. What can't be read is not there."""
        try:
            lines = self._tail.lines()
        except (OSError, FarandoleError):
            return False
        for line in lines:
            self.course.take(line)
        return bool(lines)

    def account(self) -> Account | None:
        """None where nothing has been read."""
        return None if self.course.began is None else self.course.account.account(self._run, self._prices)


# --- follow -----------------------------------------------------------------------------------------------------------
#
# New lines of the workers' log files, as they come, as far as anybody can read them.
#
# Whole lines only: what has no newline yet waits, until `flush`. Of what a progress bar overwrites (carriage returns)
# the last state counts. Reading never fails on what a process writes: undecodable bytes are replaced.
#
# It never falls behind. Each look goes to the end of every file: of what is more than `READ_BYTES` the lines are
# counted (up to `COUNT_BYTES`), and not kept; of what is left `text.py` says what is shown. A line of any length
# takes `LONGEST` characters at most.

READ_BYTES = 1024 * 1024  # of one file in a look
COUNT_BYTES = 32 * READ_BYTES
LONGEST = 10_000  # characters
_KEPT = 4 * LONGEST + 4  # bytes of a line: a character takes 4 at most, and one too many is told
_ASIDE = ASIDE.encode()


class _Log:
    """One file. `passed` and `unread`: lines and bytes that the newest look has left out."""

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        self.file: BinaryIO = open_regular(path)
        self.flow = Flow(path.stem)
        self.rest = b""
        self.lines: list[bytes] = []
        self.passed = self.unread = 0

    def look(self) -> None:
        """Everything to the end of now."""
        self.passed, self.unread = 0, 0
        behind = os.fstat(self.file.fileno()).st_size - self.file.tell() - READ_BYTES
        if behind > 0:
            self._pass_over(behind)
        *whole, rest = (self.rest + (self.file.read(READ_BYTES) or b"")).split(b"\n")
        if behind > 0 and whole:  # the end of a line whose beginning is gone
            self.passed += 1
            del whole[0]
        self.rest = rest[rest.rstrip(b"\r").rfind(b"\r") + 1 :][:_KEPT]
        self.lines = [line for line in whole if not line.startswith(_ASIDE)]

    def _pass_over(self, size: int) -> None:
        self.rest = b""
        counted = min(size, COUNT_BYTES)
        self.unread = size - counted
        self.file.seek(self.unread, os.SEEK_CUR)
        while counted > 0 and (data := self.file.read(min(counted, READ_BYTES))):
            self.passed += data.count(b"\n")
            counted -= len(data)


class Follower:
    """`with Follower(folder) as follower`; then ask for `lines()` from time to time. What is there already is old."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._logs: dict[Path, _Log] = {}
        for path in folder.glob("*.log"):
            with contextlib.suppress(OSError):  # no file: it is tried again
                self._logs[path] = _Log(path)
                self._logs[path].file.seek(0, os.SEEK_END)

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *error: object) -> None:
        for log in self._logs.values():
            log.file.close()

    def lines(self) -> list[tuple[str, str]]:
        """New (name, line) pairs, in order within each file; the name is the file's without `.log`, "" for a word of
        ours on what is not shown.
        """
        for path in sorted(self._folder.glob("*.log")):
            if path not in self._logs:
                try:
                    self._logs[path] = _Log(path)
                except OSError:  # removed at this moment, or there are no descriptors: it is tried again
                    continue
        logs = [self._logs[path] for path in sorted(self._logs)]
        for log in logs:
            log.look()
        part, now = 1 / max(1, sum(bool(log.lines) for log in logs)), self._clock()
        found: list[tuple[str, str]] = []
        for log in logs:
            first, word, then = log.flow.take(log.lines, now, part=part, passed=log.passed, unread=log.unread)
            log.lines = []
            found += _pairs(log.name, first, word, then)
        return found

    def flush(self) -> list[tuple[str, str]]:
        """All that is left, the unfinished last lines too: the writers have ended."""
        found = self.lines()
        for log in self._logs.values():
            found += _pairs(log.name, (), *log.flow.end())
            found += [(log.name, _shown(log.rest))] if log.rest and not log.rest.startswith(_ASIDE) else []
            log.rest = b""
        return found


def _pairs(name: str, first: Sequence[bytes], word: str, then: Sequence[bytes]) -> list[tuple[str, str]]:
    said = [("", word)] if word else []
    return [*((name, _shown(line)) for line in first), *said, *((name, _shown(line)) for line in then)]


def _shown(line: bytes) -> str:
    text = line.rstrip(b"\r").rpartition(b"\r")[2][:_KEPT].decode(errors="replace")
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… the rest of this line is only in its log"


# --- live -------------------------------------------------------------------------------------------------------------
#
# A live run on a display: its events and steps, from one coordinator after the other, what its workers print, and the
# figures that sum it up.

WRITTEN_S = 2.0  # for the end to be written down
WATCH_S = 0.2  # between two tries to reach a coordinator that has gone
GONE_S = 5.0  # without a coordinator, for a run whose folder nobody holds to be given up
RELAY_S = 0.1  # how often the workers' log files are looked at
TICK_S = 1.0  # how often the display is looked after when nothing happens
FIGURES_S = 5.0  # how often what is written down is summed up,
FIGURES_PART = 0.02  # and for what part of the time at most


async def show_lines(
    ticket: Ticket, display: Display, seen: Callable[[Line], None], held: Callable[[], bool] = lambda: True,
    gone_s: float = GONE_S,
) -> None:  # fmt: skip
    """Events and steps until the run is over; what was shown before is left out. `seen` is called with each line.

    Raises:
        CoordinatorUnreachable: nobody has been there for `gone_s`, and no `farandole run` holds the run's folder, as
            `held` says: it was killed.
    """
    newest, since = 0.0, time.monotonic()
    while True:
        try:
            async with subscribe(ticket, Hello(kind="observer", pid=os.getpid())) as subscription:
                again, since = newest > 0, math.inf
                while (message := await subscription.receive()) is not None:
                    line = parse_line(message.line) if isinstance(message, Note) else None
                    if line is None or (again and time_of(line) <= newest):
                        continue
                    again = False
                    newest = max(newest, time_of(line))
                    display.line(line)
                    seen(line)
                    if isinstance(line, OverEvent):
                        return
        except CoordinatorUnreachable:
            if time.monotonic() - since > gone_s and not held():
                raise
        since = min(since, time.monotonic())
        await asyncio.sleep(WATCH_S)


async def show_output(folder: Path, display: Display, ended: asyncio.Event) -> None:
    """The workers' output, from the log files in the run's folder; the rest of it once they have `ended`."""
    with Follower(folder / LOGS) as follower:
        while not ended.is_set():
            display.outputs(follower.lines())
            await up_to(RELAY_S, ended)
        display.outputs(follower.flush())


async def keep_figures(written: Written, display: Display) -> None:
    """For ever: what a run has cost so far, and what changes while nothing happens."""
    due = 0.0
    while True:
        if (began := time.monotonic()) >= due:
            await _catch_up(written)
            summing = time.monotonic()
            display.account = written.account()
            due = began + max(FIGURES_S, (time.monotonic() - summing) / FIGURES_PART)
        display.refresh()
        await asyncio.sleep(TICK_S)


async def sum_up(written: Written, display: Display, over: OverEvent | None) -> None:
    """The run is over, or killed: what came of it. Its last lines may still be on their way to the file."""
    until = time.monotonic() + WRITTEN_S
    await _catch_up(written)
    while over is not None and written.course.past.code is None and time.monotonic() < until:
        await asyncio.sleep(WATCH_S)
        await _catch_up(written)
    newest = step_of(written.course.past.checkpoint)
    left = incomplete_here(written.checkpoints, after=-1 if newest is None else newest)
    display.summary(summary(written.course, written.account(), over, left))


async def _catch_up(written: Written) -> None:
    """A part at a time, so that others get their turn."""
    while written.read_on():
        await asyncio.sleep(0)


# --- top --------------------------------------------------------------------------------------------------------------
#
# The pictures of `farandole top`: a run as it stands, and several in a line each. Values in, something that rich
# prints out; what is not known is not shown.

EVENTS = 12  # shown


class Recent(Display):
    """The newest of what a run has said."""

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

    def close(self) -> None:
        return


def picture(status: Status, recent: Recent, word: str = "") -> Group:
    """One run. `word`: what is to be said of the picture itself."""
    head = Table.grid(padding=(0, 2))
    head.add_row(_text(status.run, "bold"), _text(_state(status)), _text(_view(status)))
    parts: list[Text | Table] = [head, gauges.progress(status.step, status.total, status.epoch, recent.steps)]
    last = recent.steps[-1] if recent.steps else None
    lines = gauges.training(last, status.loss, status.samples_per_s), gauges.cost(status.account)
    parts += [Text(line) for line in lines if line]
    if word:
        parts.append(_text(word, "bold"))
    if status.workers:
        parts += [Text(), workers_table(status)]
    if recent.events:
        parts += [Text(), *(Text(one_line(event), no_wrap=True, overflow="ellipsis") for event in recent.events)]
    return Group(*parts)


def list_picture(runs: Mapping[str, Status | None]) -> Table:
    """Several runs, by the names of their folders; None: it does not answer just now."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("run", "state", "step", "epoch", "workers", "samples/s", "loss"):
        table.add_column(title, justify="left" if title in ("run", "state") else "right")
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
        who = f", waiting for {', '.join(status.stalled.workers)}" if status.stalled.workers else ""
        return f"stalled for {status.stalled.seconds:.0f} s{who}"
    return f"{status.state}: {status.reason}" if status.reason else status.state


def _view(status: Status) -> str:
    coming = [worker.id for worker in status.workers if worker.state in ("starting", "ready")]
    going = [worker.id for worker in status.workers if worker.state == "leaving"]
    parts = [
        gauges.workers(status.view.size, status.wanted, coming, going),
        "" if status.unpromised is None else f"bits {not_promised(status.unpromised)}",
    ]
    return ", ".join(part for part in parts if part)


def _text(value: str, style: str = "") -> Text:
    """Shown as it is, whoever has said it."""
    return Text(one_line(value), style=style)
