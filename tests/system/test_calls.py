"""Scripts that go different ways on different workers: real runs end at once, and say who called what.

What is decided on which message is in `protocol/test_calls.py`; random schedules with scripts that stray are part of
`protocol/test_schedules.py`. Of two ways that differ in no message of theirs, one is left to `make test-long`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.faults import FAULT_AT
from tests.support.harness import Elastic

pytestmark = [pytest.mark.processes]
JOB = Path(__file__).parents[1] / "jobs" / "faults.py"
STEPS = 12
EVALUATION = "evaluate over 96 samples in micro-batches of 16, 2 lanes"
AFTER = f"ended after step {FAULT_AT}"


def strayed(folder: Path, how: str) -> Elastic:
    """The run, over."""
    arguments = (str(folder.parent), "--fault", how, "--steps", str(STEPS))
    with Elastic(folder, JOB, *arguments, workers=2, options=["--min", "2"]) as run:
        run.until(lambda: run.process.poll() is not None, "the end")
    return run


@pytest.mark.failure(
    "Scripts that differ between workers",
    "the script calls `run.evaluate` under `if run.is_leader:`, or on some workers only",
    seen="`THE SCRIPTS MAKE DIFFERENT CALLS` within about a second, with two workers and the call of each",
    outcome="exit code 1; the state of the last complete step is saved; no worker is killed",
)
@pytest.mark.failure(
    "Scripts that differ between workers",
    (
        "workers evaluate differently at the same place: another number of samples, other micro-batches, metrics of "
        "other sizes"
    ),
    seen="`THE SCRIPTS MAKE DIFFERENT CALLS`",
    outcome="exit code 1; the state between the two steps is saved as `after-step-N...pt`",
)
@pytest.mark.failure(
    "Scripts that differ between workers",
    "the script freezes or unfreezes a layer (`requires_grad`) on some workers only",
    seen="`THE SCRIPTS MAKE DIFFERENT CALLS` at the next step",
    outcome="exit code 1; the state of that step is saved",
)
@pytest.mark.failure(
    "Scripts that differ between workers",
    "the script of one worker ends early: `break`, `sys.exit(0)`",
    seen="`THE SCRIPTS MAKE DIFFERENT CALLS` within about a second, with the last step of that worker",
    outcome="exit code 1; the state of the step after it is saved",
)
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("leader-evaluates", (EVALUATION, f"step {FAULT_AT + 1};", "not under `if run.is_leader`")),
        pytest.param(
            "unequal-evaluations", (EVALUATION, EVALUATION.replace("2 lanes", "4 lanes")), marks=pytest.mark.long
        ),
        ("leader-thaws", (f"step {FAULT_AT + 1}, of which other parameters are trained", f"step {FAULT_AT + 1};")),
        pytest.param("leader-evaluates-at-the-end", (AFTER, f"goes on with {EVALUATION}"), marks=pytest.mark.long),
        pytest.param("one-breaks", (AFTER, f"goes on with step {FAULT_AT + 1};"), marks=pytest.mark.long),
        ("one-exits", (AFTER, f"goes on with step {FAULT_AT + 1};")),
    ],
)
def test_scripts_that_go_different_ways_end_the_run_and_are_named(
    tmp_path: Path, how: str, said: tuple[str, ...]
) -> None:
    run = strayed(tmp_path / "run", how)
    assert run.process.returncode == 1, run.report()
    [event] = run.events("calls differ")
    assert sorted(event["workers"]) == ["w1", "w2"]
    assert all(worker in event["reason"] for worker in event["workers"])
    assert all(words in event["reason"] for words in said), event["reason"]
    assert event["reason"] in run.output.read_text().replace("\n", " ")
    assert not run.events("lost"), "nobody is killed for it, by Gloo or as stalled"
    [saved] = run.events("saved")
    assert saved["whole"] == (how != "unequal-evaluations"), "who has ended its script holds a whole state too"
    assert Path(saved["path"]).exists()


@pytest.mark.parametrize(
    ("how", "last"), [("everyone-breaks", FAULT_AT), pytest.param("everyone-thaws", STEPS - 1, marks=pytest.mark.long)]
)
def test_scripts_that_go_the_same_way_end_well(tmp_path: Path, how: str, last: int) -> None:
    run = strayed(tmp_path / "run", how)
    assert run.process.returncode == 0, run.report()
    assert run.step == last
    assert [event["equal"] for event in run.events("finished")] == [True]
    assert not run.events("lost")
