"""Who writes checkpoints and who begins a first view, message by message: see `protocol/coordinator/shutdown.py`."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from farandole.protocol import messages as m
from farandole.protocol.values import Checkpoints, Newest
from tests.support.mentioned import mentions
from tests.support.metric_lines import logged, stepped
from tests.support.scene import SIGNATURE, Scene

ELSEWHERE = "it is not there"


def asking(scene: Scene, *workers: str, elsewhere: Collection[str] = (), pool: str = "") -> None:
    scene.hello(*workers, pool=pool)
    for worker in workers:
        scene.say(worker, m.Ready(signature=SIGNATURE, unreached=ELSEWHERE if worker in elsewhere else ""))


def settled(scene: Scene) -> Scene:
    """All proposed views are in force, and their joiners synced."""
    while scene.coordinator.proposed:
        view = scene.coordinator.proposed
        concerned = scene.coordinator.participants()
        scene.switch(view, 0, *concerned)
    return scene


def training(*workers: str, elsewhere: Collection[str] = (), **settings: object) -> Scene:
    """All of them in the first view and synced."""
    scene = Scene(**{"wanted": len(workers), "minimum": len(workers), **settings})
    asking(scene, *workers, elsewhere=elsewhere)
    return settled(scene)


def told(scene: Scene, worker: str) -> list[tuple[str, bool]]:
    return [(s.worker, s.at_once) for s in scene.sent.get(worker, ()) if isinstance(s, m.Saver)]


def wrote(step: int, path: str = "p") -> m.Checkpointed:
    return m.Checkpointed(step=step, path=path)


def failed(step: int) -> m.Checkpointed:
    return m.Checkpointed(step=step, error="no space")


# --- while the run trains --------------------------------------------------------------------------------------------


def test_the_first_that_reaches_the_store_writes_and_is_told() -> None:
    scene = training("a", "b", "c", elsewhere=["a"])
    assert scene.coordinator.view
    assert scene.coordinator.view.members == ("b", "a", "c"), "and it has begun the run"
    assert told(scene, "b") == [("b", False)]
    assert told(scene, "a") == told(scene, "c") == [], "they never thought so"
    assert scene.fields["ready"] == {"worker": "c", "host": "h-c", "pid": 0}


def test_an_external_worker_of_rank_0_that_does_not_reach_it_leaves_it_to_another() -> None:
    scene = training("a", "b", "c", elsewhere=["b"], minimum=1)
    scene.say("a", m.LeaveRequest(reason="SIGTERM"))
    settled(scene)
    assert scene.coordinator.view
    assert scene.coordinator.view.members == ("b", "c")
    assert told(scene, "c") == [("c", False)]
    assert told(scene, "b") == []


def test_after_a_death_another_writes() -> None:
    scene = training("a", "b", "c", minimum=1)
    scene.lose("a")
    scene.report("b", 4)
    scene.report("c", 4)
    assert told(scene, "b") == [("b", False)]
    assert told(scene, "c") == []


def test_a_joiner_writes_only_once_it_holds_the_state() -> None:
    scene = training("a", minimum=1, elsewhere=[])
    scene.coordinator.workers[
        "a"
    ].unreached = ELSEWHERE  # as an external worker that is the last of the first members would be
    scene.coordinator.saver = ""
    asking(scene, "b")
    view = scene.last("a", m.Propose).view
    scene.switch(view, 3, synced=False)
    assert told(scene, "b") == []
    scene.say("b", m.Synced(view=view.number))
    assert told(scene, "b") == [("b", False)]


def test_one_that_fails_is_followed_by_the_next_which_tries_at_once() -> None:
    scene = training("a", "b", "c", elsewhere=["b"])
    scene.say("a", failed(10))
    assert told(scene, "a") == [("a", False), ("c", True)], "it writes no more"
    assert told(scene, "c") == [("c", True)]
    assert scene.events[-2:] == ["checkpoint failed", "saver"]
    scene.say("c", wrote(11))
    scene.say("c", failed(20))
    assert told(scene, "a")[-1] == ("a", True), "c has succeeded since a had failed: a may be able to by now"


def test_a_place_that_is_full_for_everybody_is_tried_by_one_after_the_other_when_one_is_due() -> None:
    scene = training("a", "b")
    scene.say("a", failed(10))
    assert told(scene, "b") == [("b", True)]
    scene.say("b", failed(11))
    assert told(scene, "a")[-1] == ("a", False), "not at once: they would go round in circles"
    scene.say("a", failed(20))
    assert told(scene, "b")[-1] == ("b", False)
    scene.say("b", wrote(30))
    assert scene.coordinator.saver == "b", "who can goes on"


def test_who_writes_goes_on_as_others_come_and_whatever_others_fail_at() -> None:
    scene = training("a", "b", wanted=3, minimum=2)
    scene.say("b", failed(10))
    assert scene.coordinator.saver == "a", "b was not asked to"
    scene.say("a", failed(10))
    assert scene.coordinator.saver == "b"
    scene.say("b", wrote(11))
    asking(scene, "c")
    settled(scene)
    assert scene.coordinator.view
    assert scene.coordinator.view.members == ("a", "b", "c")
    assert scene.coordinator.saver == "b"
    scene.say("c", failed(12))
    assert scene.coordinator.saver == "b"


def test_alone_it_tries_again_when_one_is_due() -> None:
    scene = training("a")
    scene.say("a", failed(10))
    assert told(scene, "a") == [("a", False)]
    assert "saver" not in scene.events


def test_one_that_comes_due_while_another_is_being_written_is_no_failure() -> None:
    scene = training("a", "b")
    scene.say("a", m.Checkpointed(step=5, error="still being written", late=True))
    assert scene.events[-1] == "checkpoint failed"
    assert scene.coordinator.saver == "a"


@pytest.mark.failure(
    "Checkpoints",
    "only workers that can't reach the place of the checkpoints are left",
    seen="`NO CHECKPOINTS ARE WRITTEN`, at once, once",
    outcome="training continues; the next joiner that reaches the place writes",
)
def test_if_nobody_reaches_it_an_event_says_so_once() -> None:
    scene = training("a", "b", minimum=1)
    scene.coordinator.workers["b"].unreached = ELSEWHERE
    scene.lose("a")
    scene.report("b", 4)
    assert scene.events.count("no saver") == 1
    assert ELSEWHERE in scene.fields["no saver"]["reason"]
    scene.forget()
    asking(scene, "c", elsewhere=["c"])
    settled(scene)
    assert "no saver" not in scene.events
    asking(scene, "d")
    settled(scene)
    assert told(scene, "d") == [("d", False)]


def test_who_comes_back_is_told_again() -> None:
    scene = training("a", "b")
    scene.close("a")
    scene.forget()
    scene.back("a")
    scene.report("a", 3)
    scene.report("b", 3)
    assert told(scene, "a") == [("a", False)]
    assert told(scene, "b") == []


def test_after_a_restart_everybody_is_told_again() -> None:
    scene = training("a", "b", elsewhere=["a"])
    scene.say("b", wrote(7, "seven"))
    view = scene.coordinator.view
    assert view
    assert view.members == ("b", "a")
    again = scene.restarted()
    again.back("a", "b")
    again.report("a", 3, view=view)
    again.report("b", 3, view=view)
    assert told(again, "b") == [("b", False)]
    assert told(again, "a") == [("b", False)]
    assert again.coordinator.newest == Newest(step=7, path="seven")


# --- the last one ----------------------------------------------------------------------------------------------------


def stopped(scene: Scene) -> Scene:
    scene.coordinator.request_end("SIGINT", 130, 0.0)
    scene.look()
    return scene


def test_the_last_one_is_written_by_who_reaches_the_store_and_has_not_failed() -> None:
    scene = training("a", "b", "c")
    scene.coordinator.workers["a"].unreached = ELSEWHERE
    scene.say("b", failed(10))
    settled(stopped(scene))
    assert [worker for worker in "abc" if "End" in scene.kinds(worker)] == ["c"]
    scene.say("c", m.Saved(error="no space"))
    assert scene.kinds("b")[-1] == "End"
    scene.say("b", m.Saved(path="p"))
    assert scene.events[-2:] == ["saved", "over"]


@pytest.mark.failure("Checkpoints", "the run is stopped while no worker reaches the place of the checkpoints")
def test_what_is_saved_elsewhere_does_not_end_well() -> None:
    scene = training("a")
    scene.coordinator.workers["a"].unreached = ELSEWHERE
    scene.coordinator.request_end("farandole stop", 0, 0.0)
    scene.look()
    settled(scene)
    scene.say("a", m.Saved(path="/far/p"))
    assert scene.events[-2:] == ["saved elsewhere", "over"]
    assert scene.fields["saved elsewhere"] == {"worker": "a", "host": "h-a", "path": "/far/p", "whole": True}
    over = scene.coordinator.over
    assert over
    assert over.code == 1
    assert mentions(over.reason, "h-a", "/far/p")


@pytest.mark.failure(
    "Checkpoints",
    "the run is stopped while no worker reaches the place of the checkpoints",
    seen="`THE LAST CHECKPOINT IS NOT IN THE RUN'S STORE; it is on HOST: PATH`",
    outcome="a ready joiner that reaches the place is admitted first and saves the state; else the exit code is not 0",
)
def test_somebody_who_reaches_it_is_let_in_before_a_stop() -> None:
    """Above the maximum, for that one view."""
    scene = training("a", "b", maximum=2)
    for external_worker in ("a", "b"):
        scene.coordinator.workers[external_worker].unreached = ELSEWHERE
    asking(scene, "c")
    assert scene.coordinator.proposed is None
    stopped(scene)
    view = scene.last("c", m.Propose).view
    assert (view.members, view.joining) == (("a", "b", "c"), ("c",))
    settled(scene)
    assert scene.kinds("c")[-1] == "End"
    scene.say("c", m.Saved(path="p"))
    assert scene.events[-2:] == ["saved", "over"]


def test_nobody_who_is_out_of_reach_itself_is_let_in_before_a_stop() -> None:
    scene = training("a", maximum=1)
    scene.coordinator.workers["a"].unreached = ELSEWHERE
    asking(scene, "c")
    scene.close("c")
    stopped(scene)
    assert scene.coordinator.ending
    assert scene.last("a", m.Propose).view.members == ()


def test_if_it_dies_before_it_has_the_state_the_run_stops_without() -> None:
    scene = training("a", maximum=1)
    scene.coordinator.workers["a"].unreached = ELSEWHERE
    asking(scene, "c")
    stopped(scene)
    scene.lose("c")
    scene.report("a", 3)
    settled(scene)
    assert scene.kinds("a")[-1] == "End"


# --- a first view ----------------------------------------------------------------------------------------------------


@pytest.mark.failure(
    "Checkpoints", "an external worker that can't reach the place of the checkpoints is ready first when a run resumes"
)
def test_who_is_ready_first_and_elsewhere_waits_and_does_not_begin() -> None:
    scene = Scene(wanted=2, minimum=1, newest=Newest(step=40, path="forty"))
    asking(scene, "guest", elsewhere=["guest"])
    assert scene.coordinator.proposed is None
    assert mentions(scene.fields["no leader"]["reason"], "forty")
    asking(scene, "w1", pool="local")
    assert scene.coordinator.proposed
    assert scene.coordinator.proposed.members == ("w1", "guest")
    assert scene.last("w1", m.Propose).newest == Newest(step=40, path="forty")
    assert scene.events.count("no leader") == 1


def test_who_finds_less_than_the_run_has_does_not_begin() -> None:
    scene = Scene(wanted=2, minimum=1, newest=Newest(step=40, path="forty"))
    asking(scene, "guest")
    view = scene.last("guest", m.Propose).view
    asking(scene, "w1", pool="local")
    scene.say("guest", m.CannotStart(view=view.number, reason="step 0 of 40"))
    assert scene.fields["short"] == {"worker": "guest", "host": "h-guest", "reason": "step 0 of 40"}
    scene.report("guest", 0, synced=False)
    assert scene.coordinator.proposed
    assert scene.coordinator.proposed.members == ("w1", "guest")
    assert scene.coordinator.startup_failures == {}


def test_what_is_too_little_for_another_view_says_nothing_of_this_one() -> None:
    scene = Scene(wanted=2, minimum=1, newest=Newest(step=40, path="forty"))
    asking(scene, "guest")
    view = scene.last("guest", m.Propose).view
    scene.say("guest", m.CannotStart(view=view.number + 1, reason="step 0 of 40"))
    assert scene.coordinator.proposed == view
    assert "short" not in scene.events


def test_if_the_pools_own_do_not_reach_it_the_run_ends_and_says_why() -> None:
    scene = Scene(wanted=1, newest=Newest(step=40, path="forty"), checkpoints=Checkpoints(url="/mnt/c"))
    scene.hello("w2", pool="local")
    asking(scene, "w1", elsewhere=["w1"], pool="local")
    assert scene.coordinator.over is None, "w2 may reach it"
    scene.say("w2", m.Ready(signature=SIGNATURE, unreached=ELSEWHERE))
    over = scene.coordinator.over
    assert over
    assert over.code == 1
    assert any(mentions(over.reason, worker, "/mnt/c", "forty", ELSEWHERE) for worker in ("w1", "w2"))


def test_known_is_what_was_written_into_the_store_and_what_was_gone_on_from() -> None:
    scene = training("a", "b", minimum=1, newest=Newest(step=40, path="forty"))
    scene.say("a", m.Restored(step=30, path="thirty", damaged=("forty",)))
    assert scene.coordinator.newest == Newest(step=30, path="thirty")
    scene.say("a", wrote(50, "fifty"))
    scene.coordinator.workers["b"].unreached = ELSEWHERE
    scene.say("b", wrote(60, "sixty"))
    scene.say("a", failed(70))
    assert scene.coordinator.newest == Newest(step=50, path="fifty")
    scene.lose("a")
    scene.lose("b")
    assert "state lost" in scene.events
    asking(scene, "c")
    assert scene.last("c", m.Propose).newest == Newest(step=50, path="fifty"), "the next ones have to find it"


def test_known_is_too_what_one_wrote_before_it_heard_that_another_follows() -> None:
    """Its heartbeats of that step were lost, so nobody is known to have reached it."""
    scene = training("a", "b", minimum=1, newest=Newest(step=40, path="forty"))
    scene.say("a", failed(50))
    assert scene.coordinator.saver == "b"
    scene.say("a", wrote(60, "sixty"))
    assert scene.coordinator.newest == Newest(step=60, path="sixty")


def test_the_first_line_after_a_checkpoint_is_that_of_the_step_it_was_saved_at() -> None:
    scene = training("a", newest=Newest(step=40, path="forty"))
    scene.say("a", m.Restored(step=40, path="forty"))
    lines = stepped(39), logged(39, 1), stepped(40), logged(40, 1), stepped(41)
    scene.say("a", m.Heartbeat(view=1, round=1, step=41, lines=lines))
    assert [(line.step, line.index) for line in scene.lines] == [(40, 0), (40, 1), (41, 0)]


def test_a_checkpoint_by_somebody_who_does_not_reach_the_store_is_not_the_newest() -> None:
    """Nobody else would find it: not by the saver either, nor of a step that the run has reached."""
    scene = training("a", "b", minimum=1, newest=Newest(step=40, path="forty"))
    assert scene.coordinator.view
    scene.say("b", m.Heartbeat(view=scene.coordinator.view.number, round=50, step=50))
    scene.coordinator.workers["a"].unreached = ELSEWHERE
    assert scene.coordinator.saver == "a"
    scene.say("a", wrote(50, "here alone"))
    assert scene.coordinator.newest == Newest(step=40, path="forty")
    scene.say("b", wrote(45, "in the store"))
    assert scene.coordinator.newest == Newest(step=45, path="in the store")


def test_known_is_too_what_was_written_for_a_coordinator_that_was_killed() -> None:
    scene = training("a", "b", "c", minimum=1, newest=Newest(step=40, path="forty"))
    scene = scene.restarted()
    scene.back("b")
    scene.say("b", wrote(60, "sixty"))
    assert scene.coordinator.newest == Newest(step=60, path="sixty")


def test_a_checkpoint_that_is_older_or_of_a_step_that_nobody_has_reached_is_not_the_newest() -> None:
    scene = training("a", "b", newest=Newest(step=40, path="forty"))
    scene.say("a", wrote(39, "older"))
    scene.say("b", wrote(41, "of no saver, and beyond every step"))
    assert scene.coordinator.newest == Newest(step=40, path="forty")
    scene.say("a", wrote(40, "as new"))
    assert scene.coordinator.newest == Newest(step=40, path="as new")


def test_short_of_anything_but_the_first_view_says_nothing() -> None:
    scene = training("a", "b")
    view = scene.coordinator.view
    assert view
    scene.say("a", m.CannotStart(view=view.number, reason="x"))
    assert scene.coordinator.stopping is None
    assert scene.coordinator.workers["a"].reaches
