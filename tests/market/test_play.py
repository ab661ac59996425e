"""What a job comes to, computed by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from farandole.market.play import Machines, PlannedJob, Played, Price, play
from tests.support.market import fleet, market, scripted, typed

PRICE = Price(on_demand=36.0, spot=3.6)  # a cent and a tenth of it a second
N, S, SS, D = fleet(0), fleet(1), fleet(2), fleet(0, on_demand=1)


def played(
    counts: Sequence[int], *fleets: Machines, restarts: bool = False, **job: float | tuple[float, ...]
) -> Played:
    many = {"work_s": 10**6, "start_s": 40, "speeds": (1.0, 2.0, 3.0), **job}
    return play(PlannedJob(**many), market(counts), PRICE, scripted(*fleets, restarts=restarts))  # type: ignore[arg-type]


def test_a_machine_is_paid_for_from_its_request_and_until_the_job_is_done() -> None:
    result = played([1, 1, 1], S, S, S, work_s=150)
    assert result.done_s == 190
    assert result.dollars == pytest.approx(0.19)
    assert result.seconds == pytest.approx({"start": 40, "compute": 150, "save": 0, "again": 0})
    assert result.paid_s == {"spot": 190, "on demand": 0}
    assert result.done == pytest.approx([60, 150])


def test_others_go_on_while_a_machine_starts() -> None:
    result = played([2, 2], S, SS)
    assert result.done == pytest.approx([60, 60 + 100 + 60])
    assert result.goodput == pytest.approx(220 / 300)


def test_a_job_that_restarts_waits_for_every_machine_that_comes_or_goes() -> None:
    result = played([2, 2, 2], S, SS, S, restarts=True)
    assert result.done == pytest.approx([60, 60 + 120, 60 + 120 + 60])
    assert result.seconds["start"] == 40 + 80 + 40


def test_a_start_may_take_longer_than_an_interval() -> None:
    assert played([1, 1, 1], S, S, S, start_s=250).done == pytest.approx([0, 0, 50])


def test_the_market_takes_back_those_that_compute() -> None:
    result = played([1, 2, 1], S, SS, S, start_s=150)
    assert result.lost == 1
    assert result.done == pytest.approx([0, 50, 50 + 50]), "the second one began 100 s before, and goes on to start"


def test_a_job_that_restarts_loses_the_work_since_its_checkpoint_with_a_machine() -> None:
    result = played([1, 1, 0, 1], S, S, N, S, restarts=True, checkpoint_s=100)
    assert result.lost == 1
    assert result.done == pytest.approx([60, 160, 100, 160])
    assert result.seconds == pytest.approx({"start": 80, "compute": 160, "save": 0, "again": 60})


def test_nobody_computes_while_a_checkpoint_is_saved() -> None:
    result = played([1, 1], S, S, restarts=True, checkpoint_s=30, save_s=10)
    assert result.done == pytest.approx([30 + 20, 50 + 10 + 30 + 30])
    assert result.seconds == pytest.approx({"start": 40, "compute": 120, "save": 40, "again": 0})


def test_a_checkpoint_that_is_not_whole_saves_nothing() -> None:
    result = played([1, 0], S, N, restarts=True, start_s=60, checkpoint_s=30, save_s=20)
    assert result.done == pytest.approx([30, 0])
    assert result.seconds == pytest.approx({"start": 60, "compute": 0, "save": 10, "again": 30})


@pytest.mark.parametrize(("work_s", "done_s"), [(30, 70), (31, 81), (60, 110), (61, 121)])
def test_no_checkpoint_is_saved_when_the_job_is_done(work_s: int, done_s: int) -> None:
    assert played([1, 1], S, S, restarts=True, checkpoint_s=30, save_s=10, work_s=work_s).done_s == done_s


def test_checkpoints_are_saved_on_spot_machines_of_a_job_that_restarts_only() -> None:
    for fleets, restarts in (((D, D), True), ((S, S), False)):
        result = played([1, 1], *fleets, restarts=restarts, checkpoint_s=30, save_s=10)
        assert result.seconds == pytest.approx({"start": 40, "compute": 160, "save": 0, "again": 0})


def test_a_machine_that_is_given_back_costs_no_work() -> None:
    assert played([1, 1, 1], S, N, S, restarts=True, checkpoint_s=100).done == pytest.approx([60, 60, 120])


def test_the_speed_is_that_of_the_machines_that_compute() -> None:
    result = played([2], fleet(1, on_demand=1), speeds=(1.0, 1.5))
    assert result.done == pytest.approx([90])
    assert result.dollars == pytest.approx(1.1)


def test_a_job_that_is_not_done_with_the_trace_has_no_end() -> None:
    assert played([1], S).done_s is None
    assert played([0], D).paid_s == {"spot": 0, "on demand": 100}


def test_machines_of_one_zone_do_not_become_those_of_another() -> None:
    job = PlannedJob(work_s=10**6, start_s=40, speeds=(1.0, 2.0))
    zones = market([1, 0, 1], [0, 1, 1])
    result = play(job, zones, PRICE, scripted(fleet(1, 0), fleet(0, 1), fleet(1, 1)))
    assert result.lost == 1
    assert result.done == pytest.approx([60, 60 + 60, 120 + 100 + 60])


def test_a_machine_of_another_type_does_its_part_and_has_its_price() -> None:
    """One of half the speed computes for 100 s, beside one of the usual speed from then on: 50 + 150 of 200."""
    job = PlannedJob(work_s=200, start_s=0, speeds=(1.0, 2.0))
    place = typed(market((1, 1, 1), (0, 1, 1)), (0.5, 0.3), (1.0, None))
    result = play(job, place, PRICE, scripted(fleet(1, 0), fleet(1, 1), fleet(1, 1)))
    assert result.done_s == 200
    assert result.dollars == pytest.approx((200 * 0.3 + 100 * PRICE.spot) / 3600)
    assert result.seconds["compute"] == 300


def test_speeds_between_and_beyond_the_known_numbers_of_machines() -> None:
    job = PlannedJob(work_s=1, start_s=0, speeds=(1.0, 1.8))
    assert [job.speed(machines) for machines in (0, 0.5, 1, 1.5, 2, 3)] == pytest.approx([0, 0.5, 1, 1.4, 1.8, 2.6])


def test_a_job_that_restarts_loses_what_machines_of_their_type_have_done() -> None:
    job = PlannedJob(work_s=1000, start_s=0, checkpoint_s=1000)
    place = typed(market((1, 0)), (0.5, None))
    result = play(job, place, PRICE, scripted(fleet(1), fleet(0), restarts=True))
    assert result.done == [50, 0]
