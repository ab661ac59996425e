"""How many samples a training needs until a metric reaches a target, by the size of its batch.

`farandole bench batch` trains the script in one process as if it had 1, 2, 4 workers (`farandole rehearse`), and ends
each training when it reaches the target. Pure: lines of metrics in, values and a table out.

a logged metric    the values of `run.log`. Between the last value that missed the target and the first that reaches it
                   the metric is interpolated linearly: the samples are those where the line crosses the target.
loss               the training loss, as the mean over the last steps, weighted by their samples. All sizes use equally
                   many samples for it: those of `WINDOW` steps of the largest batch.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import deque
from collections.abc import Sequence

import msgspec
from rich.table import Table

from farandole.bench.table import plain_table
from farandole.errors import UsageError
from farandole.protocol.metrics import Line, LogLine, StepLine

LOSS = "loss"
WINDOW = 10


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A metric's value that a training shall reach: at least `value` if `rises`, else at most."""

    metric: str
    value: float
    rises: bool

    @property
    def text(self) -> str:
        return f"{self.metric}{'>=' if self.rises else '<='}{self.value:g}"

    def is_reached_by(self, value: float) -> bool:
        return value >= self.value if self.rises else value <= self.value

    def best(self, values: Sequence[float]) -> float | None:
        """Return the value that is the nearest to the target, or the farthest beyond it; None without values."""
        return (max if self.rises else min)(values, default=None)


def target_of(text: str) -> Target:
    """Return the target in `text`, as "accuracy>=0.9" or "loss<=0.5".

    Raises:
        UsageError: it has another form.
    """
    found = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*(>=|<=)\s*(\S+)\s*", text)
    try:
        value = float(found[3]) if found else math.nan
    except ValueError:
        value = math.nan
    if found is None or not math.isfinite(value):
        raise UsageError(f"--target {text}: write a metric and its value, as 'accuracy>=0.9' or 'loss<=0.5'")
    return Target(metric=found[1], value=value, rises=found[2] == ">=")


class BatchRow(msgspec.Struct, frozen=True, kw_only=True):
    """What trainings with one size of the batch came to, one for each seed.

    Attributes:
        batch: samples of a step. `workers`: how many workers have this batch.
        samples: of each training until it reached the target; None: it ended before.
        best: the best value of the metric in each training, None: it had no value.
        seconds: how long each training took in this one process.
        target: the target, as "accuracy>=0.9".
    """

    workers: int
    batch: int
    samples: tuple[float | None, ...]
    best: tuple[float | None, ...]
    seconds: tuple[float, ...]
    target: str

    @property
    def mean_samples(self) -> float | None:
        """The mean number of samples; None if a training did not reach the target."""
        known = [samples for samples in self.samples if samples is not None]
        return statistics.fmean(known) if len(known) == len(self.samples) else None


class TargetWatch:
    """Follows the lines of a training until the target is reached. `steps`: for a mean of the training loss.

    Attributes:
        reached: the samples at which the target was reached; None: it was not.
        batch: samples of the largest step so far. `samples`: of all steps so far.
        values: the metric's values so far. `names`: the metrics that the script has logged.
    """

    def __init__(self, target: Target, steps: int) -> None:
        self.reached: float | None = None
        self.batch = self.samples = 0
        self.values: list[float] = []
        self.names: set[str] = set()
        self._target = target
        self._before = 0  # samples at the metric's last value
        self._window: deque[tuple[float, int]] = deque(maxlen=steps)

    def add(self, line: Line) -> None:
        """Take the next line of metrics."""
        if self.reached is not None:
            return
        if isinstance(line, StepLine):
            self.batch = max(self.batch, line.samples)
            self.samples += line.samples
            if self._target.metric == LOSS:
                self._window.append((math.inf if line.loss is None else line.loss, line.samples))
                if len(self._window) == self._window.maxlen:
                    samples = sum(count for _, count in self._window)
                    self._value(sum(loss * count for loss, count in self._window) / samples)
        elif isinstance(line, LogLine):
            self.names |= line.fields.keys()
            value = line.fields.get(self._target.metric)
            if self._target.metric != LOSS and isinstance(value, int | float):
                self._value(float(value))

    def _value(self, value: float) -> None:
        if self._target.is_reached_by(value):
            part = 1.0
            if self.values and math.isfinite(self.values[-1]):
                last = self.values[-1]
                part = (self._target.value - last) / (value - last)
            self.reached = self._before + part * (self.samples - self._before)
        self.values.append(value)
        self._before = self.samples


def batch_table(rows: Sequence[BatchRow]) -> Table:
    """Return the table: a row for each size of the batch."""
    table = plain_table("workers", "batch", "samples", "min..max", "times as many", "steps", "best", left=0)
    first = rows[0].mean_samples
    for row in rows:
        mean, known = row.mean_samples, [samples for samples in row.samples if samples is not None]
        best = [value for value in row.best if value is not None]
        table.add_row(
            str(row.workers), f"{row.batch:,}",
            f"{mean:,.0f}" if mean is not None else f"not reached, {len(known)} of {len(row.samples)}",
            f"{min(known):,.0f}..{max(known):,.0f}" if len(known) > 1 else "",
            f"{mean / first:.2f}" if mean is not None and first is not None else "",
            f"{mean / row.batch:,.0f}" if mean is not None else "",
            f"{statistics.fmean(best):.4g}" if best else "",
        )  # fmt: skip
    return table
