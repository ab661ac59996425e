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
from tests.support.harness import members, read_lines
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


def test_a_function_trains_to_the_bits_of_one_process_and_returns_a_result(
    cluster: RayCluster, tmp_path: Path, expected: bytes
) -> None:
    with driver(tmp_path) as program:
        assert program.finish() == 0, program.output
        result = program.result
        assert program.out.read_bytes() == expected
        assert result["path"] == str(program.run)
        assert result["metrics"]["step"] == max(line.get("step", 0) for line in read_lines(program.run))
        assert "model" in torch.load(result["checkpoint"]["path"], weights_only=True)
    assert cluster.actors() == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_when_the_driver_ends_the_run_saves_and_ends_and_the_next_call_continues_it(
    cluster: RayCluster, tmp_path: Path, expected: bytes, number: signal.Signals
) -> None:
    pace = tmp_path / "pace"
    pace.write_text("1.6")
    with driver(tmp_path, "--pace", str(pace)) as first:
        until(lambda: len(members(first.run)) == NODES or first.process.poll() is not None, "two workers", 200)
        assert first.process.poll() is None, first.output
        first.process.send_signal(number)
        assert first.finish() != 0
    until(lambda: not is_locked(first.run), "the end of the run", 200)
    assert cluster.actors() == []
    pace.unlink()
    with driver(tmp_path, "--pace", str(pace)) as second:
        assert second.finish() == 0, second.output
        assert second.out.read_bytes() == expected
        [resumed] = [line["step"] for line in read_lines(second.run) if line.get("event") == "resumed"]
        assert resumed > 0


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
