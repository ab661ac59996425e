"""The study's plots, as PNG beside the results: what is missing is left out, what is there is drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import numpy as np
from matplotlib import pyplot as plt

from experiments.dynamic_sgd import shelf, throughput
from experiments.dynamic_sgd.cases import RULES, TASKS, TITLES, Scale, by_samples
from experiments.dynamic_sgd.measures import ACCURACY_MARGIN, SMOOTH, Interval, Result, smoothed

COLOURS = dict(zip(RULES, ("C0", "C3", "C2", "C1", "C7"), strict=True))
Curve = Callable[[Result], tuple[np.ndarray, np.ndarray]]  # thousands of samples, values


def draw(scale: Scale) -> None:
    """All of them, of those experiments that have results.

    Raises:
        SystemExit: none has.
    """
    if not any(shelf.of(task, history, rule, scale) for task in TASKS for history in TITLES for rule in RULES):
        raise SystemExit(f"{shelf.RESULTS / scale.name}: no results of A, B or C to draw; `run` them first")
    _curves(scale, "training_loss", "training loss, smoothed", _loss, log=True)
    _curves(scale, "test_accuracy", f"accuracy on {scale.probed:,} test samples", _accuracy)
    _curves(scale, "factor", "factor on the rate", _factor)
    _accuracies(scale)
    _throughput(scale)


def _loss(result: Result) -> tuple[np.ndarray, np.ndarray]:
    values = smoothed(result.loss)
    return (np.arange(len(values)) + SMOOTH) * result.bin / 1000, values


def _accuracy(result: Result) -> tuple[np.ndarray, np.ndarray]:
    """Without the last look, which is at all test samples: others than those before it, and a step in the curve."""
    looks = result.tests[:-1]
    return np.array([look[0] / 1000 for look in looks]), np.array([look[2] for look in looks])


def _factor(result: Result) -> tuple[np.ndarray, np.ndarray]:
    return (np.arange(len(result.factor)) + 1) * result.bin / 1000, np.array(result.factor)


def _curves(scale: Scale, name: str, label: str, curve: Curve, *, log: bool = False) -> None:
    """The mean over seeds for each rule, over the static runs' band; one y-axis for a data set, and all of each curve.
    Where a loss is no number there is no curve."""
    figure, axes = plt.subplots(
        len(TASKS), len(TITLES), figsize=(16, 7), squeeze=False, sharex=True, sharey="row", layout="constrained"
    )
    for row, task in zip(axes, TASKS, strict=True):
        still = _together(shelf.static(task, scale), curve)
        for axis, (history, title) in zip(row, TITLES.items(), strict=True):
            if still is not None:
                axis.fill_between(still[0], still[1].min(0), still[1].max(0), color="0.8", label="static, all seeds")
            for rule in RULES:
                lines = _together(shelf.of(task, history, rule, scale), curve)
                if lines is not None:
                    axis.plot(lines[0], lines[1].mean(0), color=COLOURS[rule], lw=1, label=rule)
            for seen, _ in by_samples(history, scale.total, 0)[1:] if history != "random" else ():
                axis.axvline(seen / 1000, color="0.5", lw=0.6, ls=":")
            axis.set_title(f"{task}, workers: {title}", fontsize=10)
            axis.set_xlabel("thousands of samples seen")
        row[0].set_ylabel(label)
        if log:
            row[0].set_yscale("log")
            row[0].yaxis.set_major_formatter("{x:g}")
            row[0].yaxis.set_minor_formatter("{x:g}")
    axes[0][0].legend(fontsize=7)
    _save(figure, scale, name)


def _together(results: dict[int, Result], curve: Curve) -> tuple[np.ndarray, np.ndarray] | None:
    """The results' curves over the points that all of them have; None of nothing."""
    curves = [curve(result) for result in results.values()]
    if not curves:
        return None
    length = min(len(places) for places, _ in curves)
    return curves[0][0][:length], np.stack([values[:length] for _, values in curves])


def _accuracies(scale: Scale) -> None:
    """Every seed's final accuracy less that of the static run of its seed, a dot each, the mean and its interval; grey
    is the margin. Linear up to one point, logarithmic beyond."""
    figure, axes = plt.subplots(
        len(TASKS), len(TITLES), figsize=(16, 6), squeeze=False, sharey="row", layout="constrained"
    )
    for row, task in zip(axes, TASKS, strict=True):
        row[0].set_yscale("symlog", linthresh=1)  # before anything is drawn: limits are found on the scale
        for axis, (history, title) in zip(row, TITLES.items(), strict=True):
            axis.axhspan(-100 * ACCURACY_MARGIN, 0, color="0.8")
            for place, rule in enumerate(RULES):
                found = [100 * more for more in shelf.compared(task, history, rule, scale).accuracies_more]
                if not found:
                    continue
                axis.plot([place] * len(found), found, "o", color=COLOURS[rule], ms=4)
                middle = Interval.of(found)
                if len(found) > 1:
                    axis.plot([place + 0.2] * 2, [middle.low, middle.high], color=COLOURS[rule], lw=1.5)
                axis.plot(place + 0.2, middle.mean, "_", color=COLOURS[rule], ms=10, mew=2)
            axis.set_xticks(range(len(RULES)), RULES, rotation=20)
            axis.set_xlim(-0.5, len(RULES) - 0.5)
            axis.set_title(f"{task}, workers: {title}", fontsize=10)
        row[0].yaxis.set_major_formatter("{x:g}")
        row[0].set_ylabel("points above static")
    _save(figure, scale, "final_accuracy")


def _throughput(scale: Scale) -> None:
    found = throughput.read(scale)
    if not found:
        return
    figure, axis = plt.subplots(figsize=(5, 3.5), layout="constrained")
    for policy in throughput.POLICIES:
        counts = [n for n in throughput.WORKERS if f"{policy}-{n}" in found]
        label = "constant batch" if policy == "constant" else "a batch a worker"
        axis.plot(counts, [found[f"{policy}-{n}"] for n in counts], "o-", label=label)
    axis.set(xlabel="workers, on two cores", ylabel="samples a second", ylim=(0, None), xticks=throughput.WORKERS)
    axis.legend()
    _save(figure, scale, "throughput")


def _save(figure: Any, scale: Scale, name: str) -> None:
    shelf.RESULTS.mkdir(exist_ok=True)
    place = shelf.RESULTS / scale.name / f"{name}.png"
    place.parent.mkdir(exist_ok=True)
    figure.savefig(place, dpi=80)
    plt.close(figure)
