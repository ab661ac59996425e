"""How runs of real processes end, and what is there afterwards: the final state, whoever dies or hangs over it; what
`farandole status` tells of it; and how such a folder goes on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from farandole.checkpoint import restore
from farandole.checkpoint.store import Store
from tests.jobs import ending
from tests.support import forked
from tests.support.endings import SCRIPT, by_itself, ended, fingerprint_of, status
from tests.support.harness import ENVIRON, Elastic, read_lines
from tests.support.lines import naming

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="signals by /proc"),
]

STEPS = ending.EPOCHS * ending.STEPS_AN_EPOCH


def started(folder: Path, *arguments: str, options: tuple[str, ...] = ("--checkpoint-every", "never")) -> Elastic:
    both = ["--min", "2", *options]
    return Elastic(folder, SCRIPT, str(folder.with_name("out")), *arguments, workers=2, options=both)


@pytest.mark.failure(
    "Checkpoints",
    "the script runs to its end and saves nothing itself, also with `--checkpoint-every never`",
    seen="`checkpoint saved: PATH` when the last worker has finished",
    outcome="one worker saves the final state as the last checkpoint; the exit code is 0 only if it is saved",
)
@pytest.mark.failure(
    "Checkpoints",
    "`farandole run --folder` or `--resume` names a run that has run to its end",
    seen="`nothing is left to train`, at once",
    outcome=(
        "exit code 0; nothing is changed; if the script asks for more epochs, training continues with the bits of one "
        "long run"
    ),
)
def test_a_finished_run_has_its_final_state_and_goes_on_if_more_is_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with started(folder) as run:
        run.finish()
        (saved,), (finished,) = run.events("saved"), run.events("finished")
        assert saved["whole"]
        assert fingerprint_of(saved["path"]) == finished["fingerprint"], run.report()
    told: dict[str, Any] = json.loads(status(folder, "--json"))
    assert told["outcome"] == "finished"
    assert (told["code"], told["steps"], told["total"]) == (0, STEPS, STEPS)
    assert (told["fingerprint"], told["checkpoint"]) == (finished["fingerprint"], saved["path"])
    shown = status(folder)
    assert finished["fingerprint"] in shown
    assert saved["path"] in shown

    with started(folder) as run:
        assert ended(run) == 0, run.report()
        (event,) = run.events("nothing left")
        assert naming(run.output.read_text(), Path(event["path"]).name)
        assert "Traceback" not in run.report()
    assert json.loads(status(folder, "--json"))["fingerprint"] == finished["fingerprint"]
    with started(folder, "--epochs", str(ending.EPOCHS + 1), options=()) as run:
        run.finish()
        (resumed,) = run.events("resumed")
        assert (resumed["step"], resumed["path"]) == (STEPS, saved["path"])
        longer = by_itself(tmp_path / "one", "--epochs", str(ending.EPOCHS + 1))
        assert run.events("finished")[0]["fingerprint"] == longer
        assert fingerprint_of(run.events("saved")[0]["path"]) == longer


@pytest.mark.long
@pytest.mark.failure(
    "Checkpoints",
    "all workers leave the loop early, and the run is started again in its folder",
    seen="`checkpoint saved: PATH` at the first end, `resumed` at the second start",
    outcome="the run continues with the next step",
)
def test_a_loop_left_early_by_everyone_is_an_end_too_and_can_be_gone_on_with(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with started(folder, "--break-at", "6") as run:
        run.finish()
        (saved,) = run.events("saved")
        position = torch.load(saved["path"], weights_only=True)["farandole"]["position"]
        assert position == [1, 2 * ending.BATCH, 7]
        assert fingerprint_of(saved["path"]) == by_itself(tmp_path / "early", "--break-at", "6")
    with started(folder) as run:
        run.finish()
        assert run.events("finished")[0]["fingerprint"] == by_itself(tmp_path / "one")


@pytest.mark.long
@pytest.mark.failure(
    "Checkpoints",
    "the script of a single-process run with `FARANDOLE_FOLDER` ends, leaves its loop by `break`, or fails",
    seen="the path of the saved state, at the end of the process",
    outcome=(
        "it resumes from there; an error between two steps leaves `after-step-N...pt`; exit code 1 if nothing was "
        "written or no step was taken"
    ),
)
def test_a_world_of_one_has_its_final_state_and_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    final = by_itself(folder)
    lines = read_lines(folder)
    (saved,) = [line for line in lines if line.get("event") == "saved"]
    assert fingerprint_of(saved["path"]) == final
    environ = {**ENVIRON, "FARANDOLE_FOLDER": str(folder)}
    command = [sys.executable, str(SCRIPT), str(tmp_path / "again")]
    done = forked.run(command, env=environ)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert naming(done.stderr, Path(saved["path"]).name)
    done = forked.run([*command, "--epochs", "3"], env=environ)
    assert done.returncode == 0, done.stderr
    assert read_lines(folder)[-1]["event"] == "over"
    assert restore.find([str(folder / "checkpoints")]).position.step == 3 * ending.STEPS_AN_EPOCH

    failing = tmp_path / "failing"
    command = [sys.executable, "-c", f"exec(open({str(SCRIPT)!r}).read().replace('args.out.with_name', 'nowhere'))"]
    environ["FARANDOLE_FOLDER"] = str(failing)
    done = subprocess.run([*command, "out"], env=environ, capture_output=True, text=True, check=False)
    assert "nowhere" in done.stderr
    assert [event["whole"] for event in read_lines(failing) if event.get("event") == "saved"] == [False]
    early = tmp_path / "early"
    by_itself(early, "--break-at", "6")
    for fingerprint in tmp_path.glob("early-out.*"):
        fingerprint.unlink()
    assert by_itself(early) == final
    [resumed] = [line for line in read_lines(early) if line.get("event") == "resumed"]
    assert resumed["step"] == 7, "a loop that was left by `break` goes on"


@pytest.mark.failure(
    "Checkpoints",
    "the leader is killed while the script's own code saves, after the loop",
    seen="the worker is lost; the others finish",
    outcome="another worker writes the last checkpoint; the script's own save is not repeated",
)
def test_the_leader_is_killed_while_it_saves_after_the_loop(tmp_path: Path) -> None:
    with started(tmp_path / "run", "--save") as run:
        saving = tmp_path / "saving"
        run.until(lambda: saving.exists() and saving.read_text() != "", "the leader saves")
        leader = next(event["worker"] for event in run.events("ready") if event["pid"] == int(saving.read_text()))
        run.signal(leader, signal.SIGKILL)
        run.finish()
        (saved,) = run.events("saved")
        assert saved["worker"] != leader
        assert fingerprint_of(saved["path"]) == run.events("finished")[0]["fingerprint"]


@pytest.mark.long
@pytest.mark.failure(
    "Standing still",
    "one worker hangs after its last step, and the run is stopped",
    seen="`checkpoint saved` at the stop; 10 s later `w2 HANGS`",
    outcome=(
        "a worker that has finished saves the final state at once, the others get 10 s; the exit code is that of "
        "the stop, and the last message names the worker"
    ),
)
def test_one_worker_hangs_after_its_last_step(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with started(folder, "--hang") as run:
        run.until(lambda: "hanging" in run.output.read_text(), "one hangs")
        os.kill(run.process.pid, signal.SIGTERM)
        assert ended(run) == 128 + signal.SIGTERM, run.report()
        (saved,), (hung,), (over,) = run.events("saved"), run.events("hung"), run.events("over")
        assert saved["time"] < hung["time"] <= over["time"]
        assert saved["worker"] != hung["worker"]
        assert hung["worker"] in over["reason"]
    told = json.loads(status(folder, "--json"))
    assert told["outcome"] == "stopped"
    assert told["checkpoint"] == saved["path"]
    assert Store(str(folder / "checkpoints")).entries()[0].step == STEPS


def test_status_of_a_run_that_was_killed(tmp_path: Path) -> None:
    pace = tmp_path / "pace"
    pace.touch()
    folder = tmp_path / "run"
    with started(folder, "--pace", str(pace), options=("--checkpoint-every", "2steps")) as run:
        run.until(lambda: bool(run.events("checkpoint")), "a checkpoint")
        run.process.kill()
        run.process.wait()
        newest = run.events("checkpoint")[-1]["path"]
    told = json.loads(status(folder, "--json"))
    assert (told["outcome"], told["code"], told["checkpoint"]) == ("cut off", None, newest)
    assert "cut off" in status(folder)
