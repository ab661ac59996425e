"""The final state, message by message: who saves it, when others hang, and what is told of one that is not finite."""

from __future__ import annotations

import pytest

from farandole.protocol import messages as m
from farandole.protocol.coordinator.state import RunSettings
from farandole.protocol.view import View
from tests.support.mentioned import mentions
from tests.support.scene import Scene, trained

END_S = RunSettings(run="r").end_s


def finished(*workers: str, scene: Scene | None = None) -> Scene:
    scene = scene or trained(*workers)
    for worker in workers:
        scene.say(worker, m.Finished(fingerprint="f"))
    return scene


def codes(scene: Scene, *workers: str) -> set[int]:
    return {scene.last(worker, m.Goodbye).code for worker in workers}


# --- everyone has finished ---------------------------------------------------------------------------------------


def test_one_of_those_who_have_finished_saves_and_the_next_one_if_it_dies() -> None:
    scene = finished("a", "b", "c")
    end = scene.last("a", m.End)
    assert end == m.End(save=True, reason=end.reason)
    assert "End" not in scene.kinds("b")
    scene.lose("c")
    scene.lose("a")
    assert scene.events.count("lost") == 2
    assert scene.kinds("b").count("End") == 1
    scene.say("b", m.Saved(path="checkpoint"))
    assert scene.fields["saved"] == {"worker": "b", "path": "checkpoint", "whole": True}
    assert scene.events.count("finished") == 1
    assert codes(scene, "b") == {0}


@pytest.mark.failure(
    "Checkpoints", "the script runs to its end and saves nothing itself, also with `--checkpoint-every never`"
)
@pytest.mark.failure(
    "Checkpoints",
    "no worker can write the last checkpoint (the disk is full at the end)",
    seen="`no checkpoint saved: REASON`, for each worker that tries",
    outcome="exit code 1",
)
def test_a_final_state_that_nobody_can_save_is_no_good_end() -> None:
    scene = finished("a", "b")
    scene.say("a", m.Saved(error="disk full"))
    scene.say("b", m.Saved(error="disk full"))
    assert scene.events[-4:] == ["not saved", "not saved", "not saved", "over"]
    assert scene.fields["over"]["code"] == 1
    assert codes(scene, "a", "b") == {1}


def test_everyone_dies_while_the_final_state_is_saved() -> None:
    scene = finished("a", "b")
    scene.lose("a")
    scene.lose("b")
    assert scene.fields["over"]["code"] == 1


@pytest.mark.failure(
    "Scripts that differ between workers", "the script leaves different states on the workers after its last step"
)
def test_unequal_states_are_not_saved() -> None:
    scene = trained("a", "b")
    scene.say("a", m.Finished(fingerprint="f"))
    scene.say("b", m.Finished(fingerprint="g"))
    assert "End" not in scene.kinds("a")
    scene.say("a", m.Digests(step=9, names=("weight", "bias"), digests=(1, 2)))
    scene.say("b", m.Digests(step=9, names=("weight", "bias"), digests=(1, 3)))
    assert scene.last("a", m.End).allow_between, "it is called what it is"
    scene.say("a", m.Saved(path="after"))
    assert scene.fields["over"]["code"] == 1
    assert mentions(scene.fields["over"]["reason"], "b's", "a's", "bias")


def test_a_coordinator_that_is_killed_while_the_final_state_is_saved() -> None:
    scene = finished("a", "b").restarted()
    scene.back("a")
    scene.say("a", m.Finished(fingerprint="f"))
    scene.report("a", 9)
    assert "End" not in scene.kinds("a"), "b may come back, or not"
    scene.back("b")
    scene.say("b", m.Finished(fingerprint="f"))
    scene.report("b", 9)
    assert scene.last("a", m.End).save
    scene.say("a", m.Saved(path="checkpoint"))
    assert "finished" not in scene.events, "once is enough"
    assert codes(scene, "a", "b") == {0}


def test_one_of_them_does_not_come_back() -> None:
    scene = finished("a", "b").restarted()
    scene.back("b")
    scene.say("b", m.Finished(fingerprint="f"))
    scene.report("b", 9)
    scene.exit("a")
    assert scene.last("b", m.End).save
    scene.say("b", m.Saved(path="checkpoint"))
    assert codes(scene, "b") == {0}


def joined_unseen() -> tuple[Scene, View]:
    """`a` trains and `b` joins; the coordinator is killed before it hears that they have switched to the new view."""
    scene = trained("a", wanted=2, minimum=1)
    scene.ready("b")
    joined = scene.coordinator.proposed
    assert joined is not None
    assert joined.members == ("a", "b")
    return scene.restarted(), joined


def test_one_that_has_joined_unseen_is_waited_for_at_the_end_and_saves_if_it_is_the_last() -> None:
    scene, view = joined_unseen()
    scene.back("a")
    scene.say("a", m.Finished(fingerprint="f", view=view.number, round=9))
    scene.report("a", 9, view=view)
    assert "End" not in scene.kinds("a"), "b may hold the state too"
    scene.lose("a")
    assert "state lost" not in scene.events
    scene.back("b")
    scene.say("b", m.Finished(fingerprint="f", view=view.number, round=9))
    scene.report("b", 9, view=view)
    assert scene.last("b", m.End).save
    scene.say("b", m.Saved(path="checkpoint"))
    assert codes(scene, "b") == {0}


def test_one_that_becomes_synced_during_the_stop_does_not_leave_as_if_it_had_never_trained() -> None:
    scene, view = joined_unseen()
    scene.lose("a")
    scene.hello("b")
    scene.say("b", m.Synced(view=view.number), m.Finished(fingerprint="f", view=view.number, round=9))
    scene.report("b", 9, view=view)
    assert scene.last("b", m.End).save


@pytest.mark.parametrize("synced", [True, False])
def test_the_script_of_one_that_has_joined_unseen_fails(synced: bool) -> None:
    """It ends the run if it holds the state, and only its own part if not."""
    scene, view = joined_unseen()
    scene.hello("b", synced=synced)
    scene.say("b", m.ScriptFailed(traceback="t"))
    scene.back("a")
    scene.report("a", 9, view=view)
    if synced:
        scene.report("b", 9, view=view)
        assert "End" in [*scene.kinds("a"), *scene.kinds("b")], "one of them saves"
    else:
        assert codes(scene, "b") == {1}
        assert scene.members("a") == ("a",)


def test_the_script_of_a_joiner_without_the_state_fails_after_a_restart() -> None:
    """The coordinator knew that it was in the view, and not whether it was synced."""
    scene = trained("a", wanted=2, minimum=1)
    scene.ready("b")
    assert scene.coordinator.proposed
    scene.switch(scene.coordinator.proposed, 0, synced=False)
    scene = scene.restarted()
    scene.back("a")
    scene.hello("b")
    scene.say("b", m.ScriptFailed(traceback="t"))
    scene.report("a", 9)
    assert codes(scene, "b") == {1}
    assert scene.members("a") == ("a",)


def test_a_stop_is_too_late_when_everyone_has_finished() -> None:
    scene = finished("a", "b")
    scene.coordinator.request_end("SIGTERM", 143, 0.0)
    scene.look()
    scene.say("a", m.Saved(path="checkpoint"))
    assert codes(scene, "a", "b") == {0}


# --- some hang after their last step -----------------------------------------------------------------------------


def hurried(*first: str) -> Scene:
    """Of three, `first` have finished, or else all but b, when SIGTERM comes."""
    scene = trained("a", "b", "c")
    finished(*(first or ("c", "a")), scene=scene)
    scene.coordinator.request_end("SIGTERM", 143, scene.now)
    return scene.look()


def test_who_holds_the_final_state_saves_at_once_and_who_hangs_is_named() -> None:
    scene = hurried()
    assert scene.last("a", m.End).save
    scene.say("a", m.Saved(path="checkpoint"))
    scene.wait(END_S - 1, "a", "b", "c")
    assert "over" not in scene.events, "b gets its time"
    scene.wait(1, "a", "b", "c")
    assert scene.fields["hung"]["worker"] == "b"
    assert scene.fields["over"]["code"] == 143
    assert mentions(scene.fields["over"]["reason"], "SIGTERM", "b")
    assert codes(scene, "a", "b", "c") == {143}


def test_who_was_only_slow_is_compared_and_nothing_is_saved_twice() -> None:
    scene = hurried()
    scene.say("a", m.Saved(path="checkpoint"))
    scene.say("b", m.Finished(fingerprint="f"))
    assert scene.fields["finished"]["equal"]
    assert scene.events.count("saved") == 1
    assert scene.fields["over"] == {"code": 143, "reason": "SIGTERM"}
    assert "End" not in scene.kinds("b")


def test_all_have_finished_before_the_first_has_saved() -> None:
    scene = hurried()
    scene.say("b", m.Finished(fingerprint="f"))
    assert "over" not in scene.events
    scene.say("a", m.Saved(path="checkpoint"))
    assert scene.fields["over"] == {"code": 143, "reason": "SIGTERM"}


def test_the_first_stop_came_before_anybody_had_finished() -> None:
    scene = trained("a", "b")
    scene.coordinator.request_end("SIGTERM", 143, scene.now)
    scene.look()
    finished("a", scene=scene)  # it will not switch to the empty view any more
    scene.report("a", 9)
    scene.report("b", 9)
    assert scene.last("a", m.End).save
    scene.say("a", m.Saved(path="checkpoint"))
    scene.wait(END_S + 0.5, "a", "b")
    assert scene.fields["hung"]["worker"] == "b"


def test_a_save_that_takes_longer_than_those_who_hang_are_given() -> None:
    scene = hurried()
    scene.wait(END_S + 1, "a", "b", "c")
    assert scene.fields["hung"]["worker"] == "b"
    assert "over" not in scene.events
    scene.lose("a")
    assert scene.last("c", m.End).save
    scene.say("c", m.Saved(path="checkpoint"))
    assert codes(scene, "b", "c") == {143}


def test_nobody_is_left_who_holds_the_final_state_but_who_has_not_finished() -> None:
    scene = hurried()
    scene.lose("a")
    scene.lose("c")
    assert "over" not in scene.events, "b may finish yet"
    scene.say("b", m.Finished(fingerprint="f"))
    scene.say("b", m.Saved(path="checkpoint"))
    assert scene.fields["over"]["code"] == 143


def test_and_it_hangs() -> None:
    scene = trained("a", "b")
    finished("a", scene=scene)
    scene.coordinator.request_end("farandole stop", 0, scene.now)
    scene.lose("a")
    scene.wait(END_S + 1, "b")
    assert scene.fields["hung"]["worker"] == "b"
    assert mentions(scene.fields["over"]["reason"], "b")
    assert scene.fields["over"]["code"] == 1, "nothing is saved"


@pytest.mark.parametrize("stored", [False, True])
def test_a_coordinator_that_is_killed_meanwhile(stored: bool) -> None:
    scene = hurried()
    if stored:
        scene.say("a", m.Saved(path="checkpoint"))
    scene = scene.restarted()
    scene.back("a", "b", "c")
    for worker in ("a", "c"):
        scene.say(worker, m.Finished(fingerprint="f"))
    for worker in ("a", "b", "c"):
        scene.report(worker, 9)
    assert ("End" in scene.kinds("a")) is not stored
    if not stored:
        scene.say("a", m.Saved(path="checkpoint"))
    scene.wait(END_S, "a", "b", "c")
    assert scene.fields["over"]["code"] == 143
    assert mentions(scene.fields["over"]["reason"], "SIGTERM", "b")


def saved_by_a_worker_that_is_lost() -> Scene:
    """a has saved, and is lost before the next coordinator asks it; b and c go on, and are to leave."""
    scene = hurried("a")
    scene.say("a", m.Saved(path="checkpoint"))
    scene = scene.restarted()
    assert scene.coordinator.ending is not None
    assert scene.coordinator.ending.stored
    scene.lose("a")
    scene.back("b", "c")
    for worker in ("b", "c"):
        scene.report(worker, 9)
    assert scene.last("b", m.Propose).view.members == ()
    return scene


def test_workers_that_may_have_gone_on_since_the_last_save_save_again() -> None:
    scene = saved_by_a_worker_that_is_lost()
    scene.switch(scene.last("b", m.Propose).view, 11, "b", "c")
    assert scene.coordinator.over is None
    assert scene.last("b", m.End).save
    scene.say("b", m.Saved(path="later"))
    assert scene.fields["saved"]["path"] == "later"
    assert codes(scene, "b", "c") == {143}


def test_the_run_ends_where_the_state_is_saved_and_the_next_saver_need_not_save() -> None:
    before = saved_by_a_worker_that_is_lost()
    members, empty = before.coordinator.view, before.last("b", m.Propose).view
    scene = before.restarted()  # b has switched to the empty view, and c has not
    scene.back("b", "c")
    scene.report("b", 11, view=empty)
    scene.report("c", 10, view=members)
    assert scene.fields["over"] == {"code": 143, "reason": "SIGTERM"}
    assert codes(scene, "b", "c") == {143}


def test_the_script_of_one_that_has_not_finished_fails() -> None:
    scene = hurried()
    scene.say("b", m.ScriptFailed(traceback="ValueError"))
    scene.say("a", m.Saved(path="checkpoint"))
    assert scene.fields["over"]["code"] == 1
    assert mentions(scene.fields["over"]["reason"], "SIGTERM", "b")


# --- a loss that is not finite -----------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_is_one_event_whoever_says_so() -> None:
    scene = trained("a", "b")
    scene.say("b", m.NotFinite(step=7, loss="nan"))
    scene.say("a", m.NotFinite(step=7, loss="nan"))
    assert scene.events == ["not finite"]
    assert scene.fields["not finite"] == {"worker": "b", "step": 7, "loss": "nan"}
    scene.say("a", m.NotFinite(step=9, loss="inf"))
    assert scene.events == ["not finite", "not finite"]
    scene = scene.restarted()
    scene.back("a", "b")
    scene.say("a", m.NotFinite(step=9, loss="inf"))
    assert "not finite" not in scene.events
    assert scene.coordinator.ending is None


@pytest.mark.failure("The training loop", "the loss becomes NaN or infinite, with `--stop-on-nan`")
def test_stop_on_nan_ends_the_run_with_the_state_before_that_step() -> None:
    scene = trained("a", "b", stop_on_nan=True)
    scene.say("b", m.NotFinite(step=7, loss="nan"))
    scene.report("b", 8)
    scene.say("a", m.NotFinite(step=7, loss="nan"))
    scene.report("a", 8)
    assert scene.last("a", m.End).save
    scene.say("a", m.Saved(path="checkpoint"))
    assert scene.fields["over"]["code"] == 1
    assert mentions(scene.fields["over"]["reason"], "step 7", "nan")
    assert codes(scene, "a", "b") == {1}


def test_stop_on_nan_on_the_way_to_another_stop() -> None:
    """Who waits because of its loss takes no part in the round that would agree on the empty view."""
    scene = trained("a", "b", stop_on_nan=True)
    scene.coordinator.request_end("SIGTERM", 143, scene.now)
    scene.look()
    scene.say("a", m.NotFinite(step=7, loss="nan"))
    assert scene.last("b", m.Stop)
    scene.report("a", 8)
    scene.report("b", 8)
    scene.say("a", m.Saved(path="checkpoint"))
    assert scene.fields["over"]["code"] == 1


# --- nothing left to train ---------------------------------------------------------------------------------------


@pytest.mark.failure("Checkpoints", "`farandole run --folder` or `--resume` names a run that has run to its end")
def test_nothing_left_to_train_ends_the_run_well() -> None:
    scene = Scene(wanted=2, minimum=2)
    scene.ready("a", "b")
    assert scene.last("a", m.Propose)
    scene.say("a", m.Restored(step=54, path="checkpoint", done=True))
    assert "resumed" not in scene.events
    assert scene.fields["nothing left"] == {"worker": "a", "step": 54, "path": "checkpoint"}
    assert codes(scene, "a", "b") == {0}


def test_nobody_says_so_of_a_run_that_trains() -> None:
    scene = trained("a", "b")
    scene.say("a", m.Restored(step=54, path="checkpoint", done=True))
    assert scene.fields["expelled"]["worker"] == "a"
    assert scene.coordinator.over is None


def test_who_could_not_save_at_the_stop_is_asked_again_with_the_others() -> None:
    scene = trained("a", "b")
    finished("a", scene=scene)
    scene.coordinator.request_end("SIGINT", 130, scene.now)
    scene.look()
    scene.say("a", m.Saved(error="disk full"))
    before = sum(scene.kinds(worker).count("End") for worker in "ab")
    finished("b", scene=scene)
    assert sum(scene.kinds(worker).count("End") for worker in "ab") == before + 1, "somebody is asked"
    assert scene.coordinator.ending
    for worker in (scene.coordinator.ending.saver, "b" if scene.coordinator.ending.saver == "a" else "a"):
        assert scene.last(worker, m.End).save
        scene.say(worker, m.Saved(error="disk full"))
    assert scene.fields["over"]["code"] == 130
