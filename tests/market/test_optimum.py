"""The cheapest ways, against all that is possible in small cases, and below every strategy."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import product

import pytest

from farandole.market.optimum import divisible, indivisible
from farandole.market.play import Machines, PlannedJob, Price, play
from farandole.market.strategies import STRATEGIES
from farandole.market.traces import SpotMarket
from tests.support.market import fleet, market, scripted, typed

PRICE = Price(on_demand=3.06, spot=0.97)


def random_case(seed: int, intervals: int, machines: int, zones: int = 1) -> tuple[PlannedJob, SpotMarket]:
    rng = random.Random(seed)
    start_s = rng.choice((0, 60, 90, 180, 250))
    place = market(*([rng.randint(0, machines) for _ in range(intervals)] for _ in range(zones)))
    work_s = 10 * rng.randint(1, 10 * intervals - start_s // 10)
    speeds = tuple(float(count) for count in range(1, machines + 1))
    return PlannedJob(work_s=work_s, start_s=start_s, deadline_s=100 * intervals, speeds=speeds), place


def of_random_types(place: SpotMarket, seed: int) -> SpotMarket:
    rng = random.Random(seed)
    return typed(place, *((rng.choice((0.4, 0.5, 1.0, 2.0)), rng.choice((0.2, 0.97, 2.5))) for _ in place.zones))


def with_random_prices(place: SpotMarket, seed: int) -> SpotMarket:
    """Prices that change from interval to interval, some above those on demand."""
    rng = random.Random(seed)
    return SpotMarket(
        zones=tuple(
            replace(zone, spot=tuple(rng.choice((0.2, 0.97, 2.5, 4.0)) for _ in zone.counts)) for zone in place.zones
        )
    )


def cheapest(job: PlannedJob, place: SpotMarket, fleets: list[Machines], *, restarts: bool) -> float:
    """The least cost of all schedules, played."""
    best = math.inf
    for schedule in product(fleets, repeat=place.intervals):
        wanted = [each.spot for each in schedule]
        if all(
            n <= room
            for spot, there in zip(wanted, place.counts, strict=True)
            for n, room in zip(spot, there, strict=True)
        ):
            result = play(job, place, PRICE, scripted(*schedule, restarts=restarts))
            if result.done_s is not None:
                best = min(best, result.dollars)
    return best


def all_fleets(most: int, zones: int = 1) -> list[Machines]:
    """All machines that a job can have."""
    spots = [spot for spot in product(range(most + 1), repeat=zones) if sum(spot) <= most]
    return [fleet(*spot, on_demand=other) for spot in spots for other in range(most + 1 - sum(spot))]


@pytest.mark.parametrize("seed", range(60))
def test_the_cheapest_way_with_restarts_is_that_of_all_schedules(seed: int) -> None:
    zones = 1 + seed // 2 % 2
    job, place = random_case(seed, intervals=5, machines=1 + seed % 2, zones=zones)
    place = with_random_prices(place, seed) if seed >= 40 else place
    in_one_zone = [fleet(*(job.most if n == zone else 0 for n in range(zones))) for zone in range(zones)]
    fleets = [fleet(*[0] * zones), *in_one_zone, fleet(*[0] * zones, on_demand=job.most)]
    assert indivisible(job, place, PRICE) == pytest.approx(cheapest(job, place, fleets, restarts=True))


def test_work_in_fewer_steps_makes_the_cost_a_lower_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    rounded = list[bool]()
    for seed in range(12):
        job, place = random_case(400 + seed, intervals=5, machines=1)
        job = replace(job, start_s=random.Random(seed).choice((7, 61, 93)), work_s=min(job.work_s, 400))
        place = of_random_types(place, seed)
        best = cheapest(job, place, [fleet(0), fleet(1), fleet(0, on_demand=1)], restarts=True)
        assert indivisible(job, place, PRICE) == pytest.approx(best), "start and speed of any size"
        with monkeypatch.context() as patched:
            patched.setattr(f"{indivisible.__module__}.MOST_STEPS", 30)
            bound = indivisible(job, place, PRICE)
        assert best / 2 <= bound <= best + 1e-9
        rounded.append(bound < best - 1e-9)
    assert any(rounded)


@pytest.mark.parametrize("seed", range(16))
def test_no_division_of_the_work_costs_less_than_the_bound(seed: int) -> None:
    zones = 1 + seed % 2
    job, place = random_case(100 + seed, intervals=5 - zones, machines=2, zones=zones)
    bound, best = divisible(job, place, PRICE), cheapest(job, place, all_fleets(2, zones), restarts=False)
    assert bound <= best + 1e-9
    assert bound >= job.work_s * PRICE.spot / 3600 - 1e-9


@pytest.mark.parametrize("seed", range(16))
def test_the_bounds_hold_where_prices_change(seed: int) -> None:
    zones = 1 + seed % 2
    job, place = random_case(300 + seed, intervals=5 - zones, machines=2, zones=zones)
    place = with_random_prices(place, seed)
    best = cheapest(job, place, all_fleets(2, zones), restarts=False)
    assert 0 < divisible(job, place, PRICE) <= best + 1e-9


@pytest.mark.parametrize("seed", range(24))
def test_the_bounds_hold_for_machines_of_several_types(seed: int) -> None:
    zones = 1 + seed % 2
    job, place = random_case(200 + seed, intervals=5 - zones, machines=2, zones=zones)
    place = of_random_types(place, seed)
    assert divisible(job, place, PRICE) <= cheapest(job, place, all_fleets(2, zones), restarts=False) + 1e-9
    in_one_zone = [fleet(*(job.most if n == zone else 0 for n in range(zones))) for zone in range(zones)]
    fleets = [fleet(*[0] * zones), *in_one_zone, fleet(*[0] * zones, on_demand=job.most)]
    assert indivisible(job, place, PRICE) == pytest.approx(cheapest(job, place, fleets, restarts=True))


@pytest.mark.parametrize("zones", [[(2, 0, 1, 0)], [(1, 0, 1, 0), (1, 0, 0, 0)]])
def test_the_bound_is_the_cost_where_nothing_is_lost_by_a_start(zones: list[tuple[int, ...]]) -> None:
    job = PlannedJob(work_s=500, start_s=0, deadline_s=400, speeds=(1.0, 2.0))
    dollars = pytest.approx((300 * PRICE.spot + 200 * PRICE.on_demand) / 3600)
    assert divisible(job, market(*zones), PRICE) == dollars
    assert cheapest(job, market(*zones), all_fleets(2, len(zones)), restarts=False) == dollars


def test_what_cannot_be_done_in_time_has_no_cost() -> None:
    job = PlannedJob(work_s=250, start_s=0, deadline_s=200)
    assert indivisible(job, market((1, 1)), PRICE) == divisible(job, market((1, 1)), PRICE) == math.inf


def test_what_only_fast_machines_do_in_time_has_a_cost() -> None:
    job = PlannedJob(work_s=350, start_s=0, deadline_s=200)
    place = typed(market((1, 1)), (2.0, 0.5))
    assert divisible(job, place, PRICE) == pytest.approx(175 * 0.5 / 3600)
    assert indivisible(job, place, PRICE) == pytest.approx(175 * 0.5 / 3600)


@pytest.mark.parametrize("seed", range(10))
def test_every_strategy_costs_at_least_the_bound_on_long_random_traces(seed: int) -> None:
    rng, counts, now = random.Random(seed), list[int](), 4
    for _ in range(600):
        now = rng.choice((now, now, now, rng.randint(0, 8)))
        counts.append(now)
    place = market(counts, gap_s=300) if seed % 2 else market(counts, counts[::-1], gap_s=300)
    place = of_random_types(place, seed) if seed % 5 < 2 else place
    place = with_random_prices(place, seed) if seed % 5 == 3 else place
    speeds = tuple(count**0.9 for count in range(1, 9))
    job = PlannedJob(
        work_s=rng.randint(50, 250) * 3600, start_s=rng.choice((60, 180, 720)), speeds=speeds, deadline_s=180_000
    )
    bound = divisible(job, place, PRICE)
    done = 0
    for name, strategy in STRATEGIES.items():
        result = play(job, place, PRICE, strategy)
        if result.done_s is not None:
            done += 1
            assert result.dollars >= bound - 1e-6, name
    assert done >= 3
