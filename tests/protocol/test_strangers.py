"""A stranger in the connections of a proposed view: proposed anew, ever more slowly, and nobody held guilty."""

from __future__ import annotations

import pytest

from farandole.protocol import messages as m
from farandole.protocol.coordinator.view_changes import LONGEST_S, SHORTEST_S
from tests.support.scene import Scene, trained

WHERE = "127.0.0.1 4711"


def joining(*workers: str) -> Scene:
    scene = trained(*workers)
    scene.ready("x")
    return scene


def accuse(scene: Scene, worker: str, peer: str = "x") -> int:
    """Of the view that is proposed, which is given up; its number."""
    view = scene.coordinator.proposed
    assert view is not None
    scene.forget()
    scene.say(worker, m.PeerNotAuthenticated(view=view.number, peer=peer, address=WHERE))
    for member in view.members:
        scene.report(member, 5, synced=member != "x")
    return view.number


@pytest.mark.failure(
    "External workers, pools and machines",
    "a machine in the network answers instead of a worker, or a user of this machine connects to every new port first",
    seen=(
        "`UNAUTHENTICATED CONNECTION TO w1 IN PLACE OF w3, at ADDRESS`, or `BEFORE ALL PEERS`, and the time of the "
        "next attempt"
    ),
    outcome="training continues; joiners wait 1, 2, 4, ... s, at most 5 min, until it stops",
)
def test_the_joiner_gets_in_by_a_later_group_and_the_address_is_named() -> None:
    scene = joining("a", "b")
    first = accuse(scene, "b")
    told = scene.fields["stranger in group"]
    assert told == {"worker": "b", "peer": "x", "address": WHERE, "view": first, "again_s": SHORTEST_S}
    assert scene.members("a", "b") == ("a", "b"), "who was in goes on"
    assert "lost" not in scene.events
    assert scene.coordinator.proposed is None
    scene.wait(SHORTEST_S + 0.5, "a", "b", "x")
    view = scene.last("x", m.Propose).view
    assert view.members == ("a", "b", "x")
    assert view.group == view.number > first
    scene.switch(view, 6)
    assert scene.coordinator.view == view


def test_who_accuses_for_ever_costs_a_stop_ever_more_seldom_and_gets_nobody_evicted() -> None:
    scene = joining("a", "b")
    stops, waited = 0, 0.0
    scene.forget()
    while waited < 3600:
        if scene.coordinator.proposed:
            accuse(scene, "a", peer="b")
            stops += 1
        scene.wait(0.5, "a", "b", "x")
        waited += 0.5
    assert 10 < stops < 10 + 3600 / LONGEST_S + 1
    assert scene.fields["stranger in group"]["again_s"] == LONGEST_S
    assert set(scene.coordinator.workers) == {"a", "b", "x"}
    assert "lost" not in scene.events


def test_a_group_that_comes_about_ends_the_waiting() -> None:
    scene = joining("a")
    for _ in range(3):
        accuse(scene, "x", peer="a")
        scene.wait(20, "a", "x")
    scene.switch(scene.last("x", m.Propose).view, 6)
    scene.ready("y")
    scene.forget()
    scene.say("a", m.PeerNotAuthenticated(view=scene.coordinator.number, peer="y", address=WHERE))
    assert scene.fields["stranger in group"]["again_s"] == SHORTEST_S


def test_leaving_workers_do_not_wait_for_it() -> None:
    scene = joining("a", "b")
    accuse(scene, "a")
    scene.say("b", m.LeaveRequest(reason="SIGTERM"))
    assert scene.last("a", m.Propose).view.members == ("a",)


def test_a_first_view_is_proposed_anew_too() -> None:
    scene = Scene(wanted=2, minimum=2)
    scene.ready("a", "b")
    first = scene.coordinator.proposed
    assert first is not None
    scene.say("b", m.PeerNotAuthenticated(view=first.number, peer="a", address=WHERE))
    for worker in "ab":
        scene.report(worker, 0, synced=False)
    scene.wait(SHORTEST_S + 0.5, "a", "b")
    assert scene.last("a", m.Propose).view.group > first.group


def test_of_what_is_not_proposed_nobody_can_speak() -> None:
    scene = joining("a", "b")
    view = scene.coordinator.proposed
    assert view is not None
    scene.hello("guest")
    scene.forget()
    scene.say("guest", m.PeerNotAuthenticated(view=view.number, peer="x", address=WHERE))
    scene.say("a", m.PeerNotAuthenticated(view=view.number + 1, peer="x", address=WHERE))
    scene.say("a", m.PeerNotAuthenticated(view=view.number - 1, peer="x", address=WHERE))
    assert scene.events == []
    assert scene.coordinator.proposed == view


def test_a_key_for_one_is_handed_to_that_one() -> None:
    scene = joining("a", "b")
    group = scene.last("x", m.Propose).view.group
    scene.forget()
    scene.say(
        "x", m.Publish(group=group, key="from x", value=b"1", to="a"), m.Publish(group=group, key="0", value=b"2")
    )
    assert [message.value for message in scene.sent["a"] if isinstance(message, m.Published)] == [b"1", b"2"]
    assert [message.value for message in scene.sent["b"] if isinstance(message, m.Published)] == [b"2"]
