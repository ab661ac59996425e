"""Promise 4: a step makes no request to the coordinator. Counted by both workers of a run, over hundreds of steps."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from farandole.protocol.messages import HEARD_EVERY
from tests.support.harness import Elastic

pytestmark = [pytest.mark.processes, pytest.mark.skipif(sys.platform != "linux", reason="signals by /proc")]

JOB = Path(__file__).parents[1] / "jobs" / "small.py"
STEPS = 300
SETTLED = 20  # steps after which what belongs to the start of the view is over
HEARTBEAT_S = 0.5


def counted(folder: Path, steps: int) -> list[str]:
    """Arguments of the job, whose steps take 5 ms on two workers."""
    (folder / "pace").write_text("0.01")
    sizes = ["--epochs", "1", "--samples", str(8 * steps), "--batch", "8", "--micro", "2", "--width", "300"]
    return [str(folder / "out"), "--messages", "--pace", str(folder / "pace"), *sizes]


@pytest.mark.long
def test_within_a_view_nothing_is_said_but_heartbeats_and_nothing_heard_but_that_they_came(tmp_path: Path) -> None:
    with Elastic(tmp_path / "run", JOB, *counted(tmp_path, STEPS), workers=2, options=["--min", "2"]) as run:
        run.finish()
        report = run.report()
    for rank in range(2):
        counts = json.loads((tmp_path / f"out-{rank}.json").read_text())
        assert len(counts) == STEPS, report
        (since, view, sent, received), (until, last_view, sent_then, received_then) = counts[SETTLED], counts[-1]
        assert view == last_view, "one view all along"
        said = Counter(sent_then) - Counter(sent)
        heard = Counter(received_then) - Counter(received)
        assert set(said) <= {"Heartbeat"}, f"rank {rank} said {said}"
        assert set(heard) <= {"HeartbeatAnswer"}, f"rank {rank} heard {heard}"
        assert said["Heartbeat"] <= (until - since) / HEARTBEAT_S + 1, "they follow the clock, not the steps"
        assert heard["HeartbeatAnswer"] <= said["Heartbeat"] / HEARD_EVERY + 1
        assert 2 * said["Heartbeat"] < STEPS - SETTLED, "so many steps that a message a step would show"


def test_a_change_of_view_is_announced_by_a_handful_of_messages(tmp_path: Path) -> None:
    """The counters do count: what starts the view is in them."""
    with Elastic(tmp_path / "run", JOB, *counted(tmp_path, 30), workers=2, options=["--min", "2"]) as run:
        run.finish()
    for rank in range(2):
        _, _, sent, received = json.loads((tmp_path / f"out-{rank}.json").read_text())[-1]
        assert {"Ready", "Prepared", "Switched"} <= set(sent)
        assert received["Propose"] == 1
        assert set(received) <= {"Propose", "Published", "HeartbeatAnswer", "Saver"}
        assert received.get("Saver", 0) <= 1
