"""What the strategies do, and that a deadline is met whatever the market does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.market.play import PlannedJob, Price, SpotType, play
from farandole.market.strategies import (
    BUDGET,
    BY_NAME,
    STRATEGIES,
    FarandoleBudget,
    FarandoleDeadline,
    Greedy,
    Ross,
    UniformProgress,
    in_one_zone,
    spread,
)
from tests.support.market import fleet, market, moment

PRICE = Price(on_demand=3.06, spot=0.97)
SURE = ("greedy", "uniform progress", "ross", "elastic, restarts", "farandole, deadline")  # with a deadline


@pytest.mark.parametrize("name", SURE)
@given(
    counts=st.lists(st.integers(0, 3), min_size=40, max_size=80),
    start_s=st.sampled_from((0, 100, 180, 300, 720)),
    slack_s=st.integers(0, 12_000),
    checkpoint_s=st.sampled_from((0, 600, 7200)),
)
def test_a_deadline_that_on_demand_machines_make_is_met(
    name: str, counts: list[int], start_s: int, slack_s: int, checkpoint_s: int
) -> None:
    place = market(counts, gap_s=300)
    speeds = (1.0, 1.8, 2.5)
    work_s = int(speeds[-1] * (place.duration_s - start_s)) - slack_s
    job = PlannedJob(
        work_s=max(work_s, 1), start_s=start_s, deadline_s=place.duration_s, speeds=speeds, checkpoint_s=checkpoint_s
    )
    result = play(job, place, PRICE, STRATEGIES[name])
    assert result.done_s is not None
    assert result.done_s <= place.duration_s


def test_greedy_waits_as_long_as_it_can_and_stays_on_demand() -> None:
    job = PlannedJob(work_s=36_000, start_s=300, deadline_s=40_000)
    strategy = Greedy(job)
    assert strategy.decide(moment(available=(1,))) == fleet(1)
    assert strategy.decide(moment(time_s=3_300)) == fleet(0)
    assert strategy.decide(moment(time_s=3_600)) == fleet(0, on_demand=1)
    assert strategy.decide(moment(time_s=3_900, available=(1,))) == fleet(0, on_demand=1)


def test_greedy_counts_what_a_lost_machine_would_cost() -> None:
    job = PlannedJob(work_s=36_000, start_s=300, deadline_s=40_000)
    waits, hurries = Greedy(job), Greedy(job)
    assert waits.decide(moment(time_s=3_300, available=(1,), unsaved_s=100)) == fleet(1)
    assert hurries.decide(moment(time_s=3_300, available=(1,), unsaved_s=101)) == fleet(0, on_demand=1)


def test_uniform_progress_is_on_demand_while_it_is_behind() -> None:
    job = PlannedJob(work_s=36_000, start_s=300, deadline_s=72_000)
    strategy = UniformProgress(job)
    assert strategy.decide(moment(time_s=7_200, left_s=32_400.0)) == fleet(0)
    assert strategy.decide(moment(time_s=7_200, left_s=32_401.0)) == fleet(0, on_demand=1)
    there = fleet(0, on_demand=1)
    assert strategy.decide(moment(time_s=7_200, left_s=32_200.0, fleet=there)) == there, "600 s ahead are not enough"
    assert strategy.decide(moment(time_s=7_200, left_s=32_100.0, fleet=there)) == fleet(0)
    assert strategy.decide(moment(time_s=7_200, left_s=32_401.0, fleet=there, available=(1,))) == fleet(1)


def test_ross_draws_when_it_is_on_demand() -> None:
    """K is 4: the critical ratio is 5 / 3, and a third of the work that is left is done on demand."""
    job = PlannedJob(work_s=36_000, start_s=0, deadline_s=90_000, seed=3)
    price = Price(on_demand=4.0, spot=1.0)
    strategy = Ross(job)
    early = moment(time_s=29_700, price=price)
    assert strategy.decide(early) == fleet(0), "the ratio is 1.675"
    times = range(30_000, 66_000, 300)
    chosen = [strategy.decide(moment(time_s=time_s, price=price)).on_demand for time_s in times]
    assert sum(chosen[:80]) * 300 == 12_000, "a third, and it begins before 24,000 s have passed"
    assert chosen.index(1) > 0
    other = Ross(replace(job, seed=4))
    assert [other.decide(moment(time_s=time_s, price=price)).on_demand for time_s in times] != chosen, "seeds differ"
    there = Ross(job)
    [spot] = {there.decide(moment(time_s=time_s, price=price, available=(1,))) for time_s in times[:70]}
    assert spot == fleet(1), "spot machines come first"


def test_with_a_deadline_spot_machines_work_beside_those_on_demand() -> None:
    job = PlannedJob(work_s=36_000, start_s=300, deadline_s=19_000, speeds=(1.0, 2.0, 3.0))
    strategy = FarandoleDeadline(job)
    assert strategy.decide(moment(available=(3,))) == fleet(3)
    late = strategy.decide(moment(time_s=7_500, available=(3,), left_s=34_200.0))
    assert late.on_demand > 0
    assert late.spot == (3 - late.on_demand,)


# --- budget -----------------------------------------------------------------------------------------------------------


@given(
    counts=st.lists(st.integers(0, 3), min_size=30, max_size=60),
    start_s=st.sampled_from((0, 100, 300, 720)),
    more=st.sampled_from((0.0, 0.3, 2.0, 50.0)),
    speeds=st.sampled_from(((1.0,), (1.0, 2.0, 3.0), (1.0, 1.6, 2.0), (1.0, 1.0, 1.0))),
)
def test_a_budget_that_pays_for_one_on_demand_machine_is_kept(
    counts: list[int], start_s: int, more: float, speeds: tuple[float, ...]
) -> None:
    work_s = len(counts) * 300 // 2
    budget = (start_s + work_s) * PRICE.on_demand / 3600 + more
    job = PlannedJob(work_s=work_s, start_s=start_s, speeds=speeds, budget=budget)
    result = play(job, market([*counts, *[0] * len(counts)], gap_s=300), PRICE, BY_NAME[BUDGET])
    assert result.done_s is not None
    assert result.dollars <= budget + 1e-6


def test_a_budget_is_kept_where_spot_machines_never_compute() -> None:
    """Each is taken back before it has started; one costs 0.08 dollars until then."""
    place = market((1, 0) * 100, gap_s=300)
    for more in (0.05, 0.2):
        budget = (720 + 30_000) * PRICE.on_demand / 3600 + more
        job = PlannedJob(work_s=30_000, start_s=720, budget=budget)
        result = play(job, place, PRICE, BY_NAME[BUDGET])
        assert result.done_s is not None
        assert result.dollars <= budget
        assert result.paid_s["spot"] == (0 if more < 0.08 else 300), "one interval, then on demand"


def test_more_money_is_more_machines() -> None:
    hours = list[float]()
    for budget in (31.0, 40.0, 80.0):
        job = PlannedJob(work_s=36_000, start_s=300, speeds=(1.0, 1.8, 2.4, 2.8), budget=budget)
        result = play(job, market([0] * 200, gap_s=300), PRICE, BY_NAME[BUDGET])
        assert result.done_s is not None
        hours.append(result.done_s / 3600)
    assert hours[0] == pytest.approx(36_300 / 3600)
    assert hours[0] > hours[1] > hours[2] == pytest.approx((300 + 36_000 / 2.8) / 3600)


def test_spot_machines_come_before_those_on_demand_and_only_if_they_can_be_paid() -> None:
    job = PlannedJob(work_s=36_000, start_s=0, speeds=(1.0, 2.0), budget=100.0)
    strategy = FarandoleBudget(job)
    assert strategy.decide(moment(available=(2,))) == fleet(2), "two on demand would be as fast"
    assert strategy.decide(moment(available=(1,))) == fleet(1, on_demand=1)
    too_little = 100 - 30.0  # ten hours of one machine on demand cost 30.6
    assert strategy.decide(moment(available=(2,), dollars=too_little)) == fleet(2)
    assert strategy.decide(moment(available=(0,), dollars=too_little)) == fleet(0)
    assert strategy.decide(moment(available=(2,), dollars=100 - 0.1)) == fleet(1), "an interval costs 0.081"


def test_what_keeps_the_budget_certain_comes_before_what_is_cheaper_now() -> None:
    """A spot machine would use money that the on-demand machine needs if that one leaves and must start again."""
    job = PlannedJob(work_s=36_000, start_s=600, speeds=(1.0,), budget=100.0)
    spent = 100 - (36_000 * PRICE.on_demand / 3600 + 0.05)
    running = moment(available=(1,), fleet=fleet(0, on_demand=1), starts_s=(0,), dollars=spent)
    assert FarandoleBudget(job).decide(running) == fleet(0, on_demand=1)


def test_farandole_costs_less_than_what_restarts_where_machines_come_and_go() -> None:
    counts = tuple((0, 1, 2, 3, 2, 4, 1)[place // 5 % 7] for place in range(600))
    place = market(counts, gap_s=300)
    job = PlannedJob(work_s=300 * 600, start_s=240, deadline_s=place.duration_s, speeds=(1.0, 2.0, 3.0, 4.0))
    costs = {name: play(job, place, PRICE, strategy) for name, strategy in STRATEGIES.items()}
    assert all(costs[name].done_s is not None for name in SURE)
    assert costs["farandole, deadline"].dollars < min(costs[name].dollars for name in SURE[:3])


@pytest.mark.parametrize(
    ("running", "available", "wanted", "expected"),
    [
        ((0, 0), (3, 5), 4, (0, 4)),
        ((0, 0), (3, 5), 7, (2, 5)),
        ((2, 0), (3, 5), 4, (2, 2)),  # those that run stay
        ((2, 1), (2, 1), 9, (2, 1)),
        ((3, 2), (3, 4), 4, (2, 2)),  # where there is least room
        ((3, 2), (3, 5), 0, (0, 0)),
    ],
)
def test_spot_machines_of_several_zones(
    running: tuple[int, ...], available: tuple[int, ...], wanted: int, expected: tuple[int, ...]
) -> None:
    assert spread(moment(available=available, fleet=fleet(*running)), wanted) == expected


def test_all_machines_in_one_zone() -> None:
    assert in_one_zone(moment(available=(2, 3), fleet=fleet(0, 0)), 2) == (0, 2)
    assert in_one_zone(moment(available=(2, 3), fleet=fleet(2, 0)), 2) == (2, 0)
    assert in_one_zone(moment(available=(1, 1), fleet=fleet(0, 0)), 2) == (0, 0)


@pytest.mark.parametrize(
    ("running", "wanted", "expected"),
    [((0, 0), 2, (0, 2)), ((0, 0), 5, (2, 3)), ((2, 0), 3, (2, 1)), ((2, 2), 3, (1, 2))],
)
def test_machines_that_do_more_for_a_dollar_come_first_and_go_last(
    running: tuple[int, ...], wanted: int, expected: tuple[int, ...]
) -> None:
    types = (SpotType(speed=0.5, dollars=0.3), SpotType(speed=1.0, dollars=0.5))
    now = moment(available=(4, 3), fleet=fleet(*running), types=types)
    assert spread(now, wanted) == expected
    assert in_one_zone(replace(now, fleet=fleet(0, 0)), 3) == (0, 3)


def test_a_budget_pays_each_type_its_own_price() -> None:
    """An hour's budget for two machines at 0.3 and none at 0.9: only the cheap ones are had, and the rest waits."""
    types = (SpotType(speed=1.0, dollars=0.9), SpotType(speed=0.5, dollars=0.3))
    job = PlannedJob(work_s=360_000, start_s=60, budget=0.65 / 12, speeds=(1.0, 2.0, 3.0, 4.0))
    now = moment(available=(4, 3), fleet=fleet(0, 0), types=types, left_s=360_000)
    assert FarandoleBudget(job).decide(now) == fleet(0, 2)


def test_with_enough_money_the_fastest_machines_are_had_and_not_the_most() -> None:
    job = PlannedJob(work_s=36_000, start_s=60, budget=1000, speeds=(1.0, 2.0))
    now = moment(available=(2,), fleet=fleet(0), types=(SpotType(speed=0.1, dollars=0.01),))
    assert FarandoleBudget(job).decide(now) == fleet(0, on_demand=2)
