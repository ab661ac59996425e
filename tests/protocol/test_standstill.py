"""Heartbeats come and nothing moves: when that is said, of whom, and when a stop no longer waits for the step."""

from __future__ import annotations

import pytest

from farandole.protocol import messages as m
from farandole.protocol.coordinator.failures import BETWEEN_STEPS_FACTOR, hung_workers, stalled_s
from tests.support.mentioned import mentions
from tests.support.metric_lines import stepped
from tests.support.scene import Scene, trained

LIMIT, STOP = 60.0, 30.0  # the defaults


def beats(
    scene: Scene, seconds: float, *, step: int = 5, moving: str = "", waits: str = "", whole: bool = True
) -> None:
    """Heartbeats of everyone for so long, every half second; `moving` names what moves in them."""
    for number in range(round(seconds / 0.5)):
        scene.now += 0.5
        view = scene.coordinator.view
        for worker in list(scene.coordinator.workers):
            fields = {moving: number} if moving else {}
            beat = m.Heartbeat(
                **{"view": view.number if view else 0, "round": step, "step": step, **fields},
                waits_for_peers=worker in waits.split(), at_step_start=whole,
            )  # fmt: skip
            scene.say(worker, beat)
        scene.coordinator.tick(scene.now)
        scene.look()


@pytest.mark.parametrize("moving", ["round", "step", "shards_computed"])
def test_what_moves_does_not_stand(moving: str) -> None:
    scene = trained("a", "b")
    beats(scene, 3 * LIMIT, moving=moving)
    assert scene.events == []
    assert stalled_s(scene.coordinator, scene.now) is None


def test_it_is_said_after_a_minute_and_at_growing_intervals() -> None:
    scene = trained("a", "b", "c")
    beats(scene, LIMIT, waits="a c")
    assert scene.events == []
    beats(scene, 1.0, waits="a c")
    assert scene.events == ["stalled"]
    assert scene.fields["stalled"]["workers"] == ["b"]
    assert scene.fields["stalled"]["step"] == 5
    assert mentions(scene.fields["stalled"]["reason"], "step 5", "60 s")
    assert scene.kinds("b").count("Stacks") == 1
    assert "Stacks" not in scene.kinds("a"), "it waits for b"
    beats(scene, LIMIT - 1, waits="a c")
    assert scene.events == ["stalled"]
    beats(scene, 2.0, waits="a c")
    assert scene.events == ["stalled", "stalled"]
    beats(scene, 2 * LIMIT + 2, waits="a c")
    assert scene.events == ["stalled"] * 3
    assert stalled_s(scene.coordinator, scene.now) == pytest.approx(4 * LIMIT, abs=5.0)


def test_whoever_moves_ends_it() -> None:
    scene = trained("a")
    beats(scene, LIMIT + 1)
    assert stalled_s(scene.coordinator, scene.now)
    beats(scene, 0.5, step=6)
    assert stalled_s(scene.coordinator, scene.now) is None
    beats(scene, LIMIT - 1, step=6)
    assert scene.events == ["stalled"]


def test_long_steps_stand_longer() -> None:
    scene = trained("a")
    lines = tuple(stepped(step, seconds=20.0) for step in range(5))
    scene.say("a", m.Heartbeat(view=1, round=5, step=5, lines=lines))
    beats(scene, 199.0)
    assert scene.events == []
    beats(scene, 2.0)
    assert scene.events == ["stalled"]


def test_nonsense_about_steps_is_not_believed() -> None:
    scene = trained("a")
    scene.say("a", m.Heartbeat(view=1, round=5, step=5, lines=(stepped(0, seconds=1e10), stepped(1, seconds=1e10))))
    beats(scene, LIMIT + 1)
    assert scene.events == ["stalled"]


def test_nothing_is_said_while_nobody_should_move() -> None:
    starting = Scene(wanted=2, minimum=2)
    starting.ready("a")
    beats(starting, 2 * LIMIT)
    assert "stalled" not in starting.events
    stopped = trained("a", "b", orphan_s=600.0)
    stopped.close("b")
    stopped.wait(5.5, "a")
    assert stopped.coordinator.stopping
    beats(stopped, 2 * LIMIT)
    assert "stalled" not in stopped.events


# --- a stop -------------------------------------------------------------------------------------------------------


def stop(scene: Scene) -> None:
    scene.coordinator.request_end("SIGTERM", 143, scene.now)
    scene.look()


def test_a_stop_waits_half_a_minute_and_then_no_longer() -> None:
    scene = trained("a", "b")
    beats(scene, 10.0, waits="b")
    stop(scene)
    beats(scene, STOP, waits="b")
    assert "cut short" not in scene.events, "since it was asked for"
    beats(scene, 1.0, waits="b")
    assert scene.fields["cut short"]["workers"] == ["a"]
    assert scene.kinds("a")[-2:] == ["Stacks", "Stop"], "once it has answered, its stacks are in its log"
    for worker in ("a", "b"):
        scene.report(worker, 5)
    assert scene.last("b", m.End).save, "first who does not hang"
    assert "End" not in scene.kinds("a")
    scene.say("b", m.Saved(path="checkpoint"))
    goodbye = scene.last("a", m.Goodbye)
    assert goodbye == m.Goodbye(reason=goodbye.reason, code=143)
    assert mentions(goodbye.reason, "SIGTERM", "a", "step 5", "logs/a.log")


def test_the_only_one_is_asked_although_it_hangs() -> None:
    scene = trained("a")
    beats(scene, 100.0)
    stop(scene)
    beats(scene, STOP + 1)
    scene.report("a", 5)
    assert scene.last("a", m.End).save


def test_a_step_that_moves_is_waited_for_however_long_it_takes() -> None:
    scene = trained("a")
    stop(scene)
    beats(scene, 10 * STOP, moving="shards_computed")
    assert "cut short" not in scene.events


def test_long_steps_are_waited_for_longer() -> None:
    scene = trained("a")
    lines = tuple(stepped(step, seconds=20.0) for step in range(5))
    scene.say("a", m.Heartbeat(view=1, round=5, step=5, lines=lines))
    stop(scene)
    beats(scene, 59.0)
    assert "cut short" not in scene.events
    beats(scene, 2.0)
    assert "cut short" in scene.events


def test_between_two_steps_it_may_be_a_validation() -> None:
    scene = trained("a", "b")
    stop(scene)
    beats(scene, BETWEEN_STEPS_FACTOR * STOP - 1, whole=False)
    assert "cut short" not in scene.events
    beats(scene, 2.0, whole=False)
    assert "cut short" in scene.events


def test_a_coordinator_that_comes_back_gives_the_stop_its_time_again() -> None:
    scene = trained("a")
    stop(scene)
    beats(scene, STOP - 1)
    scene = scene.restarted()
    scene.back("a")
    scene.report("a", 5)
    beats(scene, STOP - 1)
    assert "cut short" not in scene.events
    beats(scene, 2.0)
    assert "cut short" in scene.events
    scene.report("a", 5)
    assert scene.last("a", m.End).save


def test_a_first_view_that_never_comes_about_does_not_hold_up_a_stop() -> None:
    """Who is to begin it can't get at the checkpoints, say."""
    scene = Scene(wanted=2, minimum=2)
    scene.ready("a", "b")
    for worker in ("a", "b"):
        scene.say(worker, m.Prepared(view=1))
    stop(scene)
    beats(scene, STOP)
    assert scene.coordinator.stopping is None
    beats(scene, 1.0)
    for worker in ("a", "b"):
        scene.report(worker, 0, synced=False)
    assert scene.coordinator.over
    assert scene.coordinator.over.code == 143


def test_who_has_finished_does_not_hang() -> None:
    scene = trained("a", "b")
    scene.say("a", m.Finished(fingerprint="f"))
    assert hung_workers(scene.coordinator) == ("b",)


@pytest.mark.failure(
    "Standing still",
    "the script hangs in one worker, and the others wait for it",
    seen=(
        "its peers report it after 30 s (`--stall`; ten median steps, if longer); the stacks of its threads are in "
        "its log"
    ),
    outcome="it is evicted and replaced; nothing is lost",
)
def test_a_stalled_peer_writes_its_stacks_before_it_has_to_go() -> None:
    scene = trained("a", "b")
    scene.say("b", m.Heartbeat(view=1, shards=1))
    scene.say("a", m.Suspect(view=1, peer="b", reason="stalled", waited_s=31))
    assert scene.kinds("b") == ["Stacks", "Stop"]
    scene = trained("a", "b")
    scene.say("a", m.Suspect(view=1, peer="b", reason="connection reset"))
    assert scene.kinds("b") == ["Stop"]


@pytest.mark.failure(
    "Checkpoints",
    "the last checkpoint never completes (a network mount that does not answer)",
    seen=(
        "`STALLED: w1 has been writing the last checkpoint for 60 s`, repeated after twice as long; stacks are in its "
        "log"
    ),
    outcome="the run waits until it is written, or a second signal ends everything",
)
def test_a_last_checkpoint_that_takes_for_ever_is_told() -> None:
    scene = trained("a", "b")
    scene.say("a", m.Finished(fingerprint="f"))
    scene.say("b", m.Finished(fingerprint="f"))
    assert scene.last("a", m.End).save
    beats(scene, LIMIT)
    assert "stalled" not in scene.events
    beats(scene, 1.5)
    assert scene.fields["stalled"]["workers"] == ["a"]
    assert mentions(scene.fields["stalled"]["reason"], "a", "60 s")
    assert scene.kinds("a").count("Stacks") == 1
    scene.say("a", m.Saved(error="it gave up"))
    assert scene.last("b", m.End).save
