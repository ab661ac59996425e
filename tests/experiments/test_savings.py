"""The study of savings: the job from published figures, what a row says, and that the page has the results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.savings import page
from experiments.savings.imagenet import (
    EIGHT,
    MANY,
    OURS,
    SINGLE,
    TYPES,
    MachineType,
    Spread,
    course,
    job_of,
    played,
    price_of,
    rows,
    spread,
)
from experiments.savings.laptop import PRICE, MachineTime, RunRule, account
from experiments.savings.trace_pool import counts_of
from farandole.market.comparison import BOUND, CHEAPEST
from farandole.market.play import PlannedJob, play
from farandole.market.strategies import STRATEGIES
from farandole.market.traces import MarketTrace, SpotMarket
from farandole.protocol.events import HostEvent, PricedEvent, StartingEvent, ViewEvent
from farandole.protocol.metrics import StepLine

RESTLESS = MarketTrace(name="restless", gap_s=300, counts=tuple((0, 12, 12, 3, 16)[n // 9 % 5] for n in range(200)))
NEVER = MarketTrace(name="never", gap_s=300, counts=(0,) * 100)


@pytest.mark.parametrize(
    ("kind", "machines", "images_per_s"), [(SINGLE, 8, 5_874), (EIGHT, 4, 19_500), (MANY, 32, 19_500)]
)
def test_the_job_has_the_published_throughputs(kind: MachineType, machines: int, images_per_s: float) -> None:
    job = job_of(kind)
    assert job.work_s / job.speed(machines) == pytest.approx(90 * 1_281_167 / images_per_s, rel=1e-3)
    assert job.deadline_s == pytest.approx(1.1 * (180 + 90 * 1_281_167 / 5_874), abs=1)
    assert price_of(kind).on_demand == pytest.approx(3.06 * kind.gpus)


@pytest.mark.parametrize("kind", TYPES)
def test_a_row_for_each_strategy(kind: MachineType) -> None:
    found = {row.strategy: row for row in rows(kind, RESTLESS, played(kind, RESTLESS, 4))}
    assert [*found] == [BOUND, CHEAPEST, *STRATEGIES]
    assert found[OURS].cost_saved == found[OURS].time_saved == Spread(mean=0.0, low=0.0, high=0.0)
    reference, ours = found["on demand"], found[OURS]
    assert reference.dollars is not None
    assert reference.cost_saved is not None
    assert ours.dollars is not None
    assert ours.missed == 0
    assert reference.cost_saved.mean == pytest.approx(1 - ours.dollars.mean / reference.dollars.mean), "always the same"
    assert reference.machines * kind.gpus == 8


def test_a_strategy_that_is_never_in_time_has_no_figures() -> None:
    found = {row.strategy: row for row in rows(SINGLE, NEVER, played(SINGLE, NEVER, 2))}
    without = found["spot, restarts"]
    assert (without.dollars, without.hours, without.cost_saved, without.missed) == (None, None, None, 1.0)


def test_a_spread() -> None:
    found = spread([float(n) for n in range(101)])
    assert found == Spread(mean=50.0, low=10.0, high=90.0)
    assert spread([]) is None


@pytest.mark.parametrize("strategy", ["on demand", "greedy", OURS])
def test_the_course_of_a_window(strategy: str) -> None:
    found = course(SINGLE, RESTLESS, 1.0, strategy)
    assert len({len(each) for each in (found.hours, found.spot, found.on_demand, found.available, found.progress)}) == 1
    assert found.progress == sorted(found.progress)
    assert found.progress[-1] == pytest.approx(1.0)
    assert all(spot <= there for spot, there in zip(found.spot, found.available, strict=True))


def test_the_page_has_the_results() -> None:
    text = page.PAGE.read_text()
    assert page.filled(text) == text


# --- a real run beside the simulation ---------------------------------------------------------------------------------


def step(number: int, when: float) -> StepLine:
    return StepLine(
        step=number, epoch=0, samples=96, loss=None, seconds=1.0, samples_per_s=None, view=1, workers=1, time=when,
        total=9, factor=None,
    )  # fmt: skip


def view(*members: str, when: float) -> ViewEvent:
    return ViewEvent(view=1, members=members, round=0, step=0, cause="", time=when)


def priced(host: str, pool: str, since: float) -> PricedEvent:
    return PricedEvent(pool=pool, host=host, dollars=1.0, since=since, day="2023-02-01", time=since)


def test_the_account_of_a_run() -> None:
    """Machine a is taken back and comes again, b is there to the end, c is requested and never computes."""
    lines = [
        priced("a", "spot", 100.0),
        priced("b", "reserve", 105.0),
        StartingEvent(worker="w1", host="a", pid=1, time=108.0),
        view("w1", when=110.0),
        StartingEvent(worker="reserve-w1", host="b", pid=2, time=112.0),
        view("w1", "reserve-w1", when=115.0),
        step(0, 116.0),
        view("reserve-w1", when=120.0),
        HostEvent(pool="spot", host="a", state="gone", time=121.0),
        priced("a", "spot", 130.0),
        StartingEvent(worker="w2", host="a", pid=3, time=136.0),
        view("reserve-w1", "w2", when=138.0),
        priced("c", "spot", 146.0),
        step(1, 150.0),
        priced("d", "spot", 151.0),
        HostEvent(pool="spot", host="a", state="gone", time=155.0),
    ]
    figures, start_s = account(lines)
    assert figures.dollars == pytest.approx((45 * 0.97 + 45 * 3.06) / 3600)
    assert figures == MachineTime(
        time_s=50.0, spot_s=21.0 + 20.0 + 4.0, on_demand_s=45.0, start_s=10.0 + 10.0 + 8.0 + 4.0, compute_s=90.0 - 32.0,
        dollars=figures.dollars,
    )  # fmt: skip
    assert start_s == pytest.approx((10 + 10 + 8) / 3)


def test_machines_of_a_trace_in_proportion(tmp_path: Path) -> None:
    path = tmp_path / "zone.json"
    path.write_text(json.dumps({"metadata": {"gap_seconds": 300}, "data": [16, 0, 3, 4, 9, 15]}))
    assert counts_of({"machines": "4", "trace": str(path), "first": "1"}) == [0, 0, 1, 2, 3]
    assert counts_of({"machines": "2"}) == [2]


def test_the_rule_of_a_run_in_the_simulation() -> None:
    """Spot machines are there for 100 of 300 s: the rest of the work is done on demand, in time."""
    place = SpotMarket(zones=(MarketTrace(name="short", gap_s=1, counts=(2,) * 100 + (0,) * 200),))
    job = PlannedJob(work_s=300, start_s=10, deadline_s=300, speeds=(1.0, 2.0, 3.0, 4.0))
    result = play(job, place, PRICE, RunRule)
    assert result.done_s is not None
    assert 200 < result.done_s <= 300
    assert result.paid_s["spot"] == pytest.approx(200, abs=5)
    assert result.paid_s["on demand"] == pytest.approx(300 - 180 + 2 * 10, rel=0.1)


def test_the_run_was_as_simulated() -> None:
    for result in page.read_laptop():
        for name in page.FIGURES:
            assert getattr(result.run, name) == pytest.approx(getattr(result.simulated, name), rel=0.1)
