"""`farandole trace` of a real run: every worker's phases of the same steps, who waited for whom; no bit is another."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from farandole.protocol.values import SAID
from tests.support.forked import ENVIRON
from tests.support.harness import FARANDOLE, Elastic, alone
from tests.support.lines import naming

pytestmark = [pytest.mark.processes]
JOB = Path(__file__).parents[1] / "jobs" / "small.py"
SLOW = "w2"
PACE_S = 0.2  # longer than what a busy machine adds to a step of the others
STEPS = 6
SIZES = ("--epochs", "1", "--samples", "12000", "--batch", "12", "--micro", "4")  # a thousand steps


def asked(run: Elastic, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*FARANDOLE, "trace", "--run", str(run.folder), *arguments],
        env=ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def done(process: subprocess.Popen[bytes], code: int = 0) -> str:
    told = process.communicate(timeout=200)[0].decode()
    assert process.returncode == code, told
    return told


class Traced:
    """A file as a viewer reads it: complete events by worker and category, in order."""

    def __init__(self, path: Path) -> None:
        whole = json.loads(path.read_text())
        assert set(whole) == {"displayTimeUnit", "traceEvents"}
        events = whole["traceEvents"]
        for event in events:
            assert event["ph"] in ("X", "M")
            assert all(isinstance(event[key], int) for key in ("pid", "tid"))
            if event["ph"] == "X":
                assert event["ts"] >= 0
                assert event["dur"] >= 0
        self.workers = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
        self.hosts = {e["args"]["name"] for e in events if e["name"] == "process_name"}
        self._events = [event for event in events if event["ph"] == "X"]

    def of(self, worker: str, category: str) -> list[dict[str, Any]]:
        found = [e for e in self._events if self.workers[e["tid"]] == worker and e["cat"] == category]
        assert [e["ts"] for e in found] == sorted(e["ts"] for e in found)
        return found

    def waited(self, worker: str) -> Counter[str]:
        """Microseconds, by whom it waited for."""
        times: Counter[str] = Counter()
        for event in self.of(worker, "wait"):
            times[event["name"].removeprefix("waits for ")] += event["dur"]
        return times


@pytest.mark.long
def test_who_waits_for_whom_while_a_run_trains_and_while_it_stands(tmp_path: Path) -> None:
    pace, out = tmp_path / "pace", tmp_path / "out.txt"
    alone(tmp_path / "one", JOB, str(tmp_path / "alone.txt"), *SIZES)
    job = (str(out), "--slow", SLOW, "--pace", str(pace), *SIZES)
    pace.write_text(str(4 * PACE_S))  # a micro-batch takes a quarter
    with Elastic(tmp_path / "run", JOB, *job, workers=3, options=["--equal", "--min", "3"]) as run:
        members = run.until_members(3)
        run.until_step(3)
        told = done(asked(run, "--steps", str(STEPS)))
        assert "https://ui.perfetto.dev" in told
        assert "note:" not in told
        in_step(Traced(run.folder / "trace.json"), members)

        first = asked(run, "--steps", "1000", "-o", str(tmp_path / "standing.json"))
        assert first.stdout
        assert b"1000 steps" in first.stdout.readline()
        assert any(member in done(asked(run, "--steps", "1"), 2) for member in members)
        run.until_step(run.step + 5)
        pace.write_text("240")  # it stands: nobody will ever tell of a thousand steps
        run.until(lambda: still(run), "all wait for one")
        first.send_signal(signal.SIGINT)
        assert naming(done(first), "note: ")
        standing(Traced(tmp_path / "standing.json"), members)

        last = asked(run, "--steps", "1000", "-o", str(tmp_path / "last.json"))
        assert last.stdout
        assert last.stdout.readline().count(b"1000 steps") == 1
        pace.write_text("0.04")  # slow enough to end before a thousand steps are taken
        run.finish()
        told = done(last)
        there = set(Traced(tmp_path / "last.json").workers.values())
        assert there, "as far as the run went"
        assert all(worker in told.partition("note: ")[2] for worker in set(members) - there), (
            "who could not tell is named"
        )
    assert out.read_text() == (tmp_path / "alone.txt").read_text(), "a trace is in no bit"


def still(run: Elastic) -> bool:
    before = run.step
    time.sleep(1.5)
    return run.step == before


def in_step(found: Traced, members: tuple[str, ...]) -> None:
    assert [found.workers[tid] for tid in sorted(found.workers)] == list(members), "by rank"
    assert len(found.hosts) == 1
    steps = {e["args"]["step"] for e in found.of(SLOW, "step")}
    assert len(steps) == STEPS
    assert max(steps) - min(steps) == STEPS - 1
    length = 0
    for worker in members:
        phases = found.of(worker, "phase")
        assert {e["args"]["step"] for e in phases} == steps
        assert {e["name"] for e in phases} <= set(SAID)
        assert all(one["ts"] + one["dur"] <= other["ts"] for one, other in pairwise(phases))
        for step in found.of(worker, "step"):
            inside = [e for e in phases if e["args"]["step"] == step["args"]["step"]]
            assert {"data", "compute", "exchange"} <= {e["name"] for e in inside}
            assert sum(e["dur"] for e in inside) == step["dur"], "no moment of a step is in no phase"
        exchanges = [e for e in phases if e["name"] == "exchange"]
        for wait in found.of(worker, "wait"):
            assert any(e["ts"] <= wait["ts"] and wait["ts"] + wait["dur"] <= e["ts"] + e["dur"] for e in exchanges)
        length = sum(e["dur"] for e in found.of(worker, "step"))
    assert length > STEPS * PACE_S * 1e6
    for worker in set(members) - {SLOW}:
        waited = found.waited(worker)
        assert waited.most_common(1)[0][0] == SLOW
        assert waited.total() > found.waited(SLOW).total()


def standing(found: Traced, members: tuple[str, ...]) -> None:
    """What is not over is there as well: whom the others are waiting for, and what that one does."""
    assert set(found.workers.values()) == set(members)
    assert found.of(SLOW, "phase")[-1]["name"] == "compute"
    for worker in set(members) - {SLOW}:
        assert found.of(worker, "wait")[-1]["name"] == f"waits for {SLOW}"
        assert found.of(worker, "wait")[-1]["dur"] > 0.5e6
        assert found.of(worker, "phase")[-1]["name"] == "exchange"
