"""What the workers' scripts call, message by message: what is a difference, what is none, and how the run ends."""

from __future__ import annotations

import pytest

from farandole.protocol import messages as m
from farandole.protocol.view import Lineage, View
from farandole.protocol.worker.state_machine import WorkerStateMachine
from tests.support.mentioned import mentions
from tests.support.scene import Scene, trained

STEP = m.Call.of("step 8")
EVALUATION = m.Call.of("evaluate over 9 samples", "sizes")


def beat(round_: int, call: m.Call = m.Call(), *, view: int = 1) -> m.Heartbeat:  # noqa: B008
    return m.Heartbeat(view=view, round=round_, step=8, call=call)


def ended(round_: int, *, view: int = 1) -> m.Finished:
    return m.Finished(fingerprint="f", view=view, round=round_, step=round_ - 1)


def saved(scene: Scene, code: int = 1) -> None:
    """The view was stopped because of a difference: the answers, the last checkpoint, the end."""
    assert scene.coordinator.ending
    scene.say(scene.coordinator.ending.saver, m.Saved(path="p"))
    assert scene.coordinator.over
    assert scene.coordinator.over.code == code
    assert scene.last(scene.coordinator.ending.saver, m.Goodbye).code == code


@pytest.mark.failure(
    "Scripts that differ between workers",
    "the script calls `run.evaluate` under `if run.is_leader:`, or on some workers only",
)
def test_different_calls_in_one_round_end_the_run() -> None:
    scene = trained("a", "b", "c")
    scene.say("a", beat(7, STEP), beat(8))
    scene.say("c", beat(8, STEP))
    scene.say("b", beat(7, STEP))
    assert "Stop" not in scene.kinds("a"), "one is a round behind, one has not begun: no difference"
    scene.say("b", beat(8, EVALUATION))
    assert scene.fields["calls differ"]["workers"] == ["c", "b"]
    reason = scene.fields["calls differ"]["reason"]
    assert mentions(reason, "c", "step 8", "b", "evaluate", 9)
    for worker in "abc":
        scene.report(worker, 8)
    assert scene.last("a", m.End).reason == reason
    saved(scene)
    assert scene.events.count("calls differ") == 1


def test_answers_to_a_stop_are_compared_before_anything_is_committed() -> None:
    """All hold a call round's words, which nobody has compared yet."""
    scene = trained("a", "b", "c")
    scene.lose("c")
    view = scene.issued(1)
    for worker, call in (("a", STEP), ("b", EVALUATION)):
        scene.say(
            worker,
            m.Stopped(
                stop=1, view=view, round=8, step=8, has_result=True, synced=True,
                lineage=Lineage(sets=(("a", "b", "c"),)), call=call,
            ),
        )  # fmt: skip
    assert "Resume" not in scene.kinds("a")
    assert scene.fields["calls differ"]["workers"] == ["a", "b"]
    saved(scene)


def test_what_the_lost_have_called_counts_no_more() -> None:
    scene = trained("a", "b", "c")
    scene.say("c", beat(8, EVALUATION))
    scene.lose("c")
    scene.report("a", 8)
    scene.report("b", 8)
    scene.say("a", beat(8, STEP, view=2))
    scene.say("b", beat(8, STEP, view=2), beat(8, EVALUATION, view=1), beat(9, STEP, view=2))
    assert "calls differ" not in scene.events


END_AND_GO_ON = [("b", ended(8)), ("a", beat(8, STEP))]


@pytest.mark.failure(
    "Scripts that differ between workers", "the script of one worker ends early: `break`, `sys.exit(0)`"
)
@pytest.mark.parametrize("said", [END_AND_GO_ON, END_AND_GO_ON[::-1]], ids=["the end first", "the end last"])
def test_a_script_that_ends_before_the_others_ends_the_run(said: list[tuple[str, m.Message]]) -> None:
    scene = trained("a", "b")
    scene.say("a", beat(7, STEP))
    scene.say(*said[0])
    assert "Stop" not in scene.kinds("a")
    scene.say(*said[1])
    assert scene.fields["calls differ"]["workers"] == ["b", "a"]
    assert mentions(scene.fields["calls differ"]["reason"], "b", "step 7", "a", "step 8")
    scene.report("a", 8)
    scene.report("b", 8)
    saved(scene)


def test_scripts_that_have_ended_after_different_steps() -> None:
    scene = trained("a", "b", "c")
    scene.say("a", ended(8))
    scene.say("b", ended(9))
    assert scene.fields["calls differ"]["workers"] == ["a", "b"]
    assert mentions(scene.fields["calls differ"]["reason"], "a", "step 7", "b", "step 8")


def test_scripts_that_end_together_end_well() -> None:
    scene = trained("a", "b", "c")
    scene.say("a", beat(7, STEP), ended(8), beat(8))
    scene.say("b", beat(7, STEP), beat(8), ended(8))
    scene.lose("a")
    scene.report("b", 8)
    scene.report("c", 7, has_result=True)
    scene.say("c", beat(8, view=2), ended(8, view=2))
    assert "calls differ" not in scene.events
    scene.say("b", m.Saved(path="p"))
    assert scene.last("c", m.Goodbye).code == 0


def test_an_end_is_remembered_by_who_comes_back_to_another_coordinator() -> None:
    scene = trained("a", "b")
    scene.say("b", ended(8))
    scene = scene.restarted()
    scene.back("a", "b")
    scene.say("b", ended(8))
    for worker in ("a", "b"):
        scene.report(worker, 8, view=scene.issued(1))
    view = scene.last("a", m.Resume).view.number
    scene.say("a", beat(8, STEP, view=view))
    assert scene.fields["calls differ"]["workers"] == ["b", "a"]
    assert mentions(scene.fields["calls differ"]["reason"], "b", "step 7")


def test_an_end_that_was_said_before_a_decision_was_heard_is_that_of_the_others() -> None:
    """Its word of the switch was lost with a connection, and all went on in another view."""
    scene = trained("a", "b")
    scene.ready("c")
    view = scene.last("a", m.Propose).view
    scene.switch(view, 8, "a", "c")
    scene.close("b")
    scene.back("b")
    for worker in "abc":
        scene.report(worker, 9, view=view)
    scene.say("b", ended(9, view=view.number))
    assert "calls differ" not in scene.events


def test_the_end_of_each_script_counts_also_if_the_first_to_end_is_lost() -> None:
    """Nobody reports it again, and the others would wait for ever (seed 50022479 of the schedules)."""
    scene = trained("a", "b", "c")
    for worker in "ac":
        scene.say(worker, ended(8))
    scene.lose("a")
    for worker in "bc":
        scene.report(worker, 8)
    scene.say("b", beat(8, STEP, view=scene.last("b", m.Resume).view.number))
    assert scene.fields["calls differ"]["workers"] == ["c", "b"]


def test_who_was_never_in_a_view_holds_nobody_up() -> None:
    scene = trained("a", "b")
    scene.hello("guest")
    scene.say("guest", m.Finished())
    scene.say("a", beat(8, STEP))
    assert "calls differ" not in scene.events


def test_what_external_workers_say_of_their_scripts_end_is_their_own_affair() -> None:
    """Two in no view contradict each other and the members, one with the fingerprint of nothing; others join still."""
    scene = trained("a", "b")
    for external_worker, round_ in (("liar", 10**6), ("other", 3)):
        scene.hello(external_worker)
        scene.say(external_worker, m.Finished(fingerprint="x", view=1, round=round_, step=round_))
        assert scene.last(external_worker, m.Goodbye).code == 0
    scene.say("a", beat(8, STEP))
    scene.ready("c")
    assert scene.last("a", m.Propose).view.joining == ("c",)
    assert "calls differ" not in scene.events


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_switch_goes_on_too(order: str) -> None:
    """The others take a joiner in, in the round that this one has not begun."""
    scene = trained("a", "b")
    scene.ready("c")
    view = scene.last("a", m.Propose).view
    said = {"a": m.Switched(view=view.number, round=8, step=8), "b": ended(8)}
    for worker in order:
        scene.say(worker, said[worker])
    assert scene.fields["calls differ"]["workers"] == ["b", "a"]
    assert mentions(scene.fields["calls differ"]["reason"], "b", "step 7", "a")


def test_a_call_in_the_view_before_is_none_that_the_others_make() -> None:
    """They have agreed on another view, and apply it with their next step, in round 8; evaluations come before that."""
    scene = trained("a", "b")
    scene.ready("c")
    view = scene.last("a", m.Propose).view
    scene.say("b", beat(7, EVALUATION))
    scene.say("a", m.Switched(view=view.number, round=8, step=8))
    scene.say("b", beat(7, EVALUATION), beat(8))
    assert "Stop" not in scene.kinds("a")
    scene.say("b", beat(8, EVALUATION))
    assert scene.fields["calls differ"]["workers"] == ["a", "b"]
    assert mentions(scene.fields["calls differ"]["reason"], "a", "b", "evaluate", 9)


@pytest.mark.failure(
    "Scripts that differ between workers",
    "the script of one worker makes another call while the run stops",
    seen="`THE SCRIPTS MAKE DIFFERENT CALLS`",
    outcome="the exit code is that of the stop; the most advanced worker saves the state",
)
@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_run_that_is_stopped_while_a_script_ends_keeps_its_own_end(order: str) -> None:
    scene = trained("a", "b")
    scene.coordinator.request_end("SIGINT", 130, 0.0)
    scene.look()
    view = scene.last("a", m.Propose).view
    assert view.members == ()
    said = {"a": m.Switched(view=view.number, round=8, step=8), "b": ended(8)}
    for worker in order:
        scene.say(worker, said[worker])
    scene.report("a", 8, view=view)
    scene.report("b", 8)
    saved(scene, code=130)


# --- a worker's side -------------------------------------------------------------------------------------------------


def member(name: str) -> WorkerStateMachine:
    made = WorkerStateMachine(name)
    view = View(number=1, members=("a", "b"), group=1)
    made.on_message(m.Propose(view=view))
    made.connected(view)
    made.enter_view(0, 0, view=1)
    return made


def test_a_round_ends_only_if_all_have_called_the_same() -> None:
    a, b = member("a"), member("b")
    assert a.call == b.call == m.Call()
    a.begin_round(0, may_switch=False, call=EVALUATION)
    b.begin_round(0, may_switch=False, call=STEP)
    words = [each.commit_message(view=1, round_=0, compute_us=0, shards=0) for each in (a, b)]
    assert not a.end_round([word for word in words if word])
    assert a.round == 0
    b.begin_round(0, may_switch=False, call=EVALUATION)
    words = [each.commit_message(view=1, round_=0, compute_us=0, shards=0) for each in (a, b)]
    assert a.end_round([word for word in words if word])
    assert a.call == m.Call(), "the next round has not begun"


@pytest.mark.failure(
    "Scripts that differ between workers",
    (
        "workers evaluate differently at the same place: another number of samples, other micro-batches, metrics of "
        "other sizes"
    ),
)
def test_a_call_stands_for_its_sizes_and_fits_the_wire() -> None:
    assert m.Call.of("evaluate", "1").number != m.Call.of("evaluate", "2").number
    assert m.decode_from_worker(m.encode(beat(8, EVALUATION))) == beat(8, EVALUATION)
