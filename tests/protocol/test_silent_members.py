"""Members that fall silent, message by message: who is given up when, and what else must be so before."""

from __future__ import annotations

from farandole.protocol import messages as m
from farandole.protocol.values import Call
from tests.support.mentioned import mentions
from tests.support.scene import Scene, trained


class Training:
    """Those of a `Scene` train, a round each half second, or stand in the last one."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.round = scene, 1
        self.go(3.0, *scene.coordinator.workers)

    def go(self, seconds: float, *alive: str, moves: bool = True, doing: str = "") -> None:
        for _ in range(round(seconds / 0.5)):
            self.round += moves
            self.scene.now += 0.5
            for worker in alive:
                call = Call.of(doing or f"step {self.round}")
                at = {"view": 1, "round": self.round, "step": self.round, "shards": 1, "shards_total": 2, "call": call}
                self.scene.say(worker, m.Heartbeat(**at))
            self.scene.coordinator.tick(self.scene.now)
            self.scene.look()

    def stopped(self) -> bool:
        return self.scene.coordinator.stopping is not None


def test_a_frozen_member_costs_the_floor() -> None:
    training = Training(trained("a", "b"))
    training.go(1.5, "a", moves=False)
    assert not training.stopped()
    training.go(0.5, "a", moves=False)
    assert training.stopped()
    training.scene.report("a", training.round)
    assert training.scene.closed == ["b"]
    assert mentions(training.scene.fields["lost"]["reason"], "1.5 s")
    assert training.scene.members("a") == ("a",)


def test_the_ceiling_is_what_the_run_was_started_with() -> None:
    training = Training(trained("a", "b", heartbeat_timeout_s=2.0))
    training.scene.close("b")
    training.go(2.0, "a", moves=False)
    assert not training.stopped(), "it may come back"
    training.go(0.5, "a", moves=False)
    assert training.stopped()


def test_whose_connection_is_dumb_is_not_given_up_while_rounds_go_on() -> None:
    """They need its word: it lives, and costs nobody anything."""
    training = Training(trained("a", "b"))
    training.go(5.0, "a")
    assert not training.stopped()
    training.go(0.5, "a")
    assert training.stopped()


def test_in_an_evaluation_a_script_may_do_anything_for_the_first_time() -> None:
    training = Training(trained("a", "b"))
    training.go(0.5, "a", "b", doing="an evaluation")
    training.go(5.0, "a", moves=False, doing="an evaluation")
    assert not training.stopped()
    training.go(0.5, "a", moves=False, doing="an evaluation")
    assert training.stopped()


def test_whose_script_has_ended_may_do_anything_too() -> None:
    training = Training(trained("a", "b"))
    training.scene.say("b", m.Finished(fingerprint="f", view=1, round=training.round + 1, step=training.round))
    training.go(4.5, "a", moves=False)
    assert not training.stopped()


def test_who_does_not_answer_a_stop_is_given_up_as_soon() -> None:
    training = Training(trained("a", "b", "c"))
    training.scene.lose("c")
    training.scene.report("a", training.round)
    assert training.scene.events == ["lost"]
    training.go(2.0, "a", moves=False)
    assert training.scene.closed == ["b"]


def test_who_has_not_been_heard_on_its_new_connection_is_given_time() -> None:
    training = Training(trained("a", "b"))
    training.scene.close("b")
    training.scene.back("b")
    training.scene.report("a", training.round)
    training.go(5.0, "a", moves=False)
    assert training.scene.closed == []
    training.go(0.5, "a", moves=False)
    assert training.scene.closed == ["b"]


def test_the_stop_of_a_false_suspicion_costs_nobody_if_it_answers_in_time() -> None:
    training = Training(trained("a", "b", "c"))
    training.go(2.0, "a", "c", moves=False)
    training.scene.report("a", training.round)
    training.scene.report("b", training.round)
    training.scene.report("c", training.round)
    assert training.scene.members("a", "b", "c") == ("a", "b", "c")
    assert "lost" not in training.scene.events


def test_what_it_does_before_its_first_step_teaches_nothing() -> None:
    scene = trained("a", "b")
    scene.wait(4.0, "a")  # b imports and compiles
    training = Training(scene)
    training.go(2.0, "a", moves=False)
    assert training.stopped()


def test_who_writes_the_last_checkpoint_has_the_ceiling() -> None:
    training = Training(trained("a", "b", "c"))
    training.scene.say("c", m.ScriptFailed(traceback="OSError: no disk"))
    for worker in ("a", "b", "c"):
        training.scene.report(worker, training.round)
    assert training.scene.coordinator.savers[0] == "a"
    training.go(4.5, "b", "c", moves=False)
    assert training.scene.coordinator.savers[0] == "a"
    training.go(1.0, "b", "c", moves=False)
    assert training.scene.coordinator.savers[0] == "b"


def test_those_of_a_run_that_was_taken_over_have_as_long_again() -> None:
    """They notice only after the timeout that they are to look elsewhere."""
    before = trained("a", "b", taken_over=True)
    scene = before.restarted()
    scene.back("a")
    scene.report("a", 1, view=before.coordinator.view)
    scene.wait(9.5, "a")
    assert scene.closed == []
    scene.wait(1.0, "a")
    assert scene.closed == ["b"]
