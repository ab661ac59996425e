"""Strategies: which machines a job has, and when.

    on demand               a fixed number of on-demand machines
    spot, restarts          a fixed number of spot machines whenever there are so many, from a checkpoint
    greedy                  the same, and on demand from the last moment on
    uniform progress        Wu, Chiang, Mao, Yang, Friedman, Shenker, Stoica: Can't Be Late (NSDI 2024)
    ross                    Bhuyan, Bhatia, Kodialam, Lakshman: Exploiting Spot Instances for Time-Critical Cloud
                            Workloads Using Optimal Randomized Strategies (2026, arXiv 2601.14612)
    elastic, restarts       as many spot machines as there are; each change restarts the job
    farandole, spot         as many spot machines as there are; nobody waits for one that comes or goes
    farandole, core         the same beside a core of on-demand machines
    farandole, deadline     as many spot machines as there are, and on-demand ones, as few and as late as possible
    farandole, budget       as fast as a budget lets for certain: spot machines, and as many on-demand ones as it pays

A strategy with a deadline never misses it if all its machines on demand can make it from the beginning: it counts on no
spot machine. It decides at the beginning of an interval, so it looks one interval ahead.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from functools import cache, partial

from farandole.market.play import Machines, Moment, PlannedJob, Strategy
from farandole.market.pools import PoolsOfRun
from farandole.plan.deadline import burst_of, fewest_on_demand, time_for


def spread(now: Moment, wanted: int) -> tuple[int, ...]:
    """Return at most `wanted` spot machines by zone: those that run, then more of the type that does the most for a
    dollar, in the zones with the most room.

    If fewer are wanted than run, those go first that do the least for a dollar, in the zones with the least room.
    """
    counts, more = [*now.fleet.spot], wanted - sum(now.fleet.spot)

    def rank(zone: int) -> tuple[float, int]:
        return now.types[zone].work_dollars, counts[zone] - now.available[zone]

    zones = sorted(range(len(counts)), key=rank, reverse=more < 0)
    for zone in zones:
        added = min(max(more, -counts[zone]), now.available[zone] - counts[zone])
        counts[zone], more = counts[zone] + added, more - added
    return tuple(counts)


def in_one_zone(now: Moment, size: int) -> tuple[int, ...]:
    """Return `size` spot machines in one zone, where they run if there are so many; else none."""

    def rank(zone: int) -> tuple[int, float, int]:
        return -now.fleet.spot[zone], now.types[zone].work_dollars, -now.available[zone]

    zones = sorted(range(len(now.available)), key=rank)
    chosen = next((zone for zone in zones if now.available[zone] >= size), None)
    return tuple(size if zone == chosen else 0 for zone in range(len(now.available)))


def no_spot(now: Moment) -> tuple[int, ...]:
    """Return no spot machine in any zone."""
    return (0,) * len(now.available)


class OnDemand(Strategy):
    """A fixed number of on-demand machines."""

    def decide(self, now: Moment) -> Machines:
        return Machines(spot=no_spot(now), on_demand=self.job.most)


class SpotRestarts(Strategy):
    """All machines are spot machines, or there are none."""

    restarts = True

    def decide(self, now: Moment) -> Machines:
        return Machines(spot=in_one_zone(now, self.job.most))


class Greedy(SpotRestarts):
    """Spot machines while there is time; once on demand, on demand to the end."""

    def __init__(self, job: PlannedJob) -> None:
        super().__init__(job)
        self._hurries = False

    def decide(self, now: Moment) -> Machines:
        self._hurries = self._hurries or self.must_hurry(now)
        if self._hurries:
            return Machines(spot=no_spot(now), on_demand=self.job.most)
        return self.while_there_is_time(now)

    def while_there_is_time(self, now: Moment) -> Machines:
        return super().decide(now)

    def must_hurry(self, now: Moment) -> bool:
        """Return True if on-demand machines that are requested an interval later may be too late.

        Until then the market may take the machines back, and what they have not saved is lost.
        """
        job = self.job
        if job.deadline_s is None:
            return False
        needed_s = job.start_s + (now.left_s + now.unsaved_s) / job.speed(job.most)
        return job.deadline_s - now.time_s - now.gap_s < needed_s


class UniformProgress(Greedy):
    """On demand whenever the work is behind an even pace; spot machines whenever there are some.

    Once on demand, it stays until the work is ahead of what is due two starts later.
    """

    def while_there_is_time(self, now: Moment) -> Machines:
        job, spot = self.job, in_one_zone(now, self.job.most)
        if any(spot) or job.deadline_s is None:
            return Machines(spot=spot)
        ahead_s = 2 * job.start_s if now.fleet.on_demand else 0
        due = job.work_s * (now.time_s + ahead_s) / job.deadline_s
        return Machines(spot=spot, on_demand=job.most if job.work_s - now.left_s < due else 0)


class Ross(Greedy):
    """ROSS, a randomized strategy: a part of the work on demand, at a random time.

    K is the price on demand over that of spot machines. The *ratio* is the time until the deadline over the time that
    the work that is left takes.

    1. While the ratio is above (1 + 2 sqrt(K)) / (1 + sqrt(K)), it uses spot machines when there are some.
    2. Then it draws an interval in which it is on demand while there are no spot machines. The interval is long enough
       for 1 / (1 + sqrt(K)) of the work that is left, and may begin as late as the deadline lets if nothing else is
       done before it.
    3. Outside of it, and after it, it is as `Greedy`.

    Known here are the abstract and a published summary. They leave open which spot machines the first phase uses, and
    what a ratio below that of the second phase means at the beginning: here the interval is drawn at once.
    """

    def __init__(self, job: PlannedJob) -> None:
        super().__init__(job)
        self._random = random.Random(job.seed)
        self._interval: tuple[float, float] | None = None  # when it begins and ends, in seconds

    def while_there_is_time(self, now: Moment) -> Machines:
        job, spot = self.job, in_one_zone(now, self.job.most)
        if job.deadline_s is None:
            return Machines(spot=spot)
        if self._interval is None:
            root = math.sqrt(now.price.on_demand / min(each.work_dollars for each in now.types))
            left_s, time_s = now.left_s / job.speed(job.most), job.deadline_s - now.time_s
            if time_s <= left_s * (1 + 2 * root) / (1 + root):
                begins = now.time_s + self._random.random() * (time_s - left_s)
                self._interval = begins, begins + left_s / (1 + root)
        injects = self._interval is not None and self._interval[0] <= now.time_s < self._interval[1]
        return Machines(spot=spot, on_demand=job.most if injects and not any(spot) else 0)


class ElasticRestarts(Greedy):
    """As many spot machines as there are; each change restarts the job."""

    any_number = True

    def while_there_is_time(self, now: Moment) -> Machines:
        return Machines(spot=spread(now, self.job.most))


class FarandoleSpot(Strategy):
    """As many spot machines as there are."""

    any_number = True

    def __init__(self, job: PlannedJob) -> None:
        super().__init__(job)
        self._pools = PoolsOfRun(job.most)

    def decide(self, now: Moment) -> Machines:
        return self._pools.decide(now)


class FarandoleCore(Strategy):
    """One on-demand machine for each `SHARE` machines of the job, and spot machines."""

    any_number = True
    SHARE = 8

    def __init__(self, job: PlannedJob) -> None:
        super().__init__(job)
        self._pools = PoolsOfRun(job.most, reserve=-(-job.most // self.SHARE))

    def decide(self, now: Moment) -> Machines:
        return self._pools.decide(now)


class FarandoleDeadline(Strategy):
    """As many spot machines as there are, and the fewest on-demand machines with which the deadline is certain.

    See `plan.deadline`.
    """

    any_number = True

    def __init__(self, job: PlannedJob) -> None:
        super().__init__(job)
        self._pools, self._burst = PoolsOfRun(job.most), 0
        if job.deadline_s is not None:
            self._burst = burst_of(job.work_s, job.deadline_s, job.start_s, job.speeds)

    def decide(self, now: Moment) -> Machines:
        job, core = self.job, 0
        if job.deadline_s is not None:
            left_s, time_s = now.left_s, job.deadline_s - now.time_s
            core = fewest_on_demand(left_s, time_s, now.gap_s, job.start_s, now.starts_s, self._burst, job.speeds)
        return self._pools.decide(now, on_demand=core)


class FarandoleBudget(Strategy):
    """The fastest machines with which the job certainly costs no more than its budget.

    Invariant: the money that is left pays for a *certain plan*, which counts on no spot machine. It is either that the
    on-demand machines that run now do all the work that is left, or that a single new one does. Machines are chosen for
    an interval so that this holds at the next decision even if the spot machines of the interval do nothing. So it
    holds to the end if it holds at the beginning. If the money is too little for it, only spot machines are used, as
    long as they can be paid; what they do costs less, so that it may hold later.
    """

    any_number = True

    def decide(self, now: Moment) -> Machines:
        assert self.job.budget is not None
        job, price, left = self.job, now.price, self.job.budget - now.dollars
        room = min(sum(now.available), job.most)
        spots = [spread(now, spot) for spot in range(room + 1)]
        hourly = [now.spot_dollars(spot) for spot in spots]
        certain_dollars = cache(partial(self._certain_dollars, now))
        best: tuple[float, float] | None = None  # the speed, and what an hour costs, less
        affordable = [n for n in range(room + 1) if hourly[n] * now.gap_s / 3600 <= left + 1e-9]
        chosen = Machines(spot=spots[max(affordable, default=0)])
        for spot in range(room + 1):
            money = left - hourly[spot] * now.gap_s / 3600 + 1e-9
            core = max(bisect_right(range(job.most - spot + 1), money, key=certain_dollars) - 1, 0)  # more cost more
            while core and certain_dollars(core) > money:
                core -= 1  # except where more machines do more work each
            fleet = Machines(on_demand=core, spot=spots[spot])
            value = job.speed(now.count(fleet)), -(hourly[spot] + core * price.on_demand)
            if certain_dollars(core) <= money and (best is None or value > best):
                best, chosen = value, fleet
        return chosen

    def _certain_dollars(self, now: Moment, core: int) -> float:
        """Return what the certain plan costs that is left after an interval with `core` on-demand machines."""
        starts = sorted((*now.starts_s[:core], *[self.job.start_s] * (core - len(now.starts_s)))) or [self.job.start_s]
        return len(starts) * time_for(now.left_s, starts, self.job.speeds) * now.price.on_demand / 3600


STRATEGIES: dict[str, type[Strategy]] = {
    "on demand": OnDemand,
    "spot, restarts": SpotRestarts,
    "greedy": Greedy,
    "uniform progress": UniformProgress,
    "ross": Ross,
    "elastic, restarts": ElasticRestarts,
    "farandole, spot": FarandoleSpot,
    "farandole, core": FarandoleCore,
    "farandole, deadline": FarandoleDeadline,
}
BUDGET = "farandole, budget"
BY_NAME = {**STRATEGIES, BUDGET: FarandoleBudget}  # the last one only for jobs with a budget
