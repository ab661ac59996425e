"""The cheapest way that was possible, by somebody who knows the trace.

**Of a job that restarts** (`indivisible`): exact, by dynamic programming over the intervals from the last one back, the
work that is left, and what runs: nothing, spot or on-demand machines. What is done in an interval is a multiple of the
greatest common divisor of the interval and the start, so nothing is rounded.

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
from typing import Any

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
    never = np.full(steps, math.inf)

    def way(kind: str, ahead: np.ndarray, start_s: int, intervals: int) -> np.ndarray:
        """Return the cost by what is left, if machines start and run for so many intervals or until the job is done."""
        dollars = (price.spot if kind == "spot" else price.on_demand) * machines / 3600
        done = (intervals * gap_s - start_s) // unit
        rest = dollars * intervals * gap_s + ahead[: max(steps - done, 0)]
        return np.concatenate([dollars * (start_s + left_s[:done]), rest])

    there = [count >= machines for count in trace.counts[: _intervals(job, trace)]]
    return float(_from_the_end(there, job.start_s, gap_s, never, never, way)[-1])


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

    def way(kind: str, ahead: np.ndarray, start_s: int, intervals: int) -> np.ndarray:
        dollars = (price.spot if kind == "spot" else price.on_demand) / 3600
        return dollars * intervals * gap_s - p * (intervals * gap_s - start_s) + ahead

    end = np.zeros((there.shape[1], len(p)))
    return _from_the_end(there[:, :, None], job.start_s, gap_s, end, np.full_like(end, math.inf), way)


Way = Callable[[str, np.ndarray, int, int], np.ndarray]


def _from_the_end(there: Any, start_s: int, gap_s: int, end: np.ndarray, never: np.ndarray, way: Way) -> np.ndarray:
    """Return the least cost from the first interval on, of a job or a machine that runs nothing at its beginning.

    From one interval to the next it runs nothing, or spot or on-demand machines that compute. To start machines takes
    several intervals, of which it computes in the last one: who knows the trace begins no start in vain.

    Args:
        there: whether there are spot machines, for each interval; a bool, or an array like the costs.
        end, never: the costs after the last interval, and of what is not possible.
        way: the cost with machines of a kind that start and run for so many intervals, from the costs afterwards on.
    """
    starting = start_s // gap_s + 1  # intervals
    nothing, running = end, {kind: [end] for kind in KINDS}  # the last item is the cost from the next interval on
    for interval in range(len(there) - 1, -1, -1):
        ahead = {"spot": there[interval : interval + starting], "on demand": [True]}
        ways = [nothing]
        if interval + starting <= len(there):
            for kind in KINDS:
                begun = way(kind, running[kind][-starting], start_s, starting)
                ways.append(np.where(np.all(ahead[kind], axis=0), begun, never))
        nothing = np.minimum.reduce(ways)
        for kind in KINDS:
            goes_on = np.where(ahead[kind][0], way(kind, running[kind][-1], 0, 1), never)
            running[kind] = [*running[kind][-starting:], np.minimum(nothing, goes_on)]
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


def _intervals(job: PlannedJob, trace: MarketTrace) -> int:
    return len(trace.counts) if job.deadline_s is None else min(job.deadline_s // trace.gap_s, len(trace.counts))
