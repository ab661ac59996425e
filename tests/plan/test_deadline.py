"""On-demand machines for a deadline."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.plan.deadline import burst_of, fewest_in_time, fewest_on_demand, time_for, work_until

LINEAR = (1.0, 2.0, 3.0, 4.0)


@pytest.mark.parametrize(
    ("work_s", "time_s", "fewest"),
    [(900, 1000, 1), (901, 1000, 2), (1800, 1000, 2), (3600, 1000, 4), (3601, 1000, None)],
)
def test_the_fewest_that_are_in_time(work_s: float, time_s: float, fewest: int | None) -> None:
    assert fewest_in_time(work_s, time_s, 100, LINEAR) == fewest
    assert burst_of(work_s, time_s, 100, LINEAR) == min(2 * (fewest or 4), 4)


@pytest.mark.parametrize(
    ("speeds", "burst"),
    [((1.0, 2.0, 3.0, 4.0), 2), ((1.0, 1.95, 2.6, 3.0), 2), ((1.0, 1.9, 2.6, 3.0), 1), ((1.0, 0.5, 0.5), 1)],
)
def test_more_machines_that_do_less_work_each_are_not_waited_for(speeds: tuple[float, ...], burst: int) -> None:
    assert burst_of(900, 1000, 100, speeds) == burst


@pytest.mark.parametrize(
    ("left_s", "running_s", "fewest"),
    [
        (1_000, (), 0),  # two of them from 300 + 100 s on: 1,200 s
        (1_200, (), 0),
        (1_201, (), 1),  # one from 100 s on: 900 + 600 s
        (1_501, (), 2),
        (9_999, (), 2),
        (1_600, (0,), 1),  # it computes already: 1,000 + 600 s
        (1_580, (20,), 1),
        (1_581, (20,), 2),
        (1_201, (0, 0), 1),  # the second is not needed
    ],
)
def test_the_fewest_on_demand(left_s: float, running_s: tuple[int, ...], fewest: int) -> None:
    assert fewest_on_demand(left_s, 1_000, 300, 100, running_s, 2, LINEAR) == fewest


@given(
    work_s=st.integers(1, 10_000), starts_s=st.lists(st.integers(0, 900), min_size=1, max_size=4).map(sorted),
    speeds=st.sampled_from((LINEAR, (1.0, 1.5, 1.8, 1.9))),
)  # fmt: skip
def test_the_time_for_work_is_when_that_work_is_done(
    work_s: int, starts_s: list[int], speeds: tuple[float, ...]
) -> None:
    time_s = time_for(work_s, starts_s, speeds)
    begun = [start for start in starts_s if start < time_s]
    assert work_until(time_s, begun, speeds) == pytest.approx(work_s)


@given(
    work=st.integers(1, 100), start_s=st.integers(0, 500), speeds=st.sampled_from((LINEAR, (1.0, 1.5, 1.8, 1.9))),
    gap_s=st.sampled_from((60, 100, 300)),
)  # fmt: skip
def test_without_any_spot_machine_the_deadline_is_met(
    work: int, start_s: int, speeds: tuple[float, ...], gap_s: int
) -> None:
    time_s = 6_000
    left_s = work / 100 * speeds[-1] * (time_s - start_s)
    burst, starts = 4, list[float]()
    for now in range(0, time_s, gap_s):
        count = fewest_on_demand(left_s, time_s - now, gap_s, start_s, sorted(starts), burst, speeds)
        starts = [*sorted(starts)[:count], *[float(start_s)] * (count - len(starts))]
        for second in range(gap_s):
            running = sum(start <= second for start in starts)
            left_s -= speeds[running - 1] if running else 0.0
        starts = [max(start - gap_s, 0.0) for start in starts]
    assert left_s <= 1e-6
