"""Workers whose host can't get them the data, message by message: who goes, who stays to save, and what is counted."""

from __future__ import annotations

import msgspec
import pytest

from farandole.protocol import messages as m
from farandole.protocol.coordinator.failures import FATAL
from farandole.protocol.coordinator.state import EXIT_DATA_UNAVAILABLE
from farandole.protocol.values import MAX_TEXT
from tests.support.mentioned import mentions
from tests.support.scene import Scene, trained

FULL = m.DataUnavailable(reason="no space left in /cache")


def test_it_goes_and_the_others_redo_its_shards() -> None:
    scene = trained("a", "b", "c")
    scene.say("b", FULL)
    assert scene.fields["unfed"] == {"worker": "b", "host": "h-b", "reason": FULL.reason}
    scene.report("b", 7)
    scene.report("a", 7)
    assert "Goodbye" not in scene.kinds("b"), "only the answers tell who holds the state"
    scene.report("c", 7, has_result=True)
    assert scene.members("a", "c") == ("a", "c")
    resume = scene.last("a", m.Resume)
    assert (resume.round, resume.commit, resume.lineage.sets[-1]) == (7, False, ("a", "c"))
    goodbye = scene.last("b", m.Goodbye)
    assert goodbye.code == EXIT_DATA_UNAVAILABLE
    assert scene.events == ["unfed", "lost", "view"]
    assert mentions(scene.fields["view"]["cause"], "b")
    assert scene.coordinator.ending is None


def test_a_step_that_all_hold_is_committed_without_it() -> None:
    """It was on its way to the next one."""
    scene = trained("a", "b")
    scene.say("b", FULL)
    scene.report("a", 7, has_result=True)
    scene.report("b", 8)
    resume = scene.last("a", m.Resume)
    assert (resume.view.members, resume.round, resume.commit) == (("a",), 7, True)


def test_said_twice_it_is_told_once() -> None:
    scene = trained("a", "b", "c")
    scene.say("b", FULL, FULL)
    assert scene.events == ["unfed"]
    assert scene.coordinator.stops == 1


def test_two_at_once_cost_one_stop() -> None:
    scene = trained("a", "b", "c")
    scene.say("b", FULL)
    scene.report("a", 7)
    scene.say("c", FULL)
    scene.report("b", 7)
    scene.report("c", 7)
    assert scene.members("a") == ("a",)
    assert scene.coordinator.roster().unfed == ("b", "c")


def test_while_others_recover_it_goes_with_that_decision() -> None:
    scene = trained("a", "b", "c")
    scene.lose("c")
    scene.report("a", 7)
    scene.say("b", FULL)
    scene.report("b", 7)
    assert scene.members("a") == ("a",)
    assert scene.coordinator.stops == 1


def test_the_last_one_saves_and_the_run_ends_with_the_reason() -> None:
    scene = trained("a")
    scene.say("a", FULL)
    scene.report("a", 7)
    assert scene.last("a", m.End).save
    scene.say("a", m.Saved(path="checkpoint"))
    assert scene.events == ["unfed", "stopping", "saved", "over"]
    goodbye = scene.last("a", m.Goodbye)
    assert goodbye.code == 1
    assert mentions(goodbye.reason, "a", "h-a", FULL.reason)


def test_the_next_coordinator_knows_that_the_run_ends() -> None:
    """The worker that saves may be gone before the next coordinator comes, so nobody reports the reason again."""
    scene = trained("a")
    scene.say("a", FULL)
    scene.report("a", 7)
    assert scene.last("a", m.End).save
    scene.coordinator.request_end("farandole stop", 0, scene.now)
    again = scene.restarted()
    assert again.coordinator.ending is not None
    assert (again.coordinator.ending.failed, again.coordinator.ending.code) == (True, 1)


def test_where_all_say_so_the_furthest_saves() -> None:
    scene = trained("a", "b", "c")
    for worker in ("c", "a", "b"):
        scene.say(worker, FULL)
    scene.report("a", 7, has_result=True)
    scene.report("b", 8)
    scene.report("c", 7, has_result=True)
    assert scene.last("b", m.End).save
    assert not any("Goodbye" in scene.kinds(worker) for worker in "abc")
    scene.say("b", m.Saved(error="disk full"))
    assert scene.last("a", m.End).save, "and the next one if it can't"
    scene.say("a", m.Saved(path="checkpoint"))
    assert scene.coordinator.roster().over == 1


@pytest.mark.parametrize("way", ["dies", "is away"])
def test_who_is_lost_meanwhile_is_no_heir(way: str) -> None:
    scene = trained("a", "b")
    scene.say("a", FULL)
    scene.report("a", 7)
    if way == "dies":
        scene.lose("b")
    else:
        scene.close("b")
        scene.wait(6.0, "a")
    assert scene.last("a", m.End).save
    assert "state lost" not in scene.events


def test_a_leaving_worker_is_no_heir() -> None:
    """It has left at a round that the others may be far beyond."""
    scene = trained("a", "b")
    first = scene.coordinator.view
    scene.say("b", m.LeaveRequest(reason="SIGTERM"))
    view = scene.last("a", m.Propose).view
    scene.switch(view, 4, "a")
    scene.say("a", FULL)
    scene.report("a", 6, view=view)
    scene.report("b", 3, has_result=True, view=first)
    assert scene.last("a", m.End).save
    assert first is not None


def test_a_joiner_that_is_refused_with_that_decision_is_no_heir() -> None:
    scene = trained("a", wanted=2)
    scene.ready("b")
    scene.switch(scene.last("a", m.Propose).view, 4)
    scene.say("a", m.Differs(step=5, workers=("b",)), FULL)
    scene.report("a", 5)
    scene.report("b", 5)
    assert scene.last("b", m.JoinRefused)
    assert scene.last("a", m.End).save
    assert "state lost" not in scene.events


@pytest.mark.parametrize("left", [True, False])
def test_it_stays_until_the_joiners_hold_the_state(*, left: bool) -> None:
    """It may be the first of the run, on a host whose disk is full from the start."""
    scene = Scene(minimum=2)
    scene.ready("a", "b")
    view = scene.last("a", m.Propose).view
    scene.switch(view, 0, synced=False)
    scene.forget()
    scene.say("a", FULL)
    assert "Stop" not in scene.kinds("a")
    if not left:
        scene.lose("b")
        scene.report("a", 0)
        assert scene.last("a", m.End).save, "nobody is left to take it over"
        return
    scene.say("b", m.Synced(view=view.number))
    scene.report("a", 0)
    scene.report("b", 0)
    assert scene.members("b") == ("b",)
    assert scene.last("a", m.Goodbye).code == EXIT_DATA_UNAVAILABLE


def test_who_has_not_entered_the_joiners_view_never_hands_them_the_state() -> None:
    """A leaving worker has, and the round that it has ended is the last before."""
    scene = trained("a", "b", "c", minimum=1)
    scene.lose("c")
    scene.ready("d")
    scene.say("b", m.LeaveRequest(reason="SIGTERM"))
    for worker in "ab":
        scene.report(worker, 3, has_result=True)
    view = scene.last("d", m.Propose).view
    assert (view.members, view.joining) == (("a", "d"), ("d",))
    scene.forget()
    scene.say("b", m.Switched(view=view.number, round=5, step=5))
    scene.say("a", FULL)
    assert "Stop" in scene.kinds("a")


def test_a_joiner_that_has_no_state_costs_itself() -> None:
    scene = trained("a", "b")
    scene.ready("c")
    scene.say("c", FULL)
    for worker in ("a", "b", "c"):
        scene.report(worker, 3, synced=worker != "c")
    assert scene.members("a", "b") == ("a", "b")
    assert scene.last("c", m.Goodbye).code == EXIT_DATA_UNAVAILABLE
    scene.hello("d")
    scene.say("d", FULL)
    assert scene.last("d", m.Goodbye).code == EXIT_DATA_UNAVAILABLE, "before it asks in it costs nobody anything"
    assert scene.coordinator.stops == 1
    assert scene.coordinator.ending is None


def test_before_there_is_a_view_the_run_ends_when_all_that_are_wanted_have_said_so() -> None:
    scene = Scene(wanted=2)
    scene.hello("a")
    scene.say("a", FULL)
    assert scene.last("a", m.Goodbye).code == EXIT_DATA_UNAVAILABLE
    assert scene.coordinator.over is None, "another one may be fed"
    scene.hello("b", "c")
    scene.say("b", FULL)
    assert scene.coordinator.over is None, "c is there"
    scene.say("c", FULL)
    assert scene.last("c", m.Goodbye).code == EXIT_DATA_UNAVAILABLE
    assert scene.coordinator.roster().over == 1
    assert mentions(scene.fields["over"]["reason"], 3, "c", "h-c", FULL.reason)


def test_who_has_its_data_begins_the_run_without_the_others() -> None:
    scene = Scene(wanted=2, minimum=1)
    scene.hello("a", "b")
    scene.say("a", FULL)
    scene.say("b", m.Ready(signature=m.Signature(facts=())))
    assert scene.last("b", m.Propose).view.members == ("b",)


def test_a_stop_that_was_asked_for_keeps_its_code() -> None:
    scene = trained("a")
    scene.coordinator.request_end("SIGINT", 130, 0.0)
    scene.look()
    scene.say("a", FULL)
    scene.report("a", 7)
    scene.say("a", m.Saved(path="checkpoint"))
    goodbye = scene.last("a", m.Goodbye)
    assert goodbye.code == 130
    assert mentions(goodbye.reason, "SIGINT", FULL.reason)


def test_where_the_run_fails_it_is_not_let_go_it_may_have_to_save() -> None:
    scene = trained("a", "b")
    scene.say("b", m.ScriptFailed(traceback="ValueError"))
    scene.say("a", FULL)
    scene.report("a", 8)
    scene.report("b", 7, has_result=True)
    assert scene.last("a", m.End).save


def test_once_others_hold_the_final_state_it_is_not_waited_for() -> None:
    scene = trained("a", "b")
    scene.say("a", m.Finished(fingerprint="f"))
    scene.coordinator.request_end("SIGINT", 130, 0.0)
    scene.look()
    assert scene.coordinator.deadline is not None
    scene.say("b", FULL)
    assert scene.last("b", m.Goodbye).code == EXIT_DATA_UNAVAILABLE
    scene.say("a", m.Saved(path="checkpoint"))
    assert scene.coordinator.roster().over == 130


def test_a_coordinator_that_comes_back_hears_it_before_the_answers() -> None:
    before = trained("a", "b")
    before.say("b", FULL)
    scene = before.restarted()
    scene.back("a", "b")
    scene.say("b", FULL)
    scene.report("b", 7)
    scene.report("a", 7)
    assert scene.members("a") == ("a",)
    assert scene.last("b", m.Goodbye).code == EXIT_DATA_UNAVAILABLE
    scene = scene.restarted()
    assert scene.coordinator.roster().unfed == ("b",), "the next one knows who was let go, and why"
    scene.back("b")
    assert scene.last("b", m.Goodbye).code == EXIT_DATA_UNAVAILABLE


def test_it_is_in_no_row_of_losses() -> None:
    scene = trained("a", wanted=2)
    for number in range(2 * FATAL):
        joiner = f"j{number}"
        scene.ready(joiner)
        scene.switch(scene.last("a", m.Propose).view, 100 * number)
        scene.say(joiner, FULL)
        scene.report("a", 100 * number)
        scene.report(joiner, 100 * number)
        scene.coordinator.on_pool_message(
            "pool",
            "h",
            m.WorkerProcessExited(worker=joiner, reason=f"exited with code {EXIT_DATA_UNAVAILABLE}"),
            scene.now,
        )
        scene.wait(3.0, "a")
        scene.hello(f"k{number}")
        scene.say(f"k{number}", FULL)
        scene.coordinator.on_pool_message(
            "pool",
            "h",
            m.WorkerProcessExited(worker=f"k{number}", reason=f"exited with code {EXIT_DATA_UNAVAILABLE}"),
            scene.now,
        )
    state = scene.look().coordinator
    assert (state.crash_loop.count, state.crash_loop.joiners, state.startup_failures) == (0, 0, {})
    assert state.roster().wanted == 2, "others are started all the same"
    assert state.roster().losses == 0
    assert state.ending is None


def test_what_it_says_is_bounded() -> None:
    assert m.decode_from_worker(m.encode(m.DataUnavailable(reason="x" * MAX_TEXT)))
    with pytest.raises(msgspec.ValidationError):
        m.decode_from_worker(m.encode(m.DataUnavailable(reason="x" * (MAX_TEXT + 1))))
