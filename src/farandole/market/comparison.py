"""Compares strategies over many beginnings in traces: cost, deadline, goodput, and how far from the cheapest way.

Strategies with a fixed number of machines have as few as make the deadline on demand, or all if there is no deadline.
Each window of a trace begins with an interval and is as long as the deadline; without a deadline it goes to the end of
the trace.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from farandole.errors import UsageError
from farandole.market.optimum import divisible, indivisible
from farandole.market.play import PlannedJob, Played, Price, play
from farandole.market.strategies import BY_NAME
from farandole.market.traces import SpotMarket
from farandole.plan.deadline import fewest_in_time

CHEAPEST, BOUND = "cheapest that restarts", "lower bound of all"


class JobOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a strategy came to in one window. `hours` is None if the job was not done; for bounds all but `dollars` is.

    `over_bound`: dollars over the lower bound of all; None if the job was not done. `start_h`, `again_h`: hours of
    machines that started, and that computed what was lost. `save_h`: hours of machines that saved a checkpoint.
    """

    trace: str
    begins_h: float
    dollars: float
    hours: float | None = None
    over_bound: float | None = None
    goodput: float | None = None
    lost: int | None = None
    spot_h: float | None = None
    on_demand_h: float | None = None
    start_h: float | None = None
    again_h: float | None = None
    save_h: float | None = None


class StrategyResult(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table: all windows of one strategy."""

    strategy: str
    machines: int
    outcomes: list[JobOutcome]

    @property
    def dollars(self) -> list[float]:
        return [each.dollars for each in self.outcomes if each.hours is not None or each.lost is None]

    @property
    def missed(self) -> int:
        """In how many windows the job was not done in time."""
        return sum(each.hours is None and each.lost is not None for each in self.outcomes)


@dataclass(frozen=True, kw_only=True)
class TraceWindow:
    """A part of a market's traces in which the job is played."""

    market: SpotMarket
    begins_s: int


def windows(markets: Sequence[SpotMarket], job: PlannedJob, beginnings: int) -> list[TraceWindow]:
    """Return `beginnings` windows of each market, at equal distances.

    Raises:
        UsageError: a trace is shorter than the deadline.
    """
    found = list[TraceWindow]()
    for market in markets:
        whole = market.intervals
        intervals = whole // 2 if job.deadline_s is None else job.deadline_s // market.gap_s
        if not 0 < intervals <= whole:
            raise UsageError(
                f"{market.name}: the trace has {market.duration_s / 3600:.1f} hours and intervals of {market.gap_s} s, "
                f"and the deadline is {(job.deadline_s or 0) / 3600:.2f} hours"
            )
        room = whole - intervals
        firsts = sorted({round(room * number / max(beginnings - 1, 1)) for number in range(beginnings)})
        for first in firsts:
            part = market.window(first, whole if job.deadline_s is None else intervals)
            found.append(TraceWindow(market=part, begins_s=first * market.gap_s))
    return found


def fixed_size(job: PlannedJob) -> int:
    """Return how many machines the strategies with a fixed number of machines have.

    Raises:
        UsageError: no number of machines makes the deadline.
    """
    if job.deadline_s is None:
        return job.most
    fewest = fewest_in_time(job.work_s, job.deadline_s, job.start_s, job.speeds)
    if fewest is None:
        deadline_h, least_h = job.deadline_s / 3600, (job.start_s + job.work_s / job.speed(job.most)) / 3600
        raise UsageError(
            f"the deadline of {deadline_h:g} hours can't be met: {job.most} machines on demand need {least_h:.2f} "
            f"hours, {least_h - deadline_h:.2f} more; set a deadline of at least that, or more machines"
        )
    return fewest


def compare(
    job: PlannedJob, places: Sequence[TraceWindow], price: Price, names: Sequence[str]
) -> Iterator[StrategyResult]:
    """Yield what each strategy comes to in all windows, after the bounds. Items come as they are computed."""
    tightest = min((in_window(job, place) for place in places), key=lambda each: each.deadline_s or 0)
    fixed = replace(job, speeds=job.speeds[: fixed_size(tightest)])
    jobs = [in_window(job, place) for place in places]
    bounds = [divisible(each, place.market, price) for each, place in zip(jobs, places, strict=True)]
    yield _bound(BOUND, job.most, places, bounds)
    cheapest = [
        max(indivisible(in_window(fixed, place), place.market, price), bound)
        for place, bound in zip(places, bounds, strict=True)
    ]
    yield _bound(CHEAPEST, fixed.most, places, cheapest, bounds)
    for name in names:
        mine = job if BY_NAME[name].any_number else fixed
        outcomes = [
            _outcome(place, play(in_window(mine, place), place.market, price, BY_NAME[name]), bound)
            for place, bound in zip(places, bounds, strict=True)
        ]
        yield StrategyResult(strategy=name, machines=mine.most, outcomes=outcomes)


def in_window(job: PlannedJob, window: TraceWindow) -> PlannedJob:
    """Return the job with its deadline at the end of an interval: what is decided later would come too late.

    Its seed is that of the window.
    """
    deadline_s = None if job.deadline_s is None else window.market.duration_s
    return replace(job, deadline_s=deadline_s, seed=window.begins_s)


def _outcome(window: TraceWindow, played: Played, bound: float) -> JobOutcome:
    return JobOutcome(
        trace=window.market.name, begins_h=window.begins_s / 3600, dollars=played.dollars,
        hours=None if played.done_s is None else played.done_s / 3600,
        over_bound=None if played.done_s is None else played.dollars / bound, goodput=played.goodput, lost=played.lost,
        spot_h=played.paid_s["spot"] / 3600, on_demand_h=played.paid_s["on demand"] / 3600,
        start_h=played.seconds["start"] / 3600, again_h=played.seconds["again"] / 3600,
        save_h=played.seconds["save"] / 3600,
    )  # fmt: skip


def _bound(
    name: str,
    machines: int,
    places: Sequence[TraceWindow],
    dollars: Sequence[float],
    bounds: Sequence[float] | None = None,
) -> StrategyResult:
    over = [each / bound for each, bound in zip(dollars, bounds or dollars, strict=True)]
    outcomes = [
        JobOutcome(trace=place.market.name, begins_h=place.begins_s / 3600, dollars=each, over_bound=ratio)
        for place, each, ratio in zip(places, dollars, over, strict=True)
    ]
    return StrategyResult(strategy=name, machines=machines, outcomes=outcomes)


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are known, None without any."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
