"""From a run's metrics to figures. Pure.

    condense   the lines of one run's metrics.jsonl -> `Result`, small enough to be kept in the repository
    spike      a training loss and a change of batch -> how far the loss rose
    summary    the results of one data set and one history -> a row for each rule, against the static runs

Steps take 32 to 384 samples, so everything is by samples: a step's loss is spread over the samples that it took.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import numpy as np

from experiments.dynamic_sgd.cases import BySamples, growths

SMOOTH, BEFORE, HORIZON = 4, 8, 80  # bins: of the moving mean, of the level before a change, looked at after it


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


@dataclass(frozen=True, kw_only=True)
class Row:
    """One rule under one history. `spikes`, `accuracies`: one a seed, in the seeds' order."""

    spikes: tuple[float, ...]
    accuracies: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """`static`: its spikes are those of the static runs at the places where the others have theirs."""

    static: Row
    rows: Mapping[str, Row]

    def spikes(self, rule: str) -> bool:
        """Whether its mean spike lies above the static runs' highest."""
        return mean(self.rows[rule].spikes) > max(self.static.spikes)

    def loses(self, rule: str) -> float:
        """How far its mean accuracy lies below the static runs' worst; 0 if it does not."""
        return max(0.0, min(self.static.accuracies) - mean(self.rows[rule].accuracies))


def summary(
    static: Sequence[Result], ruled: Mapping[str, Mapping[int, Result]], changes: Mapping[int, BySamples]
) -> Summary:
    """`ruled`: by rule and seed; `changes`: the history of each seed. Histories that never grow have no spikes."""

    def row(results: Mapping[int, Result]) -> Row:
        spikes = tuple(worst_spike(result, changes[seed]) for seed, result in results.items() if growths(changes[seed]))
        return Row(spikes=spikes, accuracies=tuple(result.accuracy for result in results.values()))

    distinct = [each for each in dict.fromkeys(changes.values()) if growths(each)]
    return Summary(
        static=Row(
            spikes=tuple(worst_spike(result, each) for each in distinct for result in static),
            accuracies=tuple(result.accuracy for result in static),
        ),
        rows={rule: row(results) for rule, results in ruled.items()},
    )


def spread(values: Sequence[float]) -> float:
    """The sample standard deviation; no number of a single value."""
    return stdev(values) if len(values) > 1 else math.nan
