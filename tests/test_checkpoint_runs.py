"""Everyone gone: runs of real processes whose every worker dies, and that come to the same bits all the same.

The job is test_same_bits' table, 24 combinations of models and optimizers, compared with a world of one; the ledger
says that every sample counted once, over both lives of the run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from harness import ENVIRON, Elastic, alone
from jobs.table import EPOCHS, SAMPLES, STEPS

from farandole.data.ledger import count

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="signals by /proc"),
]

JOB = Path(__file__).parent / "jobs" / "table.py"
EVERY_SAMPLE_ONCE = Counter((epoch, sample) for epoch in range(EPOCHS) for sample in range(SAMPLES))
OFTEN = ["--ledger", "--checkpoint-every", "5steps"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A hash of each combination, from a world of one without a checkpoint."""
    folder = tmp_path_factory.mktemp("one")
    alone(folder, JOB, str(folder / "out.json"))
    return json.loads((folder / "out.json").read_text())


class Job:
    """Arguments of the job, slow until told otherwise."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "run"
        self.pace, self.out = folder / "pace", folder / "out.json"
        self.pace.write_text("0.3")

    def run(self, workers: int, *options: str) -> Elastic:
        job = [str(self.out), "--pace", str(self.pace)]
        return Elastic(self.folder, JOB, *job, workers=workers, options=[*options])

    def hashes(self) -> dict[str, str]:
        return json.loads(self.out.read_text())

    def checkpoints(self) -> list[Path]:
        return sorted((self.folder / "checkpoints").glob("*.pt"))


def until_checkpoints(run: Elastic, number: int) -> None:
    run.until(lambda: len(run.events("checkpoint")) >= number, f"{number} checkpoints")


def end(run: Elastic) -> None:
    """kill -9 of `farandole run`; the kernel ends all that it started."""
    run.process.kill()
    run.process.wait()


def test_kill_9_of_everyone_then_another_number_of_workers(undisturbed: dict[str, str], tmp_path: Path) -> None:
    job = Job(tmp_path)
    with job.run(2, *OFTEN) as run:
        run.until_members(2)
        until_checkpoints(run, 2)
        end(run)
        reached, written = run.step, run.events("checkpoint")[-1]
    job.pace.unlink()
    with job.run(3) as run:
        run.finish()
        (resumed,) = run.events("resumed")
        assert 5 <= written["step"] <= resumed["step"] <= reached + 1
        assert resumed["differences"] == []
        assert job.hashes() == undisturbed, run.report()
        assert run.events("finished")[0]["equal"]
        assert not {e["worker"] for e in run.events("ready")} & {"w1", "w2"}, "ids are never used twice"
        told = [line["step"] for line in run.lines() if "event" not in line]
        assert told == [*range(resumed["step"], STEPS)]
    assert count(job.folder / "ledger") == EVERY_SAMPLE_ONCE
    assert len(job.checkpoints()) <= 3 + 1, "three are kept; one may not have been finished"
    done = subprocess.run(
        [sys.executable, "-m", "farandole", "run", "--folder", str(job.folder), str(JOB)],
        env=ENVIRON, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, "run to its end" in done.stderr) == (2, True), done.stderr
