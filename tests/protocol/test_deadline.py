"""What the coordinator does with a notice's deadline: it passes it on, and believes who says that its time is over."""

from __future__ import annotations

import pytest

from farandole.protocol import messages as m
from tests.support.mentioned import mentions
from tests.support.scene import Scene, host, trained

RECLAIMED = "it is reclaimed"


def noticed(scene: Scene, *workers: str, within_s: int) -> None:
    message = m.PreemptionNotice(workers=workers, host=host(workers[0]), within_s=within_s, reason=RECLAIMED)
    scene.coordinator.on_pool_message("pool", "h", message, scene.now)
    scene.look()


def test_who_has_notice_by_its_pool_hears_of_its_deadline() -> None:
    scene = trained("a", "b", "c")
    noticed(scene, "b", within_s=120)
    assert scene.last("b", m.PreemptionDeadline).within_s == 120
    assert "Deadline" not in scene.kinds("a")
    assert mentions(scene.fields["notice"]["reason"], "h-b", "120 s", RECLAIMED)
    assert scene.last("a", m.Propose).view.members == ("a", "c")


def test_who_was_out_of_reach_hears_of_it_when_it_is_back() -> None:
    scene = trained("a", "b", "c")
    scene.coordinator.tick(scene.now)
    scene.close("b")
    noticed(scene, "b", within_s=120)
    scene.now += 1.0
    scene.coordinator.tick(scene.now)
    scene.look()
    scene.back("b")
    assert scene.last("b", m.PreemptionDeadline).within_s == 119


def test_a_sooner_deadline_is_passed_on_and_a_later_one_is_not_believed() -> None:
    scene = trained("a", "b", "c")
    noticed(scene, "b", within_s=3600)
    noticed(scene, "b", within_s=30)
    assert scene.last("b", m.PreemptionDeadline).within_s == 30
    noticed(scene, "b", within_s=500)
    assert scene.last("b", m.PreemptionDeadline).within_s == 30
    assert scene.events.count("notice") == 1


def test_who_says_that_its_time_is_over_is_gone_and_the_others_go_on() -> None:
    """As after a crash, and nobody has to see its process end."""
    scene = trained("a", "b", "c", wanted=3)
    noticed(scene, "c", within_s=30)
    scene.forget()
    scene.say("c", m.Lapsed())
    assert mentions(scene.fields["lost"]["reason"], "h-c", "30 s")
    scene.report("a", 3)
    scene.report("b", 3)
    assert scene.last("a", m.Resume).view.members == ("a", "b")
    assert scene.coordinator.crash_loop.count == 0, "it was announced"
    scene.forget()
    scene.exit("c")
    assert scene.events == [], "that is known"


def test_when_the_last_have_lapsed_the_run_begins_again_at_once_with_who_is_there() -> None:
    """Their leases would last for minutes yet, as far as the coordinator knows."""
    scene = trained("a", wanted=1, maximum=1)
    scene.say("a", m.LeaveRequest(reason="it is interrupted", within_s=30.0))
    scene.hello("b")
    scene.say("a", m.Lapsed())
    assert "state lost" in scene.events
    scene.ready("b")
    assert scene.last("b", m.Propose).view.members == ("b",)


def test_who_had_no_notice_can_not_be_out_of_time() -> None:
    scene = trained("a", "b", "c")
    scene.say("b", m.Lapsed())
    assert mentions(scene.last("b", m.Goodbye).reason, "Lapsed")


@pytest.mark.parametrize("state", ["starting", "ready"])
def test_who_was_not_let_in_yet_goes_at_once(state: str) -> None:
    scene = trained("a", maximum=1)
    if state == "ready":
        scene.ready("b")
    else:
        scene.hello("b")
    noticed(scene, "b", within_s=30)
    assert scene.last("b", m.Goodbye).code == 0
