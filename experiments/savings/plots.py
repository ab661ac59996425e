"""The chart of README.md, results/imagenet.png."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt

from experiments.savings.imagenet import EIGHT, OURS, SINGLE, MachineType, course, job_of
from experiments.savings.page import RESULTS
from farandole.market.traces import MarketTrace, read


def restless(kind: MachineType, trace: MarketTrace) -> float:
    """Return where the window begins in which the number of spot machines changes most often, in hours."""
    length = (job_of(kind).deadline_s or 0) // trace.gap_s
    counts = [min(count, kind.most) for count in trace.counts]
    changes = [before != after for before, after in pairwise(counts)]
    first = max(range(len(counts) - length), key=lambda place: sum(changes[place : place + length - 1]))
    return first * trace.gap_s / 3600


def draw(traces: Path) -> None:
    """Draw imagenet.png: machines and progress in one window, for three strategies on two kinds of machines."""
    names = ("greedy", "elastic, restarts", OURS)
    figure, axes = plt.subplots(2 * len(names), 2, figsize=(12, 12), sharex=True, layout="constrained")
    for column, kind in enumerate((SINGLE, EIGHT)):
        trace = read(traces / kind.traces[0])
        begins_h = restless(kind, trace)
        for place, name in enumerate(names):
            found = course(kind, trace, begins_h, name)
            above, below = axes[2 * place][column], axes[2 * place + 1][column]
            above.step(found.hours, found.available, where="post", color="0.8", label="spot machines that there are")
            layers = (found.spot, found.on_demand)
            above.stackplot(found.hours, *layers, step="post", labels=("spot", "on demand"), colors=("C0", "C3"))
            above.set_title(f"{name}, at most {kind.most} x {kind.name}")
            above.set_ylabel("machines")
            below.plot(found.hours, found.progress, color="C2")
            below.set_ylabel("progress")
            below.set_ylim(0, 1.05)
        axes[-1][column].set_xlabel("hours")
    axes[0][0].legend(loc="upper right", fontsize="small")
    figure.savefig(RESULTS / "imagenet.png", dpi=80)
    plt.close(figure)
