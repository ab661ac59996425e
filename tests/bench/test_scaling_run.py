"""`farandole bench scaling` on a real script with one and two workers."""

from __future__ import annotations

import json
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.support.forked import ENVIRON, run
from tests.support.harness import FARANDOLE
from tests.support.lines import naming

JOB = Path(__file__).parents[1] / "jobs" / "ending.py"
SMALL = JOB.with_name("small.py")
BATCH, MICRO = 16, 4  # the job's
STEPS = ("--workers", "1,2", "--steps", "2")


def bench(folder: Path, *words: str) -> tuple[int, str]:
    """Exit code and output of a bench with these options, on the job and its arguments."""
    done = run([*FARANDOLE, "bench", "scaling", *words], cwd=folder, timeout=300)
    return done.returncode, done.stdout + done.stderr


def job(folder: Path, *arguments: str) -> list[str]:
    (folder / "written").mkdir()
    return [str(JOB), str(folder / "written" / "out"), "--record", *arguments]


@pytest.mark.long
@pytest.mark.processes
def test_both_modes_are_measured_with_one_and_two_workers(tmp_path: Path) -> None:
    files = ("--json", "rows.json", "--plot", "chart.svg", "--price", "m5=0.25", "--ddp", "--transport", "gloo")
    sizes = ("--argument", "samples=320", *job(tmp_path, "--samples", "{samples}", "--epochs", "50"))
    code, out = bench(tmp_path, *STEPS, *files, *sizes)
    assert code == 0, out
    found = json.loads((tmp_path / "rows.json").read_text())
    ours = [row for row in found if row["contestant"] == "farandole"]
    series = [(row["run"]["mode"], row["run"]["workers"]) for row in ours]
    assert series == [("strong", 1), ("strong", 2), ("weak", 1), ("weak", 2)]
    assert len(found) == 8, "as many of ddp"
    seen = [row["measured"] for row in ours]
    assert [each["batch"] for each in seen] == [BATCH, BATCH, BATCH, 2 * BATCH]
    assert [each["shards"] for each in seen] == [each["batch"] // MICRO for each in seen]
    assert {each["samples"] for each in seen} == {50 * 320}
    assert [each["sent_mb"] > 0 for each in seen] == [False, True, False, True]
    assert all(0 <= each["exposed"] < 1 for each in seen if each["exposed"] is not None)
    assert all(each["startup_s"] > 0 for each in seen)
    assert seen[0] == seen[2], "one worker runs once for both"
    assert all(row["dollars"]["m5"] > 0 for row in found)
    assert ElementTree.parse(tmp_path / "chart.svg").getroot().tag.endswith("svg")
    assert naming(out, "3 of 3", "2 workers", "weak")
    folders = {path.read_text().splitlines()[0] for path in (tmp_path / "written").iterdir()}
    assert len(folders) == 3
    assert not [folder for folder in folders if Path(folder).exists()]


@pytest.mark.long
@pytest.mark.processes
def test_the_workers_may_be_on_the_hosts_of_a_pool(tmp_path: Path) -> None:
    """An agent starts them. They have nothing of the run's folder, and their log has the measurements."""
    shutil.copy(SMALL, tmp_path / "train.py")
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    (tmp_path / "files").write_text("*.py\n")
    pool = ("--pool", "ssh,hosts=hosts", "--files", "files")
    code, out = bench(tmp_path, *STEPS, *pool, "--json", "rows.json", "train.py", "out", "--epochs", "50")
    assert code == 0, out
    found = json.loads((tmp_path / "rows.json").read_text())
    series = [(row["run"]["mode"], row["run"]["workers"], row["measured"]["batch"]) for row in found]
    assert series == [("strong", 1, BATCH), ("strong", 2, BATCH), ("weak", 1, BATCH), ("weak", 2, 2 * BATCH)]
    assert all(row["measured"]["step_ms"] > 0 for row in found)
    assert naming(out, "localhost"), "what happens to a host is shown"


@pytest.mark.long
@pytest.mark.processes
def test_a_script_that_is_too_short_for_more_workers_shows_what_was_measured(tmp_path: Path) -> None:
    """12 steps with a constant batch, and 6 with a constant batch of each of two workers; 8 are needed."""
    code, out = bench(tmp_path, *STEPS, *job(tmp_path, "--samples", "96", "--epochs", "2"))
    assert code == 1
    assert naming(out, " 6 steps", " 8", "--steps 2", "2 --workers")
    assert [line.split()[:2] for line in out.splitlines() if line.startswith(("strong", "weak"))] == [
        ["strong", "1"], ["strong", "2"], ["weak", "1"],
    ]  # fmt: skip
    assert "unknown" in out


@pytest.mark.processes
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--workers", "0", str(JOB)), "--workers 0: "),
        (("--price=-1", str(JOB)), "--price -1: "),
        (("--steps", "0", str(JOB)), "--steps 0: "),
        (("--plot", "chart.gif", str(JOB)), "--plot chart.gif: "),
        (("--json", "no/such.json", str(JOB)), "--json no/such.json: "),
        (("--codec", "zip", str(JOB)), "--codec zip: "),
        (("none.py",), "script none.py: "),
        (("--files", "list", str(JOB)), "--files list: "),
        (("--listen", "10.0.0.1", str(JOB)), "--listen 10.0.0.1: "),
        (("--pool", "cloud", str(JOB)), "--pool cloud: "),
    ],
)
def test_what_can_not_be_asked_is_one_line(tmp_path: Path, options: tuple[str, ...], says: str) -> None:
    command = [*FARANDOLE, "bench", "scaling", *options]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRON, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"farandole: error: {says}")
    assert len(done.stderr.splitlines()) == 1
