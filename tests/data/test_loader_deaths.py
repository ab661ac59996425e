"""A loader process that is killed under way: the run goes on, and says so."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from farandole.data import ledger
from farandole.observe.text import describe
from farandole.protocol.metrics import parse_line
from tests.jobs.loading import EPOCHS, SAMPLES
from tests.support.fake_worker import gone
from tests.support.harness import Elastic, alone, read_lines

JOB = Path(__file__).parents[1] / "jobs" / "loading.py"
LOADING = ("--loaders", "2")


@pytest.mark.long
@pytest.mark.failure(
    "Data and loader processes",
    "a DataLoader process is killed (out of memory, `kill -9`)",
    seen=(
        "an event and a line in the worker's log name the process and the signal, in the next micro-batch or after 5 s"
    ),
    outcome="the worker starts its loader processes again and requests the same samples: same bits, nothing is lost",
)
@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_killed_loader_process_costs_no_sample_and_no_worker(tmp_path: Path) -> None:
    out, single = tmp_path / "out", tmp_path / "single"
    for folder in (out, single):
        folder.mkdir()
    (out / "hold").touch()
    with Elastic(
        tmp_path / "run", JOB, str(out), *LOADING, "--hold", "3", workers=2, options=["--min", "2", "--ledger"]
    ) as run:
        run.until(lambda: len(list(out.glob("held-*"))) == 2, "both workers between two steps")
        held = sorted(out.glob("held-*"))[0]
        victim = int(held.read_text().split()[0])
        os.kill(victim, signal.SIGKILL)
        run.until(lambda: gone(victim), "its end")
        (out / "hold").unlink()
        run.finish()
        [told] = run.events("loader replaced")
        assert str({e["worker"]: e["pid"] for e in run.events("ready")}[told["worker"]]) == held.name[5:]
        assert re.search(rf"\bpid {victim}\b.*\bSIGKILL\b", told["reason"])
        assert told["reason"] in describe(parse_line(json.dumps(told).encode()))
        assert told["reason"] in (run.folder / "logs" / f"{told['worker']}.log").read_text()
        assert run.events("lost") == run.events("failed") == []
        counts = ledger.count(run.folder / "ledger")
        assert sorted(counts.items()) == [((epoch, n), 1) for epoch in range(EPOCHS) for n in range(SAMPLES)]
    alone(tmp_path / "alone", JOB, str(single), *LOADING)
    assert (out / "weights").read_text() == (single / "weights").read_text()
    assert not [line for line in read_lines(tmp_path / "alone") if line.get("event") == "loader replaced"]
