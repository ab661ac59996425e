"""The study of savings: the job from published figures, what a row says, and that the page has the results."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")

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
from farandole.market.comparison import BOUND, CHEAPEST
from farandole.market.strategies import STRATEGIES
from farandole.market.traces import MarketTrace
from tests.support.every import every

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


@every(TYPES)
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
    assert page.filled(text, page.read_rows()) == text
