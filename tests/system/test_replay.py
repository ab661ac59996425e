"""Rehearsal and replay: a world of one gives the bits of a real run that grew, lost a worker and shrank, under every
policy; and what is said when it can't.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from farandole.cli.reproduce import history_of, warn_of_differences
from farandole.coordinator.journal import Journal
from farandole.errors import UsageError
from farandole.plan.rules import RULES
from farandole.plan.shards import History
from farandole.protocol.coordinator.reconnection import Durable
from farandole.protocol.coordinator.state import RunSettings
from farandole.protocol.events import ReadyEvent, ResumedEvent, StateLostEvent
from farandole.protocol.messages import Signature
from farandole.protocol.metrics import Line, LogLine, as_written
from tests.support import forked
from tests.support.harness import ENVIRON, FARANDOLE, Elastic, read_lines
from tests.support.lines import naming
from tests.support.metric_lines import an, step_line

JOB = Path(__file__).parents[1] / "jobs" / "small.py"
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="signals by /proc")


def command(*arguments: str | Path, code: int = 0) -> str:
    done = forked.run([*FARANDOLE, *map(str, arguments)], env=ENVIRON, timeout=90)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def grow_lose_and_shrink(run: Elastic) -> None:
    run.until_step(2)
    run.command("scale", "3")
    run.until_members(3)
    run.until_step(run.step + 2)
    victim = run.members[1]
    run.signal(victim, signal.SIGKILL)
    run.until(lambda: victim not in run.members, "a view without the victim")
    run.until_step(run.step + 2)
    run.command("scale", "1")
    run.until_members(1)


def elastic(tmp_path: Path, *arguments: str) -> Path:
    pace, folder = tmp_path / "pace", tmp_path / "run"
    pace.write_text("1.2")
    with Elastic(
        folder, JOB, str(tmp_path / "out"), "--pace", str(pace), *arguments, workers=1, options=["--seed", "7"]
    ) as run:
        grow_lose_and_shrink(run)
        pace.unlink()
        run.finish()
        assert [event["equal"] for event in run.events("finished")] == [True]
    return folder


IN_EVERY_RUN = ("AdaScale", "MomentumCompensation")  # one that measures, one that remembers


@pytest.mark.long
@pytest.mark.processes
@on_linux
@pytest.mark.parametrize(
    "rule",
    [pytest.param(r.__name__, marks=[] if r.__name__ in IN_EVERY_RUN else [pytest.mark.long]) for r in RULES],
)
def test_a_replay_has_the_bits_of_the_run(rule: str, tmp_path: Path) -> None:
    folder = elastic(tmp_path, "--rule", rule)
    sizes = {line["workers"] for line in read_lines(folder) if "event" not in line}
    assert {1, 3} <= sizes
    told = command("replay", folder, "--folder", tmp_path / "replayed")
    [finished] = [line for line in read_lines(folder) if line.get("event") == "finished"]
    assert finished["fingerprint"] in told
    steps = [[line for line in read_lines(place) if "event" not in line] for place in (folder, tmp_path / "replayed")]
    for there, here in zip(*steps, strict=True):
        assert {key: there[key] for key in ("step", "samples", "loss", "workers", "factor")} == {
            key: here[key] for key in ("step", "samples", "loss", "workers", "factor")
        }


@pytest.mark.long
@pytest.mark.processes
@on_linux
def test_what_a_rule_remembers_comes_back_with_a_checkpoint(tmp_path: Path) -> None:
    """Everyone dies; without its averages AdaScale would have another gain, and without their sum another end."""
    pace, folder = tmp_path / "pace", tmp_path / "run"
    pace.write_text("1.2")
    options = ["--checkpoint-every", "2steps"]
    job = [str(tmp_path / "out"), "--pace", str(pace), "--rule", "AdaScale", "--base-steps", "60"]
    with Elastic(folder, JOB, *job, workers=2, options=options) as run:
        run.until_members(2)
        run.until(lambda: bool(run.events("checkpoint")), "a checkpoint")
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for worker in run.members:
                run.signal(worker, number)
        run.until(lambda: bool(run.events("resumed")), "the checkpoint in use")
        run.until_members(2)
        pace.unlink()
        run.finish()
        (resumed,) = run.events("resumed")
        again = [line for line in run.lines() if "event" not in line and line["step"] >= resumed["step"] > 0]
        assert any(line["workers"] == 2 and line["factor"] > 1 for line in again)
    [finished] = [line for line in read_lines(folder) if line.get("event") == "finished"]
    assert finished["fingerprint"] in command("replay", folder, "--folder", tmp_path / "replayed")
    gains = [line["factor"] for line in read_lines(tmp_path / "replayed") if "event" not in line]
    assert sum(gains[:-1]) < 60 <= sum(gains) + 1e-3, "at the same end"


@pytest.mark.long
@pytest.mark.processes
def test_a_rehearsal_takes_the_history_wherever_it_stands(tmp_path: Path) -> None:
    (tmp_path / "history").write_text("0 1\n4 3\n9 2\n")
    one = command("rehearse", JOB, tmp_path / "a", "--rule", "AdaScale", "--history", tmp_path / "history")
    other = command("rehearse", "--history", tmp_path / "history", JOB, tmp_path / "b", "--rule", "AdaScale")
    assert one == other
    assert one.startswith("fingerprint ")
    constant = {
        command("rehearse", "--history", path, JOB, tmp_path / "c")
        for path in (tmp_path / "history", _written(tmp_path / "ones", "0 1\n"))
    }
    assert len(constant) == 1, "with a constant batch the history changes nothing"


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


# --- what can't be -----------------------------------------------------------------------------------------------


def steps(*workers: int, first: int = 0) -> list[Line]:
    return [step_line(first + n, workers=count) for n, count in enumerate(workers)]


def test_of_steps_taken_again_the_last_time_counts() -> None:
    lines = [*steps(1, 2, 3), an(StateLostEvent), an(ResumedEvent, step=1), *steps(4, 4, first=1)]
    assert history_of(lines, Path("r")).changes == ((0, 1), (1, 4))
    lines = [*steps(1, 2, 3), an(StateLostEvent), LogLine(step=2, fields={}), *steps(5)]
    assert history_of(lines, Path("r")).changes == ((0, 5),)


def test_a_checkpoint_knows_the_steps_whose_lines_died_with_everyone() -> None:
    saved = (4, History(((0, 1), (2, 3))))
    assert history_of([*steps(1, 1), *steps(2, first=4)], Path("r"), saved).changes == ((0, 1), (2, 3), (4, 2))
    assert history_of([*steps(1, 1, 3, 3, 5, 5), *steps(2, first=4)], Path("r"), saved).changes == (
        (0, 1),
        (2, 3),
        (4, 2),
    )
    with pytest.raises(UsageError, match=r"step 4\b"):
        history_of(steps(2, first=5), Path("r"), saved)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], r"step 0\b"),
        (steps(2, 2, first=5), r"step 0\b"),
        ([*steps(2, 2), *steps(2, first=4)], r"step 2\b"),
    ],
)
def test_a_run_whose_steps_are_not_all_known_is_not_replayed(lines: list[Line], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        history_of(lines, Path("r"))


def test_other_libraries_are_told_before_the_bits_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    facts = (("torch version", "1.0"), ("numpy version", np.__version__), ("parameter model.weight", "[3] float32"))
    journal = Journal(tmp_path)
    journal.commit(
        [an(ReadyEvent)],
        Durable(fixed_targets={"": 1}, signature=Signature(facts=facts)),
    )
    journal.close()
    try:
        warn_of_differences(tmp_path, RunSettings(run="r"))
    finally:
        torch.set_num_threads(threads)
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("farandole: warning: torch version: ")
    assert naming(told, "1.0", torch.__version__)


@pytest.mark.processes
def test_what_can_not_be_replayed_is_said_in_one_line(tmp_path: Path) -> None:
    assert naming(command("replay", tmp_path, code=2), "farandole: error: ", tmp_path)
    (tmp_path / "settings.json").write_text(json.dumps({"run": "r"}))
    (tmp_path / "metrics.jsonl").write_bytes(as_written(step_line(0)))
    assert naming(command("replay", tmp_path, code=2), f"farandole replay {tmp_path} SCRIPT")
    told = command("rehearse", "--history", tmp_path / "none", JOB, tmp_path / "out", code=2)
    assert str(tmp_path / "none") in told
    told = command("rehearse", "--history", _written(tmp_path / "h", "0 2\n3 x\n"), JOB, tmp_path / "out", code=2)
    assert "h, line 2: '3 x'" in told
