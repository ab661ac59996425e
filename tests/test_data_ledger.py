"""The ledger counts what counted, and says so when workers disagree."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from farandole.data.ledger import Ledger, count
from farandole.errors import LedgerError, UsageError


def write_two_steps(folder: Path) -> None:
    """Workers a and b; in step 1, b computed shard 1 and was lost, so a computed it again and a's counted."""
    a, b = Ledger(folder / "a.jsonl"), Ledger(folder / "b.jsonl")
    a.computed(epoch=0, step=0, shard=0, samples=[4, 2])
    b.computed(epoch=0, step=0, shard=1, samples=[1, 3])
    for ledger in (a, b):
        ledger.committed(epoch=0, step=0, shards={0: "a", 1: "b"})
    a.computed(epoch=0, step=1, shard=0, samples=[0, 5])
    b.computed(epoch=0, step=1, shard=1, samples=[6])
    a.computed(epoch=0, step=1, shard=1, samples=[6])
    a.committed(epoch=0, step=1, shards={0: "a", 1: "a"})
    a.close()
    b.close()


def test_each_committed_sample_counts_once(tmp_path: Path) -> None:
    write_two_steps(tmp_path)
    assert count(tmp_path) == Counter({(0, sample): 1 for sample in range(7)})


def test_what_was_computed_and_not_committed_does_not_count(tmp_path: Path) -> None:
    write_two_steps(tmp_path)
    Ledger(tmp_path / "c.jsonl").computed(epoch=0, step=2, shard=0, samples=[0, 1, 2])
    assert count(tmp_path).total() == 7


def test_a_sample_used_twice_shows_as_two(tmp_path: Path) -> None:
    write_two_steps(tmp_path)
    c = Ledger(tmp_path / "c.jsonl")
    c.computed(epoch=0, step=2, shard=0, samples=[6])
    c.committed(epoch=0, step=2, shards={0: "c"})
    assert count(tmp_path)[0, 6] == 2


def test_epochs_are_counted_apart(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "a.jsonl")
    for epoch in range(3):
        ledger.computed(epoch=epoch, step=epoch, shard=0, samples=[9])
        ledger.committed(epoch=epoch, step=epoch, shards={0: "a"})
    assert count(tmp_path) == Counter({(0, 9): 1, (1, 9): 1, (2, 9): 1})


@pytest.mark.parametrize(
    ("worker", "shards", "difference"),
    [
        ("c", {0: "a", 1: "a"}, "epoch 0, step 0, shard 1: a counted b's, c counted a's"),
        ("c", {0: "a"}, "epoch 0, step 0, shard 1: a counted b's, c counted nobody's"),
        ("c", {0: "a", 1: "b", 2: "c"}, "epoch 0, step 0, shard 2: a counted nobody's, c counted c's"),
        ("b", {0: "b", 1: "b"}, "epoch 0, step 0, shard 0: a counted a's, b counted b's"),
    ],
)
def test_committed_records_must_agree(tmp_path: Path, worker: str, shards: dict[int, str], difference: str) -> None:
    write_two_steps(tmp_path)
    Ledger(tmp_path / f"{worker}.jsonl").committed(epoch=0, step=0, shards=shards)
    with pytest.raises(LedgerError, match=difference):
        count(tmp_path)


def test_a_computation_that_counted_must_be_written_down(tmp_path: Path) -> None:
    write_two_steps(tmp_path)
    Ledger(tmp_path / "a.jsonl").committed(epoch=0, step=2, shards={0: "a", 1: "ghost"})
    Ledger(tmp_path / "a.jsonl").computed(epoch=0, step=2, shard=0, samples=[])
    with pytest.raises(LedgerError, match="step 2, shard 1: a counted ghost's, which wrote down none"):
        count(tmp_path)


def test_a_shard_computed_twice_must_be_the_same(tmp_path: Path) -> None:
    write_two_steps(tmp_path)
    again = Ledger(tmp_path / "a.jsonl")
    again.computed(epoch=0, step=0, shard=0, samples=[4, 2])
    assert count(tmp_path)[0, 4] == 1
    again.computed(epoch=0, step=0, shard=0, samples=[2, 4])
    with pytest.raises(LedgerError, match="step 0, shard 0: a computed it twice, of different samples"):
        count(tmp_path)


def test_a_torn_last_line_is_left_out_and_replaced(tmp_path: Path) -> None:
    write_two_steps(tmp_path)
    path = tmp_path / "a.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])  # step 1 was never committed then
    assert count(tmp_path) == Counter({(0, sample): 1 for sample in (4, 2, 1, 3)})
    Ledger(path).committed(epoch=0, step=1, shards={0: "a", 1: "a"})
    assert path.read_bytes() == whole


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    write_two_steps(tmp_path)
    with (tmp_path / "b.jsonl").open("a") as file:
        file.write('{"type":"computed","epoch":0}\n')
    with pytest.raises(LedgerError, match=r"b\.jsonl, line 4"):
        count(tmp_path)


def test_a_ledger_that_count_would_not_find_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"worker id>\.jsonl"):
        Ledger(tmp_path / "a.json")


@pytest.mark.processes
def test_kill_9_loses_nothing_that_was_written(tmp_path: Path) -> None:
    script = f"""
import os, signal
from farandole.data.ledger import Ledger
ledger = Ledger({str(tmp_path / "a.jsonl")!r})
for step in range(500):
    ledger.computed(epoch=0, step=step, shard=0, samples=range(step * 3, step * 3 + 3))
    ledger.committed(epoch=0, step=step, shards={{0: "a"}})
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", script], env=os.environ, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert count(tmp_path) == Counter({(0, sample): 1 for sample in range(1500)})
