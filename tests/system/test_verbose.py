"""`farandole run -vv`: what the processes of a run log, each in its own file, and that no secret is in any of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from farandole.control.ticket import load
from tests.support.harness import Elastic
from tests.support.lines import naming

JOB = Path(__file__).parents[1] / "jobs" / "small.py"


@pytest.mark.processes
def test_each_process_logs_its_part_and_no_secret(tmp_path: Path) -> None:
    with Elastic(tmp_path / "run", JOB, str(tmp_path / "out"), workers=2, options=["-vv", "--min", "2"]) as run:
        run.finish()
    secret = load(str(run.folder / "ticket")).secret
    for worker in ("w1", "w2"):
        log = (run.folder / "logs" / f"{worker}.log").read_text()
        assert naming(log, f" {worker} INFO farandole.worker.groups: ", "view 1")
        assert naming(log, f" {worker} INFO farandole.training.loop: ", "step 0", "epoch 0", "view 1")
        assert naming(log, f" {worker} DEBUG farandole.worker.connection: ", "Heartbeat")
    log = (run.folder / "coordinator.log").read_text()
    assert naming(log, "INFO farandole.coordinator.server: ", "view", "{")
    assert naming(log, "DEBUG farandole.coordinator.server: ", "w1", "Goodbye")
    for path in run.folder.rglob("*.log"):
        assert secret not in path.read_text(), path
    assert secret not in run.output.read_text()
