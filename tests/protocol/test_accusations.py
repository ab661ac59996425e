"""Who goes, when members say of each other that nothing comes: whose word contradicts the others', or has no ground."""

from __future__ import annotations

import pytest

from farandole.protocol import events
from farandole.protocol import messages as m
from farandole.protocol.coordinator.state import BENEFITS, RETURNS
from tests.support.mentioned import mentions
from tests.support.scene import Scene, trained


def answered(scene: Scene, round_: int = 8) -> None:
    for worker in list(scene.coordinator.stopping.unanswered if scene.coordinator.stopping else ()):
        scene.report(worker, round_)


def accuses(scene: Scene, worker: str, *peers: str, waited_s: int = 0) -> None:
    view = scene.coordinator.number
    for peer in peers:
        scene.say(worker, m.Suspect(view=view, peer=peer, reason="connection reset", waited_s=waited_s))


@pytest.mark.parametrize("accuser", "abcd")
def test_who_accuses_several_that_have_no_complaint_goes_itself(accuser: str) -> None:
    scene = trained("a", "b", "c", "d")
    others = [worker for worker in "abcd" if worker != accuser]
    accuses(scene, accuser, *others[:2])
    answered(scene)
    assert scene.members(*others) == tuple(others)
    assert scene.closed == [accuser]


@pytest.mark.parametrize("accuser", "ab")
def test_of_one_word_against_one_other_who_came_later_goes(accuser: str) -> None:
    scene = trained("a", "b", "c")
    accuses(scene, accuser, "b" if accuser == "a" else "a")
    answered(scene)
    assert scene.members("a", "c") == ("a", "c")


def test_who_has_been_right_by_its_standing_too_often_goes_itself() -> None:
    names = [f"w{number}" for number in range(BENEFITS + 3)]
    scene = trained(*names)
    for peer in names[1 : BENEFITS + 1]:
        accuses(scene, "w0", peer)
        answered(scene)
    assert scene.members("w0") == ("w0", *names[BENEFITS + 1 :])
    accuses(scene, "w0", names[BENEFITS + 1])
    answered(scene)
    assert scene.members(*names[BENEFITS + 1 :]) == tuple(names[BENEFITS + 1 :])


def test_a_third_ones_heartbeat_tells_who_of_a_pair_goes() -> None:
    scene = trained("a", "b", "c")
    scene.say("c", m.Heartbeat(view=1, round=8, waits_for_peers=True, blocked_on="a"))
    accuses(scene, "b", "a")
    answered(scene)
    assert scene.members("b", "c") == ("b", "c")


def test_who_hangs_says_so_itself_by_not_saying_that_it_waits() -> None:
    """Of two, the one that came later is believed: the other is what it waits for."""
    scene = trained("a", "b")
    scene.say("a", m.Heartbeat(view=1, round=8, shards=1, shards_total=2))
    scene.say("b", m.Heartbeat(view=1, round=8, shards=1, shards_total=2, waits_for_peers=True, blocked_on="a"))
    accuses(scene, "b", "a", waited_s=31)
    answered(scene)
    assert scene.members("b") == ("b",)


def test_of_who_waits_itself_only_what_it_waits_for_is_the_cause() -> None:
    """Between hosts: d hangs, c of its host waits for it, and a and b of the other one for what c is to pass on."""
    scene = trained("a", "b", "c", "d")
    for worker, peer in (("a", "c"), ("b", "c"), ("c", "d"), ("d", "")):
        scene.say(
            worker, m.Heartbeat(view=1, round=8, shards=1, shards_total=2, waits_for_peers=bool(peer), blocked_on=peer)
        )
    accuses(scene, "a", "c", waited_s=31)
    assert scene.coordinator.stopping is None
    accuses(scene, "c", "d", waited_s=31)
    answered(scene)
    assert scene.members("a", "b", "c") == ("a", "b", "c"), "three wait for d, though only c has said so"


def test_where_all_wait_for_each_other_in_a_circle_each_is_heard() -> None:
    scene = trained("a", "b", "c")
    for worker, peer in (("a", "b"), ("b", "c"), ("c", "a")):
        scene.say(worker, m.Heartbeat(view=1, round=8, shards=1, shards_total=2, waits_for_peers=True, blocked_on=peer))
    accuses(scene, "a", "b", waited_s=31)
    assert scene.coordinator.stopping is not None


def test_nobody_has_waited_for_one_whose_rounds_went_on() -> None:
    scene = trained("a", "b", "c")
    for round_ in (7, 8, 9):
        scene.say("a", m.Heartbeat(view=1, round=round_, shards=1, shards_total=2))
        scene.wait(1.0)
    accuses(scene, "b", "a", waited_s=31)
    assert scene.coordinator.stopping is None
    accuses(scene, "b", "a")
    assert scene.coordinator.stopping is not None, "a connection that broke is another matter"


def test_one_may_have_been_waited_for_that_has_just_gone_on() -> None:
    scene = trained("a", "b", "c")
    scene.wait(60.0, "a", "b", "c")
    for round_ in (7, 8):
        scene.say("a", m.Heartbeat(view=1, round=round_, shards=1, shards_total=2))
        scene.wait(40.0, "a", "b", "c")
    accuses(scene, "b", "a", waited_s=61)
    assert scene.coordinator.stopping is not None


@pytest.mark.parametrize("peer", ["c", "d", "e"], ids=["itself", "a candidate", "one that has been let go"])
def test_a_storm_of_suspicions_of_who_is_in_no_view_with_it_changes_no_view(peer: str) -> None:
    """There were 481 views in 20 s."""
    scene = trained("a", "b", "c", maximum=3)
    scene.hello("d")
    for _ in range(500):
        accuses(scene, "c", peer)
        answered(scene)
    assert scene.coordinator.view == scene.issued(1)
    assert scene.events == ["starting"]


def test_a_storm_of_suspicions_takes_no_more_views_than_there_are_workers() -> None:
    scene = trained("a", "b", "c", "d")
    for _ in range(100):
        for worker in "bcd":
            accuses(scene, "a", worker)
            answered(scene)
    assert scene.events.count("view") <= 3


def test_an_external_worker_in_no_view_accuses_nobody() -> None:
    scene = trained("a", "b", maximum=2)
    scene.ready("guest", pool="")
    accuses(scene, "guest", "a", "b")
    scene.say("guest", m.Heartbeat(view=1, blocked_on="a"))
    assert scene.coordinator.stopping is None


def test_who_comes_back_again_and_again_is_put_out() -> None:
    scene = trained("a", "b", "c")
    for _ in range(10 * RETURNS):
        if "b" in scene.coordinator.departed:
            break
        scene.close("b")
        scene.back("b")
        answered(scene)
    assert scene.events.count("view") <= RETURNS + 1
    assert scene.fields["lost"]["worker"] == "b"
    assert scene.members("a", "c") == ("a", "c")


@pytest.mark.parametrize("accuser", "ab")
def test_where_nobody_else_can_tell_the_loss_names_both(accuser: str) -> None:
    scene = trained("a", "b", "c")
    accuses(scene, accuser, "b" if accuser == "a" else "a")
    answered(scene)
    lost = scene.fields["lost"]
    assert lost["worker"] == "b"
    assert mentions(lost["reason"], "a", "b")


def test_where_others_can_tell_the_loss_says_why() -> None:
    scene = trained("a", "b", "c", "d")
    accuses(scene, "a", "b", "c")
    answered(scene)
    assert (scene.fields["lost"]["worker"], scene.fields["lost"]["reason"]) == ("a", "connection reset")


def test_the_record_of_who_goes_has_all_that_counts_against_it_and_nothing_that_is_settled() -> None:
    """The connection of b and c is broken, and a accuses both: one of b and c goes, and one of a and b."""
    scene = trained("a", "b", "c")
    for worker, peer, reason in (("b", "c", "connection reset"), ("a", "b", "wrong"), ("a", "c", "wrong")):
        scene.say(worker, m.Suspect(view=scene.coordinator.number, peer=peer, reason=reason))
    answered(scene)
    lost = {event.worker: event.reason for event in scene.recorded if isinstance(event, events.LostEvent)}
    assert set(lost) == {"b", "c"}
    assert mentions(lost["c"], "connection reset", "wrong")
    assert mentions(lost["b"], "wrong")
    assert not mentions(lost["b"], "connection reset")
