"""The end of a run, message by message: finished, failed, stopped, and who saves the last checkpoint."""

from __future__ import annotations

import msgspec
import pytest

from farandole.errors import UsageError
from farandole.protocol import messages as m
from tests.support.mentioned import mentions
from tests.support.scene import Scene, trained


def test_finish() -> None:
    scene = trained("a", "b")
    scene.say("a", m.Finished(fingerprint="f"))
    assert scene.coordinator.roster().wanted == 0
    scene.ready("c")
    assert "Propose" not in scene.kinds("c")
    scene.say("b", m.Finished(fingerprint="f"))
    assert scene.fields["finished"] == {"fingerprint": "f", "equal": True}
    assert scene.last("a", m.End).save
    scene.say("a", m.Saved(path="checkpoint"))
    assert {w: scene.last(w, m.Goodbye).code for w in "abc"} == {"a": 0, "b": 0, "c": 0}
    assert scene.coordinator.roster().over == 0


@pytest.mark.failure(
    "Scripts that differ between workers", "the script leaves different states on the workers after its last step"
)
def test_unequal_fingerprints_are_recorded() -> None:
    scene = trained("a", "b")
    scene.say("a", m.Finished(fingerprint="f"))
    scene.say("b", m.Finished(fingerprint="g"))
    assert scene.fields["finished"] == {"fingerprint": "f != g", "equal": False}


def test_the_last_that_had_not_finished_dies() -> None:
    scene = trained("a", "b")
    scene.say("a", m.Finished(fingerprint="f"))
    scene.lose("b")
    scene.say("a", m.Saved(path="checkpoint"))
    assert scene.last("a", m.Goodbye).code == 0


def test_one_dies_while_others_have_finished() -> None:
    scene = trained("a", "b", "c")
    scene.say("a", m.Finished(fingerprint="f"))
    scene.lose("c")
    scene.report("a", 9)
    scene.report("b", 8, has_result=True)
    assert scene.last("b", m.Resume).round == 9
    scene.say("b", m.Finished(fingerprint="f"))
    scene.say("a", m.Saved(path="checkpoint"))
    assert scene.last("a", m.Goodbye).code == 0


def test_a_failed_script_ends_the_run_after_a_checkpoint() -> None:
    scene = trained("a", "b", "c")
    scene.say("b", m.ScriptFailed(traceback="ValueError"))
    scene.report("a", 7, has_result=True)
    scene.report("b", 8)
    scene.report("c", 7, has_result=True)
    assert scene.last("b", m.End).save
    assert "Resume" not in scene.kinds("a")
    scene.say("c", m.ScriptFailed(traceback="ValueError"))  # others fail alike
    scene.say("b", m.Saved(error="its state is of no whole step"))
    assert scene.last("a", m.End).save
    scene.lose("a")
    assert scene.last("c", m.End).save
    scene.say("c", m.Saved(path="checkpoint"))
    assert scene.events[-2:] == ["saved", "over"]
    goodbye = scene.last("b", m.Goodbye)
    assert goodbye == m.Goodbye(reason=goodbye.reason, code=1)
    assert mentions(goodbye.reason, "b")


def test_a_script_that_failed_between_two_steps_everywhere() -> None:
    scene = trained("a", "b", "c")
    scene.say("a", m.ScriptFailed(traceback="ValueError"))
    for worker in ("a", "b", "c"):
        scene.report(worker, 7)
    for worker in ("a", "b"):
        assert not scene.last(worker, m.End).allow_between
        scene.say(worker, m.Saved(error="between two steps", between=True))
    scene.lose("a")
    scene.say("c", m.Saved(error="between two steps", between=True))
    assert scene.last("b", m.End).allow_between  # a is not asked any more
    scene.say("b", m.Saved(path="checkpoint"))
    assert scene.fields["saved"] == {"worker": "b", "path": "checkpoint", "whole": False}


@pytest.mark.failure("Checkpoints", "no worker can write the last checkpoint (the disk is full at the end)")
def test_nobody_can_save() -> None:
    scene = trained("a")
    scene.say("a", m.ScriptFailed(traceback="ValueError"))
    scene.report("a", 7)
    scene.say("a", m.Saved(error="disk full"))
    assert scene.events[-2:] == ["not saved", "over"]


def test_a_joiners_failed_script_is_its_own_affair() -> None:
    scene = trained("a", "b")
    scene.ready("c")
    assert scene.last("a", m.Propose)
    scene.say("c", m.ScriptFailed(traceback="OSError"))
    assert scene.last("c", m.Goodbye).code == 1
    scene.report("a", 3)  # c was in the proposed view, which is given up
    scene.report("b", 3)
    assert scene.last("a", m.Resume).view.members == ("a", "b")
    assert scene.coordinator.ending is None


def test_the_script_fails_before_there_is_a_view() -> None:
    scene = Scene(wanted=2)
    scene.hello("a", "b")
    scene.say("a", m.ScriptFailed(traceback="ImportError"))
    assert {w: scene.last(w, m.Goodbye).code for w in "ab"} == {"a": 1, "b": 1}


def test_the_exit_code_of_the_script_is_that_of_the_run() -> None:
    scene = Scene(wanted=2)
    scene.hello("a", "b")
    scene.say("a", m.ScriptFailed(traceback="wrong arguments", code=2))
    scene.say("b", m.ScriptFailed(traceback="wrong arguments", code=3))
    assert scene.fields["over"]["code"] == scene.coordinator.roster().over == 2, "the first one counts"
    assert {w: scene.last(w, m.Goodbye).code for w in "ab"} == {"a": 1, "b": 1}, "no worker takes it for its own"

    scene = trained("a")
    scene.say("a", m.ScriptFailed(traceback="no data", code=7))
    scene.report("a", 7)
    scene.say("a", m.Saved(path="checkpoint"))
    assert scene.fields["over"]["code"] == 7

    scene = trained("a", "b")
    scene.ready("c")
    scene.say("c", m.ScriptFailed(traceback="wrong arguments", code=2))
    assert scene.last("c", m.Goodbye).code == 1
    assert scene.coordinator.ending is None


@pytest.mark.parametrize("code", [0, -1, 128])
def test_no_failure_has_another_exit_code(code: int) -> None:
    with pytest.raises(msgspec.ValidationError, match="code"):
        m.decode_from_worker(m.encode(m.ScriptFailed(traceback="", code=code)))


def test_a_leaving_worker_that_fails_between_two_steps_ends_the_run_like_any_member() -> None:
    scene = trained("a", "b")
    scene.say("b", m.LeaveRequest(reason="SIGTERM"))
    scene.switch(scene.last("a", m.Propose).view, 4, "a")
    scene.say("b", m.ScriptFailed(traceback="ValueError"))
    assert scene.coordinator.ending
    assert scene.coordinator.ending.failed


def test_stop_and_savers() -> None:
    scene = trained("a", "b", "c")
    scene.coordinator.request_end("SIGINT", 130, 0.0)
    scene.look()
    view = scene.last("a", m.Propose).view
    assert view.members == ()
    scene.switch(view, 5, "a", "b", "c")
    assert scene.kinds("a")[-1] == "End"
    assert scene.coordinator.over is None
    scene.lose("a")
    assert scene.kinds("b")[-1] == "End"
    scene.lose("c")
    scene.say("b", m.Saved(path="checkpoint"))
    assert scene.last("b", m.Goodbye).code == 130
    assert scene.coordinator.roster().over == 130


def test_a_crash_while_the_run_stops() -> None:
    scene = trained("a", "b", "c")
    scene.coordinator.request_end("SIGINT", 130, 0.0)
    scene.look()
    empty = scene.last("a", m.Propose).view
    scene.switch(empty, 5, "b")
    scene.lose("c")
    scene.report("a", 4, has_result=True, view=scene.issued(1))
    scene.report("b", 5, view=empty)
    assert scene.last("b", m.End).save  # b has ended round 4, a has not yet
    scene.say("b", m.Saved(path="checkpoint"))
    assert scene.last("a", m.Goodbye).code == 130


def test_stop_before_there_is_a_view() -> None:
    scene = Scene()
    scene.hello("a")
    scene.coordinator.request_end("SIGINT", 130, 0.0)
    assert scene.look().last("a", m.Goodbye).code == 130


def test_stop_and_then_everyone_dies() -> None:
    scene = trained("a")
    scene.coordinator.request_end("SIGINT", 130, 0.0)
    scene.lose("a")
    assert scene.coordinator.over
    assert scene.events[-2:] == ["not saved", "over"]


def test_checkpoints_are_events_and_decide_nothing() -> None:
    scene = trained("a", "b")
    view = scene.coordinator.view
    scene.say("a", m.Restored(step=40, path="p", damaged=("torn", "flipped"), differences=("epochs",)))
    assert scene.events[-3:] == ["checkpoint damaged", "checkpoint damaged", "resumed"]
    assert scene.fields["resumed"] == {"worker": "a", "step": 40, "path": "p", "differences": ["epochs"]}
    scene.say("a", m.Checkpointed(step=50, path="q", bytes=9, seconds=1.5, copy_ms=0.5))
    assert scene.fields["checkpoint"]["path"] == "q"
    scene.say("a", m.Checkpointed(step=60, error="no space"))
    assert scene.fields["checkpoint failed"] == {"worker": "a", "step": 60, "reason": "no space"}
    assert scene.coordinator.view is view
    assert scene.coordinator.ending is None


@pytest.mark.failure(
    "Processes, signals and crash loops", "`scale`, `release` or `attach` is called while the run ends"
)
def test_nobody_is_asked_for_or_released_while_the_run_ends() -> None:
    scene = trained("a", "b")
    scene.coordinator.request_end("farandole stop", 0, scene.now)
    scene.forget()
    for ask in (lambda: scene.coordinator.scale(3, scene.now), lambda: scene.coordinator.release("a", scene.now)):
        with pytest.raises(UsageError, match="farandole stop"):
            ask()
    assert scene.look().events == []
    assert not scene.coordinator.workers["a"].leaving
