"""The coordinator's own part: what people ask for, who is called what, and workers that die before they can join."""

from __future__ import annotations

import pytest

from farandole.errors import UsageError
from farandole.protocol import messages as m
from tests.support.mentioned import mentions
from tests.support.scene import SIGNATURE, Scene, trained


def test_scale() -> None:
    scene = trained("a", "b", "c", minimum=1, maximum=4)
    scene.coordinator.scale(2, 0.0)
    scene.look()
    assert scene.fields["notice"]["worker"] == "c"
    assert mentions(scene.fields["notice"]["reason"], 2)
    assert scene.last("c", m.Propose).view.members == ("a", "b")
    assert scene.coordinator.roster().wanted == 2
    assert scene.coordinator.roster().leaving == ("c",)
    for wanted in (0, 5):
        with pytest.raises(UsageError, match=f"scale {wanted}: "):
            scene.coordinator.scale(wanted, 0.0)


def test_release_by_worker_and_by_host() -> None:
    scene = trained("a", "b", "c", wanted=3, minimum=1, maximum=3)
    assert scene.coordinator.release("b", 0.0) == ["b"]
    assert scene.coordinator.release("h-c", 0.0) == ["c"]
    assert scene.coordinator.roster().wanted == 1
    with pytest.raises(UsageError, match=r"\ba\b.*\bh-a\b"):
        scene.coordinator.release("z", 0.0)


def test_release_never_wants_less_than_the_minimum() -> None:
    """The last to leave needs a replacement to hand the state to."""
    scene = trained("a", "b")
    scene.coordinator.release("a", 0.0)
    assert scene.coordinator.roster().wanted == 2


def test_a_crash_does_not_change_what_is_wanted() -> None:
    scene = trained("a", "b")
    scene.lose("b")
    assert scene.coordinator.roster().wanted == 2


def test_startup_failures_end_a_run_that_has_no_view() -> None:
    scene = Scene(wanted=1, startup_failures=3)
    for worker in ("a", "b", "c"):
        scene.hello(worker)
        scene.lose(worker)
    assert scene.coordinator.over
    assert scene.coordinator.over.code == 1
    assert mentions(scene.coordinator.over.reason, 3)


@pytest.mark.failure(
    "Processes, signals and crash loops",
    "workers die before they have joined (a broken installation, no memory for one more)",
)
def test_startup_failures_of_a_run_that_goes_on_end_the_replacements() -> None:
    scene = trained("a", startup_failures=3, wanted=2)
    for worker in ("b", "c", "d"):
        scene.hello(worker)
        scene.lose(worker)
    assert scene.coordinator.over is None
    assert "no replacements" in scene.events
    assert scene.coordinator.roster().wanted == 1


def test_a_worker_that_joins_by_hand_is_no_startup_failure() -> None:
    scene = Scene(wanted=1, startup_failures=1)
    scene.hello("a", pool="")
    scene.close("a")
    scene.wait(6.0)
    assert scene.events == ["starting", "lost"]
    assert scene.coordinator.over is None


def test_a_process_that_dies_is_counted_once_whatever_is_seen_of_it_first() -> None:
    scene = Scene(wanted=1, startup_failures=100)
    scene.hello("a", "b", "c", "d")
    scene.exit("a")  # its connection is seen to close later
    scene.close("a")
    scene.close("b")
    scene.exit("b")
    scene.close("c")
    scene.wait(6.0, "d")  # given up before its pool has noticed
    scene.exit("c")
    scene.exit("e")  # it has never said Hello
    assert scene.coordinator.startup_failures == {"": 4}
    assert scene.events == [*["starting"] * 4, "lost", "lost", "lost", "exited"]


def test_a_connection_that_closes_is_no_startup_failure() -> None:
    scene = Scene(wanted=2, startup_failures=1)
    scene.hello("a")
    scene.close("a")
    scene.ready("a", "b")
    assert scene.coordinator.over is None
    assert scene.last("a", m.Propose).view.members == ("a",)


def test_joiners_that_die_without_state_are_startup_failures_too() -> None:
    scene = trained("a", startup_failures=2, wanted=2)
    for worker in ("b", "c"):
        scene.ready(worker)
        scene.switch(scene.last("a", m.Propose).view, 3, synced=False)
        scene.lose(worker)
        scene.report("a", 3)
    assert "no replacements" in scene.events


def test_names() -> None:
    scene = Scene()
    hello = m.Hello(kind="worker")
    assert [scene.coordinator.hello(hello, 0.0) for _ in range(2)] == ["guest-1", "guest-2"]
    named = m.Hello(kind="worker", worker="w1")
    assert [scene.coordinator.hello(named, 0.0) for _ in range(2)] == ["w1", "w1-3"]


def test_who_comes_when_it_is_over_is_told_so() -> None:
    scene = Scene()
    scene.coordinator.request_end("SIGINT", 130, 0.0)
    scene.hello("a")
    assert scene.kinds("a") == ["Welcome", "Goodbye"]
    scene.say("a", m.Ready(signature=SIGNATURE))
    assert scene.kinds("a") == ["Welcome", "Goodbye"]
