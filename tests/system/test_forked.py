"""A script that forks and lets the children run on disturbs nobody: they are told, and leave by themselves."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import farandole
from farandole.errors import NotReplicated, UsageError
from tests.support.harness import Elastic, alone

JOB = Path(__file__).parents[1] / "jobs" / "forking.py"
TOLD = "was forked by a worker, and the run is that worker's alone"


@pytest.mark.processes
def test_children_that_run_on_end_nobody_and_loader_processes_go_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    alone(tmp_path / "alone", JOB, str(out))
    [end] = out.iterdir()
    expected, _ = json.loads(end.read_text())
    end.unlink()
    with Elastic(tmp_path / "run", JOB, str(out), "--fork", workers=2, options=["--min", "2"]) as run:
        run.finish()
        assert [(event["equal"], event["fingerprint"]) for event in run.events("finished")] == [(True, expected)]
        assert run.events("lost") == run.events("failed") == []
        assert len(run.events("view")) == 1
        logs = [(tmp_path / "run" / "logs" / f"w{n}.log").read_text() for n in (1, 2)]
    assert [json.loads(path.read_text()) for path in out.iterdir()] == 2 * [[expected, [1, 1, 7, -15]]]
    for log in logs:
        assert log.count(TOLD) == 2
        assert "backward: this process" in log
        assert "the last child leaves" in log


def test_in_a_child_all_of_a_run_is_refused_but_its_device(run: farandole.Run) -> None:
    child = os.fork()
    if not child:
        os._exit(_refused(run))
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(NotReplicated):  # the parent is asked for something else
        run.fingerprint()


def _refused(run: farandole.Run) -> int:
    asked = {
        "rank": lambda: run.rank,
        "is_leader": lambda: run.is_leader,
        "log": lambda: run.log(loss=1.0),
        "replicate": lambda: run.replicate(),
        "steps": lambda: run.steps(None, epochs=1),  # type: ignore[arg-type]
        "fingerprint": run.__class__,  # what it is may be asked
    }
    wrong = 0
    for name, ask in asked.items():
        try:
            ask()
        except UsageError as error:
            wrong += TOLD not in str(error) or not str(error).startswith(name)
        else:
            wrong += name != "fingerprint"
    return wrong + (run.device.type not in ("cpu", "cuda"))
