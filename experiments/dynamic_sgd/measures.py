"""From a run's metrics to figures. Pure.

    condense   the lines of one run's metrics.jsonl -> `Result`, small enough to be kept in the repository
    spike      a training loss and a change of batch -> how far the loss rose
    rise       a training loss and a place -> the mean after it, less the mean before
    paired     the results of one rule under one history -> differences from the static runs of the same seeds
    Interval   differences by seed -> their mean and how far it can be trusted

Steps take 32 to 384 samples, so everything is by samples: a step's loss is spread over the samples that it took.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import numpy as np

from experiments.dynamic_sgd.cases import BySamples, growths

SMOOTH, BEFORE, HORIZON = 4, 8, 80  # bins: of the moving mean, of the level before a change, looked at after it
ACCURACY_MARGIN, RISE_MARGIN = 0.005, 0.05  # what is too little to matter: half a point; of a loss between 0.3 and 2
QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # 97.5 % of Student's t, 1 to 9 degrees


@dataclass(frozen=True, kw_only=True)
class Result:
    """One training. `loss`, `factor`: means over `bin` samples each, a loss of None where it was no number any more.
    `tests`: (samples seen, test loss, accuracy), the last over the whole test part. `seconds`: of its steps."""

    bin: int
    loss: tuple[float | None, ...]
    factor: tuple[float, ...]
    tests: tuple[tuple[int, float | None, float], ...]
    steps: int
    seconds: float
    fingerprint: str

    @property
    def accuracy(self) -> float:
        return self.tests[-1][2]


def condense(lines: Iterable[Mapping[str, Any]], size: int) -> Result:
    """From a run's lines, in order; one mean for every `size` samples."""
    lines = list(lines)
    steps = [line for line in lines if "samples" in line]
    taken = [line["samples"] for line in steps]
    loss = binned([math.nan if line["loss"] is None else line["loss"] for line in steps], taken, size)
    return Result(
        bin=size,
        loss=tuple(None if math.isnan(value) else round(value, 4) for value in loss),
        factor=tuple(round(value, 3) for value in binned([line.get("factor", 1.0) for line in steps], taken, size)),
        tests=tuple(
            (line["seen"], line["test_loss"] and round(line["test_loss"], 4), round(line["accuracy"], 4))
            for line in lines
            if "accuracy" in line
        ),
        steps=len(steps),
        seconds=round(sum(line["seconds"] for line in steps), 1),
        fingerprint=next(line["fingerprint"] for line in lines if "fingerprint" in line),
    )


def binned(values: Sequence[float], taken: Sequence[int], size: int) -> list[float]:
    """Means over `size` samples each, of values that hold for `taken` samples each; a rest is left out."""
    ends = np.concatenate([[0], np.cumsum(taken)])
    sums = np.concatenate([[0.0], np.cumsum(np.multiply(values, taken))])
    return (np.diff(np.interp(np.arange(0, ends[-1] + 1, size), ends, sums)) / size).tolist()


def smoothed(loss: Sequence[float | None]) -> np.ndarray:
    """The mean over each `SMOOTH` bins in a row, shape (bins - SMOOTH + 1,); infinite where there is no number."""
    return np.lib.stride_tricks.sliding_window_view(_numbers(loss), SMOOTH).mean(1)


def spike(loss: Sequence[float | None], size: int, start: int, stop: int) -> float:
    """The highest smoothed loss in the samples [start, stop), at most `HORIZON` bins, less the level before `start`.

    Negative where the loss only falls; infinite where it is no number any more, there or before.
    """
    first, last = start // size, min(stop // size, start // size + HORIZON, len(loss))
    highest, before = smoothed(loss[first:last]).max(), _numbers(loss[max(0, first - BEFORE) : first]).mean()
    return float(highest - before) if np.isfinite(highest) else math.inf


def _numbers(loss: Sequence[float | None]) -> np.ndarray:
    return np.array([math.inf if value is None else value for value in loss])


def worst_spike(result: Result, changes: BySamples) -> float:
    """Of all growths of the batch that leave room for a moving mean."""
    found = [
        spike(result.loss, result.bin, start, stop)
        for start, stop in growths(changes)
        if start >= BEFORE * result.bin and min(stop, len(result.loss) * result.bin) - start >= SMOOTH * result.bin
    ]
    return max(found)


def rise(result: Result, at: int, samples: int) -> float:
    """The mean loss of the `samples` samples from `at` on, less that of as many before it."""
    middle, width = at // result.bin, samples // result.bin
    loss = _numbers(result.loss)
    return float(loss[middle : middle + width].mean() - loss[middle - width : middle].mean())


def shared(result: Result, static: Result, changes: BySamples) -> bool:
    """Whether the two have the same losses up to the first change, which may be the first step's size."""
    until = (changes[1][0] if len(changes) > 1 else 1 << 62) if changes[0][1] == 1 else 0
    return result.loss[: until // result.bin] == static.loss[: until // result.bin]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One rule under one history: its seeds, and for each how far the loss rises, the final accuracy, and by how much
    either is more than in the static run of the same seed, looked at in the same places. A history that never grows has
    no rises."""

    seeds: tuple[int, ...]
    rises: tuple[float, ...]
    accuracies: tuple[float, ...]
    rises_more: tuple[float, ...]
    accuracies_more: tuple[float, ...]


def paired(ruled: Mapping[int, Result], static: Mapping[int, Result], changes: Callable[[int], BySamples]) -> Row:
    """By seed; `changes`: the history of a seed. A seed that only one of the two has is left out."""
    seeds = tuple(sorted(ruled.keys() & static.keys()))
    rises = {seed: worst_spike(ruled[seed], changes(seed)) for seed in seeds if growths(changes(seed))}
    return Row(
        seeds=seeds,
        rises=tuple(rises.values()),
        accuracies=tuple(ruled[seed].accuracy for seed in seeds),
        rises_more=tuple(value - worst_spike(static[seed], changes(seed)) for seed, value in rises.items()),
        accuracies_more=tuple(ruled[seed].accuracy - static[seed].accuracy for seed in seeds),
    )


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean of differences and its 95 % confidence interval."""

    mean: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Interval:
        """Student's t over the values, one a seed. Of a single one it is everything; infinite if one value is.

        Raises:
            StatisticsError: there are none.
        """
        middle = mean(values)
        if not math.isfinite(middle):
            return Interval(mean=middle, low=middle, high=middle)
        if len(values) == 1:
            return Interval(mean=middle, low=-math.inf, high=math.inf)
        half = QUANTILES[len(values) - 2] * stdev(values) / math.sqrt(len(values))
        return Interval(mean=middle, low=middle - half, high=middle + half)


def accuracy_verdict(more: Interval) -> str:
    """`more`: accuracy than the static runs, as a share of 1."""
    return "holds" if more.low > -ACCURACY_MARGIN else "loses" if more.high < 0 else "open"


def rise_verdict(more: Interval) -> str:
    """`more`: rise of the loss than the static runs'."""
    return "calm" if more.high < RISE_MARGIN else "spikes" if more.low > 0 else "open"
