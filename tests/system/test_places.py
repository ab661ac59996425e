"""Two runs in one place: who comes second is refused, says who has it, and touches nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.harness import ENVIRON, FARANDOLE, Elastic, read_lines

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="signals by /proc"),
]
JOB = Path(__file__).parents[1] / "jobs" / "small.py"


def refused(command: list[str], cwd: Path, **environ: str) -> str:
    """What is said in the last line by a command that has to fail."""
    done = subprocess.run(
        command, env={**ENVIRON, **environ}, cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode in (1, 2), done.stdout + done.stderr
    return done.stderr.splitlines()[-1]


@pytest.mark.long
@pytest.mark.failure(
    "Checkpoints",
    "two runs get the same place for checkpoints (`--checkpoints`), possibly at the same moment",
    seen="one sentence at the start, with the run that uses the place, its folder, its host and the remedy",
    outcome=(
        "exit code 2; only one gets the place; a run uses checkpoints of another only with `--resume`, and never "
        "removes them"
    ),
)
@pytest.mark.failure(
    "Checkpoints",
    "a script trains by itself (`FARANDOLE_FOLDER`) in the folder of a live run or of another such script",
)
def test_a_live_runs_place_and_folder_are_its_own(tmp_path: Path) -> None:
    place, pace, out = tmp_path / "place", tmp_path / "pace", tmp_path / "out"
    pace.write_text("1")
    options = ["--checkpoints", str(place), "--checkpoint-every", "2steps", "--keep", "2"]
    first = Elastic(tmp_path / "first", JOB, str(out), "--pace", str(pace), workers=1, options=options)
    with first as run:
        run.until(lambda: bool(run.events("checkpoint")), "a checkpoint")
        pace.write_text("1000")  # it outlasts all that follows
        second = [*FARANDOLE, "run", "--workers", "1", "--folder", "second", "--checkpoints", str(place)]
        for resume in ([], ["--resume", str(place)]):
            said = refused([*second, *resume, str(JOB), "other"], tmp_path)
            assert f"run first ({run.folder} on" in said
        assert not (tmp_path / "second").exists()
        said = refused([sys.executable, str(JOB), "other"], tmp_path, FARANDOLE_FOLDER=str(run.folder))
        assert f"{run.folder} (process {run.process.pid} on" in said
        run.process.kill()
        run.process.wait()
        written = run.events("checkpoint")[-1]["step"]
    pace.unlink()
    assert "--resume" in refused([*second, str(JOB), "other"], tmp_path), "it is over, but what it left is its own"
    theirs = sorted(path.name for path in place.glob("step-*"))
    options = ["--checkpoints", str(place), "--resume", str(place), "--keep", "1", "--checkpoint-every", "2steps"]
    with Elastic(tmp_path / "third", JOB, str(tmp_path / "third.txt"), workers=1, options=options) as run:
        run.finish()
        (resumed,) = run.events("resumed")
        assert resumed["step"] >= written
    assert set(theirs) <= {path.name for path in place.glob("step-*")}, "nothing of the first was removed"
    said = refused([*FARANDOLE, "run", "--folder", "first", str(JOB), str(out)], tmp_path)
    assert "run third" in said
    assert [line for line in read_lines(tmp_path / "first") if line.get("event") == "resumed"] == []
