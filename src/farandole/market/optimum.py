"""The cheapest way that was possible, by somebody who knows the trace.

**Of a job that restarts** (`indivisible`): exact, by dynamic programming over the intervals from the last one back, the
work that is left, and what runs: nothing, spot or on-demand machines, and how long they still start. What an interval
does is a multiple of the greatest common divisor of the interval and the start, so nothing is rounded.

**Of a job that can be divided** (`divisible`): a lower bound of the cost. The work of all machines adds up, so with a
price `p` for a second of work each machine decides by itself when it is worth its cost. For each p, what the work costs
at p, plus the least of (cost - p * work) over all that the machines could do, is below the cost of every schedule that
does the work (Lagrange's dual). The bound is the largest over p. Machine i has a spot machine's place whenever the
market has at least i: if n(t) machines run at time t, the times with n(t) >= i are a schedule for machine i, and fewer
of these machines start than of the real ones. n machines count as n times one, also where they are slower.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from farandole.market.play import PlannedJob, Price
from farandole.market.traces import MarketTrace

KINDS = ("spot", "on demand")


def indivisible(job: PlannedJob, trace: MarketTrace, price: Price) -> float:
    """Return the least cost in dollars of a job that has all its machines or none, and restarts at each change.

    The job is done by its deadline, or within the trace if it has none. Infinite if that is not possible.
    """
    machines, gap_s = job.most, trace.gap_s
    unit = math.gcd(gap_s, job.start_s) if job.start_s else gap_s
    work_s = job.work_s / job.speed(machines)
    steps = math.ceil(work_s / unit - 1e-9)  # what is left is work_s, less a multiple of the unit
    left_s = work_s - unit * np.arange(steps - 1, -1, -1)
    dollars = {"spot": price.spot * machines / 3600, "on demand": price.on_demand * machines / 3600}  # a second
    waits = _waits(job, gap_s)
    nothing = np.full(steps, math.inf)  # the cost from the next interval on, by what is left
    running = {(kind, wait): nothing for kind in KINDS for wait in waits}
    for available in reversed(trace.counts[: _intervals(job, trace)]):
        ways = {
            (kind, wait): _interval(running[kind, max(wait - gap_s, 0)], dollars[kind], left_s, wait, gap_s, unit)
            for kind in KINDS
            if kind == "on demand" or available >= machines
            for wait in waits
        }
        nothing = np.minimum.reduce([nothing, *(ways[kind, job.start_s] for kind in KINDS if (kind, 0) in ways)])
        running = {state: np.minimum(nothing, ways.get(state, nothing)) for state in running}
    return float(nothing[-1])


def _interval(ahead: np.ndarray, dollars: float, left_s: np.ndarray, wait: int, gap_s: int, unit: int) -> np.ndarray:
    """Return the cost by what is left, if these machines run for an interval or until the job is done."""
    done = (gap_s - min(wait, gap_s)) // unit
    rest = dollars * gap_s + ahead[: max(len(ahead) - done, 0)]
    return np.concatenate([dollars * (wait + left_s[:done]), rest])


def divisible(job: PlannedJob, trace: MarketTrace, price: Price) -> float:
    """Return a cost in dollars below which no division of the work among machines that come and go can be.

    Infinite if all machines together can't do the work in time.
    """
    counts = np.array(trace.counts[: _intervals(job, trace)])
    work_s = job.work_s / max(speed / (count + 1) for count, speed in enumerate(job.speeds))
    if len(counts) * trace.gap_s - job.start_s < work_s / job.most:
        return math.inf
    levels = sorted({min(int(count), job.most) for count in counts if count} | {job.most})
    many = np.diff([0, *levels])
    there = counts[:, None] >= np.array(levels)

    def dual(p: np.ndarray) -> np.ndarray:
        return p * work_s + many @ _least(job, trace.gap_s, price, there, p)

    return max(0.0, _largest(dual, price.spot / 3600, 100 * price.on_demand / 3600))


def _least(job: PlannedJob, gap_s: int, price: Price, there: np.ndarray, p: np.ndarray) -> np.ndarray:
    """Return the least of cost - p * work that one machine can do, shape (levels, prices).

    It is a spot machine where `there`, shape (intervals, levels), or one on demand. `p`: shape (prices,).
    """
    waits = _waits(job, gap_s)
    gains = {wait: p * (gap_s - min(wait, gap_s)) for wait in waits}
    dollars = {"spot": price.spot * gap_s / 3600, "on demand": price.on_demand * gap_s / 3600}
    nothing = np.zeros((there.shape[1], len(p)))
    running = {(kind, wait): nothing for kind in KINDS for wait in waits}
    for available in there[::-1, :, None]:
        ways = {
            (kind, wait): dollars[kind] - gains[wait] + running[kind, max(wait - gap_s, 0)] for kind, wait in running
        }
        for wait in waits:
            ways["spot", wait] = np.where(available, ways["spot", wait], math.inf)
        nothing = np.minimum.reduce([nothing, *(ways[kind, job.start_s] for kind in KINDS)])
        running = {state: np.minimum(nothing, way) for state, way in ways.items()}
    return nothing


def _largest(concave: Callable[[np.ndarray], np.ndarray], low: float, high: float) -> float:
    """Return the largest value of a concave function between two places, from finer and finer grids."""
    best = -math.inf
    for _ in range(6):
        places = np.linspace(low, high, 65)
        values = concave(places)
        at = int(values.argmax())
        best = max(best, float(values[at]))
        low, high = places[max(at - 1, 0)], places[min(at + 1, len(places) - 1)]
    return best


def _waits(job: PlannedJob, gap_s: int) -> list[int]:
    """Return how long a machine can still have to start at the beginning of an interval."""
    return sorted({max(job.start_s - number * gap_s, 0) for number in range(job.start_s // gap_s + 2)})


def _intervals(job: PlannedJob, trace: MarketTrace) -> int:
    return len(trace.counts) if job.deadline_s is None else min(job.deadline_s // trace.gap_s, len(trace.counts))
