"""The account that a coordinator tells: that of all lines, also of those from before it began."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from farandole.control import run_folder
from farandole.control.run_folder import METRICS
from farandole.coordinator.rest import EVERY_S, READ_S, RunCost
from farandole.protocol import events
from farandole.protocol.coordinator.account import account
from farandole.protocol.coordinator.state import RunSettings
from farandole.protocol.cost import Prices
from farandole.protocol.events import WorkerTime
from farandole.protocol.metrics import as_written
from tests.support.metric_lines import an, step_line

PRICES = Prices(date="2026-11-01", pools={"local": 3600.0})


def told(worker: str, compute: float, **more: Any) -> bytes:
    spent = WorkerTime(host="h", pool="local", step=3, seconds={"start": 1.0, "compute": compute})
    return as_written(an(events.TimeSpentEvent, workers={worker: spent}, ended=(), **more))


def came(worker: str) -> bytes:
    return as_written(an(events.StartingEvent, worker=worker, host="h", time=1.0))


GONE = [came("w1"), told("w1", 5.0, time=7.0), as_written(an(events.LeftEvent, worker="w1", host="h", time=8.0))]


def spent(folder: Path, *lines: bytes, prices: Prices = PRICES) -> RunCost:
    folder.chmod(0o700)
    (folder / METRICS).write_bytes(b"".join(lines))
    return RunCost(RunSettings(run="r", prices=prices), folder)


def test_before_anything_is_told_nothing_is_known(tmp_path: Path) -> None:
    made = RunCost(RunSettings(run="r"), tmp_path)
    made.look(0.0)
    assert made.account is None


def test_it_is_that_of_the_lines_and_goes_on_with_them(tmp_path: Path) -> None:
    made = spent(tmp_path, *GONE, came("w2"), told("w2", 2.0, time=9.0))
    made.look(0.0)
    assert made.account is not None
    with (tmp_path / METRICS).open("rb") as file:
        whole = account("r", file, PRICES)
    assert (made.account.seconds, made.account.dollars) == (whole.seconds, whole.dollars)
    with (tmp_path / METRICS).open("ab") as file:
        file.write(told("w2", 20.0, time=30.0))
    made.look(READ_S / 2)
    made.look(READ_S)
    assert made.account.seconds["compute"] == 7.0, "sums are made now and then"
    made.look(EVERY_S + READ_S)
    assert made.account.seconds["compute"] == 25.0


def test_a_long_file_is_read_part_by_part_and_nothing_is_told_before_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "READ_BYTES", 2000)
    made = spent(
        tmp_path, *GONE, *(as_written(step_line(n)) for n in range(100)), came("w2"), told("w2", 2.0, time=9.0)
    )
    looks = 0
    while made.account is None:
        made.look(0.0)
        looks += 1
    assert looks > 5
    assert made.account.seconds["compute"] == 7.0


def test_unknown_stays_unknown_and_what_can_not_be_read_is_not_there(tmp_path: Path) -> None:
    made = spent(tmp_path, *GONE, prices=Prices())
    made.look(0.0)
    assert made.account is not None
    assert made.account.dollars is None
    (tmp_path / METRICS).unlink()
    (tmp_path / METRICS).mkdir()
    made.look(100.0)
    assert made.account is not None
