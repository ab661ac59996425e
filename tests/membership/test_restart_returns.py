"""A coordinator comes back, and not everyone does; or it is killed once more."""

from __future__ import annotations

import pytest

from farandole.membership import messages as m
from tests.support.scene import SIGNATURE, Scene, trained


def test_one_does_not_return() -> None:
    scene = trained("a", "b", "c").restarted()
    scene.back("a", "b")
    for worker in ("a", "b"):
        scene.report(worker, 7)
    scene.wait(5.0, "a", "b")
    assert "Resume" not in scene.kinds("a")
    scene.wait(0.5, "a", "b")
    assert scene.members("a", "b") == ("a", "b")


def test_one_had_died_meanwhile_and_its_pool_says_so() -> None:
    scene = trained("a", "b", "c").restarted()
    scene.back("a", "b")
    for worker in ("a", "b"):
        scene.report(worker, 7)
    scene.exit("c")
    assert scene.members("a", "b") == ("a", "b"), "no timeout"


def test_nobody_returns() -> None:
    scene = trained("a", "b", orphan_s=60.0).restarted()
    scene.wait(60.0)
    assert scene.events == ["coordinator back", "out of reach"], "they may train on for their lease"
    scene.wait(0.5)
    assert scene.events[-1] == "state lost"
    scene.ready("c", "d")
    assert scene.last("c", m.Propose).view.number == 2


def test_all_had_died_meanwhile() -> None:
    scene = trained("a", "b", orphan_s=60.0).restarted()
    scene.exit("a", "b")
    assert scene.events == ["coordinator back", "lost", "lost", "state lost"]


def test_who_was_still_starting_is_missed() -> None:
    """b froze before it was ready: its pool takes it for one that trains, so somebody has to say that it is gone."""
    before = Scene(minimum=2)
    before.ready("a")
    before.hello("b")
    scene = before.restarted()
    scene.ready("a")
    scene.wait(6.0, "a")
    assert scene.events == ["coordinator back", "ready", "lost"]
    assert scene.coordinator.roster().evicted == ("b",)


def test_an_evicted_worker_and_a_leaver_are_still_known() -> None:
    before = trained("a", "b", "c")
    before.say("c", m.Leaving(reason="SIGTERM"))
    before.switch(before.last("c", m.Propose).view, 4, "a", "b", "c")
    before.close("b", "c")
    before.wait(5.5, "a")
    before.report("a", 7)
    scene = before.restarted()
    scene.back("a", "b", "c")
    assert {w: scene.last(w, m.Goodbye).code for w in "bc"} == {"b": 3, "c": 0}
    assert scene.coordinator.roster().evicted == ("b",)
    assert scene.kinds("a") == ["Welcome", "Stop"]


# --- and once more -------------------------------------------------------------------------------------------------


def test_killed_again_and_again() -> None:
    scene = trained("a", "b", "c")
    for number in range(1, 4):
        scene = scene.restarted().restarted()
        scene.back("a", "b", "c")
        for worker in ("a", "b", "c"):
            scene.report(worker, 7)
        assert scene.last("a", m.Resume).view.number == number + 1
        assert scene.members("a", "b", "c") == ("a", "b", "c")


@pytest.mark.parametrize("seen", ["exit close", "close exit", "exit"])
def test_exits_that_are_told_again_count_once(seen: str) -> None:
    scene = Scene(wanted=2, startup_failures=100)
    for worker in ("a", "b", "c"):
        scene.ready(worker)
        for what in seen.split():
            getattr(scene, what)(worker)
        scene = scene.restarted()
        scene.exit(*"abc"[: "abc".index(worker) + 1])
    assert scene.coordinator.startup_failures == 3


def test_an_exit_that_is_told_again_is_not_its_successors() -> None:
    scene = trained("a", "b", "c")
    scene.exit("c")
    scene.close("c")
    for worker in ("a", "b"):
        scene.report(worker, 7)
    scene.ready("d")
    scene = scene.restarted()
    scene.back("a", "b")
    scene.hello("d")
    scene.exit("c")
    for worker in ("a", "b"):
        scene.report(worker, 8)
    scene.report("d", 0, synced=False)
    assert scene.members("a", "b") == ("a", "b")
    scene.say("d", m.Ready(signature=SIGNATURE))
    assert scene.last("d", m.Propose).view.members == ("a", "b", "d")
    assert scene.coordinator.startup_failures == 0
