"""Losses that repeat themselves, message by message: what counts, what begins the count anew, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from farandole.protocol import messages as m
from farandole.protocol.coordinator.failures import FATAL
from tests.support.deaths import APART, KILL, SEGV, beat, die, pass_by, stopped
from tests.support.mentioned import mentions
from tests.support.scene import Scene, trained


def life(scene: Scene, number: int, *, at: int, reason: str) -> None:
    """Two new workers begin again, come to a step, and die."""
    names = (f"a{number}", f"b{number}")
    scene.ready(*names)
    while scene.coordinator.proposed:
        scene.switch(scene.coordinator.proposed, 0)
    beat(scene, at)
    for name in names:
        die(scene, name, reason)


def lives(scene: Scene, ats: Sequence[int], reason: str, apart: float = APART) -> None:
    for number, at in enumerate(ats):
        if not scene.coordinator.over:
            life(scene, number, at=at, reason=reason)
            scene.now += apart
            scene.coordinator.tick(scene.now)
            scene.coordinator.tick(scene.now)


@dataclass(frozen=True)
class Case:
    """Everyone dies, in these steps, `apart` seconds one after the other."""

    ats: tuple[int, ...]
    count: int
    remark: str
    reason: str = SEGV
    apart: float = APART


CASES = (
    Case((5,), 1, "one that takes both counts once"),
    Case((5, 5, 5, 5), 4, "still going"),
    Case((5, 5, 5, 5, 5), 5, "over"),
    Case((5, 5, 5, 5, 5), 5, "all killed by somebody, who does it again and again in the same place", KILL),
    Case((5, 4, 5, 3, 4), 5, "none got further than the first"),
    Case((5, 5, 5, 5, 6), 1, "the last got further"),
    Case((3, 5, 9, 12, 20), 1, "each got further"),
    Case((5, 5, 7, 7, 7, 7), 4, "from the furthest on"),
    Case((5, 5, 5, 5, 5), 5, "within moments, but each time it takes others", KILL, 0.1),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.remark)
def test_everyone_dies(case: Case) -> None:
    scene = Scene(wanted=2, minimum=2)
    lives(scene, case.ats, case.reason, case.apart)
    assert scene.coordinator.crash_loop.count == case.count
    assert (scene.coordinator.over is not None) == (case.count == FATAL)
    assert scene.coordinator.roster().losses == case.count


def test_it_ends_with_code_1_and_says_how_often_where_and_of_what() -> None:
    scene = Scene(wanted=2, minimum=2)
    lives(scene, [6] * FATAL, SEGV)
    assert scene.coordinator.over
    assert scene.coordinator.over.code == 1
    assert mentions(scene.coordinator.over.reason, FATAL, "step 6", "signal 11")
    assert scene.events[-2:] == ["not saved", "over"]


def test_a_coordinator_that_comes_back_goes_on_counting() -> None:
    scene = Scene(wanted=2, minimum=2)
    for number in range(FATAL):
        assert scene.coordinator.over is None
        lives(scene, [5], SEGV) if number == 0 else life(scene, number, at=5, reason=SEGV)
        scene = scene.restarted()
    assert scene.coordinator.over
    assert scene.coordinator.over.code == 1


# --- one member after the other, while others live -------------------------------------------------------------------


def one_after_the_other(reason: str, steps: Sequence[int], apart: float = APART, *, peers_first: bool = False) -> Scene:
    """Six workers, of which one dies in each of `steps`; the others redo what it was in."""
    scene = trained(*"abcdef")
    for worker, step in zip("fedcb", steps, strict=False):
        beat(scene, step)
        if peers_first:
            scene.say("a", m.Suspect(view=scene.coordinator.number, peer=worker, reason="connection reset"))
            scene.close(worker)
        else:
            die(scene, worker, reason)
        if scene.coordinator.stopping and not scene.coordinator.over:
            for other in [w for w in "abcdef" if w < worker]:
                scene.say(other, stopped(scene, step))
        if peers_first:
            assert worker in scene.coordinator.departed
            scene.coordinator.on_pool_message(
                "pool", f"h-{worker}", m.WorkerProcessExited(worker=worker, reason=reason), scene.now
            )
            scene.look()
        if scene.coordinator.ending:
            break
        pass_by(scene, apart)
    return scene


@pytest.mark.parametrize(
    ("reason", "steps", "apart", "peers_first", "count"),
    [
        (SEGV, (5, 5, 5, 5, 5), APART, False, 5),
        (SEGV, (5, 5, 5, 5, 5), APART, True, 5),
        ("exited with code 134", (5, 5, 5, 5, 5), APART, False, 5),
        (SEGV, (5, 5, 5, 5, 6), APART, False, 1),
        (SEGV, (5, 5, 5, 5, 5), 0.0, False, 1),
        (KILL, (5, 5, 5, 5, 5), APART, False, 0),
        (KILL, (5, 5, 5, 5, 5), APART, True, 0),
    ],
)
def test_members_die_one_after_the_other(
    reason: str, steps: tuple[int, ...], apart: float, peers_first: bool, count: int
) -> None:
    """Only by their own doing: a kill -9 may be anybody's."""
    scene = one_after_the_other(reason, steps, apart, peers_first=peers_first)
    assert scene.coordinator.crash_loop.count == count
    assert (scene.coordinator.ending is not None) == (count == FATAL)


def test_what_it_died_of_is_told_although_the_others_have_gone_on() -> None:
    scene = one_after_the_other(SEGV, [5], peers_first=True)
    assert scene.fields["died"] == {"worker": "f", "reason": SEGV}
    assert "died" not in one_after_the_other(KILL, [5], peers_first=True).events, "that was its pool"
    assert one_after_the_other(SEGV, [5], peers_first=True).restarted().coordinator.crash_loop.count == 1


@pytest.mark.failure(
    "Processes, signals and crash loops",
    "workers die by themselves at the same step, one after the other, while others live",
    seen="an event for each death; a death by `kill -9` is not counted",
    outcome=(
        'after five deaths the others save the state of the last complete step; exit code 1 with "died 5 times at '
        'step 5"'
    ),
)
def test_who_is_left_then_saves() -> None:
    scene = one_after_the_other(SEGV, [6] * FATAL)
    assert scene.last("a", m.End).save
    scene.say("a", m.Saved(path="checkpoint"))
    assert scene.events[-2:] == ["saved", "over"]
    assert scene.last("a", m.Goodbye).code == 1
    assert mentions(scene.last("a", m.Goodbye).reason, FATAL, "step 6", "signal 11")


@pytest.mark.parametrize("peers_first", [False, True])
def test_it_counts_on_with_a_step_and_begins_anew_beyond_it(peers_first: bool) -> None:
    scene = one_after_the_other(SEGV, [5, 5, 5], peers_first=peers_first)
    beat(scene, 5)
    assert scene.coordinator.roster().losses == 3
    beat(scene, 6)
    assert scene.coordinator.roster().losses == 0


def who_leaves(scene: Scene) -> None:
    scene.say("b", m.LeaveRequest(reason="SIGTERM"))
    die(scene, "b", SEGV)


def who_is_silent(scene: Scene) -> None:
    scene.wait(5.5, "a")
    scene.report("a", 5)
    assert "b" in scene.coordinator.departed
    scene.coordinator.on_pool_message("pool", "h-b", m.WorkerProcessExited(worker="b", reason=KILL), scene.now)


def who_had_finished(scene: Scene) -> None:
    scene.say("b", m.Finished(fingerprint="f"))
    die(scene, "b", SEGV)


@pytest.mark.parametrize("loss", [who_leaves, who_is_silent, who_had_finished])
def test_what_was_asked_for_does_not_count(loss: Callable[[Scene], None]) -> None:
    scene = trained("a", "b", minimum=1)
    scene.coordinator.workers["b"].entered = 5
    beat(scene, 5)
    loss(scene)
    assert scene.coordinator.roster().losses == 0
