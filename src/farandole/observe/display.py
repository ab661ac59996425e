"""What `farandole run` shows while it runs: events as they happen, the workers' own output, and how far training is.

On a terminal a few lines of figures stay at the bottom, and everything else scrolls above them. Elsewhere (a file, a
pipe) it is plain lines: one for each event, and every two seconds a row of a table about the progress. Text of users
and workers is shown as plain text, never read as markup; control sequences stay in the log files. No thread draws
anything: who tells something draws it, the figures every `REFRESH_S` at most.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from farandole.control.run_folder import METRICS
from farandole.control.status import RATE_STEPS, Status, samples_per_s
from farandole.membership import events
from farandole.membership.account import Account
from farandole.membership.metrics import Line, LogLine, StepLine
from farandole.membership.speeds import WHOLE, stragglers
from farandole.observe import gauges
from farandole.observe.flow import Flow
from farandole.observe.presence import Presence
from farandole.observe.rows import Rows
from farandole.observe.words import clock, describe
from farandole.platform.output import one_line, plain

PROGRESS_EVERY_S = 2.0
REFRESH_S = 0.25
LOGGED_PART = 0.05  # of the lines that workers may print, for those of `run.log`
QUIET = (
    events.Proposed,
    events.Ready,
    events.TimeSpent,
    events.Priced,
    events.RunStarted,
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
        if isinstance(line, events.View):
            self._slow = {worker: speed for worker, speed in self._slow.items() if worker in line.members}
        if isinstance(line, events.Shares):
            self._slow = stragglers({worker: share / WHOLE for worker, share in line.shares.items()})
        if isinstance(line, events.Over):
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
        self._rows = Rows()
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
