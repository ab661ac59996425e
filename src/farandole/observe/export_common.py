"""A cursor in a run's metrics.jsonl: the lines from one byte on, as they come, each with the byte where it begins.

The file is the buffer: who reads slowly is behind, and takes no memory for it. Whole lines count, and a torn one waits
for its end, or goes when the next coordinator cuts it off. What is no line (`protocol/metrics.py`) is passed over and
counted. A file that has become shorter than what was read of it is not the one that was read: reading goes on at its
end, and that counts as one damaged line, for to read it again would tell everything twice.
"""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

import msgspec

from farandole.platform.files import opener, read, write_atomically
from farandole.protocol.metrics import Line, LogLine, StepLine, parse_line
from farandole.protocol.values import Count

# --- cursor -----------------------------------------------------------------------------------------------------------

READ_BYTES = 256 * 1024  # at a time; no line of a run is a tenth as long
Placed = tuple[int, Line]


class Cursor:
    """In the file at `path`, from byte `at` on.

    Attributes:
        damaged: lines that were passed over.
    """

    def __init__(self, path: Path, at: int = 0) -> None:
        self._path = path
        self.at = at
        self.damaged = 0

    def read(self) -> list[Placed]:
        """The next lines; none, where there are none yet, or no file.

        Raises:
            NotPrivate: the file is another's.
            OSError: it can't be read.
        """
        data = self._bytes()
        if b"\n" not in data:
            if len(data) == READ_BYTES:  # nothing that a run has written
                self.damaged += 1
                self.at += len(data)
            return []
        found: list[Placed] = []
        for line in data.split(b"\n")[:-1]:
            if (parsed := parse_line(line)) is None:
                self.damaged += 1
            else:
                found.append((self.at, parsed))
            self.at += len(line) + 1
        return found

    def _bytes(self) -> bytes:
        try:
            with open(self._path, "rb", opener=opener) as file:
                size = file.seek(0, 2)
                if size < self.at:
                    self.damaged += 1
                    self.at = size
                file.seek(self.at)
                return file.read(READ_BYTES)
        except FileNotFoundError:
            return b""


def before(path: Path, at: int) -> list[Line]:
    """The newest lines that end at byte `at` or before, oldest first; as many as one reading has."""
    cursor = Cursor(path, max(0, at - READ_BYTES))
    return [line for place, line in cursor.read() if place < at]


# --- mark -------------------------------------------------------------------------------------------------------------
#
# How far an export has got, in a small file beside what it writes: so that the next process goes on there.
#
# It is replaced whole, after what it speaks of has been written. A file that is none, or of another run's metrics, is
# as good as none: the export then begins at the beginning.

LONGEST = 16 * 1024  # bytes


class Mark(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`at`: the byte of metrics.jsonl from which on lines are wanted; what has been written is of steps before `step`.
    `file`: which file that is, by its inode. `run`: whose it is. `id`: what the tool calls the run.
    """

    at: Count = 0
    step: Count = 0
    file: Count = 0
    run: str = ""
    id: str = ""

    def save(self, path: Path) -> None:
        """Raises OSError."""
        write_atomically(path, msgspec.json.encode(self) + b"\n")


def load(path: Path, metrics: Path) -> Mark:
    """The mark at `path`, of the lines in the file `metrics`. Where there is none, or one of other lines, it is of the
    beginning; with the name of the run whose those are.
    """
    file, run = identity(metrics), metrics.absolute().parent.name
    with contextlib.suppress(OSError, ValueError, RecursionError):  # msgspec's own errors among them
        found = msgspec.json.decode(read(path)[:LONGEST], type=Mark)
        if found.file == file and found.at <= os.stat(metrics).st_size:
            return found
        run = found.run or run
    return Mark(file=file, run=run)


def identity(metrics: Path) -> int:
    """0 where the file is not there yet."""
    try:
        return os.stat(metrics).st_ino & (2**53 - 1)
    except FileNotFoundError:
        return 0


# --- spacing ----------------------------------------------------------------------------------------------------------
#
# Which steps an export has, where they are so fast that to write each would cost more than may be: pure.
#
# A step is left out that comes sooner after the last one that was not than `least_s`, by the times in the lines.
# Never left out: a step whose loss is not finite, the first with another number of workers, one whose number is no
# greater. It goes by the lines alone, so who reads them again from a step that it has finds the same ones.
# metrics.jsonl has all.


class Spacing:
    """Of one export, in seconds."""

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._last: StepLine | None = None

    def admits(self, line: StepLine) -> bool:
        """Whether the export has this step, the next in the file."""
        last = self._last
        out = (
            last is not None
            and line.loss is not None
            and line.workers == last.workers
            and line.step > last.step
            and 0.0 <= line.time - last.time < self._least_s  # also where the clock went back
        )
        self._last = last if out else line
        return not out


# --- values -----------------------------------------------------------------------------------------------------------
#
# What a line says, as numbers and texts with names: the same for every tool. Pure.
#
# A step's own numbers are named `step/...`, with the unit in the name. What a script logs keeps its name; where that is
# one of ours, `log/` stands before it. A number that is not finite is null in the file, and not a number here.

LOSS = "step/loss"
LEARNING_RATE = "step/learning_rate"  # what the script and its schedule had set, times the rule's factor
FACTOR = "step/learning_rate_factor"
SPEED = "step/samples_per_second"
SECONDS = "step/seconds"
EVALUATION, ONCE, PAUSE = "step/evaluation_seconds", "step/once_seconds", "step/pause_seconds"  # of those
SAMPLES = "step/samples"
SKIPPED = "step/samples_skipped"
WORKERS = "step/workers"
VIEW = "step/view"
EPOCH = "step/epoch"
OURS = frozenset((
    LOSS, LEARNING_RATE, FACTOR, SPEED, SECONDS, EVALUATION, ONCE, PAUSE, SAMPLES, SKIPPED, WORKERS, VIEW, EPOCH,
))  # fmt: skip
Numbers = dict[str, float]
Texts = dict[str, str]


def of_step(line: StepLine) -> Numbers:
    """Without those that are not known."""
    numbers: Numbers = {LOSS: _number(line.loss), SECONDS: line.seconds, SAMPLES: float(line.samples)}
    numbers |= {WORKERS: float(line.workers), VIEW: float(line.view), EPOCH: float(line.epoch)}
    if line.samples_per_s is not None:
        numbers[SPEED] = line.samples_per_s
    if line.learning_rate is not None:
        numbers[LEARNING_RATE] = line.learning_rate * _number(line.factor)
        numbers[FACTOR] = _number(line.factor)
    some = {SKIPPED: line.skipped, EVALUATION: line.evaluation_s, ONCE: line.once_s, PAUSE: line.pause_s}
    numbers |= {name: float(value) for name, value in some.items() if value}
    return numbers


def of_log(line: LogLine) -> tuple[Numbers, Texts]:
    """What `run.log` was given: numbers, truths as 0 and 1 among them, and texts."""
    numbers: Numbers = {}
    texts: Texts = {}
    for name, value in line.fields.items():
        known = f"log/{name}" if name in OURS or not name else name
        if isinstance(value, str):
            texts[known] = value
        else:
            numbers[known] = _number(value)
    return numbers, texts


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
