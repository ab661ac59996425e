"""A joiner that does not compute what the run does is refused by the name of it; who computes wrong is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.harness import Elastic

pytestmark = pytest.mark.processes

JOB = Path(__file__).parents[1] / "jobs" / "faults.py"


def job(folder: Path, fault: str, worker: str, at: int) -> tuple[str, ...]:
    """Arguments of the job: `worker` computes wrong from step `at` on. Steps are slow while FOLDER/pace is there."""
    sizes = ("--steps", "60", "--batch", "24", "--micro", "4", "--pace", str(folder / "pace"))
    return str(folder), "--fault", f"wrong-{fault}", "--worker", worker, "--at", str(at), *sizes


def fingerprint(run: Elastic) -> str:
    run.until(lambda: run.process.poll() is not None, "the end")
    finished = run.events("finished")
    assert [event["equal"] for event in finished] == [True], run.report()
    return finished[0]["fingerprint"]


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What comes of it where all compute the same."""
    folder = tmp_path_factory.mktemp("right")
    with Elastic(folder / "run", JOB, *job(folder, "loss", "nobody", 0), workers=2, options=[]) as run:
        return fingerprint(run)


@pytest.mark.failure(
    "External workers, pools and machines",
    "the script, data, augmentation or decoder of a joiner gives another micro-batch, loss or gradient than the run's",
    seen=(
        "`w2 is refused: its results differ from those of w1`, with the first difference, before the end of its first "
        "step"
    ),
    outcome="the others repeat the step without it, with the same bits",
)
@pytest.mark.parametrize(
    ("how", "what"),
    [
        pytest.param("batch", "the micro-batch", marks=pytest.mark.long),
        ("loss", "the loss"),
        ("gradient", "model.0.weight"),
        ("buffers", "buffers"),
    ],
)
def test_a_joiner_that_computes_something_else_is_refused_and_the_bits_are_the_same(
    how: str, what: str, tmp_path: Path, right: str
) -> None:
    pace = tmp_path / "pace"
    pace.write_text("0.1")
    with Elastic(tmp_path / "run", JOB, *job(tmp_path, how, "w3", 0), workers=2, options=["--min", "2"]) as run:
        run.until_members(2)  # the one that is wrong must not be the first: it would be right then
        run.command("scale", "3")
        run.until(lambda: run.events("refused"), "the proof")
        pace.unlink()
        same = fingerprint(run)
        refused = run.events("refused")
        assert {event["worker"] for event in refused} == {"w3"}, run.report()
        assert all(value in refused[0]["reason"] for value in ("shard 0", what))
        assert same == right


@pytest.mark.failure(
    "External workers, pools and machines",
    "a machine computes wrong results, sometimes or always (`--audit PART` searches for it)",
    seen="`w2 on node1 COMPUTES WRONG RESULTS`, with the micro-batch and the first difference",
    outcome="it leaves; no pool starts a worker on that host again; the step is computed without it",
)
def test_one_bit_of_one_gradient_is_found_in_the_step_in_which_it_is_flipped(tmp_path: Path) -> None:
    options = ["--min", "3", "--audit", "100%"]
    with Elastic(tmp_path / "run", JOB, *job(tmp_path, "gradient", "w2", 20), workers=3, options=options) as run:
        run.until(lambda: run.events("computes wrong"), "the verdict")
        wrong = run.events("computes wrong")
        assert [event["worker"] for event in wrong] == ["w2"], run.report()
        assert "model.0.weight" in wrong[0]["reason"]
        view = next(event for event in run.events("view") if len(event["members"]) == 2)
        assert (view["step"], view["outcome"]) == (20, "redo")


def test_two_alone_are_both_named_and_the_run_ends_if_it_was_told_to(tmp_path: Path) -> None:
    options = ["--min", "2", "--audit", "1", "--stop-undecided"]
    with Elastic(tmp_path / "run", JOB, *job(tmp_path, "gradient", "w2", 20), workers=2, options=options) as run:
        run.until(lambda: run.process.poll() is not None, "the end")
        over = run.events("over")[-1]
        assert over["code"] == 1, run.report()
        assert all(worker in over["reason"] for worker in ("w1", "w2"))
        assert [event["whole"] for event in run.events("saved")] == [True]
