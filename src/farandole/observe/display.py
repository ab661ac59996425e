"""What `farandole run` shows while it runs: events as they happen, the workers' own output, and how far training is.

On a terminal a bar at the bottom shows the progress, and everything else scrolls above it. Elsewhere (a file, a
pipe) it is plain lines: one for each event, and one about the progress every two seconds. Text of users and workers is
shown as plain text, never read as markup; control sequences stay in the log files.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from farandole.control.status import samples_per_s
from farandole.membership import events
from farandole.membership.metrics import Line, StepLine
from farandole.membership.speeds import WHOLE, stragglers
from farandole.observe.words import clock, describe, number
from farandole.platform.plain import one_line, plain

PROGRESS_EVERY_S = 2.0
RATE_STEPS = 50
QUIET = (
    events.Proposed,
    events.Ready,
    events.TimeSpent,
    events.Priced,
)  # the view that follows says it, or nothing has happened


def open_display(stream: TextIO) -> Display:
    """The display that suits `stream`."""
    return LiveDisplay(Console(file=stream)) if stream.isatty() else PlainDisplay(stream)


class Display(ABC):
    """A context manager; `line` and `output` are called from one thread. `wanted` is the caller's to keep."""

    def __init__(self, wanted: int = 0) -> None:
        self.wanted = wanted
        self.size = 0
        self._slow: dict[str, float] = {}  # by the shares in force
        self._steps: deque[StepLine] = deque(maxlen=RATE_STEPS)

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def line(self, line: Line) -> None:
        """A line of metrics.jsonl: an event or a step."""
        if isinstance(line, StepLine):
            self._steps.append(line)
            self.progress(line)
            return
        if isinstance(line, events.View):
            self.size = len(line.members)
            self._slow = {worker: speed for worker, speed in self._slow.items() if worker in line.members}
        if isinstance(line, events.Shares):
            self._slow = stragglers({worker: share / WHOLE for worker, share in line.shares.items()})
        if not isinstance(line, QUIET):
            self.show(f"{clock(line)}  {describe(line)}")

    def output(self, worker: str, text: str) -> None:
        """A line that a worker printed."""
        self.show(f"{worker} | {text}")

    @property
    def facts(self) -> str:
        """Loss, samples a second, workers and stragglers, in words."""
        last = self._steps[-1] if self._steps else None
        rate = samples_per_s(self._steps)
        parts = [
            f"loss {number(last.loss)}" if last else "",
            f"{rate:.0f} samples/s" if rate else "",
            f"{self.size} of {self.wanted} workers" if self.wanted else f"{self.size} workers",
            *(f"{worker} at {speed:.2f} of the speed" for worker, speed in self._slow.items()),
        ]
        return one_line(", ".join(part for part in parts if part))

    def show(self, text: str) -> None:
        """Others may have put anything into it."""
        self._put(plain(text))

    @abstractmethod
    def _put(self, text: str) -> None: ...

    @abstractmethod
    def progress(self, line: StepLine) -> None:
        """A step has ended."""

    @abstractmethod
    def close(self) -> None: ...


class PlainDisplay(Display):
    """Lines of text."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._stream = stream
        self._clock = clock
        self._due = 0.0

    def _put(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def progress(self, line: StepLine) -> None:
        now = self._clock()
        if now >= self._due:
            self._due = now + PROGRESS_EVERY_S
            total = f" of {line.total}" if line.total else ""
            self.show(f"{clock(line)}  step {line.step}{total}, epoch {line.epoch}: {self.facts}")

    def close(self) -> None:
        return


class LiveDisplay(Display):
    """A bar at the bottom of a terminal, everything else above it."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._progress = Progress(
            TextColumn("step {task.fields[step]}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[facts]}", markup=False),
            TimeElapsedColumn(),
            console=console,
            refresh_per_second=4,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def _put(self, text: str) -> None:
        self._progress.console.print(Text(text), soft_wrap=True)

    def progress(self, line: StepLine) -> None:
        step, total = line.step, line.total
        shown = f"{step}/{total}" if total else str(step)
        if self._task is None:
            self._task = self._progress.add_task("train", step=shown, facts=self.facts)
        self._progress.update(self._task, completed=step, total=total, step=shown, facts=self.facts)

    def close(self) -> None:
        self._progress.stop()
