"""Common parts of the exports: a cursor in a run's metrics.jsonl, the mark file, spacing of steps, named values.

The cursor returns lines from one byte on, each with its byte offset. The file is the buffer: a slow reader lags behind
and needs no memory for it. Only complete lines count. A torn line waits for its end, or disappears when the next
coordinator cuts it off. Invalid lines (`protocol/metrics.py`) are skipped and counted. If the file is shorter than the
part that was read, it is another file: reading continues at its end, and that counts as one damaged line, because to
read it again would export everything twice.
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

READ_BYTES = 256 * 1024  # bytes per read; a line of a run has less than a tenth of that
Placed = tuple[int, Line]


class Cursor:
    """A cursor in the file at `path`, from byte `at` on.

    Attributes:
        damaged: number of lines that were skipped.
    """

    def __init__(self, path: Path, at: int = 0) -> None:
        self._path = path
        self.at = at
        self.damaged = 0

    def read(self) -> list[Placed]:
        """Returns the next lines with their offsets; no lines if none are new or the file does not exist.

        Raises:
            NotPrivate: the file belongs to another user.
            OSError: the file can't be read.
        """
        data = self._bytes()
        if b"\n" not in data:
            if len(data) == READ_BYTES:  # not a line that a run wrote
                self.damaged += 1
                self.at += len(data)
            return []
        placed: list[Placed] = []
        for line in data.split(b"\n")[:-1]:
            if (parsed := parse_line(line)) is None:
                self.damaged += 1
            else:
                placed.append((self.at, parsed))
            self.at += len(line) + 1
        return placed

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
    """Returns the newest lines that end at byte `at` or before, oldest first; as many as one read holds."""
    cursor = Cursor(path, max(0, at - READ_BYTES))
    return [line for place, line in cursor.read() if place < at]


# --- mark -------------------------------------------------------------------------------------------------------------
#
# The mark: the position of an export, in a small file beside its output, so that the next process continues there.
#
# The file is replaced atomically, after the output up to that position was written. An invalid file, or one of another
# run's metrics, is ignored: the export then starts from the beginning.

LONGEST = 16 * 1024  # bytes


class Mark(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The position of an export.

    Attributes:
        at: byte of metrics.jsonl at which the next line begins.
        step: all exported steps are before this one.
        file: inode of metrics.jsonl. `run`: name of the run. `id`: the tool's own id of the run.
    """

    at: Count = 0
    step: Count = 0
    file: Count = 0
    run: str = ""
    id: str = ""

    def save(self, path: Path) -> None:
        """Writes the mark. Raises OSError."""
        write_atomically(path, msgspec.json.encode(self) + b"\n")


def load(path: Path, metrics: Path) -> Mark:
    """Returns the mark at `path` for the file `metrics`.

    If there is none, or one of another file, returns a mark of the beginning, with the name of the run.
    """
    file, run = identity(metrics), metrics.absolute().parent.name
    with contextlib.suppress(OSError, ValueError, RecursionError):  # includes the errors of msgspec
        mark = msgspec.json.decode(read(path)[:LONGEST], type=Mark)
        if mark.file == file and mark.at <= os.stat(metrics).st_size:
            return mark
        run = mark.run or run
    return Mark(file=file, run=run)


def identity(metrics: Path) -> int:
    """Returns the inode of the file; 0 if it does not exist yet."""
    try:
        return os.stat(metrics).st_ino & (2**53 - 1)
    except FileNotFoundError:
        return 0


# --- spacing ----------------------------------------------------------------------------------------------------------
#
# Selects the steps that are exported, if steps are so fast that to write each would cost too much. Pure.
#
# A step is omitted if it comes less than `least_s` after the last exported one, by the times in the lines. Never
# omitted: a step whose loss is not finite, the first step with another number of workers, a step whose number is not
# greater than the last. The choice depends on the lines alone, so a reader that starts again from an exported step
# selects the same steps. metrics.jsonl has all steps.


class Spacing:
    """Spacing of the steps of one export, in seconds."""

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._last: StepLine | None = None

    def admits(self, line: StepLine) -> bool:
        """Returns True if the next step in the file is exported."""
        last = self._last
        out = (
            last is not None
            and line.loss is not None
            and line.workers == last.workers
            and line.step > last.step
            and 0.0 <= line.time - last.time < self._least_s  # also if the clock went back
        )
        self._last = last if out else line
        return not out


# --- values -----------------------------------------------------------------------------------------------------------
#
# The values of a line, as numbers and texts with names, equal for every tool. Pure.
#
# The numbers of a step are named `step/...`, with the unit in the name. A logged value keeps its name; `log/` is put
# before a name that equals one of farandole's. A number that is not finite is null in the file, and NaN here.

LOSS = "step/loss"
LEARNING_RATE = "step/learning_rate"  # the value of the script and its schedule, times the rule's factor
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
    """Returns the known numbers of a step, by name."""
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
    """Returns the values of a `run.log` call: numbers (booleans as 0 and 1) and texts."""
    numbers: Numbers = {}
    texts: Texts = {}
    for name, value in line.fields.items():
        key = f"log/{name}" if name in OURS or not name else name
        if isinstance(value, str):
            texts[key] = value
        else:
            numbers[key] = _number(value)
    return numbers, texts


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
