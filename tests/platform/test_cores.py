"""Cores of its own for each slot, in processes that are bound for it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from farandole.platform import cpu

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="binds threads to cores as Linux does")

BOUND = """
import os, threading
from farandole.platform import cpu
waiting, going = threading.Event(), threading.Event()
early = threading.Thread(target=going.wait)
early.start()
had = os.sched_getaffinity(0)
print("why:", cpu.pin(1, 1) or "-")
print("early:", *os.sched_getaffinity(early.native_id))
late = threading.Thread(target=lambda: print("late:", *os.sched_getaffinity(0)))
late.start(); late.join(); going.set()
if not os.fork():
    print("forked:", os.sched_getaffinity(0) == had, flush=True)
    os._exit(0)
os.wait()
print("main:", *os.sched_getaffinity(0))
"""


def test_all_threads_of_a_worker_are_bound_and_what_it_forks_is_free() -> None:
    mine = cpu.of_slot(1, 1, os.sched_getaffinity(0))
    if not mine:
        pytest.skip("one core: a second slot has none")
    done = subprocess.run([sys.executable, "-u", "-c", BOUND], capture_output=True, text=True, check=True)
    (core,) = map(str, mine)
    assert done.stdout.splitlines() == [
        "why: -", f"early: {core}", f"late: {core}", "forked: True", f"main: {core}"
    ]  # fmt: skip


def test_a_slot_beyond_the_cores_is_not_bound() -> None:
    here = os.sched_getaffinity(0)
    assert re.findall(r"\d+", cpu.pin(len(here), 1)) == [str(len(here)), "1", str(len(here))]
    assert cpu.pin(0, len(here) + 1)
    assert os.sched_getaffinity(0) == here
    assert not cpu.before()


def test_slots_have_cores_of_their_own_before_any_core_has_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "CPUS", tmp_path)
    for core, siblings in enumerate(("0-1", "0-1", "2-3", "2-3", "4,6", "5", "4,6")):
        (tmp_path / f"cpu{core}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{core}" / "topology" / "thread_siblings_list").write_text(siblings + "\n")
    assert [cpu.of_slot(slot, 1, range(7)) for slot in range(7)] == [(0,), (2,), (4,), (5,), (1,), (3,), (6,)]
    assert [cpu.of_slot(slot, 3, range(7)) for slot in range(3)] == [(0, 2, 4), (5, 1, 3), ()]
    assert cpu.of_slot(1, 1, (3, 9)) == (3,), "no topology is told of core 9; core 3 is a second thread"
