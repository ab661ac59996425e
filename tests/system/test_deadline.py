"""`farandole run --deadline` with real workers: the last pool has some if, and only if, the deadline needs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.harness import Elastic, alone

pytestmark = pytest.mark.processes

JOB = Path(__file__).parents[1] / "jobs" / "small.py"
POOLS = ["--pool", "local,size=1,name=spot", "--pool", "local,size=2,name=reserve"]


def on_demand(run: Elastic) -> set[str]:
    """All workers of the last pool that were ever in a view."""
    return {worker for view in run.events("view") for worker in view["members"] if worker.startswith("reserve-")}


@pytest.mark.long
def test_a_deadline_that_is_near_gets_on_demand_workers_and_the_same_bits(tmp_path: Path) -> None:
    alone(tmp_path / "one", JOB, str(tmp_path / "expected"))
    pace = tmp_path / "pace"
    pace.write_text("2")
    job = (JOB, str(tmp_path / "out"), "--pace", str(pace))  # 108 s for one worker
    with Elastic(tmp_path / "run", *job, workers=1, options=[*POOLS, "--deadline", "30s"]) as run:
        run.until(lambda: len(on_demand(run)) == 2, "two on-demand workers")
        pace.unlink()
        run.finish()
        wanted = [event["wanted"] for event in run.events("scale")]
        assert wanted[0] == 0, run.report()
        assert max(wanted) == 2, run.report()
    assert (tmp_path / "out").read_bytes() == (tmp_path / "expected").read_bytes()


@pytest.mark.long
def test_a_deadline_that_is_far_gets_none(tmp_path: Path) -> None:
    job = (JOB, str(tmp_path / "out"), "--epochs", "20")
    with Elastic(tmp_path / "run", *job, workers=1, options=[*POOLS, "--deadline", "12h"]) as run:
        run.finish()
        assert on_demand(run) == set()
        assert [event["wanted"] for event in run.events("scale")] == [0], run.report()
