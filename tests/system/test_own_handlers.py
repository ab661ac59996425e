"""A script with signal handlers of its own, in a run of two workers: SIGTERM to one is that one's leave."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.harness import Elastic

pytestmark = [pytest.mark.processes]
JOBS = Path(__file__).parents[1] / "jobs"
SCRIPT = f"""
import os, signal, sys
from pathlib import Path

def save_and_go(number, frame):
    (Path(sys.argv[1]) / f"saved-{{os.environ['FARANDOLE_WORKER']}}").touch()
    sys.exit(0)

signal.signal(signal.SIGTERM, save_and_go)
sys.path.insert(0, {str(JOBS)!r})
import faults
faults.main()
"""


@pytest.mark.long
@pytest.mark.failure(
    "Processes, signals and crash loops",
    "the script or a library sets its own handler of SIGTERM, SIGINT or SIGHUP, and a worker gets that signal",
    seen="a line in the worker's log when the handler is set; at the signal, the worker leaves as usual",
    outcome=(
        "the worker leaves between two steps and then calls the handler; a handler set by a C library hides the signal"
    ),
)
def test_a_notice_to_one_worker_is_its_leave(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    pace = tmp_path / "pace"
    pace.write_text("0.5")
    with Elastic(tmp_path / "run", script, str(tmp_path), "--pace", str(pace), workers=2, options=[]) as run:
        first, second = run.until_members(2)
        run.until_step(1)
        run.signal(second, signal.SIGTERM)
        run.until(lambda: any(event["worker"] == second for event in run.events("left")), "it leaves")
        run.until(lambda: (tmp_path / f"saved-{second}").exists(), "its handler is called")
        pace.unlink()
        run.finish()
    assert run.events("lost") == []
    assert run.events("failed") == []
    assert not (tmp_path / f"saved-{first}").exists()
