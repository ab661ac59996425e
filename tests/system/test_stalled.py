"""Real processes that hang in the script where no peer waits for them: it is said, seen, and ends when asked to."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import msgspec
import pytest
import torch

from tests.support.harness import ENVIRON, FARANDOLE, Elastic
from tests.support.lines import naming

pytestmark = [pytest.mark.processes]
JOB = Path(__file__).parents[1] / "jobs" / "faults.py"
OPTIONS = ["--standstill", "1", "--stop-limit", "0.5", "--checkpoint-every", "2steps"]


def status(run: Elastic, *options: str) -> str:
    command = [*FARANDOLE, "status", "--run", str(run.folder), *options]
    return subprocess.run(command, env=ENVIRON, capture_output=True, text=True, timeout=200, check=True).stdout


def hanging(tmp_path: Path, fault: str) -> Elastic:
    arguments = (str(tmp_path), "--fault", fault, "--epochs", "1000")
    return Elastic(tmp_path / "run", JOB, *arguments, workers=1, options=OPTIONS)


@pytest.mark.long
@pytest.mark.failure(
    "Standing still",
    "the script hangs in the only worker, or in all of them",
    seen=(
        "`STALLED` with the step and the workers, after 60 s (ten median steps, if longer), and again after twice "
        "as long each time; `farandole status` says so too, and shows no samples/s; the stacks of all threads are "
        "in `logs/w1.log`"
    ),
    outcome="nobody is evicted, since it may be honest work; `farandole stop` ends the run",
)
@pytest.mark.failure(
    "Standing still",
    "`farandole stop`, Ctrl-C or SIGTERM while the script hangs within a step",
    seen=(
        "`the stop no longer waits`, with the workers that hang, after 30 s (three median steps, if longer) "
        "without progress"
    ),
    outcome=(
        "the state of the last complete step is saved, by another thread where the training thread hangs; the exit "
        "code is that of the stop; the message says where the stacks are"
    ),
)
def test_a_hang_of_the_only_member_is_told_and_a_stop_saves_the_last_whole_step(tmp_path: Path) -> None:
    with hanging(tmp_path, "hang") as run:
        run.until(lambda: len(run.events("stalled")) >= 2, "it is said again")
        first, second, *_ = run.events("stalled")
        assert first["step"] == 5
        assert first["workers"] == ["w1"]
        assert "step 5" in first["reason"]
        assert second["seconds"] > 1.9 * first["seconds"]
        assert naming(run.output.read_text(), "step 5", "w1", "logs/w1.log")

        told = msgspec.json.decode(status(run, "--json"))
        assert told["state"] == "stalled"
        assert told["samples_per_s"] is None
        assert told["stalled"]["workers"] == ["w1"]
        assert "step 5" in status(run)
        log = (run.folder / "logs" / "w1.log").read_text()
        assert "in stand_for_ever" in log

        run.process.send_signal(signal.SIGTERM)
        run.until(lambda: run.process.poll() is not None, "the end")
        assert run.process.returncode == 128 + signal.SIGTERM, run.report()
        [cut] = run.events("cut short")
        assert cut["workers"] == ["w1"]
        [saved] = run.events("saved")
        assert saved["whole"]
        assert Path(saved["path"]).name.startswith("step-00000005-"), "of the beginning of the step that hangs"
        assert torch.load(saved["path"], weights_only=True)
        [over] = run.events("over")
        assert all(value in over["reason"] for value in ("w1", "step 5", "logs/w1.log"))


@pytest.mark.long
@pytest.mark.failure(
    "Standing still",
    "`farandole stop`, Ctrl-C or SIGTERM while all workers hang between two steps, as in a validation that never ends",
    seen="`the stop no longer waits`, after ten times as long, since the validation may end",
    outcome="the state that the script has left is saved as `after-step-N...pt`; the earlier checkpoints stay",
)
def test_a_hang_between_two_steps_is_waited_for_longer_and_saved_as_that(tmp_path: Path) -> None:
    with hanging(tmp_path, "hang-between-steps") as run:
        run.until(lambda: (tmp_path / "hung").exists() and bool(run.events("stalled")), "it hangs")
        run.command("stop")
        run.until(lambda: run.process.poll() is not None, "the end")
        [asked], [cut], [saved] = run.events("stopping"), run.events("cut short"), run.events("saved")
        assert cut["time"] - asked["time"] > 5.0, "it might have been a validation"
        assert not saved["whole"]
        assert Path(saved["path"]).name.startswith("after-step-")
