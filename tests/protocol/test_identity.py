"""Who is who, when a connection is opened again: a name alone takes nobody's place, and what was lost is told again."""

from __future__ import annotations

import pytest

from farandole.errors import ProtocolError
from farandole.protocol import messages as m
from tests.support.scene import SIGNATURE, Scene, trained

TIMEOUT = 5.0  # the default of heartbeat_timeout_s


def test_a_hello_said_again_takes_nobodys_place() -> None:
    scene = trained("a", "b")
    with pytest.raises(ProtocolError, match=r"\bHello\b.*\bb\b"):
        scene.greet("b", pool="pool", session="s-b", attempt=1)
    assert scene.look().sent == {}
    assert scene.coordinator.workers["b"].connected
    scene.wait(20.0, "a", "b")
    assert scene.events == []


def test_a_stranger_of_the_same_name_gets_another() -> None:
    scene = trained("a", "b")
    assert scene.greet("b", pool="pool", session="another", attempt=1) == "b-1"
    assert scene.kinds("b-1") == ["Welcome"]
    assert "b" not in scene.sent
    assert scene.coordinator.workers["b"].session == "s-b"


def test_an_evicted_worker_is_told_so_as_often_as_it_comes_back() -> None:
    scene = trained("a", "b")
    scene.close("b")
    scene.wait(TIMEOUT + 0.5, "a")
    scene.report("a", 7)
    for _ in range(2):
        scene.forget()
        scene.back("b")
        assert scene.kinds("b") == ["Goodbye"]
        assert scene.last("b", m.Goodbye).code == 3
        scene.say("b", m.Ready(signature=SIGNATURE))
        assert list(scene.coordinator.workers) == ["a"]


def test_a_leaving_worker_whose_goodbye_was_lost_is_told_again() -> None:
    scene = trained("a", "b")
    scene.say("b", m.LeaveRequest(reason="SIGTERM"))
    scene.switch(scene.last("b", m.Propose).view, 4, "a", "b")
    scene.close("b")
    scene.forget()
    scene.back("b")
    assert scene.kinds("b") == ["Goodbye"]
    assert scene.last("b", m.Goodbye).code == 0


def test_a_worker_with_a_state_that_this_run_does_not_know_may_not_stay() -> None:
    scene = trained("a")
    scene.back("z")
    assert scene.last("z", m.Goodbye).code == 3
    assert list(scene.coordinator.workers) == ["a"]


def test_a_candidate_asks_in_again() -> None:
    scene = Scene(wanted=2, minimum=2)
    scene.ready("a")
    scene.close("a")
    scene.ready("b", "c")
    assert scene.last("b", m.Propose).view.members == ("b", "c"), "who is absent enters no view"
    scene.switch(scene.last("b", m.Propose).view, 0)
    scene.forget()
    scene.ready("a")
    assert scene.kinds("a")[:2] == ["Welcome", "ViewWithdrawn"], "whatever it was told before is void"
    assert scene.last("a", m.Propose).view.members == ("b", "c", "a")


def test_a_joiner_comes_back_while_it_connects() -> None:
    scene = trained("a")
    scene.ready("b")
    scene.close("b")
    scene.hello("b")
    scene.report("a", 3)
    scene.report("b", 0, synced=False)
    assert scene.members("a") == ("a",)
    assert [type(message) for message in scene.sent["b"][-2:]] == [m.ViewWithdrawn, m.Propose]
    assert scene.last("b", m.Propose).view.number == 4


def test_the_saver_comes_back() -> None:
    scene = trained("a", "b", "c")
    scene.say("c", m.ScriptFailed(traceback="ValueError"))
    for worker in ("a", "b", "c"):
        scene.report(worker, 7)
    assert scene.last("a", m.End).save
    scene.forget()
    scene.close("a", "b")
    scene.back("a", "b")
    assert scene.kinds("a") == ["Welcome", "End"], "it may not have heard it"
    assert scene.kinds("b") == ["Welcome"]
    scene.close("a")
    scene.wait(TIMEOUT, "b", "c")
    assert scene.kinds("b") == ["Welcome"]
    scene.wait(0.5, "b", "c")
    assert scene.kinds("b") == ["Welcome", "End"], "the next best"
    scene.say("b", m.Saved(path="checkpoint"))
    assert scene.events[-2:] == ["saved", "over"]
