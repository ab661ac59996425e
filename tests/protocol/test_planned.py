"""Planned changes, message by message: joins, leaves, and joiners that hold them up."""

from __future__ import annotations

import pytest

from farandole.protocol import messages as m
from farandole.protocol.coordinator.state import WINDOW
from farandole.protocol.difference import first_difference
from farandole.protocol.view import Lineage
from tests.support.mentioned import mentions
from tests.support.scene import FACTS, SIGNATURE, Scene, trained, view_of


def test_first_view() -> None:
    scene = Scene(wanted=2, minimum=2)
    scene.ready("a")
    assert scene.kinds("a") == ["Welcome"]
    scene.ready("b")
    view = scene.last("a", m.Propose).view
    assert view == scene.last("b", m.Propose).view == view_of(1, "a", "b", joining=("b",))
    scene.say("a", m.Publish(group=1, key="k", value=b"v"))
    assert scene.last("b", m.Published).value == b"v"
    assert "Published" not in scene.kinds("a")
    assert scene.coordinator.view is None
    scene.switch(view, 0, "a", synced=False)
    assert scene.coordinator.view == view
    scene.switch(view, 0, "b")
    assert (scene.coordinator.proposed, scene.coordinator.unsynced) == (None, set())


def test_a_first_view_has_at_most_the_maximum() -> None:
    scene = Scene(wanted=2, minimum=1, maximum=2)
    scene.hello("a", "b", "c")
    for worker in ("a", "b", "c"):
        scene.say(worker, m.Ready(signature=SIGNATURE))
    scene.switch(scene.last("a", m.Propose).view, 0)
    scene.switch(scene.last("b", m.Propose).view, 1)
    assert scene.coordinator.view
    assert scene.coordinator.view.members == ("a", "b")
    assert "Propose" not in scene.kinds("c")


def test_joiners_that_are_ready_together_enter_in_one_view() -> None:
    scene = trained("a")
    scene.ready("b")
    first = scene.last("b", m.Propose).view
    scene.ready("c", "d")
    assert scene.kinds("c") == ["Welcome"]  # one change at a time
    scene.switch(first, 5, synced=False)
    assert "Propose" not in scene.kinds("c")  # b has no state yet
    scene.say("b", m.Synced(view=first.number))
    second = scene.last("a", m.Propose).view
    assert second.members == ("a", "b", "c", "d")
    assert second.joining == ("c", "d")
    assert second.group == second.number


def test_a_leaving_worker_goes_when_everyone_has_switched() -> None:
    scene = trained("a", "b", "c")
    scene.say("b", m.LeaveRequest(reason="SIGTERM"))
    view = scene.last("b", m.Propose).view
    assert view == view_of(2, "a", "c", group=1, unchecked=("a", "c"))
    scene.switch(view, 4, "b", "a")
    assert "Goodbye" not in scene.kinds("b")  # its last word may still be on its way to c
    scene.switch(view, 4, "c")
    assert scene.last("b", m.Goodbye).code == 0
    assert "left" in scene.events
    scene.lose("b")
    assert "lost" not in scene.events


def test_a_join_and_a_leave_are_one_view() -> None:
    scene = trained("a", "b", maximum=2)
    scene.ready("c")
    assert "Propose" not in scene.kinds("c")
    scene.say("b", m.LeaveRequest(reason="SIGTERM"))
    assert scene.last("c", m.Propose).view == view_of(2, "a", "c", joining=("c",), unchecked=("a", "c"))
    assert scene.last("b", m.Propose).view.number == 2


def test_the_last_who_hold_the_state_stay_until_a_joiner_has_it() -> None:
    scene = trained("a", "b")
    scene.say("a", m.LeaveRequest(reason="SIGTERM"))
    first = scene.last("a", m.Propose).view
    assert first.members == ("b",)
    scene.say("b", m.LeaveRequest(reason="SIGTERM"))
    scene.switch(first, 1, "a", "b")
    assert scene.coordinator.proposed is None
    scene.ready("c")
    join = scene.last("c", m.Propose).view
    assert join.members == ("b", "c")
    scene.switch(join, 2)
    assert scene.last("b", m.Propose).view.members == ("c",)


def test_a_candidate_that_has_notice_goes_at_once() -> None:
    scene = trained("a", maximum=1)
    scene.ready("b")
    scene.say("b", m.LeaveRequest(reason="SIGTERM"))
    assert scene.last("b", m.Goodbye).code == 0
    assert scene.events.count("left") == 1


@pytest.mark.failure(
    "External workers, pools and machines",
    "the script of an external worker has another model or length of data",
    seen="an event `refused`, on both sides, with the first difference",
    outcome="its exit code is 1; the run continues without it",
)
def test_a_different_worker_is_refused_with_the_first_difference() -> None:
    scene = trained("a")
    other = (FACTS[0], ("intra-op threads", "2"), ("weight", "(2, 4) float32"))
    scene.ready("b", facts=other)
    reason = scene.last("b", m.JoinRefused).reason
    assert mentions(reason, "intra-op threads", 1, 2)
    assert not mentions(reason, "weight")
    assert "b" not in scene.coordinator.workers


@pytest.mark.parametrize(
    ("theirs", "difference"),
    [
        (FACTS, ""),
        (FACTS[:2], "weight: the run has (2, 3) float32, this worker has none"),
        ((*FACTS, ("bias", "(2,) float32")), "bias: the run has none, this worker has (2,) float32"),
    ],
)
def test_first_difference(theirs: tuple[tuple[str, str], ...], difference: str) -> None:
    assert first_difference(SIGNATURE, m.Signature(facts=theirs)) == difference


def test_a_joiner_that_does_not_connect_in_time() -> None:
    scene = trained("a", "b", prepare_timeout_s=30.0, heartbeat_timeout_s=500.0)
    scene.ready("c")
    scene.ready("d")
    view = scene.last("a", m.Propose).view
    assert view.members == ("a", "b", "c")
    for worker in ("a", "b"):
        scene.say(worker, m.Prepared(view=view.number))
    scene.wait(29.0)
    assert scene.kinds("a")[-1] == "Propose"
    scene.wait(2.0)
    scene.report("a", 3)
    scene.report("b", 3)
    assert scene.closed == [], "c may hold up nobody but itself: it goes when everyone has answered"
    scene.report("c", 0, synced=False)
    assert scene.closed == ["c"]
    assert scene.last("c", m.Goodbye).code == 3
    assert scene.last("d", m.Propose).view.members == ("a", "b", "d")


def test_of_several_joiners_those_that_are_not_connected_go() -> None:
    scene = trained("a", prepare_timeout_s=30.0, heartbeat_timeout_s=500.0)
    scene.ready("b")
    scene.ready("c", "d")
    scene.switch(scene.last("a", m.Propose).view, 0)
    view = scene.last("a", m.Propose).view
    assert view.joining == ("c", "d")
    scene.say("c", m.Prepared(view=view.number))
    scene.wait(31.0)
    for worker in ("a", "b"):
        scene.report(worker, 3)
    for worker in ("c", "d"):
        scene.report(worker, 0, synced=False)
    assert scene.closed == ["d"]


def test_a_joiner_goes_although_only_a_member_is_not_connected() -> None:
    scene = trained("a", prepare_timeout_s=30.0, heartbeat_timeout_s=500.0)
    scene.ready("b")
    scene.say("b", m.Prepared(view=scene.last("a", m.Propose).view.number))
    scene.wait(31.0)
    scene.report("a", 3)
    scene.report("b", 0, synced=False)
    assert scene.closed == ["b"]  # a holds the state


def test_of_a_first_view_anyone_may_be_to_blame() -> None:
    scene = Scene(wanted=2, minimum=2, prepare_timeout_s=30.0, heartbeat_timeout_s=500.0)
    scene.ready("a", "b")
    scene.say("b", m.Prepared(view=1))
    scene.wait(31.0)
    scene.report("a", 0, synced=False)
    scene.report("b", 0, synced=False)
    assert scene.closed == ["a"]


# --- shards dealt by speed ---------------------------------------------------------------------------------------


def beat(scene: Scene, times: dict[str, int], beats: int = WINDOW) -> None:
    """Heartbeats with what a shard takes each, sixteen shards in a step."""
    view = scene.coordinator.view
    assert view
    for _ in range(beats):
        for worker, shard_us in times.items():
            scene.say(worker, m.Heartbeat(view=view.number, shard_us=shard_us, shards=1, shards_total=16))
        scene.coordinator.tick(scene.now)
        scene.look()


def test_a_slow_worker_gets_a_smaller_share_and_a_faster_one_more() -> None:
    scene = trained("a", "b")
    beat(scene, {"a": 100, "b": 208}, WINDOW - 1)
    assert scene.kinds("a") == []
    beat(scene, {"a": 100, "b": 208}, 1)
    view = scene.last("a", m.Propose).view
    assert view == view_of(2, "a", "b", group=1, shares=(1000, 481), unchecked=("a", "b")), "and no new connections"
    assert scene.last("b", m.Propose).view == view
    assert "shares" not in scene.events
    scene.switch(view, 5)
    reason = scene.fields["shares"]["reason"]
    assert scene.fields["shares"] == {"view": 2, "step": 5, "shares": {"a": 1000, "b": 481}, "reason": reason}
    assert mentions(reason, "b", "0.48")
    beat(scene, {"a": 100, "b": 100}, 20 * WINDOW)
    scene.switch(scene.last("a", m.Propose).view, 9)
    assert scene.coordinator.view
    assert scene.coordinator.view.shares == ()
    assert not mentions(scene.fields["shares"]["reason"], "b")


def test_a_run_can_be_told_to_deal_equally() -> None:
    scene = trained("a", "b", by_speed=False)
    beat(scene, {"a": 100, "b": 400}, 3 * WINDOW)
    assert scene.kinds("a") == []
    assert scene.coordinator.speeds.relative() == {"a": 1.0, "b": 0.25}, "status names it all the same"


def test_joins_and_leaves_come_first_and_keep_the_shares() -> None:
    scene = trained("a", "b", "c")
    beat(scene, {"a": 100, "b": 200, "c": 400})
    scene.switch(scene.last("a", m.Propose).view, 5)
    scene.ready("d")
    join = scene.last("d", m.Propose).view
    assert join.shares == (1000, 500, 250, 500), "a joiner counts as the median until it has been measured"
    beat(scene, {"a": 900, "b": 100, "c": 100})
    assert scene.last("a", m.Propose).view is join, "one change at a time"
    scene.switch(join, 6)
    assert join.lineage(join.synced) == Lineage(sets=(("a", "b", "c"),), shares=(1000, 500, 250))
    scene.say("a", m.LeaveRequest(reason="SIGTERM"))
    assert scene.last("b", m.Propose).view.shares == (500, 250, 500)


def test_who_remains_alone_or_among_equals_has_no_shares() -> None:
    scene = trained("a", "b", "c")
    beat(scene, {"a": 100, "b": 400, "c": 100})
    scene.switch(scene.last("a", m.Propose).view, 5)
    scene.say("b", m.LeaveRequest(reason="SIGTERM"))
    assert scene.last("a", m.Propose).view.shares == ()


def test_a_crash_keeps_the_survivors_shares() -> None:
    scene = trained("a", "b", "c")
    beat(scene, {"a": 100, "b": 200, "c": 400})
    view = scene.last("a", m.Propose).view
    scene.switch(view, 5)
    scene.lose("a")
    for worker in ("b", "c"):
        scene.report(worker, 5, view=view)
    resume = scene.last("b", m.Resume)
    assert resume.view.shares == (500, 250)
    assert resume.lineage == Lineage(sets=(("a", "b", "c"), ("b", "c")), shares=(1000, 500, 250))


def test_a_loss_gives_proposed_shares_up() -> None:
    scene = trained("a", "b", "c")
    beat(scene, {"a": 100, "b": 200, "c": 400})
    scene.lose("c")
    for worker in ("a", "b"):
        scene.report(worker, 5)
    assert scene.last("a", m.Resume).view.shares == ()
    assert scene.coordinator.proposed is None
