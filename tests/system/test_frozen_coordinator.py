"""A coordinator that is frozen for good: it is replaced, and whoever has none saves what it holds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.by_hand import ERRORS, by_hand
from tests.support.fake_worker import until
from tests.support.harness import ENVIRON, Elastic
from tests.support.lines import naming

pytestmark = [pytest.mark.processes]
TELLING = Path(__file__).parents[1] / "jobs" / "telling.py"
IMPATIENT = (
    "import sys; from farandole.cli.supervisor import Supervisor; Supervisor.silence_s = 2.0\n"
    "from farandole.cli import main; sys.argv[0] = 'farandole'; main()"
)


class Impatient(Elastic):
    """Of a run that replaces a frozen coordinator after two seconds."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        self.on, self.folder, self.earlier = (), folder, 0
        self.deadline = time.monotonic() + 120.0
        self.output = folder.with_name(f"{folder.name}.out")
        options = ["--workers", "2", "--folder", str(folder), str(TELLING), *arguments]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", IMPATIENT, "run", *options], env=ENVIRON, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip


@pytest.mark.long
def test_it_is_replaced_and_the_run_goes_on_and_can_be_stopped(tmp_path: Path) -> None:
    (tmp_path / "pace").write_text("0.05")
    with Impatient(tmp_path / "run", [str(tmp_path / "out"), "--pace", str(tmp_path / "pace")]) as run:
        run.until_members(2)
        run.until_step(3)
        frozen = json.loads((run.folder / "coordinator.json").read_text())["pid"]
        os.kill(frozen, signal.SIGSTOP)
        run.signal(run.members[-1], signal.SIGKILL)
        run.process.send_signal(signal.SIGTERM)
        run.until(lambda: run.process.poll() is not None, "the end")
        assert run.process.returncode == 128 + signal.SIGTERM, run.report()
        said = run.output.read_text()
        assert naming(said, "2 s")
        assert naming(said, "signal 9")
        assert run.events("coordinator back")
        [saved] = run.events("saved")
        assert Path(saved["path"]).exists()


@pytest.mark.long
def test_workers_whose_script_has_ended_save_what_they_hold_when_nobody_lets_them_go(
    tmp_path: Path,
) -> None:
    job = [str(TELLING), str(tmp_path / "out"), "--pace", str(tmp_path / "pace")]
    step = tmp_path / "out.step"
    with by_hand(tmp_path / "run", 2, job, wanted=2, minimum=2, orphan_s=10.0) as run:
        until(lambda: step.exists() and int(step.read_text()) >= 250)  # of 320: the rest takes less than the lease
        (tmp_path / "pace").write_text("0.05")
        os.kill(run.coordinator.pid, signal.SIGSTOP)
        (tmp_path / "pace").unlink()
        assert [process.wait(200) for process in run.workers] == [4, 4]
        assert (tmp_path / "out").exists(), "they had finished"
    assert list((tmp_path / "run" / "checkpoints").glob("*.pt"))
    said = (tmp_path / "run" / ERRORS).read_text()
    assert naming(said, "10 s")
    assert "Traceback" not in said
