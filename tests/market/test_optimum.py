"""The cheapest ways, against all that is possible in small cases, and below every strategy."""

from __future__ import annotations

import math
import random
from itertools import product

import pytest

from farandole.market.optimum import divisible, indivisible
from farandole.market.play import Machines, PlannedJob, Price, play
from farandole.market.strategies import STRATEGIES
from farandole.market.traces import MarketTrace
from tests.support.market import scripted

PRICE = Price(on_demand=3.06, spot=0.97)


def random_case(seed: int, intervals: int, machines: int) -> tuple[PlannedJob, MarketTrace]:
    rng = random.Random(seed)
    start_s = rng.choice((0, 60, 90, 180, 250))
    trace = MarketTrace(name="t", gap_s=100, counts=tuple(rng.randint(0, machines) for _ in range(intervals)))
    work_s = 10 * rng.randint(1, 10 * intervals - start_s // 10)
    speeds = tuple(float(count) for count in range(1, machines + 1))
    return PlannedJob(work_s=work_s, start_s=start_s, deadline_s=100 * intervals, speeds=speeds), trace


def cheapest(job: PlannedJob, trace: MarketTrace, fleets: list[Machines], *, restarts: bool) -> float:
    """The least cost of all schedules, played."""
    best = math.inf
    for schedule in product(fleets, repeat=len(trace.counts)):
        if all(fleet.spot <= count for fleet, count in zip(schedule, trace.counts, strict=True)):
            result = play(job, trace, PRICE, scripted(*schedule, restarts=restarts))
            if result.done_s is not None:
                best = min(best, result.dollars)
    return best


@pytest.mark.parametrize("seed", range(30))
def test_the_cheapest_way_with_restarts_is_that_of_all_schedules(seed: int) -> None:
    job, trace = random_case(seed, intervals=5, machines=1 + seed % 2)
    fleets = [Machines(), Machines(spot=job.most), Machines(on_demand=job.most)]
    assert indivisible(job, trace, PRICE) == pytest.approx(cheapest(job, trace, fleets, restarts=True))


@pytest.mark.parametrize("seed", range(12))
def test_no_division_of_the_work_costs_less_than_the_bound(seed: int) -> None:
    job, trace = random_case(100 + seed, intervals=4, machines=2)
    fleets = [Machines(spot=spot, on_demand=other) for spot in range(3) for other in range(3 - spot)]
    bound, best = divisible(job, trace, PRICE), cheapest(job, trace, fleets, restarts=False)
    assert bound <= best + 1e-9
    assert bound >= job.work_s * PRICE.spot / 3600 - 1e-9


def test_the_bound_is_the_cost_where_nothing_is_lost_by_a_start() -> None:
    trace = MarketTrace(name="t", gap_s=100, counts=(2, 0, 1, 0))
    job = PlannedJob(work_s=500, start_s=0, deadline_s=400, speeds=(1.0, 2.0))
    assert divisible(job, trace, PRICE) == pytest.approx((300 * PRICE.spot + 200 * PRICE.on_demand) / 3600)
    assert cheapest(
        job, trace, [Machines(spot=s, on_demand=d) for s in range(3) for d in range(3 - s)], restarts=False
    ) == (pytest.approx((300 * PRICE.spot + 200 * PRICE.on_demand) / 3600))


def test_what_cannot_be_done_in_time_has_no_cost() -> None:
    trace = MarketTrace(name="t", gap_s=100, counts=(1, 1))
    job = PlannedJob(work_s=250, start_s=0, deadline_s=200)
    assert indivisible(job, trace, PRICE) == divisible(job, trace, PRICE) == math.inf


@pytest.mark.parametrize("seed", range(10))
def test_every_strategy_costs_at_least_the_bound_on_long_random_traces(seed: int) -> None:
    rng, counts, now = random.Random(seed), list[int](), 4
    for _ in range(600):
        now = rng.choice((now, now, now, rng.randint(0, 8)))
        counts.append(now)
    trace = MarketTrace(name="t", gap_s=300, counts=tuple(counts))
    speeds = tuple(count**0.9 for count in range(1, 9))
    job = PlannedJob(
        work_s=rng.randint(50, 250) * 3600, start_s=rng.choice((60, 180, 720)), speeds=speeds, deadline_s=180_000
    )
    bound = divisible(job, trace, PRICE)
    done = 0
    for name, strategy in STRATEGIES.items():
        result = play(job, trace, PRICE, strategy)
        if result.done_s is not None:
            done += 1
            assert result.dollars >= bound - 1e-6, name
    assert done >= 3
