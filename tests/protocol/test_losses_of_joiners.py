"""Joiners that die as they come, one after the other: what counts, and when no more are started."""

from __future__ import annotations

import pytest

from farandole.protocol import messages as m
from farandole.protocol.coordinator.failures import FATAL, JOINER_TRIAL_STEPS, TOGETHER_S
from tests.support.deaths import APART, KILL, SEGV, beat, die, pass_by, stopped
from tests.support.mentioned import mentions
from tests.support.scene import Scene, trained


def joins(scene: Scene, worker: str, at: int) -> None:
    scene.ready(worker)
    scene.switch(scene.last("a", m.Propose).view, at)


def joiner_dies(scene: Scene, worker: str, at: int, after: int, reason: str = KILL, apart: float = APART) -> None:
    joins(scene, worker, at)
    beat(scene, at + after)
    die(scene, worker, reason)
    scene.say("a", stopped(scene, at + after)) if scene.coordinator.stopping else None
    for other in scene.coordinator.stopping.unanswered.copy() if scene.coordinator.stopping else ():
        scene.say(other, stopped(scene, at + after))
    pass_by(scene, apart)


@pytest.mark.parametrize(
    ("after", "joiners", "remark"),
    [
        ((1, 1, 1, 1), 4, "four: one more is started"),
        ((1, 1, 1, 1, 1), 5, "no more"),
        ((0, JOINER_TRIAL_STEPS, 1, 3, 2), 5, "within ten steps"),
        ((1, 1, 1, 1, JOINER_TRIAL_STEPS + 1), 0, "the last one had lived"),
        ((1, 1, JOINER_TRIAL_STEPS + 1, 1, 1), 2, "one in between had"),
    ],
)
def test_joiners_that_die_as_they_come(after: tuple[int, ...], joiners: int, remark: str) -> None:
    scene = trained("a", wanted=2)
    for number, steps in enumerate(after):
        joiner_dies(scene, f"j{number}", 100 * (number + 1), steps)
    assert scene.coordinator.crash_loop.joiners == joiners, remark
    assert scene.coordinator.roster().losses == joiners, "the pool takes its time"
    assert scene.coordinator.roster().wanted == (1 if joiners == FATAL else 2)
    assert scene.coordinator.ending is None, "the run goes on"
    assert ("no replacements" in scene.events) == (joiners == FATAL)


@pytest.mark.parametrize("apart", [0.5, TOGETHER_S - 0.5, TOGETHER_S, APART])
def test_joiners_that_come_one_after_the_other_count_however_soon_they_die(apart: float) -> None:
    scene = trained("a", wanted=2)
    for number in range(FATAL):
        assert scene.coordinator.crash_loop.joiners == number
        joiner_dies(scene, f"j{number}", 100 * (number + 1), 1, SEGV, apart)
    assert scene.coordinator.roster().wanted == 1
    assert mentions(scene.fields["no replacements"]["reason"], FATAL)


@pytest.mark.parametrize(("apart", "joiners"), [(0.0, 1), (0.4, 1), (TOGETHER_S, FATAL)])
def test_joiners_that_one_cause_takes_count_once(apart: float, joiners: int) -> None:
    """As when all are without a coordinator for too long."""
    scene = trained("a", minimum=1, wanted=2)
    for number in range(FATAL):
        scene.ready(f"j{number}")
        view = scene.coordinator.proposed
        assert view is not None
        scene.switch(view, number)
    for number in range(FATAL):
        scene.lose(f"j{number}")
        scene.now += apart
        scene.coordinator.tick(scene.now)
    assert scene.coordinator.crash_loop.joiners == joiners


def test_where_the_run_begins_again_its_joiners_count_from_there() -> None:
    scene = Scene(wanted=2, minimum=1)
    scene.ready("a")
    scene.switch(scene.last("a", m.Propose).view, 0)
    beat(scene, 100)
    die(scene, "a", KILL)
    pass_by(scene, APART)
    scene.ready("b")
    scene.switch(scene.last("b", m.Propose).view, 0)
    scene.ready("j")
    scene.switch(scene.last("b", m.Propose).view, 1)
    beat(scene, 2)
    die(scene, "j", KILL)
    assert scene.coordinator.crash_loop.joiners == 1


def test_it_is_said_and_scale_begins_anew() -> None:
    scene = trained("a", wanted=2)
    for number in range(FATAL):
        joiner_dies(scene, f"j{number}", 100 * (number + 1), 1, SEGV)
    assert scene.fields["no replacements"]["wanted"] == 1
    assert mentions(scene.fields["no replacements"]["reason"], FATAL, "10 steps", "signal 11")
    scene.coordinator.scale(2, scene.now)
    assert scene.coordinator.roster().wanted == 2
    assert scene.coordinator.crash_loop.joiners == 0


def test_one_that_came_with_them_and_lives_breaks_the_row() -> None:
    scene = trained("a", wanted=3)
    joiner_dies(scene, "j0", 100, 1)
    joins(scene, "b", 200)
    for number in range(1, FATAL):
        joiner_dies(scene, f"j{number}", 100 * (number + 2), 1)
    assert scene.coordinator.crash_loop.joiners == FATAL - 1, "j0 is not in it"


@pytest.mark.failure(
    "Processes, signals and crash loops",
    "every joiner dies within ten steps (a broken GPU, too little memory for one more worker)",
)
def test_too_few_without_them_end_the_run() -> None:
    scene = trained("a", "b", wanted=2)
    die(scene, "b", KILL)
    scene.report("a", 5)
    pass_by(scene, APART)
    for number in range(FATAL):
        assert scene.coordinator.ending is None
        joiner_dies(scene, f"j{number}", 100 * (number + 1), 1)
    assert scene.last("a", m.End).save
    assert scene.coordinator.ending is not None
    assert mentions(scene.coordinator.ending.reason, FATAL, 1, 2)


def test_a_coordinator_that_comes_back_knows_of_joiners() -> None:
    scene = trained("a", wanted=2)
    for number in range(FATAL - 1):
        joiner_dies(scene, f"j{number}", 100 * (number + 1), 1)
    joins(scene, "last", 900)
    scene = scene.restarted()
    scene.back("a", "last")
    scene.coordinator.on_pool_message("pool", "h-last", m.WorkerProcessExited(worker="last", reason=SEGV), scene.now)
    scene.close("last")
    assert scene.coordinator.crash_loop.joiners == FATAL
    assert scene.coordinator.roster().wanted == 1
