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
        ("c", {0: "a", 1: "a"}, r"step 0, shard 1: .*\ba\b.*\bb\b.*\bc\b.*\ba\b"),
        ("c", {0: "a"}, r"step 0, shard 1: .*\ba\b.*\bb\b.*\bc\b"),
        ("c", {0: "a", 1: "b", 2: "c"}, r"step 0, shard 2: .*\ba\b.*\bc\b.*\bc\b"),
        ("b", {0: "b", 1: "b"}, r"step 0, shard 0: .*\ba\b.*\ba\b.*\bb\b.*\bb\b"),
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
    with pytest.raises(LedgerError, match=r"step 2, shard 1: .*\ba\b.*\bghost\b"):
        count(tmp_path)


def test_a_shard_computed_twice_must_be_the_same(tmp_path: Path) -> None:
    write_two_steps(tmp_path)
    again = Ledger(tmp_path / "a.jsonl")
    again.computed(epoch=0, step=0, shard=0, samples=[4, 2])
    assert count(tmp_path)[0, 4] == 1
    again.computed(epoch=0, step=0, shard=0, samples=[2, 4])
    with pytest.raises(LedgerError, match=r"step 0, shard 0: .*\ba\b"):
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
    with pytest.raises(LedgerError, match=r"b\.jsonl, line 5"):
        count(tmp_path)


def test_a_ledger_that_count_would_not_find_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"/a\.json\b.*\.jsonl\b"):
        Ledger(tmp_path / "a.json")


# --- runs that went back to a checkpoint -------------------------------------------------------------------------


def life(folder: Path, worker: str, origin: str, steps: range, *, parent: str = "", shared: bool = False) -> Ledger:
    """A worker that began as `origin` at the first of `steps` (or, `shared`, was handed that state) and did these."""
    ledger = Ledger(folder / f"{worker}.jsonl")
    if not shared:
        ledger.resumed(origin=origin, step=steps.start, parent=parent)
    ledger.entered(origin=origin)
    for step in steps:
        ledger.computed(epoch=0, step=step, shard=0, samples=[2 * step, 2 * step + 1])
        ledger.committed(epoch=0, step=step, shards={0: worker})
    return ledger


def once(steps: int) -> Counter[tuple[int, int]]:
    return Counter({(0, sample): 1 for sample in range(2 * steps)})


def test_steps_taken_again_after_a_checkpoint_count_once(tmp_path: Path) -> None:
    """The names say nothing of the order: the last life's files come first, in the middle, and last."""
    for names in ("abc", "cab", "bca"):
        folder = tmp_path / names
        life(folder, names[0], "first", range(50))
        life(folder, names[1], "second", range(40, 60), parent="first")
        life(folder, names[2], "third", range(55, 70), parent="second")
        assert count(folder) == once(70)


def test_a_life_that_led_nowhere_does_not_count(tmp_path: Path) -> None:
    life(tmp_path, "a", "first", range(50))
    life(tmp_path, "b", "lost", range(40, 55), parent="first")  # left no checkpoint
    life(tmp_path, "c", "third", range(40, 70), parent="first")
    life(tmp_path, "d", "from nothing", range(20))
    assert count(tmp_path) == once(70)


def test_one_process_may_live_twice(tmp_path: Path) -> None:
    """A world of one goes on in its file."""
    life(tmp_path, "alone", "first", range(50)).close()
    life(tmp_path, "alone", "second", range(30, 60), parent="first").close()
    assert count(tmp_path) == once(60)


def test_steps_left_out_or_taken_twice_by_a_resumed_run_show(tmp_path: Path) -> None:
    life(tmp_path / "gap", "a", "first", range(50))
    life(tmp_path / "gap", "b", "second", range(41, 60), parent="first")
    gap = Ledger(tmp_path / "gap" / "b.jsonl").path
    gap.write_text(gap.read_text().replace('"step":41,"parent"', '"step":40,"parent"'))
    assert once(60) - count(tmp_path / "gap") == Counter({(0, 80): 1, (0, 81): 1})
    life(tmp_path / "twice", "a", "first", range(50))
    life(tmp_path / "twice", "b", "second", range(39, 60), parent="first")
    twice = Ledger(tmp_path / "twice" / "b.jsonl").path
    twice.write_text(twice.read_text().replace('"step":39,"parent"', '"step":40,"parent"'))
    assert count(tmp_path / "twice") - once(60) == Counter({(0, 78): 1, (0, 79): 1})


def test_workers_of_one_life_must_agree_and_of_two_need_not(tmp_path: Path) -> None:
    life(tmp_path, "a", "first", range(5))
    life(tmp_path, "b", "second", range(3, 9), parent="first")
    c = life(tmp_path, "c", "second", range(9, 9), shared=True)
    c.committed(epoch=0, step=3, shards={0: "b"})
    assert count(tmp_path) == once(9)
    c.committed(epoch=0, step=4, shards={0: "a"})
    with pytest.raises(LedgerError, match=r"step 4, shard 0: .*\bb\b.*\bb\b.*\bc\b.*\ba\b"):
        count(tmp_path)


def test_a_life_begins_once(tmp_path: Path) -> None:
    life(tmp_path, "a", "first", range(5))
    Ledger(tmp_path / "b.jsonl").resumed(origin="first", step=2, parent="")
    with pytest.raises(LedgerError, match=r"\borigin\b.*\bfirst\b"):
        count(tmp_path)


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
