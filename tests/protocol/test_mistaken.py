"""A member that is wrong, by a bug, a broken memory or on purpose: what one wrong value does to the others.

Which field can do what, and what comes of it:

    Stopped.view, lineage      never issued: it goes, barred, whatever the others say
    Stopped.round, holds       contradicts several: it goes, barred; contradicts one: who came later goes
    Stopped.prepared           false: the same, where a view is on its way
    Stopped.synced              false: it loses the state that it holds; true without state: the replicas differ
    Stopped.call, Finished     the scripts go different ways: ends the run by design, and names both sides
    Heartbeat.blocked_on        one voice, as in Suspect
    Suspect                    one voice: who has most against it goes; nobody for one that is in no view
    Prepared                   of another view than the proposed one: nothing
    Switched                   of another view than the proposed one: nothing
    Level                      nothing: who is not waited for says it in vain
    Restored, Checkpointed     nothing, unless it comes from who begins, or is to write
    NotFinite, Differs         of several that hold the state, one alone: nothing, until another says so
    Saved, Digests, Short      its own affair: who was not asked is not heard
    Failed                     ends the run by design, and names it
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from farandole.protocol import messages as m
from farandole.protocol.coordinator.state import EXIT_BANNED, EXIT_EVICTED
from farandole.protocol.view import Lineage, View
from farandole.protocol.worker.state_machine import WorkerStateMachine
from tests.support.mentioned import mentions
from tests.support.scene import Scene, trained


def stop(scene: Scene) -> None:
    """As after a connection that broke: everyone is asked."""
    scene.close("b")
    scene.back("b")


def says(scene: Scene, worker: str, **wrong: Any) -> None:
    """Its answer to the last stop, honest but for `wrong`."""
    view = scene.coordinator.view
    assert view
    honest = {"round": 8, "view": view, **wrong}
    dealt = scene.dealt(view, honest["round"])
    report = m.Stopped(
        **{
            "stop": scene.last(worker, m.Stop).stop,
            "step": 8,
            "has_result": False,
            "synced": True,
            "lineage": dealt,
            **honest,
        }
    )
    scene.say(worker, m.decode_from_worker(m.encode(report)))


V = View(number=1, members=("a", "b", "c"), joining=("b", "c"), group=1)
SELF_EVIDENT = [
    ({"view": View(number=7, members=("c",), group=7)}, ["view 7", 1]),
    ({"view": msgspec.structs.replace(V, members=("c", "a", "b"))}, ["view 1", 3]),
    ({"view": msgspec.structs.replace(V, group=3)}, ["view 1", 3]),
    ({"view": msgspec.structs.replace(V, joining=())}, ["view 1", 3]),
    ({"view": msgspec.structs.replace(V, shares=(1, 1, 1000))}, ["view 1", 3]),
    ({"view": None}, []),
    ({"lineage": Lineage(sets=(("c", "c", "c"),))}, ["view 1", "round 8"]),
    ({"lineage": Lineage(sets=(("a", "b", "c"), ("c",)))}, ["view 1", "round 8"]),
    ({"lineage": Lineage(sets=(("a", "b", "c"),), shares=(1, 1, 1000))}, ["view 1", "round 8"]),
    ({"lineage": Lineage(sets=())}, ["view 1", "round 8"]),
]


@pytest.mark.parametrize("liar", "abc")
@pytest.mark.parametrize(("wrong", "named"), SELF_EVIDENT, ids=str)
def test_what_was_never_issued_steers_nothing(liar: str, wrong: dict[str, Any], named: list[object]) -> None:
    scene = trained("a", "b", "c")
    stop(scene)
    honest = [worker for worker in "abc" if worker != liar]
    for worker in "abc":
        says(scene, worker, **(wrong if worker == liar else {}))
    assert scene.members(*honest) == tuple(honest)
    assert scene.last(honest[0], m.Resume).round == 8
    assert mentions(scene.fields["lost"]["reason"], *named)
    assert scene.last(liar, m.Goodbye).code == EXIT_BANNED


def test_who_holds_no_state_may_be_in_a_view_that_all_others_have_left_long_since() -> None:
    """It has not heard that it was sent out of it."""
    scene = trained("a", "b")
    old = View(number=1, members=("a", "b", "c"), joining=("b", "c"), group=1)
    scene.ready("c")
    view = scene.last("c", m.Propose).view
    scene.switch(view, 8, synced=False)
    stop(scene)
    for worker in "ab":
        says(scene, worker)
    scene.report("c", 0, synced=False, view=old)
    assert "lost" not in scene.events
    assert scene.last("c", m.ViewWithdrawn)


@pytest.mark.parametrize("liar", "abc")
@pytest.mark.parametrize(
    "wrong", [{"round": 10}, {"round": 2**53}, {"round": 6, "has_result": True}, {"round": 9}, {"round": 7}], ids=str
)
def test_a_round_that_contradicts_both_others(liar: str, wrong: dict[str, Any]) -> None:
    """It took the run over: all others were behind what nobody had ended."""
    scene = trained("a", "b", "c")
    stop(scene)
    honest = [worker for worker in "abc" if worker != liar]
    for worker in "abc":
        says(scene, worker, **(wrong if worker == liar else {}))
    assert scene.members(*honest) == tuple(honest)
    assert scene.last(honest[0], m.Resume).round == 8
    assert scene.last(liar, m.Goodbye).code == EXIT_BANNED
    assert mentions(scene.fields["lost"]["reason"], *honest)


def test_one_word_against_one_other_is_the_longer_standing_ones() -> None:
    scene = trained("a", "b")
    stop(scene)
    says(scene, "a", round=8)
    says(scene, "b", round=2000)
    assert scene.members("a") == ("a",)
    assert scene.last("b", m.Goodbye).code == EXIT_EVICTED, "it may have been right"


def test_the_proposed_view_is_not_in_force_where_nobody_else_is_prepared_for_it() -> None:
    """Else the others were told to go on over connections that they do not have."""
    scene = trained("a", "b", "c")
    scene.ready("d")
    proposed = scene.last("a", m.Propose).view
    stop(scene)
    for worker in "ab":
        says(scene, worker)
    says(scene, "c", view=proposed, round=8, prepared=proposed.number, lineage=scene.dealt(proposed, 8))
    scene.report("d", 0, synced=False)
    assert scene.members("a", "b") == ("a", "b")
    assert scene.last("a", m.Resume).view.group == 1
    assert mentions(scene.fields["lost"]["reason"], "c", f"view {proposed.number}")


def test_the_proposed_view_is_not_in_force_where_others_have_begun_the_round_in_the_one_before() -> None:
    """All are prepared for it; shards that the others have computed would be dealt by it to somebody else."""
    scene = trained("a", "b", "c")
    scene.say("c", m.LeaveRequest(reason="SIGTERM"))
    proposed = scene.last("a", m.Propose).view
    stop(scene)
    call = m.Call.of("step 8")
    for worker in "ab":
        says(scene, worker, prepared=proposed.number, call=call)
    says(scene, "c", view=proposed, prepared=proposed.number, lineage=scene.dealt(proposed, 8), call=call)
    assert scene.members("a", "b") == ("a", "b")
    assert scene.last("a", m.Resume).lineage.sets[0] == ("a", "b", "c")
    assert scene.last("c", m.Goodbye).code == EXIT_BANNED


def test_replicas_of_two_rounds_are_not_compared_and_who_says_so_is_proved_wrong() -> None:
    scene = trained("a", "b", "c")
    scene.say("c", m.Differs(step=7, workers=("b",)))
    scene.say("b", m.ScriptFailed(traceback="ValueError"))
    scene.report("b", 7, has_result=True)
    scene.report("c", 7, has_result=True)
    scene.report("a", 8)
    assert not any("Compare" in scene.kinds(worker) for worker in "abc")
    assert scene.last("a", m.End).save


@pytest.mark.parametrize("told", [True, False])
def test_a_worker_that_the_others_go_on_without_is_behind_and_its_replica_does_not_differ(*, told: bool) -> None:
    """One report is false, or its replica differs from that of the only one in the same step."""
    scene = trained("a", "b", "c")
    scene.say("c", m.LeaveRequest(reason="SIGTERM"))
    proposed = scene.last("a", m.Propose).view
    scene.say("b", m.Differs(step=9, workers=("a",)))
    scene.say("a", m.ScriptFailed(traceback="ValueError"))
    for worker in "ab":
        says(scene, worker, view=proposed, round=9, prepared=proposed.number, lineage=scene.dealt(proposed, 9))
    says(scene, "c", round=7, prepared=proposed.number)
    for worker, step, digest in (("c", 7, 1), ("b", 9, 2), ("a", 9, 2 if told else 3)):
        scene.say(worker, m.Digests(step=step, names=("weight",), digests=(digest,)))
    assert scene.last("a", m.End).save
    differing = scene.fields["replicas differ"]["workers"]
    assert list(differing) == (["a"] if told else ["b"])


def test_no_member_has_entered_it_either_and_begun_nothing() -> None:
    scene = trained("a", "b", "c", "d")
    scene.say("d", m.LeaveRequest(reason="SIGTERM"))
    proposed = scene.last("a", m.Propose).view
    stop(scene)
    for worker in "abd":
        says(scene, worker, prepared=proposed.number, call=m.Call.of("step 8"))
    says(scene, "c", view=proposed, prepared=proposed.number, lineage=scene.dealt(proposed, 8))
    assert scene.last("a", m.Resume).lineage.sets[0] == ("a", "b", "c", "d")
    assert scene.last("c", m.Goodbye).code == EXIT_BANNED


@pytest.mark.parametrize("round_", [7, 8])
def test_a_leaving_worker_is_never_ahead_in_the_view_without_it(round_: int) -> None:
    """Else the others were told to go on there, in a round for which what they have computed is somebody else's."""
    scene = trained("a", "b", "c")
    scene.say("c", m.LeaveRequest(reason="SIGTERM"))
    proposed = scene.last("a", m.Propose).view
    stop(scene)
    for worker in "ab":
        says(scene, worker, prepared=proposed.number, round=round_)
    says(scene, "c", view=proposed, round=9, prepared=proposed.number, lineage=scene.dealt(proposed, 9))
    assert scene.members("a", "b") == ("a", "b")
    assert scene.last("a", m.Resume).round == round_
    assert scene.last("a", m.Resume).lineage.sets[0] == ("a", "b", "c")
    assert scene.last("c", m.Goodbye).code == EXIT_BANNED


def test_a_leaving_worker_may_be_behind() -> None:
    """The others have gone on without it, in the view that all of them have agreed on."""
    scene = trained("a", "b", "c")
    scene.say("c", m.LeaveRequest(reason="SIGTERM"))
    proposed = scene.last("a", m.Propose).view
    stop(scene)
    for worker in "ab":
        says(scene, worker, view=proposed, round=9, prepared=proposed.number, lineage=scene.dealt(proposed, 9))
    says(scene, "c", round=7, prepared=proposed.number)
    assert scene.members("a", "b") == ("a", "b")
    assert scene.last("a", m.Resume).round == 9
    assert "lost" not in scene.events


def test_a_dealing_of_the_views_first_round_is_not_one_of_a_later_one() -> None:
    scene = trained("a", "b", "c")
    scene.ready("d")
    view = scene.last("a", m.Propose).view
    scene.switch(view, 4)
    stop(scene)
    for worker in "bcd":
        says(scene, worker)
    says(scene, "a", lineage=view.lineage(view.synced))
    assert scene.members("b", "c", "d") == ("b", "c", "d")
    assert scene.last("b", m.Resume).lineage.sets == (("a", "b", "c", "d"), ("b", "c", "d"))


def test_who_has_agreed_on_a_view_reports_that_it_is_prepared() -> None:
    """Though it has not begun anything in it."""
    member = WorkerStateMachine("a")
    second = View(number=2, members=("a", "b"), group=1)
    member.on_message(m.Propose(view=View(number=1, members=("a",), group=1)))
    member.connected(View(number=1, members=("a",), group=1))
    member.enter_view(0, 0, view=1)
    member.begin_round(0, may_switch=True)
    member.on_message(m.Propose(view=second))
    member.connected(second)
    word = member.commit_message(view=1, round_=0, compute_us=0, shards=0)
    assert word is not None
    assert member.end_round([word])
    [report] = member.on_message(m.Stop(stop=1))
    assert isinstance(report, m.Stopped)
    assert (report.view, report.prepared) == (View(number=1, members=("a",), group=1), 2)


def test_nobody_is_behind_its_own_heartbeats() -> None:
    scene = trained("a", "b", "c")
    scene.say("b", m.Heartbeat(view=1, round=8))
    stop(scene)
    says(scene, "a", round=8)
    says(scene, "b", round=7, has_result=True)
    says(scene, "c", round=8)
    assert scene.members("a", "c") == ("a", "c")
    assert mentions(scene.fields["lost"]["reason"], "round 8")


def test_a_view_of_before_the_last_decision_is_known_to_the_next_coordinator() -> None:
    """The honest case: nobody has heard the decision, which the journal holds, and the old view with it."""
    scene = trained("a", "b", "c")
    first = scene.issued(1)
    scene.lose("c")
    for worker in "ab":
        scene.report(worker, 8)
    scene = scene.restarted()
    scene.back("a", "b")
    for worker in "ab":
        scene.report(worker, 8, view=first)
    assert scene.members("a", "b") == ("a", "b")
    assert "lost" not in scene.events


@pytest.mark.parametrize("dies", [True, False])
def test_who_has_answered_a_stop_stays_in_its_round_also_for_the_next_coordinator(*, dies: bool) -> None:
    """Nobody has heard the decision; the one that could contradict the longest-standing worker is gone."""
    scene = trained("a", "b", "c")
    first = scene.issued(1)
    scene.lose("c")
    for worker in "ab":
        scene.report(worker, 8, view=first, has_result=True)
    if dies:
        scene = scene.restarted()
        scene.back("a", "b")
    else:
        scene.close("a", "b")
        scene.back("a", "b")
    scene.report("a", 9, view=first)
    scene.report("b", 8, view=first, has_result=True)
    assert scene.fields["lost"]["worker"] == "a"
    assert mentions(scene.fields["lost"]["reason"], "round 9", "round 8")
    assert scene.members("b") == ("b",)
