"""A run that Python code starts, on a real cluster: `farandole.integrations.ray.run`."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from farandole.control.run_folder import is_locked
from tests.pool.ray.conftest import NODES
from tests.support.cluster_run import EPOCHS, JOB
from tests.support.forked import ENVIRON
from tests.support.harness import read_lines
from tests.support.pages import ROOT, block_with, changed
from tests.support.ray_cluster import RayCluster
from tests.support.slurm import until

pytestmark = [pytest.mark.processes, pytest.mark.world, pytest.mark.timeout(280)]

PROGRAM = JOB.with_name("from_python.py")


class Driver:
    """The program, as a process."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.out, self.run, self._output = folder / "out", folder / "store" / "run", folder / "output"
        hears = ["env", "--default-signal=INT"]  # a shell ignores it for what it starts in the background
        command = [*hears, sys.executable, PROGRAM.name, str(self.out), str(folder / "store"), *EPOCHS, *arguments]
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(command, cwd=PROGRAM.parent, env=ENVIRON, stdout=output, stderr=output)

    def finish(self) -> int:
        return self.process.wait(200)

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    @property
    def result(self) -> dict[str, Any]:
        return json.loads(next(line for line in self.output.splitlines() if line.startswith("result "))[7:])


@contextlib.contextmanager
def driver(folder: Path, *arguments: str) -> Iterator[Driver]:
    started = Driver(folder, *arguments)
    try:
        yield started
    except AssertionError as error:
        raise AssertionError(f"{error}\n{started.output[-5000:]}") from error
    finally:
        started.process.kill()
        started.process.wait()


def at_work(folder: Path, calls: int) -> bool:
    """Whether the run of that many calls has all its workers."""
    starts = [line for line in read_lines(folder) if line.get("event") == "run started"]
    views = [line for line in read_lines(folder) if line.get("event") == "view"]
    return (
        len(starts) == calls
        and views != []
        and views[-1]["time"] > starts[-1]["time"]
        and len(views[-1]["members"]) == NODES
    )


@pytest.mark.timeout(900)  # four drivers, one after the other
def test_when_the_driver_ends_the_run_saves_and_ends_and_the_next_call_continues_it_to_the_bits_of_one_process(
    cluster: RayCluster, tmp_path: Path, expected: bytes
) -> None:
    pace = tmp_path / "pace"
    pace.write_text("1.6")
    for calls, number in enumerate((signal.SIGINT, signal.SIGTERM, signal.SIGKILL), 1):
        with driver(tmp_path, "--pace", str(pace)) as ended:
            until(lambda calls=calls: at_work(ended.run, calls) or ended.process.poll() is not None, "two workers", 200)
            assert ended.process.poll() is None, ended.output
            ended.process.send_signal(number)
            assert ended.finish() != 0
        until(lambda: not is_locked(ended.run), "the end of the run", 200)
        assert cluster.actors() == []
    pace.unlink()
    with driver(tmp_path, "--pace", str(pace)) as last:
        assert last.finish() == 0, last.output
        assert last.out.read_bytes() == expected
        result = last.result
        assert result["path"] == str(last.run)
        assert result["metrics"]["step"] == max(line.get("step", 0) for line in read_lines(last.run))
        assert "model" in torch.load(result["checkpoint"]["path"], weights_only=True)
        resumed = [line["step"] for line in read_lines(last.run) if line.get("event") == "resumed"]
        assert len(resumed) == 3
        assert resumed == sorted(resumed)
        assert resumed[0] > 0
    assert cluster.actors() == []


def test_an_error_of_the_function_is_one_of_the_call(cluster: RayCluster, tmp_path: Path) -> None:
    with driver(tmp_path, "--raises") as program:
        assert program.finish() == 1
        last = program.output.strip().splitlines()[-1]
        assert last.startswith("farandole.integrations.ray.TrainingFailed: ")
        assert "a value that the function does not know" in program.output
        assert str(program.run) in last
    assert cluster.actors() == []


def test_the_page_s_program_runs_as_it_stands(cluster: RayCluster, tmp_path: Path) -> None:
    program = block_with(ROOT / "docs" / "ray.md", "import", "python")
    (tmp_path / "program.py").write_text(changed(program, {"/shared/runs": str(tmp_path / "runs")}))
    command = [sys.executable, "program.py"]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRON, check=False, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    loss, checkpoint, path = done.stdout.splitlines()[-1].split()
    assert float(loss) < 1
    assert path == str(tmp_path / "runs" / "mine")
    assert Path(checkpoint).is_relative_to(path)
    assert cluster.actors() == []
