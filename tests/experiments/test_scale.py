"""The study of scale: runs with every message, goodput by events, and that the page has the results."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from experiments.scale import history, page
from experiments.scale.events import (
    Failing,
    elastic_goodput,
    failure_times,
    goodput_row,
    restarting_goodput,
    speed,
)
from experiments.scale.machines import STEP_S, StepTimes, changes, failures
from experiments.tables import filled
from farandole.protocol.view import View
from farandole.simulate.replica import SHARDS

SMALL = 6


def test_a_run_with_changes_says_how_long_each_was() -> None:
    before = SHARDS["train"]
    row = changes(SMALL)
    assert SHARDS["train"] == before
    assert row.workers == SMALL
    assert row.failures == 2, "killed, and silent"
    assert set(row.pauses_s) == {"killed", "silent", "notice", "join"}
    assert row.step_s == pytest.approx(STEP_S, rel=0.2)
    assert 0 < row.pauses_s["killed"] < row.pauses_s["silent"] < 5.0, (
        "a silence is noticed later than a closed connection"
    )
    assert abs(row.pauses_s["notice"]) < 0.3
    assert abs(row.pauses_s["join"]) < 0.3
    assert row.peers == SMALL - 1
    assert row.sent >= row.peers
    assert row.heartbeats_per_s > SMALL
    assert row.others > 0
    assert row.coordinator_ms > 0
    assert 0.5 < row.goodput < 1


def test_workers_of_one_host_send_to_few_others() -> None:
    row = changes(16, kinds=())
    assert row.peers == 8, "seven of its host, and one of the other"
    assert row.failures == 0
    assert row.goodput > 0.95


@pytest.mark.long
def test_a_history_comes_to_the_same_account_at_both_levels() -> None:
    before = SHARDS["train"]
    [row] = history.rows([6], intervals=6, steps=500)
    assert SHARDS["train"] == before
    assert row.lost == 3
    messages, events = row.messages, row.events
    assert messages.compute == events.compute == 500 * history.MICRO_BATCHES * history.SHARD_S
    assert 0 < messages.again < 3 * history.MICRO_BATCHES * history.SHARD_S, "each loss costs less than a step"
    assert messages.done_s == pytest.approx(events.done_s, rel=0.03)
    assert messages.paid_s == pytest.approx(events.paid_s, rel=0.03)
    for name in ("start", "wait"):
        assert getattr(messages, name) == pytest.approx(getattr(events, name), rel=0.15, abs=0.02 * events.paid_s)


def test_machines_that_are_taken_back_before_they_compute_are_paid_as_starts() -> None:
    taken = history.History((1,), 20, seed=1)
    taken.world.at(5.0, taken.set_count, 3)
    taken.world.at(10.0, taken.set_count, 1)
    account = taken.play()
    assert [machine.worker is None for machine in taken.machines] == [True, True, False]
    assert taken.lost == 2
    assert account.start == pytest.approx(10 + 5 + history.START_S, abs=1.0)


def test_both_levels_come_to_the_same_goodput() -> None:
    row = page.both_levels(SMALL, 12.0, 80)
    assert row.failures >= 3
    assert row.events == pytest.approx(row.messages, abs=0.03)
    assert failures(SMALL, 1e6, 10).failures == 0


def test_a_join_is_the_beginning_of_a_view_with_a_new_member() -> None:
    times = StepTimes()
    for now, members in enumerate((("a", "b"), ("a", "b"), ("a",), ("a", "c"), ("c",))):
        worker: Any = SimpleNamespace(world=SimpleNamespace(now=float(now)))
        for _ in members:  # each of them begins it
            times.switched(worker, View(number=now, members=members, group=1), 0)
    assert times.joins == [0.0, 3.0]


def test_times_of_losses() -> None:
    times = failure_times(10.0, 1000.0, 1)
    assert times == sorted(times)
    assert len(times) == pytest.approx(100, abs=30)
    assert failure_times(10.0, 500.0, 1) == [when for when in times if when < 500]


# --- events -----------------------------------------------------------------------------------------------------------

JOB = Failing(workers=8, shards_of_worker=4, lost=1, start_s=100.0, pause_s=2.0)


def test_the_speed_is_that_of_the_worker_with_most_micro_batches() -> None:
    assert [speed(JOB, missing) for missing in (0, 1, 4, 8)] == [1.0, 0.8, 0.5, 0.0]


def test_a_failure_costs_its_pause_and_the_machine_until_it_is_replaced() -> None:
    assert elastic_goodput(JOB, [], 1000.0) == 1.0
    assert elastic_goodput(JOB, [500.0], 1000.0) == pytest.approx(1 - (2.0 + 100 * 0.2) / 1000)
    assert elastic_goodput(JOB, [950.0], 1000.0) == pytest.approx(1 - (2.0 + 50 * 0.2) / 1000), "not replaced any more"
    two = elastic_goodput(JOB, [500.0, 550.0], 1000.0)
    assert two == pytest.approx(1 - (2.0 + 50 * 0.2 + 2.0 * 0.8 + 50 * (1 - 4 / 6) + 50 * 0.2) / 1000)


def test_a_restart_costs_its_time_and_the_work_since_the_checkpoint() -> None:
    """The interval is 100 s: sqrt(2 * 5 * 1000)."""
    assert restarting_goodput([], 1050.0, 1000.0, 60.0, 5.0) == pytest.approx(1000 / 1050)
    one = restarting_goodput([150.0], 1050.0, 1000.0, 60.0, 5.0)
    assert one == pytest.approx((100 + 8 * 100) / 1050), "one whole interval, then 840 s: eight, with their checkpoints"
    while_restarting = restarting_goodput([150.0, 180.0], 1050.0, 1000.0, 60.0, 5.0)
    assert while_restarting == pytest.approx((100 + 700 + 75) / 1050)


def test_goodput_rises_with_the_time_between_failures() -> None:
    rows = [goodput_row(Failing(workers=4_096, lost=8), mean_s, 300 * mean_s) for mean_s in (600.0, 3600.0, 86_400.0)]
    for name in ("elastic", "restart_3m", "restart_10m"):
        found = [getattr(row, name) for row in rows]
        assert found == sorted(found)
        assert 0 < found[0] < found[-1] <= 1
    assert all(row.elastic > row.restart_3m > row.restart_10m for row in rows)


def test_failures_are_so_often_in_the_mean() -> None:
    assert len(failure_times(100.0, 1e6, 3)) == pytest.approx(10_000, rel=0.05)


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_has_the_tables_of_the_results() -> None:
    text = page.PAGE.read_text()
    assert filled(text, page.tables()) == text
    for name, table in page.tables().items():
        assert len(table.splitlines()) > 2, name
        assert table in text
