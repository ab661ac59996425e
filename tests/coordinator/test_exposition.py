"""What Prometheus reads of a run: names, units, values; what is not known is not there; the dashboard's queries."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip(
    "prometheus_client", reason="prometheus_client is not installed: pip install 'farandole[prometheus]'"
)

from prometheus_client.parser import text_string_to_metric_families

from farandole.control.status import AccountStatus, CoordinatorStatus, Stalled, Status, ViewStatus, WorkerStatus
from farandole.coordinator import prometheus as expositions
from farandole.coordinator.prometheus import MOST_LOGGED, Exposition
from farandole.protocol import events
from farandole.protocol.metrics import LogLine
from tests.support.metric_lines import an, step_line

ROOT = Path(__file__).parents[2]
NASTY = 'a "quoted" \\ name <b> {x="y"} 训练\u00a0#'
STATUS = Status(
    run="r", coordinator=CoordinatorStatus(pid=9, address="http://127.0.0.1:1"), view=ViewStatus(number=3, size=2),
    step=57, epoch=2, wanted=3, minimum=1, maximum=None, state="training", reason="", code=None,
    workers=(
        WorkerStatus(id="w1", host="h", pid=1, pool="", rank=0, state="member", speed=1.0, shards=5, of=8),
        WorkerStatus(id=NASTY, host=NASTY, pid=2, pool="", rank=1, state="member", speed=0.5, shards=3, of=8),
        WorkerStatus(id="w3", host="h", pid=3, pool="", rank=None, state="starting"),
    ),
    samples_per_s=1234.5, loss=0.5, total=100,
    account=AccountStatus(
        seconds={"compute": 60.0, "exchange": 20.0, "data": 0.0}, goodput=0.75, worker_hours=80 / 3600, dollars=1.5
    ),
)  # fmt: skip


def told(status: Status = STATUS) -> Exposition:
    """One that has been told of some of everything."""
    exposition = Exposition(lambda: status)
    exposition.take(
        step_line(56, samples=64, skipped=1, loss=0.5, seconds=0.2, learning_rate=0.1, factor=2.0, time=99.0)
    )
    exposition.take(LogLine(step=56, fields={"accuracy": 0.75, NASTY: 1, "note": "text", "best": True, "lost": None}))
    exposition.take(an(events.LostEvent, worker=NASTY))
    exposition.take(an(events.CheckpointEvent, step=50, bytes=1000, seconds=1.5, copy_ms=20.0, time=98.0))
    return exposition


def samples(exposition: Exposition) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """By name and labels, as Prometheus' own parser of this language reads them."""
    text = exposition.text().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(exposition: Exposition, name: str, /, **labels: str) -> float | None:
    return samples(exposition).get((name, tuple(sorted(labels.items()))))


def test_the_account_is_there_and_dollars_only_where_they_are_known() -> None:
    page = told()
    assert value(page, "farandole_worker_seconds_total", **{"class": "compute"}) == 60.0
    assert value(page, "farandole_worker_seconds_total", **{"class": "data"}) == 0.0
    assert value(page, "farandole_goodput_ratio") == 0.75
    assert value(page, "farandole_cost_dollars") == 1.5
    assert STATUS.account is not None
    unpriced = msgspec.structs.replace(STATUS.account, dollars=None)
    assert value(told(msgspec.structs.replace(STATUS, account=unpriced)), "farandole_cost_dollars") is None
    early = told(msgspec.structs.replace(STATUS, account=None))
    assert value(early, "farandole_goodput_ratio") is None
    assert not [name for name, _ in samples(early) if name == "farandole_worker_seconds_total"]


def test_it_says_how_the_run_stands_and_what_it_has_counted() -> None:
    page = told()
    for name, expected in {
        "farandole_step": 57, "farandole_steps_planned": 100, "farandole_epoch": 2, "farandole_loss": 0.5,
        "farandole_learning_rate": 0.1, "farandole_learning_rate_factor": 2, "farandole_samples_per_second": 1234.5,
        "farandole_steps_total": 1, "farandole_samples_total": 63, "farandole_samples_skipped_total": 1,
        "farandole_step_duration_seconds_sum": 0.2, "farandole_step_duration_seconds_count": 1,
        "farandole_view": 3, "farandole_view_workers": 2, "farandole_workers_wanted": 3, "farandole_stalled_seconds": 0,
        "farandole_last_step_timestamp_seconds": 99, "farandole_checkpoint_size_bytes": 1000,
        "farandole_checkpoint_copy_seconds": 0.02, "farandole_checkpoint_step": 50,
    }.items():  # fmt: skip
        assert value(page, name) == expected, name
    assert value(page, "farandole_run_state", state="training") == 1
    assert value(page, "farandole_run_state", state="stalled") == 0
    assert value(page, "farandole_events_total", event="lost") == 1
    assert value(page, "farandole_events_total", event="stalled") == 0, "so that the first is an increase"
    assert value(page, "farandole_workers", state="member") == 2
    assert value(page, "farandole_worker_speed_ratio", worker=NASTY, host=NASTY) == 0.5
    assert value(page, "farandole_logged", name="accuracy") == 0.75
    assert value(page, "farandole_logged", name=NASTY) == 1
    assert math.isnan(value(page, "farandole_logged", name="lost") or 0)
    assert value(page, "farandole_logged", name="note") is None, "a text is no metric"


def test_what_is_not_known_is_not_there() -> None:
    page = Exposition(lambda: msgspec.structs.replace(STATUS, total=None, samples_per_s=None, workers=()))
    names = {name for name, _ in samples(page)}
    assert not names & {
        "farandole_steps_planned", "farandole_samples_per_second", "farandole_loss", "farandole_learning_rate",
        "farandole_worker_speed_ratio", "farandole_checkpoint_step", "farandole_last_step_timestamp_seconds",
    }  # fmt: skip


def test_a_loss_that_is_not_finite_is_no_number() -> None:
    page = told()
    page.take(msgspec.structs.replace(step_line(57), loss=None))
    assert math.isnan(value(page, "farandole_loss") or 0)


def test_a_stall_is_seen() -> None:
    status = msgspec.structs.replace(STATUS, state="stalled", stalled=Stalled(seconds=12.5, workers=("w1",)))
    assert value(told(status), "farandole_stalled_seconds") == 12.5
    assert value(told(status), "farandole_run_state", state="stalled") == 1


def test_the_names_a_script_logs_are_bounded() -> None:
    page = told()
    for number in range(3 * MOST_LOGGED):
        page.take(LogLine(step=1, fields={f"name {number}": number}))
    page.take(LogLine(step=2, fields={"accuracy": 0.9}))
    assert sum(name == "farandole_logged" for name, _ in samples(page)) == MOST_LOGGED
    assert value(page, "farandole_logged", name="accuracy") == 0.9


def test_who_reads_often_gets_what_the_one_before_got() -> None:
    asked, now = [0], [100.0]

    def status() -> Status:
        asked[0] += 1
        return STATUS

    page = Exposition(status, clock=lambda: now[0])
    for _ in range(10):
        page.text()
    assert asked == [1]
    now[0] += expositions.CACHED_S
    page.text()
    assert asked == [2]


def names() -> set[str]:
    """Of all series that a run can have."""
    found = {name for name, _ in samples(told())}
    assert all(re.fullmatch(r"farandole_[a-z_]+", name) for name in found)
    return found


def test_names_are_as_prometheus_wants_them() -> None:
    kinds = {family.name: family.type for family in text_string_to_metric_families(told().text().decode())}
    for name, kind in kinds.items():
        assert kind in ("gauge", "counter", "histogram"), name
        assert not re.search(r"(_ms|_us|_percent|_count|_mb)$", name), f"{name}: base units"
    assert not {name for name in names() if name.endswith("_created")}


def queries(board: Any) -> list[str]:
    if isinstance(board, dict):
        here = [board[key] for key in ("expr", "query") if isinstance(board.get(key), str)]
        return here + [query for each in board.values() for query in queries(each)]
    return [query for each in board for query in queries(each)] if isinstance(board, list) else []


def test_the_dashboard_asks_for_nothing_that_is_not_there() -> None:
    asked = {name for query in queries(json.loads((ROOT / "docs" / "grafana.json").read_text()))
             for name in re.findall(r"farandole_\w+", query)}  # fmt: skip
    assert len(asked) > 15
    assert asked <= names()
    labels = {label for name, found in samples(told()) for label, _ in found}
    written = (ROOT / "docs" / "grafana.json").read_text()
    assert set(re.findall(r"\{\{(\w+)\}\}", written)) <= labels


def test_the_events_that_the_dashboard_names_exist() -> None:
    written = (ROOT / "docs" / "grafana.json").read_text()
    [named] = re.findall(r'event=~\\"([^"\\]+)\\"', written)
    known = {labels[0][1] for name, labels in samples(told()) if name == "farandole_events_total"}
    assert set(named.split("|")) <= known


def test_each_metric_has_a_help_text() -> None:
    """docs/observing.md refers to these texts and does not list the metrics."""
    families = list(text_string_to_metric_families(told().text().decode()))
    assert families
    assert not [family.name for family in families if not family.documentation]


def test_metrics_that_the_page_names_exist() -> None:
    page = (ROOT / "docs" / "observing.md").read_text()
    named = set(re.findall(r"farandole_\w+", page))
    assert named
    assert named <= names()
