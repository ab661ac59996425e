"""Forged lines of metrics, sent to a live run: by external workers that hold the ticket, and by its own rank 0.

The run goes on, to the weights of a world of one; its metrics.jsonl has each step's line once and none that was forged;
`farandole status` answers; and a coordinator that is killed and comes back to a file with lines of another program in
it passes over those.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from attack.lines import NONE_AT_ALL, forge, forged
from farandole.control.ticket import load
from tests.support.damaged_lines import DAMAGED_LINES
from tests.support.harness import ENVIRON, FARANDOLE, Elastic, alone

pytestmark = [pytest.mark.processes]

JOB = Path(__file__).parents[1] / "jobs" / "digits.py"
HOLD = 50  # the step in which the job waits until its pace is gone
STEPS = 60
STEERING = "\x1b\x07\x9b\u202e\u2066"


def whole(folder: Path) -> list[dict[str, object]]:
    """The lines that are some: the file holds others too by then."""
    found: list[dict[str, object]] = []
    for line in (folder / "metrics.jsonl").read_bytes().split(b"\n")[:-1]:
        if line not in DAMAGED_LINES:
            found.append(json.loads(line))
    return found


class Damaged(Elastic):
    def lines(self) -> list[dict[str, object]]:
        return whole(self.folder) if (self.folder / "metrics.jsonl").exists() else []


def status(run: Elastic, *options: str) -> str:
    command = [*FARANDOLE, "status", *options, "--run", str(run.folder)]
    done = subprocess.run(command, env=ENVIRON, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not set(STEERING) & set(done.stdout + done.stderr)
    return done.stdout


def coordinator(run: Elastic) -> int:
    return int(json.loads((run.folder / "coordinator.json").read_text())["pid"])


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="ends a process by its id")
def test_forged_lines(tmp_path: Path) -> None:
    pace = tmp_path / "pace"
    pace.touch()
    job = [str(tmp_path / "out"), "--pace", str(pace), "--forge"]
    with Damaged(tmp_path / "run", JOB, *job, workers=2, options=["--min", "2", "--max", "2"]) as run:
        run.until_members(2)
        run.until_step(2)
        view, before = run.events("view")[-1], coordinator(run)
        assert asyncio.run(forge(load(str(run.folder / "ticket")))) == []
        assert json.loads(status(run, "--json"))["state"] == "training"
        assert "training" in status(run)
        run.until_step(8)  # its own rank 0 forges at step 5
        assert coordinator(run) == before, "it has not died of it"
        assert run.events("view")[-1] == view

        with (run.folder / "metrics.jsonl").open("ab") as file:
            file.write(b"\n".join(DAMAGED_LINES) + b"\n")
        os.kill(before, signal.SIGKILL)
        run.until(lambda: bool(run.events("coordinator back")), "the next coordinator")
        run.until_step(min(max(run.step, 8) + 3, HOLD))
        assert json.loads(status(run, "--json"))["view"]["size"] == 2
        pace.unlink()
        run.finish()

    steps = [line["step"] for line in run.lines() if "event" not in line]
    assert steps == list(range(STEPS)), "each step's line once, in order"
    assert [event["lines"] for event in run.events("metrics damaged")] == [len(DAMAGED_LINES)]
    assert 0 < len(run.events("malformed")) <= len(NONE_AT_ALL)
    said = run.output.read_text() + status(run)
    assert not forged((run.folder / "metrics.jsonl").read_bytes())
    assert not forged(said.encode())
    assert not set(STEERING) & set(said)
    lost = {event["worker"] for event in run.events("lost")}  # the external workers that told lies do not come back
    assert not lost & set(view["members"])
    alone(tmp_path / "one", JOB, str(tmp_path / "one.out"))
    assert (tmp_path / "out").read_text() == (tmp_path / "one.out").read_text()
