"""Connections that break, message by message: who is waited for, who is given up, and what those hear who come back."""

from __future__ import annotations

import pytest

from farandole.protocol import messages as m
from tests.support.mentioned import mentions
from tests.support.scene import Scene, trained, view_of

TIMEOUT = 5.0  # the default of heartbeat_timeout_s


# --- a connection closes ---------------------------------------------------------------------------------------


def test_it_comes_back_before_the_timeout() -> None:
    scene = trained("a", "b", "c")
    scene.close("b")
    scene.wait(TIMEOUT - 1, "a", "c")
    assert scene.sent == {}, "it trains on with the others, who need nothing"
    scene.back("b")
    assert scene.kinds("b") == ["Welcome", "Stop"], "it may have missed anything"
    assert scene.kinds("a") == scene.kinds("c") == ["Stop"]
    for worker in ("a", "b", "c"):
        scene.report(worker, 7)
    assert scene.members("a", "b", "c") == ("a", "b", "c")
    assert scene.last("b", m.Resume).view.number == 2
    assert scene.events == ["view"]


def test_it_does_not_come_back() -> None:
    scene = trained("a", "b", "c")
    scene.close("b")
    scene.wait(TIMEOUT, "a", "c")
    assert scene.sent == {}
    scene.wait(0.5, "a", "c")
    scene.report("a", 7)
    assert scene.events == [], "c may go on in view 1 yet, as far as anybody knows"
    scene.report("c", 7)
    assert scene.members("a", "c") == ("a", "c")
    assert scene.events == ["lost", "view"]
    assert scene.fields["lost"]["worker"] == "b"
    assert scene.coordinator.roster().evicted == ("b",), "it may be alive"


@pytest.mark.parametrize("order", ["exit close", "close exit"])
def test_its_process_has_ended_for_certain(order: str) -> None:
    scene = trained("a", "b", "c")
    for what in order.split():
        getattr(scene, what)("b")
    assert scene.kinds("a") == scene.kinds("c") == ["Stop"], "at once, no timeout"
    assert scene.events == ["lost"]
    for worker in ("a", "c"):
        scene.report(worker, 7)
    assert scene.members("a", "c") == ("a", "c")
    assert scene.coordinator.roster().evicted == (), "nothing is left to kill"


def test_a_peer_has_lost_it_too() -> None:
    scene = trained("a", "b", "c")
    scene.close("b")
    scene.say("a", m.Suspect(view=1, peer="b", reason="connection reset"))
    for worker in ("a", "c"):
        scene.report(worker, 7)
    assert scene.members("a", "c") == ("a", "c"), "no timeout"
    assert mentions(scene.fields["lost"]["reason"], "a")


def test_a_peer_had_lost_it_before() -> None:
    scene = trained("a", "b", "c")
    scene.say("a", m.Suspect(view=1, peer="b", reason="connection reset"))
    for worker in ("a", "c"):
        scene.report(worker, 7)
    assert "Resume" not in scene.kinds("a"), "b is connected: it is asked"
    scene.close("b")
    assert scene.members("a", "c") == ("a", "c")


def test_who_accuses_and_is_absent_itself_can_not_hurt() -> None:
    scene = trained("a", "b", "c")
    scene.close("b")
    scene.say("b", m.Suspect(view=1, peer="a", reason="connection reset"))  # it came late
    for worker in ("a", "c"):
        scene.report(worker, 7)
    assert scene.events == [], "a has answered, b is waited for"
    scene.wait(TIMEOUT + 0.5, "a", "c")
    assert scene.members("a", "c") == ("a", "c")


# --- several at once ---------------------------------------------------------------------------------------------


def test_all_connections_close_and_all_come_back() -> None:
    scene = trained("a", "b", "c")
    scene.close("a", "b", "c")
    scene.wait(TIMEOUT - 1)
    for worker in ("c", "a", "b"):
        scene.back(worker)
    assert {w: scene.kinds(w) for w in "abc"} == {w: ["Welcome", "Stop"] for w in "abc"}
    for worker in ("a", "b", "c"):
        scene.report(worker, 7, has_result=worker == "a")
    assert scene.members("a", "b", "c") == ("a", "b", "c")
    assert (scene.last("b", m.Resume).round, scene.last("b", m.Resume).commit) == (7, False)
    assert scene.events == ["view"]


def test_all_are_out_of_reach_for_longer_than_the_timeout() -> None:
    scene = trained("a", "b", "c", orphan_s=60.0)
    scene.close("a", "b", "c")
    scene.wait(50.0)
    assert scene.events == ["out of reach"], "once, and nobody is given up: they train"
    scene.back("b")
    scene.report("b", 70)
    assert scene.events == ["out of reach"], "the way is free again: the others may be right behind"
    scene.wait(TIMEOUT - 1.0, "b")
    scene.back("c")
    scene.report("c", 70)
    scene.wait(1.5, "b", "c")
    assert scene.members("b", "c") == ("b", "c"), "nobody trains on without them: they need not wait for a for ever"


def test_all_are_silent_beyond_their_lease() -> None:
    scene = trained("a", "b", orphan_s=60.0)
    scene.close("a", "b")
    scene.wait(60.0)
    assert scene.events == ["out of reach"]
    scene.wait(0.5)
    assert scene.events == ["out of reach", "lost", "lost", "state lost"]
    scene.ready("c", "d")
    assert scene.last("c", m.Propose).view == view_of(2, "c", "d", joining=("d",), unchecked=("c", "d"))
    scene.back("a")
    assert scene.kinds("a")[-1:] == ["Goodbye"], "its state is no longer the run's; a Welcome would renew its lease"
    assert scene.last("a", m.Goodbye).code == 3


def test_the_last_who_holds_the_state_is_waited_for() -> None:
    """a is dead for certain, so nobody makes progress; but b, out of reach, may come back with the state."""
    scene = trained("a", "b", orphan_s=60.0)
    scene.close("b")
    scene.lose("a")
    scene.wait(TIMEOUT + 10.0)
    assert scene.events == ["lost", "out of reach"], "no beginning anew from a checkpoint"
    scene.back("b")
    scene.report("b", 7)
    assert scene.members("b") == ("b",)
    assert "state lost" not in scene.events


def leaving_worker_alone() -> Scene:
    """c has left for view 2 of a and b and lingers; what a and b do there is unknown. c knows of view 2."""
    scene = trained("a", "b", "c", orphan_s=60.0)
    scene.say("c", m.LeaveRequest(reason="SIGTERM"))
    view = scene.last("c", m.Propose).view
    scene.close("a", "b")
    scene.say("c", m.Switched(view=view.number, round=6, step=6))
    scene.wait(TIMEOUT + 0.5, "c")
    scene.report("c", 6, view=view)
    scene.wait(50.0, "c")
    assert scene.events[-1] == "out of reach", "a and b may train on in view 2, which needs nothing of c"
    assert "Resume" not in scene.kinds("c")
    return scene


def test_a_leaving_worker_that_lingers_waits_for_the_end_of_a_lease() -> None:
    scene = leaving_worker_alone()
    scene.wait(5.0, "c")
    assert scene.members("c") == ("c",), "it takes the run up again"
    assert scene.coordinator.roster().evicted == ("a", "b")


def test_a_leaving_worker_that_lingers_may_go_when_one_of_the_others_is_back() -> None:
    scene = leaving_worker_alone()
    scene.back("b")
    scene.report("b", 80, view=scene.issued(2))
    scene.wait(TIMEOUT + 0.5, "b", "c")
    assert scene.members("b") == ("b",)
    assert scene.last("c", m.Goodbye).code == 0
    assert scene.coordinator.roster().evicted == ("a",)


def test_a_leaving_worker_that_lingers_and_one_that_ends_for_certain() -> None:
    scene = leaving_worker_alone()
    scene.exit("a")
    assert "view" not in scene.events[-1:], "view 2 goes no further without a, but b may come back with its state"
    scene.exit("b")
    assert scene.members("c") == ("c",)


def test_a_deaf_worker_comes_back_by_itself() -> None:
    """Its heartbeats come, it hears nothing: it finds that out within the timeout, and connects again."""
    scene = trained("a", "b", "c")
    scene.lose("c")
    scene.report("a", 7)
    scene.wait(TIMEOUT, "a", "b")
    assert scene.events == ["lost"]
    scene.back("b")  # its old connection was never seen to close
    assert scene.kinds("b") == ["Stop", "Welcome", "Stop"]
    scene.report("b", 7)
    assert scene.members("a", "b") == ("a", "b")


# --- during a stop -----------------------------------------------------------------------------------------------


def test_it_comes_back_during_a_stop() -> None:
    scene = trained("a", "b", "c")
    scene.close("b")
    scene.lose("c")
    scene.report("a", 7)
    scene.wait(TIMEOUT - 1, "a")
    scene.back("b")
    assert scene.kinds("b")[-2:] == ["Welcome", "Stop"]
    assert scene.last("b", m.Stop) == scene.last("a", m.Stop), "the same stop"
    scene.wait(TIMEOUT - 1, "a", "b")  # its silence counts from now
    scene.report("b", 7)
    assert scene.members("a", "b") == ("a", "b")


def test_its_connection_breaks_after_its_answer_and_before_the_decision() -> None:
    scene = trained("a", "b", "c")
    scene.lose("c")
    scene.report("b", 7)
    scene.close("b")
    scene.back("b")
    assert scene.kinds("b")[-1] == "Welcome", "it has answered"
    scene.report("a", 7)
    assert scene.members("a", "b") == ("a", "b")


def test_its_connection_breaks_before_it_has_heard_the_decision() -> None:
    scene = trained("a", "b", "c")
    scene.lose("c")
    scene.report("b", 7)
    scene.close("b")
    scene.report("a", 7)
    scene.back("b")
    assert scene.last("b", m.Stop).stop == 2
    scene.report("b", 7, view=scene.issued(1))
    scene.report("a", 7)
    assert scene.members("a", "b") == ("a", "b")
    assert scene.last("b", m.Resume).view.number == 3


def test_nothing_is_proposed_while_a_member_is_absent() -> None:
    scene = trained("a", "b")
    scene.close("b")
    scene.ready("c")
    assert "Propose" not in scene.kinds("a")
    scene.back("b")
    for worker in ("a", "b"):
        scene.report(worker, 7)
    assert scene.last("c", m.Propose).view.members == ("a", "b", "c")
