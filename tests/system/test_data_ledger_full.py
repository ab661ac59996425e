"""A ledger that can't be written holds nobody up, is told about once, and is never counted by."""

from __future__ import annotations

import errno
import os
from collections import Counter
from pathlib import Path

import pytest

from farandole.data.ledger import Ledger, count
from farandole.errors import LedgerIncomplete
from tests.support.disks import fill, small_disk

pytestmark = [pytest.mark.processes]


def take(ledger: Ledger, steps: range) -> None:
    for step in steps:
        ledger.computed(epoch=0, step=step, shard=0, samples=list(range(step * 50, step * 50 + 50)))
        ledger.committed(epoch=0, step=step, shards={0: ledger.path.stem})


@pytest.mark.failure(
    "Data and loader processes",
    "a ledger from which samples are counted could not be written completely",
    seen="`LedgerError`, with the number of missing records",
    outcome="no wrong count is shown",
)
@pytest.mark.world
def test_what_is_lost_is_told_once_and_the_ledger_says_that_it_is_incomplete(tmp_path: Path) -> None:
    told: list[str] = []
    with small_disk(tmp_path / "disk", "1m") as disk:
        ledger = Ledger(disk / "ledger" / "w1.jsonl", told.append)
        take(ledger, range(3))
        assert count(disk / "ledger").total() == 150
        full = fill(disk)
        take(ledger, range(3, 100))
        assert told == [f"{ledger.path}: {os.strerror(errno.ENOSPC)}"]
        assert ledger.lost_records > 0
        with pytest.raises(LedgerIncomplete, match=rf"\b{ledger.lost_records}\b"):
            count(disk / "ledger")
        lost = ledger.lost_records
        full.unlink()
        take(ledger, range(100, 103))
        assert ledger.lost_records == lost, "there is room again"
        with pytest.raises(LedgerIncomplete, match=rf"\b{lost}\b"):
            count(disk / "ledger")
        assert all(line.startswith(b"{") for line in ledger.path.read_bytes().splitlines()), "nothing is torn"
        ledger.close()


@pytest.mark.failure(
    "Data and loader processes", "a ledger from which samples are counted could not be written completely"
)
@pytest.mark.world
def test_a_disk_that_is_full_from_the_start(tmp_path: Path) -> None:
    told: list[str] = []
    with small_disk(tmp_path / "disk", "1m") as disk:
        disk.chmod(0o700)  # as a run's folder has it
        full = fill(disk)
        ledger = Ledger(disk / "w1.jsonl", told.append)
        take(ledger, range(2))
        assert (len(told), ledger.lost_records) == (1, 4)
        full.unlink()
        take(ledger, range(2, 4))
        with pytest.raises(LedgerIncomplete, match=r"\b4\b"):
            count(disk)
        ledger.close()


def test_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    (tmp_path / "ledger").write_text("a file in its place")
    ledger = Ledger(tmp_path / "ledger" / "w1.jsonl")
    take(ledger, range(1))
    assert ledger.lost_records == 2
    os.unlink(tmp_path / "ledger")
    take(ledger, range(1, 2))
    with pytest.raises(LedgerIncomplete, match=r"\b2\b"):
        count(tmp_path / "ledger")
    ledger.close()


def test_a_ledger_from_before_there_was_a_first_line_still_counts(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "w1.jsonl")
    take(ledger, range(2))
    ledger.close()
    ledger.path.write_bytes(ledger.path.read_bytes().partition(b"\n")[2])
    assert count(tmp_path) == Counter({(0, sample): 1 for sample in range(100)})
