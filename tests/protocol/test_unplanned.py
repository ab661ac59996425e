"""Unplanned changes, message by message: crashes, accusations, silence."""

from __future__ import annotations

import pytest

from farandole.protocol import messages as m
from farandole.protocol.messages import RunTerms
from farandole.protocol.view import Lineage
from tests.support.mentioned import mentions
from tests.support.scene import Scene, trained, view_of


def test_crash_redo() -> None:
    scene = trained("a", "b", "c")
    scene.lose("b")
    assert scene.last("a", m.Stop) == scene.last("c", m.Stop) == m.Stop(stop=1)
    scene.report("a", 7, has_result=True)
    assert "Resume" not in scene.kinds("a")
    scene.report("c", 7)
    resume = scene.last("a", m.Resume)
    assert resume == scene.last("c", m.Resume)
    assert (resume.view, resume.round, resume.commit) == (view_of(2, "a", "c", group=1), 7, False)
    assert resume.lineage.sets == (("a", "b", "c"), ("a", "c"))
    assert scene.fields["view"]["outcome"] == "redo"


def test_crash_commit() -> None:
    scene = trained("a", "b", "c")
    scene.lose("b")
    scene.report("a", 7, has_result=True)
    scene.report("c", 7, has_result=True)
    assert scene.last("a", m.Resume).commit


def test_a_second_crash_during_the_stop() -> None:
    scene = trained("a", "b", "c")
    scene.lose("b")
    scene.report("a", 7)
    scene.lose("c")
    assert scene.last("a", m.Resume).view.members == ("a",)
    assert scene.kinds("a").count("Stop") == 1


def test_a_report_of_an_earlier_stop_does_not_count() -> None:
    scene = trained("a", "b", "c")
    scene.lose("c")
    scene.report("a", 7)
    scene.report("b", 7)
    scene.lose("b")
    scene.say(
        "a",
        m.Stopped(
            stop=1,
            view=view_of(2, "a", group=1),
            round=9,
            step=9,
            has_result=False,
            synced=True,
            lineage=Lineage(sets=(("a",),)),
        ),
    )
    assert scene.coordinator.stopping is not None
    scene.report("a", 7)
    assert scene.last("a", m.Resume).round == 7


def test_a_joiner_dies_while_it_connects() -> None:
    scene = trained("a")
    scene.ready("b", "c")
    scene.lose("b")
    scene.report("a", 3)
    assert scene.last("a", m.Resume).view.members == ("a",)
    assert scene.last("a", m.Propose).view.members == ("a", "c")


def test_a_joiner_without_state_waits_for_the_next_view() -> None:
    scene = trained("a", "b")
    scene.ready("c")
    view = scene.last("a", m.Propose).view
    scene.switch(view, 3, synced=False)
    scene.lose("b")
    scene.report("a", 3)
    scene.report("c", 3, synced=False)
    assert isinstance(scene.sent["c"][-2], m.ViewWithdrawn)
    assert scene.last("c", m.Propose).view.members == ("a", "c")


def test_nobody_holds_the_state_any_more() -> None:
    scene = trained("a")
    scene.ready("b")
    scene.switch(scene.last("a", m.Propose).view, 3, synced=False)
    scene.lose("a")
    scene.report("b", 3, synced=False)
    assert "state lost" in scene.events
    assert scene.last("b", m.Propose).view == view_of(3, "b", unchecked=("b",))


def test_suspicion_with_the_accused_alive() -> None:
    scene = trained("a", "b", "c")
    scene.say("a", m.Suspect(view=1, peer="b", reason="connection reset"))
    for worker in ("a", "b", "c"):
        scene.report(worker, 2)
    assert scene.last("b", m.Goodbye).code == 3
    assert scene.closed == ["b"]
    assert scene.coordinator.roster().evicted == ("b",)
    assert scene.last("a", m.Resume).view.members == ("a", "c")


def test_suspicion_of_one_that_has_died() -> None:
    scene = trained("a", "b", "c")
    scene.say("a", m.Suspect(view=1, peer="b", reason="connection reset"))
    scene.lose("b")
    scene.report("a", 2)
    scene.report("c", 2)
    assert scene.coordinator.roster().evicted == ()
    assert scene.last("a", m.Resume).view.members == ("a", "c")


def test_a_joiner_that_can_not_reach_the_only_veteran_goes_itself() -> None:
    scene = trained("a")
    scene.ready("b")
    view = scene.last("b", m.Propose).view
    scene.switch(view, 3, synced=False)
    scene.say("b", m.Suspect(view=view.number, peer="a", reason="connection reset"))
    scene.report("a", 3)
    scene.report("b", 3, synced=False)
    assert scene.closed == ["b"]
    assert scene.last("a", m.Resume).view.members == ("a",)


def test_a_leaving_worker_that_waits_for_a_word_of_the_view_before() -> None:
    """a and b have switched; c never will, because the pair of b and c broke with b's last word in it."""
    scene = trained("a", "b", "c")
    scene.say("c", m.LeaveRequest(reason="SIGTERM"))
    view = scene.last("a", m.Propose).view
    scene.switch(view, 4, "a", "b")
    scene.say("c", m.Suspect(view=1, peer="b", reason="connection reset"))
    assert scene.last("c", m.Stop).stop == 1


def test_suspicions_of_views_that_are_no_more_do_not_count() -> None:
    scene = trained("a", "b", "c")
    scene.lose("c")
    scene.report("a", 2)
    scene.report("b", 2)
    scene.forget()
    scene.say("a", m.Suspect(view=1, peer="b", reason="connection reset"))
    scene.say("a", m.Suspect(view=2, peer="c", reason="connection reset"))
    assert scene.coordinator.stopping is None


def computed(scene: Scene, *workers: str) -> None:
    """They have ended a step in which they had shards."""
    for worker in workers:
        scene.say(worker, m.Heartbeat(view=1, shards=2, shards_total=4))


def test_one_that_keeps_its_peers_waiting_is_evicted() -> None:
    scene = trained("a", "b", "c")
    computed(scene, "a", "b", "c")
    scene.say("b", m.Heartbeat(view=1, shards=0, shards_total=1))  # since then too few for everyone
    scene.say("a", m.Suspect(view=1, peer="b", reason="stalled", waited_s=31))
    for worker in ("a", "b", "c"):
        scene.report(worker, 2)
    assert scene.closed == ["b"]
    assert mentions(scene.fields["lost"]["reason"], "31 s")


@pytest.mark.failure(
    "Standing still",
    "a worker compiles for longer than the stall limit, in the first step that it computes",
    seen="nothing: its peers wait for up to ten times the limit",
    outcome="the run continues with it; nothing is lost",
)
def test_the_first_step_that_a_worker_computes_may_take_ten_times_as_long() -> None:
    scene = trained("a", "b", "c", stall_s=20.0)
    computed(scene, "a", "c")
    for waited_s in (21, 100, 200):
        scene.say("a", m.Suspect(view=1, peer="b", reason="stalled", waited_s=waited_s))
        assert scene.coordinator.stopping is None
    scene.say("a", m.Suspect(view=1, peer="b", reason="stalled", waited_s=201))
    for worker in ("a", "b", "c"):
        scene.report(worker, 2)
    assert scene.closed == ["b"]
    assert scene.last("a", m.Resume).view.members == ("a", "c")


def test_in_its_first_step_a_broken_connection_counts_and_patience_does_not_outlive_another_stop() -> None:
    scene = trained("a", "b", "c")
    computed(scene, "a", "c")
    scene.say("a", m.Suspect(view=1, peer="c", reason="connection reset"))
    scene.say("a", m.Suspect(view=1, peer="b", reason="stalled", waited_s=31))
    for worker in ("a", "b", "c"):
        scene.report(worker, 2)
    assert scene.closed == ["c"]


def test_missed_heartbeats() -> None:
    scene = trained("a", "b", heartbeat_timeout_s=5.0)
    scene.wait(5.0, "a")
    assert scene.kinds("a") == []
    scene.wait(0.5, "a")
    assert scene.closed == [], "b may be alive: a must have stopped first"
    scene.report("a", 3)
    assert scene.closed == ["b"]
    assert scene.members("a") == ("a",)


def test_a_coordinator_that_was_away_itself_blames_nobody() -> None:
    scene = trained("a", "b", heartbeat_timeout_s=5.0)
    for scene.now in (1.0, 60.0, 61.0):
        scene.coordinator.tick(scene.now)
    assert scene.look().sent == {}


def test_messages_of_workers_that_are_out_are_ignored() -> None:
    scene = trained("a", "b")
    scene.say("a", m.Welcome(run="r", worker="a", folder="", terms=RunTerms(), lines=(-1, 0)))
    assert scene.closed == ["a"]
    scene.say("a", m.Finished(), m.Suspect(view=1, peer="b", reason="?"))
    scene.report("b", 0)
    assert scene.last("b", m.Resume).view.members == ("b",)


def test_two_evictions_at_one_tick_of_which_one_brings_about_the_other() -> None:
    scene = trained("a", "b", "c", heartbeat_timeout_s=5.0)
    scene.say("a", m.Suspect(view=1, peer="b", reason="connection reset"))
    scene.report("b", 2)
    scene.report("a", 2)
    scene.wait(5.5, "a")  # c never answers, b has answered: both are frozen
    assert sorted(scene.closed) == ["b", "c"]
    assert scene.last("a", m.Resume).view.members == ("a",)
