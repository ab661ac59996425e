"""A coordinator that was killed at any moment, and the next one, which knows only what the journal holds.

In every phase: everyone with a part is waited for, those who return are asked where they stand, the view's number
grows, and it goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from farandole.protocol import messages as m
from farandole.protocol.view import View
from tests.support.mentioned import mentions
from tests.support.scene import Scene, trained, view_of

V1 = view_of(1, "a", "b", "c")


def starting() -> Scene:
    scene = Scene(minimum=2)
    scene.ready("a")
    scene.hello("b")
    return scene


def first_view_proposed() -> Scene:
    scene = Scene(minimum=2)
    scene.ready("a", "b")
    return scene


def first_view_in_force_for_some() -> Scene:
    scene = first_view_proposed()
    scene.switch(scene.last("a", m.Propose).view, 0, "a", synced=False)
    return scene


def training() -> Scene:
    return trained("a", "b", "c")


def join_proposed() -> Scene:
    scene = trained("a", "b")
    scene.ready("c")
    return scene


def join_switched_by_some() -> Scene:
    scene = join_proposed()
    scene.switch(scene.last("c", m.Propose).view, 4, "a", synced=False)
    return scene


def leave_proposed() -> Scene:
    scene = training()
    scene.say("c", m.LeaveRequest(reason="SIGTERM"))
    return scene


def leave_switched_by_some() -> Scene:
    scene = leave_proposed()
    scene.switch(scene.last("c", m.Propose).view, 4, "c")
    return scene


def stopping() -> Scene:
    scene = training()
    scene.lose("c")
    scene.report("a", 7)
    return scene


def stopped_and_resumed() -> Scene:
    scene = stopping()
    scene.report("b", 7)
    return scene


def ending_proposed() -> Scene:
    scene = training()
    scene.coordinator.request_end("SIGINT", 130, scene.now)
    return scene.look()


def ending_with_a_saver() -> Scene:
    scene = ending_proposed()
    scene.switch(scene.last("a", m.Propose).view, 5, "a", "b", "c")
    assert scene.last("a", m.End)
    return scene


def failed() -> Scene:
    scene = training()
    scene.say("b", m.ScriptFailed(traceback="ValueError"))
    return scene


def failed_with_a_saver() -> Scene:
    scene = failed()
    for worker in ("a", "b", "c"):
        scene.report(worker, 7)
    assert scene.last("a", m.End)
    return scene


@dataclass(frozen=True)
class Phase:
    """`asked` are those with a part; `then` is where the answers, of round 7 and the newest view, lead to."""

    scene: Callable[[], Scene]
    asked: str
    then: str


PHASES = (
    Phase(first_view_proposed, "ab", "start"),
    Phase(first_view_in_force_for_some, "ab", "resume a"),
    Phase(training, "abc", "resume abc"),
    Phase(join_proposed, "abc", "resume ab"),
    Phase(join_switched_by_some, "abc", "resume ab"),
    Phase(leave_proposed, "abc", "resume abc"),
    Phase(leave_switched_by_some, "abc", "resume ab"),
    Phase(stopping, "ab", "resume ab"),
    Phase(stopped_and_resumed, "ab", "resume ab"),
    Phase(ending_proposed, "abc", "resume abc end"),
    Phase(ending_with_a_saver, "abc", "save"),
    Phase(failed, "abc", "save"),
    Phase(failed_with_a_saver, "abc", "save"),
)


def answer(scene: Scene, worker: str, view: View | None, *, synced: bool = True) -> None:
    scene.report(worker, 7, view=view, synced=synced)


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.scene.__name__)
def test_killed(phase: Phase) -> None:
    before = phase.scene()
    newest = before.coordinator.view
    stateless = before.coordinator.unsynced | ({"c"} if phase.scene is join_proposed else set())
    number = before.coordinator.number
    scene = before.restarted()
    assert scene.coordinator.stopping is not None
    assert scene.coordinator.stopping.unanswered == set(phase.asked), "nobody with a part is forgotten"
    assert scene.coordinator.number == number
    assert scene.events == ["coordinator back"]

    for worker in phase.asked:
        scene.hello(worker, synced=newest is not None and worker not in stateless)
        assert scene.kinds(worker) == ["Welcome", "Stop"]
    for worker in phase.asked:
        answer(scene, worker, newest, synced=newest is not None and worker not in stateless)

    match phase.then.split():
        case ["start"]:
            assert {w: scene.kinds(w)[2:] for w in "ab"} == {w: ["ViewWithdrawn", "Propose"] for w in "ab"}
            assert scene.last("a", m.Propose).view.number > number
        case ["resume", members, *end]:
            assert scene.members(*members) == tuple(members)
            assert scene.last(members[0], m.Resume).view.number == number + 1
            for worker in stateless:
                assert "ViewWithdrawn" in scene.kinds(worker)
            if end:
                assert scene.last("a", m.Propose).view.members == (), "everyone leaves after the same step"
        case ["save"]:
            assert scene.last("a", m.End).save
            assert [w for w in "bc" if "End" in scene.kinds(w)] == []
            scene.say("a", m.Saved(path="checkpoint"))
            assert scene.events[-2:] == ["saved", "over"]
            assert {w: scene.kinds(w)[-1] for w in "abc"} == dict.fromkeys("abc", "Goodbye")


def test_the_run_fails_before_it_is_known_that_the_first_view_is_in_force() -> None:
    """The workers have trained in it while there was no coordinator: their state is saved."""
    before = first_view_proposed()
    view = before.last("a", m.Propose).view
    scene = before.restarted()
    for worker in "ab":
        scene.hello(worker, synced=True)
    scene.say("b", m.ScriptFailed(traceback="ValueError"))
    again = scene.restarted()
    assert again.coordinator.ending is not None
    for worker in "ab":
        again.hello(worker, synced=True)
        again.report(worker, 7, view=view)
    assert again.last("a", m.End).save
    again.wait(1.0, "a", "b")
    assert not again.coordinator.over
    again.say("a", m.Saved(path="checkpoint"))
    assert again.events[-2:] == ["saved", "over"]


def test_killed_before_there_is_a_view() -> None:
    scene = starting().restarted()
    assert scene.coordinator.stopping is None
    scene.ready("b", "a")
    assert {w: scene.kinds(w) for w in "ab"} == {w: ["Welcome", "ViewWithdrawn", "Propose"] for w in "ab"}
    assert scene.last("a", m.Propose).view.number == 1


def test_killed_when_it_was_over() -> None:
    before = ending_with_a_saver()
    before.say("a", m.Saved(path="checkpoint"))
    scene = before.restarted()
    assert scene.coordinator.roster().over == 130
    scene.back("a", "b", "c")
    scene.hello("z")
    for worker in ("a", "b", "c", "z"):
        assert scene.kinds(worker) == ["Welcome", "Goodbye"]
        assert scene.last(worker, m.Goodbye).code == 130


def test_the_first_view_was_in_force_and_the_coordinator_did_not_know_it() -> None:
    scene = first_view_proposed().restarted()
    view = view_of(1, "a", "b", joining=("b",))
    scene.back("a")
    scene.hello("b")
    scene.report("a", 9, view=view)
    scene.report("b", 9, view=view, synced=False)
    assert scene.members("a") == ("a",)
    assert [type(message) for message in scene.sent["b"][-2:]] == [m.ViewWithdrawn, m.Propose]


def test_the_last_holder_dies_before_the_coordinator_knows_that_the_first_view_was_in_force() -> None:
    """The next workers begin from step 0, and what they report of step 0 is of their run: nobody is beyond it."""
    scene = first_view_proposed().restarted()
    view = view_of(1, "a", "b", joining=("b",))
    scene.hello("a", synced=True)
    scene.report("a", 9, view=view)
    scene.lose("a")
    scene.lose("b")
    assert "state lost" in scene.events
    scene.ready("c", "d")
    second = scene.last("c", m.Propose).view
    scene.switch(second, 0, "c", "d", synced=False)
    scene.say("d", m.Synced(view=second.number))
    for worker in "cd":
        scene.say(worker, m.ShardsDiffer(step=0))
    assert scene.coordinator.stopping is not None


def test_a_leaving_worker_is_let_go() -> None:
    before = leave_switched_by_some()
    view = before.coordinator.view
    scene = before.restarted()
    scene.back("a", "b", "c")
    first = scene.issued(1)
    scene.report("a", 5, view=first)
    scene.report("b", 4, view=first, has_result=True)
    scene.report("c", 5, view=view)
    assert scene.members("a", "b") == ("a", "b")
    assert scene.last("a", m.Resume).round == 5
    assert scene.last("c", m.Goodbye).code == 0


def test_what_people_had_asked_for_stays() -> None:
    before = trained("a", "b", "c", minimum=1)
    before.coordinator.scale(2, 0.0)
    scene = before.look().restarted()
    assert scene.coordinator.roster() == m.Roster(wanted=2, leaving=("c",))
    scene.back("a", "b", "c")
    for worker in ("a", "b", "c"):
        scene.report(worker, 7)
    assert scene.last("c", m.Propose).view.members == ("a", "b"), "c need not say again that it leaves"


def test_a_different_worker_is_refused_as_before() -> None:
    scene = training().restarted()
    scene.ready("z", facts=(("torch version", "1.0"),))
    assert mentions(scene.last("z", m.JoinRefused).reason, "torch version", "2.13", "1.0")
