"""Real processes that die for ever in the same place: the run ends, or goes on without them, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.harness import Elastic
from tests.support.lines import naming

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]
JOB = Path(__file__).parents[1] / "jobs" / "faults.py"


def job(folder: Path, fault: str) -> tuple[str, ...]:
    """Arguments of the job, in which a micro-batch takes 10 ms."""
    (folder / "pace").write_text("0.04")
    return str(folder), "--fault", fault, "--epochs", "1000", "--pace", str(folder / "pace")


@pytest.mark.long
@pytest.mark.failure(
    "Processes, signals and crash loops",
    "all workers die at the same step after every restart (a broken library, a sample that crashes, too little memory)",
    seen="an event for each death; replacements start after 1, 2, 4, ... s, at most 60 s",
    outcome=(
        'after five deaths without progress, exit code 1 with "died 5 times at step 5 (signal 11)"; the checkpoints '
        "stay"
    ),
)
def test_a_run_that_dies_at_step_5_for_ever_ends_after_five_times(tmp_path: Path) -> None:
    """It goes on from the checkpoint of step 3 each time."""
    options = ["--min", "2", "--checkpoint-every", "3steps"]
    with Elastic(tmp_path / "run", JOB, *job(tmp_path, "die"), workers=2, options=options, deadline_s=360.0) as run:
        run.until(lambda: run.process.poll() is not None, "the end")
        assert run.process.returncode == 1, run.report()
        assert naming(run.output.read_text(), "5 times", "step 5", "signal 11")
        assert [event["step"] for event in run.events("resumed")] == [3] * 4
        assert len(run.events("state lost")) == 4, "the fifth time, the first of the two to die is enough"
        begun = [event["time"] for event in run.events("view") if event["cause"] == "first view"]
        lost = [event["time"] for event in run.events("state lost")]
        waits = [later - before for before, later in zip(lost, begun[1:], strict=False)]
        assert waits[-1] > 8.0, "the last replacements came after 8 s"


@pytest.mark.failure(
    "Processes, signals and crash loops",
    "every joiner dies within ten steps (a broken GPU, too little memory for one more worker)",
    seen='after the fifth, "5 joiners in a row died within 10 steps of entering (signal 11)" and the new target',
    outcome=(
        "no more are started; `farandole scale` tries again; with fewer than `--min` left, the run saves and ends "
        "with exit code 1"
    ),
)
@pytest.mark.long
def test_joiners_that_die_in_their_first_step_are_given_up_and_the_run_goes_on(tmp_path: Path) -> None:
    arguments = job(tmp_path, "die-joiner")
    with Elastic(tmp_path / "run", JOB, *arguments, workers=1, options=[], deadline_s=360.0) as run:
        run.until_step(3)
        run.command("scale", "2")
        run.until(lambda: bool(run.events("no replacements")), "no more joiners")
        [given_up] = run.events("no replacements")
        assert given_up["wanted"] == 1
        assert all(value in given_up["reason"] for value in ("5 joiners", "10 steps", "signal 11"))
        assert sum("signal 11" in event["reason"] for event in run.events("lost")) <= 5
        assert naming(run.output.read_text(), given_up["reason"], "1 worker")
        run.until_step(run.step + 20)
        assert [event["worker"] for event in run.events("starting")] == [f"w{n}" for n in range(1, 7)]
        run.command("stop")
        run.finish()


def test_a_process_that_is_no_use_any_more_is_replaced_and_the_run_goes_on(tmp_path: Path) -> None:
    """As one that has taken a state over which nobody else holds any more (`training/run_state.py`)."""
    with Elastic(tmp_path / "run", JOB, *job(tmp_path, "supersede"), workers=2, options=[]) as run:
        run.until_members(2)
        run.until(lambda: bool(run.events("lost")), "one to go")
        run.until_members(2)
        assert not run.events("failed"), run.report()
        assert "no use any more" in run.output.read_text()
        run.command("stop")
        run.finish()
