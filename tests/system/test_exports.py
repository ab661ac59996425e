"""A run that is exported while it runs: the same bits, each step once in TensorBoard through crashes and a resume, and
no harm from an export that fails, hangs or is killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from farandole.protocol.metrics import StepLine, parse_lines
from tests.jobs import small
from tests.support.fake_worker import gone, until
from tests.support.harness import read_lines
from tests.support.launched import farandole
from tests.support.lines import naming
from tests.support.small_job import OFTEN, Job, until_checkpoints

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]
TOKEN = "s3cret-0123456789abcdef"


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def children(pid: int, word: str) -> list[int]:
    """The processes that `pid` has started, in whose command line `word` stands."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == pid and word in (entry / "cmdline").read_bytes().decode(errors="replace"):
                    found.append(int(entry.name))
            except (OSError, ValueError, IndexError):
                continue
    return found


def counted(folder: Path) -> list[tuple[int, float]]:
    """Steps and losses that count by metrics.jsonl: of each step the last."""
    found, _ = parse_lines((folder / "metrics.jsonl").read_bytes().splitlines())
    return sorted({line.step: round(line.loss or 0.0, 5) for line in found if isinstance(line, StepLine)}.items())


def shown(folder: Path) -> list[tuple[int, float]]:
    from tests.support.event_files import read

    return [(step, round(loss, 5)) for step, loss in read(folder)[0]["step/loss"]]


def test_through_kills_and_a_resume_each_step_is_in_tensorboard_once(job: Job, undisturbed: str) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'farandole[tensorboard]'")
    job.pace.write_text("0.5")  # of faster steps some are left out; one of a single micro-batch takes a quarter
    with job.run(2, *OFTEN, "--tensorboard") as run:
        run.until(lambda: len(list((job.folder / "tensorboard").glob("events*"))) > 0, "event files")
        until_checkpoints(run, 1)
        exporter = children(run.process.pid, "farandole.observe.export_process")
        assert len(exporter) == 1
        os.kill(exporter[0], signal.SIGKILL)
        run.signal("w2", signal.SIGKILL)
        until_checkpoints(run, 2)
        run.until(lambda: children(run.process.pid, "farandole.observe.export_process"), "another exporter")
        run.process.kill()  # and all with it
        run.process.wait()
    with job.run(2, *OFTEN, "--tensorboard") as run:
        run.finish()
    assert job.out.read_text() == undisturbed
    lost = sum(line["lines"] for line in read_lines(job.folder) if line.get("event") == "lines lost")
    assert (
        len(counted(job.folder)) + lost == small.STEPS
    )  # a checkpoint may be saved before the lines of its last steps
    assert shown(job.folder / "tensorboard") == [
        (step, pytest.approx(loss, rel=1e-4)) for step, loss in counted(job.folder)
    ]


def test_an_export_that_can_not_be_written_is_told_once_and_the_run_ends_as_ever(job: Job, undisturbed: str) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'farandole[tensorboard]'")
    job.quick()
    (job.folder.parent / "file").write_text("in the way")
    with job.run(2, "--tensorboard-dir", str(job.folder.parent / "file" / "below")) as run:
        run.finish()
    assert job.out.read_text() == undisturbed
    output = run.output.read_text()
    assert len(naming(output, "TensorBoard", "[Errno")) == 1


@pytest.mark.long
def test_one_that_hangs_is_ended_after_the_run(job: Job, undisturbed: str) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'farandole[tensorboard]'")
    with job.run(2, "--tensorboard") as run:
        run.until(lambda: len(list((job.folder / "tensorboard").glob("events*"))) > 0, "event files")
        [exporter] = children(run.process.pid, "farandole.observe.export_process")
        os.kill(exporter, signal.SIGSTOP)
        job.quick()
        run.finish()
    assert job.out.read_text() == undisturbed
    assert "exports" in run.output.read_text()
    until(lambda: gone(exporter))


def test_metrics_are_served_by_a_token_that_is_nowhere_to_be_seen(job: Job, tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    with job.run(2, "--metrics-token", str(token)) as run:
        run.until(lambda: any("loss" in line for line in read_lines(job.folder)), "steps")
        address = json.loads((job.folder / "coordinator.json").read_text())["address"]
        request = urllib.request.Request(f"{address}/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
        deadline = time.monotonic() + 30
        page = ""
        while "farandole_steps_total" not in page or "farandole_loss " not in page:
            page = urllib.request.urlopen(request, timeout=10).read().decode()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert 'farandole_run_info{bits="same",run="run"' in page
        for pid in {run.process.pid, *children(run.process.pid, "farandole")}:
            assert TOKEN not in Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            assert TOKEN not in Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        job.quick()
        run.finish()
    for path in job.folder.rglob("*"):
        if path.is_file():
            assert TOKEN.encode() not in path.read_bytes(), path
    assert TOKEN not in run.output.read_text()
    assert f"{address}/metrics" in run.output.read_text()


def test_a_token_that_others_can_read_starts_nothing(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o644)
    (tmp_path / "train.py").write_text("raise SystemExit(7)")
    done = farandole("run", "--metrics-token", "token", "--folder", "r", "train.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "0644" in done.stderr or "prometheus_client" in done.stderr
    assert TOKEN not in done.stderr + done.stdout
    assert not (tmp_path / "r").exists()


WITHOUT = """
import importlib.util, sys
found, missing = importlib.util.find_spec, sys.argv[1].split(",")
importlib.util.find_spec = lambda name, package=None: None if name in missing else found(name, package)
sys.argv[:2] = ["farandole"]
from farandole.cli import main
main()
"""


@pytest.mark.parametrize(
    ("options", "extra"),
    [(["--tensorboard"], "tensorboard"), (["--wandb", "p"], "wandb"), (["--metrics-token", "token"], "prometheus")],
)
def test_a_package_that_is_missing_is_asked_for_by_name(tmp_path: Path, options: list[str], extra: str) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(7)")
    missing = "tensorboard,wandb,prometheus_client"
    command = [sys.executable, "-c", WITHOUT, missing, "run", *options, "--folder", "r", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert f'[{extra}]"' in done.stderr
    assert not (tmp_path / "r").exists()
