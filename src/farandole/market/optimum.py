"""The cheapest way that was possible, by somebody who knows the trace.

**Of a job that restarts** (`indivisible`): exact, by dynamic programming over the intervals from the last one back, the
work that is left, and what runs: nothing, spot or on-demand machines. What is done in an interval is a multiple of one
step of the work, so nothing is rounded. If the work has more than `MOST_STEPS` of these, then the steps are longer and
what is done is rounded up, which makes the cost a lower bound. No checkpoint is saved, since it is known when machines
are taken back.

**Of a job that can be divided** (`divisible`): a lower bound of the cost. The work of all machines adds up, so with a
price `p` for a second of work each machine decides by itself when it is worth its cost. For each p, what the work costs
at p, plus the least of (cost - p * work) over all that the machines could do, is below the cost of every schedule that
does the work (Lagrange's dual). The bound is the largest over p. Machine i has a spot machine's place whenever the
market has at least i: if n(t) machines run at time t, the times with n(t) >= i are a schedule for machine i, and fewer
of these machines start than of the real ones. (On-demand machines have the places from the last one down.) n machines
count as n times one, also where they are slower. In a market of several zones there may be more machines than the job
can have. Both make the bound lower.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from farandole.market.play import PlannedJob, Price, SpotType, types_of
from farandole.market.traces import SpotMarket

Presence = Mapping[
    str, Any
]  # where there are machines of a kind: a bool, or an array like the costs, for each interval
Way = Callable[[str, range, np.ndarray, int], np.ndarray]
ON_DEMAND = "on demand"
MOST_STEPS = 20_000  # of the work that is left; twice as many double the time


@dataclass(frozen=True, kw_only=True)
class _MachineKind:
    """Machines of one kind.

    `paid`: what one has cost by the beginning of each interval, and by the end of the last one, from the first one on.
    `least`: what the work costs that an on-demand machine does in an hour, in the cheapest interval.
    """

    speed: float
    paid: np.ndarray
    least: float

    def dollars(self, intervals: range) -> float:
        """Return what one costs in these intervals."""
        return float(self.paid[intervals.stop] - self.paid[intervals.start])


def indivisible(job: PlannedJob, market: SpotMarket, price: Price) -> float:
    """Return the least cost in dollars of a job that has all its machines or none, and restarts at each change.

    Its machines are in one zone. It is done by its deadline, or within the traces if it has none. Infinite if that is
    not possible.
    """
    machines, gap_s, intervals = job.most, market.gap_s, _intervals(job, market)
    work_s = job.work_s / job.speed(machines)
    types = _machine_kinds(market, price, intervals)
    faster = {kind: job.speed(machines * each.speed) / job.speed(machines) for kind, each in types.items()}
    unit = _unit_s(gap_s, job.start_s, faster.values(), work_s)
    steps = math.ceil(work_s / unit - 1e-9)  # what is left is work_s, less a multiple of the unit
    left_s = work_s - unit * np.arange(steps - 1, -1, -1)
    never = np.full(steps, math.inf)

    ends_s = gap_s * np.arange(intervals + 1)

    def way(kind: str, within: range, ahead: np.ndarray, start_s: int) -> np.ndarray:
        """Return the cost by what is left, if machines start and run in these intervals or until the job is done."""
        one, time_s = types[kind], len(within) * gap_s
        done = math.ceil((time_s - start_s) * faster[kind] / unit - 1e-9)
        rest = machines * one.dollars(within) + ahead[: max(steps - done, 0)]
        paid_s = np.minimum(start_s + left_s[:done] / faster[kind], time_s)
        paid = np.interp(within.start * gap_s + paid_s, ends_s, one.paid) - one.paid[within.start]
        return np.concatenate([machines * paid, rest])

    kinds: Presence = {
        ON_DEMAND: [True] * intervals,
        **{_zone(n): [count >= machines for count in zone.counts[:intervals]] for n, zone in enumerate(market.zones)},
    }
    return float(_from_the_end(kinds, intervals, job.start_s, gap_s, never, never, way)[-1])


def divisible(job: PlannedJob, market: SpotMarket, price: Price) -> float:
    """Return a cost in dollars below which no division of the work among machines that come and go can be.

    Infinite if all machines together can't do the work in time.
    """
    gap_s, intervals = market.gap_s, _intervals(job, market)
    types = _machine_kinds(market, price, intervals)
    more = job.speed(job.most + 1) - job.speed(job.most)
    work_s = job.work_s / max(more, *(speed / (count + 1) for count, speed in enumerate(job.speeds)))
    if intervals * gap_s - job.start_s < work_s / job.most / max(each.speed for each in types.values()):
        return math.inf
    by_level = [_by_level(zone.counts[:intervals], job.most) for zone in market.zones]
    always = np.ones((intervals, 1), bool)
    if len(by_level) == 1:
        many, there = by_level[0]
        seats: list[tuple[np.ndarray, Presence]] = [(many, {_zone(0): there, ON_DEMAND: np.ones_like(there)})]
    else:
        seats = [(many, {_zone(n): there}) for n, (many, there) in enumerate(by_level)]
        seats.append((np.array([job.most]), {ON_DEMAND: always}))

    def dual(p: np.ndarray) -> np.ndarray:
        return p * work_s + sum(many @ _least(job, gap_s, types, kinds, p) for many, kinds in seats)

    cheapest = min(each.least for each in types.values())
    return max(0.0, _largest(dual, cheapest / 3600, 100 * price.on_demand / 3600))


def _by_level(counts: Sequence[int], most: int) -> tuple[np.ndarray, np.ndarray]:
    """Return how many machines are there at the same times, shape (levels,), and when, shape (intervals, levels)."""
    levels = sorted({min(count, most) for count in counts if count} | {most})
    return np.diff([0, *levels]), np.array(counts)[:, None] >= np.array(levels)


def _least(
    job: PlannedJob, gap_s: int, types: Mapping[str, _MachineKind], kinds: Presence, p: np.ndarray
) -> np.ndarray:
    """Return the least of cost - p * work that one machine can do, shape (levels, prices).

    `kinds`: arrays of shape (intervals, levels). `p`: shape (prices,).
    """

    def way(kind: str, within: range, ahead: np.ndarray, start_s: int) -> np.ndarray:
        work_s = (len(within) * gap_s - start_s) * types[kind].speed
        return types[kind].dollars(within) - p * work_s + ahead

    intervals, levels = next(iter(kinds.values())).shape
    end = np.zeros((levels, len(p)))
    there = {kind: each[:, :, None] for kind, each in kinds.items()}
    return _from_the_end(there, intervals, job.start_s, gap_s, end, np.full_like(end, math.inf), way)


def _zone(number: int) -> str:
    """Return the name of the kind of the spot machines of a zone."""
    return f"zone {number}"


def _machine_kinds(market: SpotMarket, price: Price, intervals: int) -> dict[str, _MachineKind]:
    """Return the speed and the cost of a machine of each kind."""

    def kind(types: Sequence[SpotType]) -> _MachineKind:
        hourly = np.array([each.dollars for each in types])
        paid = np.concatenate([[0.0], np.cumsum(hourly * market.gap_s / 3600)])
        return _MachineKind(speed=types[0].speed, paid=paid, least=min(each.work_dollars for each in types))

    by_zone = zip(*types_of(market, price)[:intervals], strict=True)
    on_demand = SpotType(speed=1.0, dollars=price.on_demand)
    return {**{_zone(n): kind(types) for n, types in enumerate(by_zone)}, ON_DEMAND: kind([on_demand] * intervals)}


def _from_the_end(
    there: Presence, intervals: int, start_s: int, gap_s: int, end: np.ndarray, never: np.ndarray, way: Way
) -> np.ndarray:
    """Return the least cost from the first interval on, of a job or a machine that runs nothing at its beginning.

    From one interval to the next it runs nothing, or machines of a kind that compute. To start machines takes several
    intervals, of which it computes in the last one: who knows the trace begins no start in vain.

    Args:
        there: where there are machines, by kind.
        end, never: the costs after the last interval, and of what is not possible.
        way: the cost with machines of a kind that start and run in some intervals, from the costs afterwards on.
    """
    starting = start_s // gap_s + 1  # intervals
    nothing, running = end, {kind: [end] for kind in there}  # the last item is the cost from the next interval on
    for interval in range(intervals - 1, -1, -1):
        ways = [nothing]
        if interval + starting <= intervals:
            for kind, available in there.items():
                begun = way(kind, range(interval, interval + starting), running[kind][-starting], start_s)
                ways.append(np.where(np.all(available[interval : interval + starting], axis=0), begun, never))
        nothing, alone = np.minimum.reduce(ways), range(interval, interval + 1)
        for kind, available in there.items():
            goes_on = np.where(available[interval], way(kind, alone, running[kind][-1], 0), never)
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


def _unit_s(gap_s: int, start_s: int, faster: Iterable[float], work_s: float) -> float:
    """Return the step of the work that is left, in seconds.

    It is the largest of which the work of an interval, with a start or without, is a multiple; longer if the work has
    more than `MOST_STEPS` of these.
    """
    speeds = [Fraction(each).limit_denominator(1000) for each in faster]
    done = [each * time_s for each in speeds for time_s in (gap_s, start_s)]
    common = math.lcm(*(each.denominator for each in done))
    unit = math.gcd(*(int(each * common) for each in done)) / common
    return max(unit, work_s / MOST_STEPS)


def _intervals(job: PlannedJob, market: SpotMarket) -> int:
    return market.intervals if job.deadline_s is None else min(job.deadline_s // market.gap_s, market.intervals)
