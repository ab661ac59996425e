"""What a script does on one worker alone ends the run, which names the worker, the step and the first tensor."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from farandole.protocol import messages as m
from farandole.training.digest import ROTATION
from tests.jobs.faults import FAULT_AT
from tests.support.harness import Elastic
from tests.support.scene import Scene, trained

JOB = Path(__file__).parents[1] / "jobs" / "faults.py"
A = (("x", 1), ("y", 2), ("z", 3))
B = (("x", 1), ("y", 5), ("z", 6))

HOW = {
    "setting": (r"w2's replica differs from w1's at step (\d+), first in setting denormals flushed", 2),
    "rate": (r"w2's replica differs from w1's at step (\d+), first in optimizer\.param_groups\[0\]\.lr", 1),
    "forward": (r"w2's replica differs from w1's at step (\d+), first in model\.1\.running_mean", 1),
    "schedule": (r"w2's replica differs from w1's at step (\d+), first in schedule\.\w+", 1),
    "element": (r"w2's replica differs from w1's at step (\d+), first in model\.0\.weight", ROTATION),
    "end": (r"w2's replica differs from w1's after the last step(), first in model\.2\.bias", 0),
}


# --- real runs ---------------------------------------------------------------------------------------------------


@pytest.mark.failure(
    "Scripts that differ between workers",
    (
        "the script changes its replica on one worker alone: a learning rate, a forward pass in training mode, a "
        "scheduler's step"
    ),
    seen="`THE REPLICAS DIFFER` in the next step, with two workers and the first value that differs",
    outcome=(
        "exit code 1; the state of the larger group is saved as `after-step-N...pt`; a checkpoint written since the "
        "change may hold the change"
    ),
)
@pytest.mark.failure(
    "Scripts that differ between workers",
    (
        "the script changes a setting of torch on one worker alone: threads, precision of products, flushing of "
        "denormal numbers"
    ),
    seen="`THE REPLICAS DIFFER` within two steps, with the name of the setting",
    outcome="exit code 1; the state of the larger group is saved as `after-step-N...pt`",
)
@pytest.mark.failure(
    "Scripts that differ between workers",
    "the script changes one element of a parameter, a large buffer or an optimizer's state on one worker alone",
    seen="`THE REPLICAS DIFFER` within 512 steps",
    outcome="exit code 1; the state of the larger group is saved as `after-step-N...pt`",
)
@pytest.mark.failure(
    "Scripts that differ between workers",
    "the script leaves different states on the workers after its last step",
    seen="`THE REPLICAS DIFFER ... after the last step`, at the end",
    outcome="exit code 1; no checkpoint of that state is saved",
)
@pytest.mark.processes
@pytest.mark.parametrize("how", HOW)
def test_what_is_done_on_one_worker_alone_ends_the_run(how: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    pattern, within = HOW[how]
    with Elastic(folder, JOB, *job(tmp_path, how, 600 if within else 12), workers=2, options=["--min", "2"]) as run:
        run.until(lambda: run.process.poll() is not None, "the end")
        assert run.process.returncode == 1, run.report()
        told = run.events("replicas differ")[-1]
        found = re.fullmatch(pattern, told["reason"]) or re.fullmatch(swapped(pattern), told["reason"])
        assert found, run.report()
        over = run.events("over")[-1]
        assert (over["code"], over["reason"]) == (1, told["reason"])
        saved = run.events("saved")
        assert [event["whole"] for event in saved] == [False]
        assert Path(saved[0]["path"]).name.startswith("after-step-")
        assert not list((folder / "checkpoints").glob("step-*"))
        if within:
            assert FAULT_AT < int(found[1]) <= FAULT_AT + within
        assert told["reason"] in run.output.read_text()


@pytest.mark.long
@pytest.mark.failure(
    "External workers, pools and machines",
    "under `--bits any` the replica of an admitted worker drifts by the rounding of its optimizer",
    seen="`the replicas differ at step 512`, the first time and each time their number has doubled",
    outcome="the run continues; every 512 steps, workers that differ get the state of the oldest member",
)
@pytest.mark.processes
def test_where_it_is_allowed_the_state_is_given_again_and_all_end_with_the_same(tmp_path: Path) -> None:
    """The job alters one element at step 5, which the digest of step 512 shows."""
    arguments = job(tmp_path, "element", 1100)
    with Elastic(tmp_path / "run", JOB, *arguments, workers=2, options=["--min", "2", "--bits", "any"]) as run:
        run.finish()
        assert run.events("drifting")[0]["times"] == 1
        [finished] = run.events("finished")
        assert finished["equal"], run.report()
        assert len(run.events("view")) == len(run.events("ready")) - 1, "nobody had to leave for it"


def job(folder: Path, how: str, steps: int) -> tuple[str, ...]:
    return str(folder), "--fault", f"differ-{how}", "--steps", str(steps), "--micro", "4"


def swapped(pattern: str) -> str:
    """Either worker may be the longest-standing one."""
    return pattern.replace("w2's", "W").replace("w1's", "w2's").replace("W", "w1's")


# --- the coordinator, message by message ---------------------------------------------------------------------------


def digests(*pairs: tuple[str, int], step: int = 7) -> m.Digests:
    return m.Digests(step=step, names=tuple(n for n, _ in pairs), digests=tuple(d for _, d in pairs))


def told(*workers: str) -> Scene:
    """They train, `b` differs, `a` and `b` say so, and all have stopped."""
    scene = trained(*workers)
    scene.say("a", m.Differs(step=7, workers=("b",)))
    scene.say("b", m.Differs(step=7, workers=("b",)))
    for worker in workers:
        scene.report(worker, 7, has_result=True)
    return scene


def test_the_side_of_most_counts_and_one_of_it_saves_what_is_no_checkpoint() -> None:
    scene = told("a", "b", "c")
    assert scene.fields["replicas differ"]["workers"] == ["b"]
    assert not scene.coordinator.roster().wanted
    for worker, pairs in (("a", A), ("b", B), ("c", A)):
        assert scene.kinds(worker)[-1] == "Compare"
        scene.say(worker, digests(*pairs))
    assert scene.fields["replicas differ"]["first"] == "y"
    reason = scene.fields["replicas differ"]["reason"]
    assert re.search(r"\bb\b.*\bstep 7\b.*\by\b", reason)
    assert scene.last("a", m.End) == m.End(save=True, reason=reason, allow_between=True)
    scene.say("a", m.Saved(error="disk full"))
    assert scene.last("c", m.End).allow_between
    assert "End" not in scene.kinds("b")
    scene.say("c", m.Saved(path="after-step"))
    assert scene.last("b", m.Goodbye) == m.Goodbye(reason=reason, code=1)


def test_between_two_the_longest_standing_is_right() -> None:
    scene = told("a", "b")
    scene.say("b", digests(*B))
    scene.say("a", digests(*A))
    assert scene.fields["replicas differ"]["workers"] == ["b"]
    assert scene.fields["replicas differ"]["first"] == "y"
    assert re.search(r"\bb\b.*\ba\b.*\bstep 7\b.*\by\b", scene.fields["replicas differ"]["reason"])


@pytest.mark.failure(
    "Scripts that differ between workers",
    "a worker whose replica differs dies before it can name the difference",
    seen="`THE REPLICAS DIFFER` with the worker and the step, but no tensor",
    outcome="exit code 1",
)
def test_who_dies_is_not_waited_for_and_an_odd_one_is_named_all_the_same() -> None:
    scene = told("a", "b", "c")
    scene.say("a", digests(*A))
    scene.lose("b")
    assert "End" not in scene.kinds("a")
    scene.say("c", digests(*A))
    assert scene.last("a", m.End).allow_between
    scene.say("a", m.Saved(path="p"))
    reason = scene.last("c", m.Goodbye).reason
    assert re.match(r"b\b.*\bstep 7\b", reason)


def test_a_coordinator_that_comes_back_asks_again() -> None:
    scene = told("a", "b")
    scene.say("a", digests(*A))
    scene = scene.restarted()
    scene.back("a", "b")
    for worker in ("a", "b"):
        scene.say(worker, m.Differs(step=7, workers=("b",)))
        scene.report(worker, 7, has_result=True)
    for worker, pairs in (("a", A), ("b", B)):
        assert scene.kinds(worker)[-1] == "Compare"
        scene.say(worker, digests(*pairs))
    scene.say("a", m.Saved(path="p"))
    assert scene.last("b", m.Goodbye).code == 1


def test_who_comes_back_while_they_are_compared_is_asked_again() -> None:
    scene = told("a", "b")
    scene.close("b")
    scene.back("b")
    assert scene.kinds("b")[-1] == "Compare"


def test_a_difference_at_the_end() -> None:
    scene = trained("a", "b", "c")
    for worker in ("a", "b", "c"):
        scene.say(worker, m.Finished(fingerprint="g" if worker == "c" else "f"))
    assert scene.fields["finished"]["equal"] is False
    assert scene.fields["replicas differ"]["workers"] == ["c"]
    for worker, pairs in (("a", A), ("b", A), ("c", B)):
        scene.say(worker, digests(*pairs))
    scene.say("a", m.Saved(path="p"))
    reason = "c's replica differs from the others' after the last step, first in y"
    assert scene.last("c", m.Goodbye) == m.Goodbye(reason=reason, code=1)


def test_names_and_digests_are_bounded() -> None:
    for wrong in (m.Digests(step=0, names=("x",) * 10_001, digests=()), m.Digests(step=0, names=(), digests=(-1,))):
        with pytest.raises(msgspec.ValidationError):
            m.decode_from_worker(m.encode(wrong))
