"""The coordinator's plain paths, message by message: what comes in, what goes out to whom."""

from __future__ import annotations

from typing import Any

import pytest

from farandole.errors import UsageError
from farandole.membership import messages as m
from farandole.membership.coordinator import Coordinator, first_difference
from farandole.membership.records import Close, Record, RunSettings, Send
from farandole.membership.view import View

FACTS = (("torch version", "2.13"), ("intra-op threads", "1"), ("weight", "(2, 3) float32"))


class Scene:
    """A coordinator, its clock, and what it has sent and recorded since the last look."""

    def __init__(self, **settings: Any) -> None:
        self.coordinator = Coordinator(RunSettings(run="r", **{"wanted": 2, **settings}))
        self.now = 0.0
        self.sent: dict[str, list[m.Message]] = {}
        self.events: list[str] = []
        self.closed: list[str] = []
        self.fields: dict[str, dict[str, Any]] = {}

    def look(self) -> Scene:
        for action in self.coordinator.drain():
            match action:
                case Send(worker, message):
                    self.sent.setdefault(worker, []).append(message)
                case Record(event, fields):
                    self.events.append(event)
                    self.fields[event] = fields
                case Close(worker):
                    self.closed.append(worker)
                case _:
                    pass
        return self

    def forget(self) -> None:
        self.look()
        self.sent, self.events = {}, []

    def say(self, worker: str, *messages: m.Message) -> None:
        for message in messages:
            self.coordinator.receive(worker, message, self.now)
        self.look()

    def hello(self, *workers: str, pool: str = "pool") -> None:
        for worker in workers:
            self.coordinator.hello(m.Hello(kind="worker", worker=worker, host=f"h-{worker}", pool=pool), self.now)
        self.look()

    def ready(self, *workers: str, pool: str = "pool", facts: tuple[tuple[str, str], ...] = FACTS) -> None:
        self.hello(*workers, pool=pool)
        for worker in workers:
            self.say(worker, m.Ready(signature=m.Signature(facts=facts)))

    def switch(self, view: View, round_: int, *workers: str, level: bool = True) -> None:
        for worker in workers or view.members:
            self.say(worker, m.Switched(view=view.number, round=round_, step=round_))
        for joiner in view.joining if level else ():
            self.say(joiner, m.Level(view=view.number))

    def last(self, worker: str, kind: type[Any]) -> Any:
        found = [message for message in self.sent.get(worker, ()) if isinstance(message, kind)]
        assert found, f"{worker} was sent no {kind.__name__}"
        return found[-1]

    def kinds(self, worker: str) -> list[str]:
        return [type(message).__name__ for message in self.sent.get(worker, ())]

    def lose(self, worker: str) -> None:
        self.coordinator.disconnected(worker, self.now)
        self.look()

    def report(self, worker: str, round_: int, *, holds: bool = False, level: bool = True) -> None:
        """`worker` answers the last Stop as a member of the coordinator's view."""
        view = self.coordinator.view
        self.say(
            worker,
            m.Stopped(
                stop=self.last(worker, m.Stop).stop, view=view.number if view and level else 0, round=round_,
                step=round_, holds=holds, level=level, lineage=(view.members,) if view else (),
            ),
        )  # fmt: skip


def trained(*workers: str, **settings: Any) -> Scene:
    """Everyone in the first view and level."""
    scene = Scene(**{"wanted": len(workers), "minimum": len(workers), **settings})
    scene.ready(*workers)
    while scene.coordinator.proposed:
        scene.switch(scene.coordinator.proposed, 0)
    assert scene.coordinator.view
    assert scene.coordinator.view.members == workers
    scene.forget()
    return scene


# --- planned changes -----------------------------------------------------------------------------------------


def test_first_view() -> None:
    scene = Scene(wanted=2, minimum=2)
    scene.ready("a")
    assert scene.kinds("a") == ["Welcome"]
    scene.ready("b")
    view = scene.last("a", m.Propose).view
    assert view == scene.last("b", m.Propose).view == View(number=1, members=("a", "b"), joining=("b",), group=1)
    scene.say("a", m.Publish(group=1, key="k", value=b"v"))
    assert scene.last("b", m.Published).value == b"v"
    assert "Published" not in scene.kinds("a")
    assert scene.coordinator.view is None
    scene.switch(view, 0, "a", level=False)
    assert scene.coordinator.view == view
    scene.switch(view, 0, "b")
    assert (scene.coordinator.proposed, scene.coordinator.unlevel) == (None, set())


def test_a_first_view_has_at_most_the_maximum() -> None:
    scene = Scene(wanted=2, minimum=1, maximum=2)
    scene.hello("a", "b", "c")
    for worker in ("a", "b", "c"):
        scene.say(worker, m.Ready(signature=m.Signature(facts=FACTS)))
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
    scene.switch(first, 5, level=False)
    assert "Propose" not in scene.kinds("c")  # b has no state yet
    scene.say("b", m.Level(view=first.number))
    second = scene.last("a", m.Propose).view
    assert second.members == ("a", "b", "c", "d")
    assert second.joining == ("c", "d")
    assert second.group == second.number


def test_a_leaver_goes_when_everyone_has_switched() -> None:
    scene = trained("a", "b", "c")
    scene.say("b", m.Leaving(reason="SIGTERM"))
    view = scene.last("b", m.Propose).view
    assert view == View(number=2, members=("a", "c"), group=1)
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
    scene.say("b", m.Leaving(reason="SIGTERM"))
    assert scene.last("c", m.Propose).view == View(number=2, members=("a", "c"), joining=("c",), group=2)
    assert scene.last("b", m.Propose).view.number == 2


def test_the_last_who_hold_the_state_stay_until_a_joiner_has_it() -> None:
    scene = trained("a", "b")
    scene.say("a", m.Leaving(reason="SIGTERM"))
    first = scene.last("a", m.Propose).view
    assert first.members == ("b",)
    scene.say("b", m.Leaving(reason="SIGTERM"))
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
    scene.say("b", m.Leaving(reason="SIGTERM"))
    assert scene.last("b", m.Goodbye).code == 0


def test_a_different_worker_is_refused_with_the_first_difference() -> None:
    scene = trained("a")
    other = (FACTS[0], ("intra-op threads", "2"), ("weight", "(2, 4) float32"))
    scene.ready("b", facts=other)
    assert scene.last("b", m.Refused).reason == "intra-op threads: the run has 1, this worker has 2"
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
    assert first_difference(m.Signature(facts=FACTS), m.Signature(facts=theirs)) == difference


# --- unplanned changes -----------------------------------------------------------------------------------------


def test_crash_redo() -> None:
    scene = trained("a", "b", "c")
    scene.lose("b")
    assert scene.last("a", m.Stop) == scene.last("c", m.Stop) == m.Stop(stop=1)
    scene.report("a", 7, holds=True)
    assert "Resume" not in scene.kinds("a")
    scene.report("c", 7)
    resume = scene.last("a", m.Resume)
    assert resume == scene.last("c", m.Resume)
    assert (resume.view, resume.round, resume.commit) == (View(number=2, members=("a", "c"), group=1), 7, False)
    assert resume.lineage == (("a", "b", "c"), ("a", "c"))
    assert scene.fields["view"]["outcome"] == "redo"


def test_crash_commit() -> None:
    scene = trained("a", "b", "c")
    scene.lose("b")
    scene.report("a", 7, holds=True)
    scene.report("c", 7, holds=True)
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
    scene.say("a", m.Stopped(stop=1, view=2, round=9, step=9, holds=False, level=True, lineage=(("a",),)))
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
    scene.switch(view, 3, level=False)
    scene.lose("b")
    scene.report("a", 3)
    scene.report("c", 3, level=False)
    assert isinstance(scene.sent["c"][-2], m.Demoted)
    assert scene.last("c", m.Propose).view.members == ("a", "c")


def test_nobody_holds_the_state_any_more() -> None:
    scene = trained("a")
    scene.ready("b")
    scene.switch(scene.last("a", m.Propose).view, 3, level=False)
    scene.lose("a")
    scene.report("b", 3, level=False)
    assert "state lost" in scene.events
    assert scene.last("b", m.Propose).view == View(number=3, members=("b",), group=3)


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
    scene.switch(view, 3, level=False)
    scene.say("b", m.Suspect(view=view.number, peer="a", reason="connection reset"))
    scene.report("a", 3)
    scene.report("b", 3, level=False)
    assert scene.closed == ["b"]
    assert scene.last("a", m.Resume).view.members == ("a",)


def test_a_leaver_that_waits_for_a_word_of_the_view_before() -> None:
    """a and b have switched; c never will, because the pair of b and c broke with b's last word in it."""
    scene = trained("a", "b", "c")
    scene.say("c", m.Leaving(reason="SIGTERM"))
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


def test_missed_heartbeats() -> None:
    scene = trained("a", "b", heartbeat_timeout_s=5.0)
    for scene.now in (2.0, 4.0, 5.5):
        scene.say("a", m.Heartbeat())
        scene.coordinator.tick(scene.now)
    scene.look()
    assert scene.closed == ["b"]
    assert scene.last("a", m.Stop)


def test_a_coordinator_that_was_away_itself_blames_nobody() -> None:
    scene = trained("a", "b", heartbeat_timeout_s=5.0)
    for scene.now in (1.0, 60.0, 61.0):
        scene.coordinator.tick(scene.now)
    assert scene.look().closed == []


def test_a_joiner_that_does_not_connect_in_time() -> None:
    scene = trained("a", "b", prepare_timeout_s=30.0, heartbeat_timeout_s=1000.0)
    scene.ready("c")
    scene.ready("d")
    view = scene.last("a", m.Propose).view
    assert view.members == ("a", "b", "c")
    for worker in ("a", "b"):
        scene.say(worker, m.Prepared(view=view.number))
    scene.coordinator.tick(29.0)
    assert scene.look().closed == []
    scene.coordinator.tick(31.0)
    assert scene.look().closed == ["c"]
    scene.report("a", 3)
    scene.report("b", 3)
    assert scene.last("d", m.Propose).view.members == ("a", "b", "d")


def test_of_several_joiners_those_that_are_not_connected_go() -> None:
    scene = trained("a", prepare_timeout_s=30.0, heartbeat_timeout_s=1000.0)
    scene.ready("b")
    scene.ready("c", "d")
    scene.switch(scene.last("a", m.Propose).view, 0)
    view = scene.last("a", m.Propose).view
    assert view.joining == ("c", "d")
    scene.say("c", m.Prepared(view=view.number))
    scene.coordinator.tick(31.0)
    assert scene.look().closed == ["d"]


def test_a_joiner_goes_although_only_a_member_is_not_connected() -> None:
    scene = trained("a", prepare_timeout_s=30.0, heartbeat_timeout_s=1000.0)
    scene.ready("b")
    scene.say("b", m.Prepared(view=scene.last("a", m.Propose).view.number))
    scene.coordinator.tick(31.0)
    assert scene.look().closed == ["b"]  # a holds the state


def test_of_a_first_view_anyone_may_be_to_blame() -> None:
    scene = Scene(wanted=2, minimum=2, prepare_timeout_s=30.0, heartbeat_timeout_s=1000.0)
    scene.ready("a", "b")
    scene.say("b", m.Prepared(view=1))
    scene.coordinator.tick(31.0)
    assert scene.look().closed == ["a"]


def test_messages_of_workers_that_are_out_are_ignored() -> None:
    scene = trained("a", "b")
    scene.say("a", m.Welcome(run="r", worker="a", folder="", seed=0, threads=1, minimum=1, heartbeat_s=1, stall_s=1))
    assert scene.closed == ["a"]
    scene.say("a", m.Finished(), m.Suspect(view=1, peer="b", reason="?"))
    scene.report("b", 0)
    assert scene.last("b", m.Resume).view.members == ("b",)


def test_two_evictions_at_one_tick_of_which_one_brings_about_the_other() -> None:
    scene = trained("a", "b", "c", heartbeat_timeout_s=5.0)
    scene.say("a", m.Suspect(view=1, peer="b", reason="connection reset"))
    scene.report("b", 2)
    scene.report("a", 2)
    for scene.now in (2.0, 4.0, 6.0):  # c never answers, b has answered: both are frozen
        scene.say("a", m.Heartbeat())
        scene.coordinator.tick(scene.now)
    assert sorted(scene.look().closed) == ["b", "c"]
    assert scene.last("a", m.Resume).view.members == ("a",)


# --- people ------------------------------------------------------------------------------------------------------


def test_scale() -> None:
    scene = trained("a", "b", "c", minimum=1, maximum=4)
    scene.coordinator.scale(2, 0.0)
    scene.look()
    assert scene.last("c", m.Leave).reason == "scaled to 2"
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
    with pytest.raises(UsageError, match="no such worker or host; there are: a on h-a"):
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


# --- the end -------------------------------------------------------------------------------------------------------


def test_finish() -> None:
    scene = trained("a", "b")
    scene.say("a", m.Finished(fingerprint="f"))
    assert scene.coordinator.roster().wanted == 0
    scene.ready("c")
    assert "Propose" not in scene.kinds("c")
    scene.say("b", m.Finished(fingerprint="f"))
    assert scene.fields["finished"] == {"fingerprint": "f", "equal": True}
    assert {w: scene.last(w, m.Goodbye).code for w in "abc"} == {"a": 0, "b": 0, "c": 0}
    assert scene.coordinator.roster().over == 0


def test_unequal_fingerprints_are_recorded() -> None:
    scene = trained("a", "b")
    scene.say("a", m.Finished(fingerprint="f"))
    scene.say("b", m.Finished(fingerprint="g"))
    assert scene.fields["finished"] == {"fingerprint": "f != g", "equal": False}


def test_the_last_that_had_not_finished_dies() -> None:
    scene = trained("a", "b")
    scene.say("a", m.Finished(fingerprint="f"))
    scene.lose("b")
    assert scene.last("a", m.Goodbye).code == 0


def test_one_dies_while_others_have_finished() -> None:
    scene = trained("a", "b", "c")
    scene.say("a", m.Finished(fingerprint="f"))
    scene.lose("c")
    scene.report("a", 9)
    scene.report("b", 8, holds=True)
    assert scene.last("b", m.Resume).round == 9
    scene.say("b", m.Finished(fingerprint="f"))
    assert scene.last("a", m.Goodbye).code == 0


def test_a_failed_script_ends_the_run_after_a_checkpoint() -> None:
    scene = trained("a", "b", "c")
    scene.say("b", m.Failed(traceback="ValueError"))
    scene.report("a", 7)
    scene.report("b", 8)
    scene.report("c", 7)
    assert scene.last("b", m.End).save
    assert "Resume" not in scene.kinds("a")
    scene.say("c", m.Failed(traceback="ValueError"))  # others fail alike
    scene.say("b", m.Saved(error="its state is of no whole step"))
    assert scene.last("a", m.End).save
    scene.lose("a")
    assert scene.last("c", m.End).save
    scene.say("c", m.Saved(path="checkpoint"))
    assert scene.events[-2:] == ["saved", "over"]
    assert scene.last("b", m.Goodbye) == m.Goodbye(reason="the script failed on b", code=1)


def test_a_script_that_failed_between_two_steps_everywhere() -> None:
    scene = trained("a", "b", "c")
    scene.say("a", m.Failed(traceback="ValueError"))
    for worker in ("a", "b", "c"):
        scene.report(worker, 7)
    for worker in ("a", "b"):
        assert not scene.last(worker, m.End).between
        scene.say(worker, m.Saved(error="between two steps", between=True))
    scene.lose("a")
    scene.say("c", m.Saved(error="between two steps", between=True))
    assert scene.last("b", m.End).between  # a is not asked any more
    scene.say("b", m.Saved(path="checkpoint"))
    assert scene.fields["saved"] == {"worker": "b", "path": "checkpoint", "whole": False}


def test_checkpoints_are_events_and_decide_nothing() -> None:
    scene = trained("a", "b")
    view = scene.coordinator.view
    scene.say("a", m.Restored(step=40, path="p", damaged=("torn", "flipped"), differences=("epochs",)))
    assert scene.events[-3:] == ["checkpoint damaged", "checkpoint damaged", "resumed"]
    assert scene.fields["resumed"] == {"worker": "a", "step": 40, "path": "p", "differences": ["epochs"]}
    scene.say("a", m.Checkpointed(step=50, path="q", bytes=9, seconds=1.5, copy_ms=0.5))
    assert scene.fields["checkpoint"]["path"] == "q"
    scene.say("a", m.Checkpointed(step=60, error="no space"))
    assert scene.fields["checkpoint failed"] == {"worker": "a", "step": 60, "reason": "no space"}
    assert scene.coordinator.view is view
    assert scene.coordinator.ending is None


def test_nobody_can_save() -> None:
    scene = trained("a")
    scene.say("a", m.Failed(traceback="ValueError"))
    scene.report("a", 7)
    scene.say("a", m.Saved(error="disk full"))
    assert scene.events[-2:] == ["not saved", "over"]


def test_a_joiners_failed_script_is_its_own_affair() -> None:
    scene = trained("a", "b")
    scene.ready("c")
    assert scene.last("a", m.Propose)
    scene.say("c", m.Failed(traceback="OSError"))
    assert scene.last("c", m.Goodbye).code == 1
    scene.report("a", 3)  # c was in the proposed view, which is given up
    scene.report("b", 3)
    assert scene.last("a", m.Resume).view.members == ("a", "b")
    assert scene.coordinator.ending is None


def test_the_script_fails_before_there_is_a_view() -> None:
    scene = Scene(wanted=2)
    scene.hello("a", "b")
    scene.say("a", m.Failed(traceback="ImportError"))
    assert {w: scene.last(w, m.Goodbye).code for w in "ab"} == {"a": 1, "b": 1}


def test_a_leaver_that_fails_between_two_steps_ends_the_run_like_any_member() -> None:
    scene = trained("a", "b")
    scene.say("b", m.Leaving(reason="SIGTERM"))
    scene.switch(scene.last("a", m.Propose).view, 4, "a")
    scene.say("b", m.Failed(traceback="ValueError"))
    assert scene.coordinator.ending
    assert scene.coordinator.ending.failed


def test_stop_and_savers() -> None:
    scene = trained("a", "b", "c")
    scene.coordinator.stop("SIGINT", 130, 0.0)
    scene.look()
    view = scene.last("a", m.Propose).view
    assert view.members == ()
    scene.switch(view, 5, "a", "b", "c")
    assert scene.kinds("a")[-1] == "End"
    assert scene.coordinator.over is None
    scene.lose("a")
    assert scene.kinds("b")[-1] == "End"
    scene.lose("c")
    scene.say("b", m.Saved(path="checkpoint"))
    assert scene.last("b", m.Goodbye).code == 130
    assert scene.coordinator.roster().over == 130


def test_a_crash_while_the_run_stops() -> None:
    scene = trained("a", "b", "c")
    scene.coordinator.stop("SIGINT", 130, 0.0)
    scene.look()
    empty = scene.last("a", m.Propose).view
    scene.switch(empty, 5, "b")
    scene.lose("c")
    scene.say("a", m.Stopped(stop=1, view=1, round=4, step=4, holds=True, level=True, lineage=(("a", "b", "c"),)))
    scene.say("b", m.Stopped(stop=1, view=empty.number, round=5, step=5, holds=False, level=True, lineage=((),)))
    assert scene.last("b", m.End).save  # b has ended round 4, a has not yet
    scene.say("b", m.Saved(path="checkpoint"))
    assert scene.last("a", m.Goodbye).code == 130


def test_stop_before_there_is_a_view() -> None:
    scene = Scene()
    scene.hello("a")
    scene.coordinator.stop("SIGINT", 130, 0.0)
    assert scene.look().last("a", m.Goodbye).code == 130


def test_stop_and_then_everyone_dies() -> None:
    scene = trained("a")
    scene.coordinator.stop("SIGINT", 130, 0.0)
    scene.lose("a")
    assert scene.coordinator.over
    assert scene.events[-2:] == ["not saved", "over"]


def test_startup_failures_end_a_run_that_has_no_view() -> None:
    scene = Scene(wanted=1, startup_failures=3)
    for worker in ("a", "b", "c"):
        scene.hello(worker)
        scene.lose(worker)
    assert scene.coordinator.over
    assert scene.coordinator.over.code == 1
    assert "3 workers in a row died before they could join" in scene.coordinator.over.reason


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
    scene.lose("a")
    assert scene.coordinator.over is None


def test_joiners_that_die_without_state_are_startup_failures_too() -> None:
    scene = trained("a", startup_failures=2, wanted=2)
    for worker in ("b", "c"):
        scene.ready(worker)
        scene.switch(scene.last("a", m.Propose).view, 3, level=False)
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
    scene.coordinator.stop("SIGINT", 130, 0.0)
    scene.hello("a")
    assert scene.kinds("a") == ["Welcome", "Goodbye"]
    scene.say("a", m.Ready(signature=m.Signature(facts=FACTS)))
    assert scene.kinds("a") == ["Welcome", "Goodbye"]
