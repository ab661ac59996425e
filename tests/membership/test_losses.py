"""Losses that repeat themselves, message by message: what counts, what begins the count anew, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from farandole.membership import messages as m
from farandole.membership.losses import FATAL, TOGETHER_S, TRIAL
from farandole.membership.view import View
from tests.support.scene import Scene, trained

SEGV, KILL = "killed by signal 11", "killed by signal 9"
APART = TOGETHER_S + 1


def beat(scene: Scene, step: int) -> None:
    """Everyone in the view is in `step`."""
    view = scene.coordinator.view
    for worker in view.members if view else ():
        scene.say(worker, m.Heartbeat(view=view.number if view else 0, step=step))


def die(scene: Scene, worker: str, reason: str) -> None:
    """Its process ends, and its pool sees it first."""
    scene.coordinator.from_pool("pool", f"h-{worker}", m.Exited(worker=worker, reason=reason), scene.now)
    scene.close(worker)


def pass_by(scene: Scene, seconds: float) -> None:
    scene.wait(seconds, *scene.coordinator.workers)


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
    assert scene.coordinator.losses.count == case.count
    assert (scene.coordinator.over is not None) == (case.count == FATAL)
    assert scene.coordinator.roster().losses == case.count


def test_it_ends_with_code_1_and_says_how_often_where_and_of_what() -> None:
    scene = Scene(wanted=2, minimum=2)
    lives(scene, [5] * FATAL, SEGV)
    assert scene.coordinator.over
    assert scene.coordinator.over.code == 1
    assert scene.coordinator.over.reason.startswith("died 5 times at step 5 (signal 11), and never got further")
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
            scene.coordinator.from_pool("pool", f"h-{worker}", m.Exited(worker=worker, reason=reason), scene.now)
            scene.look()
        if scene.coordinator.ending:
            break
        pass_by(scene, apart)
    return scene


def stopped(scene: Scene, step: int) -> m.Stopped:
    view: View | None = scene.coordinator.view
    assert view is not None
    return m.Stopped(
        stop=scene.coordinator.stops, view=view, round=step, step=step, holds=False, synced=True,
        lineage=scene.dealt(view, step),
    )  # fmt: skip


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
    assert scene.coordinator.losses.count == count
    assert (scene.coordinator.ending is not None) == (count == FATAL)


def test_what_it_died_of_is_told_although_the_others_have_gone_on() -> None:
    scene = one_after_the_other(SEGV, [5], peers_first=True)
    assert scene.fields["died"] == {"worker": "f", "reason": SEGV}
    assert "died" not in one_after_the_other(KILL, [5], peers_first=True).events, "that was its pool"
    assert one_after_the_other(SEGV, [5], peers_first=True).restarted().coordinator.losses.count == 1


def test_who_is_left_then_saves() -> None:
    scene = one_after_the_other(SEGV, [5] * FATAL)
    assert scene.last("a", m.End).save
    scene.say("a", m.Saved(path="checkpoint"))
    assert scene.events[-2:] == ["saved", "over"]
    assert scene.last("a", m.Goodbye).code == 1
    assert "died 5 times at step 5 (signal 11)" in scene.last("a", m.Goodbye).reason


@pytest.mark.parametrize("peers_first", [False, True])
def test_it_counts_on_with_a_step_and_begins_anew_beyond_it(peers_first: bool) -> None:
    scene = one_after_the_other(SEGV, [5, 5, 5], peers_first=peers_first)
    beat(scene, 5)
    assert scene.coordinator.roster().losses == 3
    beat(scene, 6)
    assert scene.coordinator.roster().losses == 0


def who_leaves(scene: Scene) -> None:
    scene.say("b", m.Leaving(reason="SIGTERM"))
    die(scene, "b", SEGV)


def who_is_silent(scene: Scene) -> None:
    scene.wait(5.5, "a")
    scene.report("a", 5)
    assert "b" in scene.coordinator.departed
    scene.coordinator.from_pool("pool", "h-b", m.Exited(worker="b", reason=KILL), scene.now)


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


# --- joiners ---------------------------------------------------------------------------------------------------------


def joins(scene: Scene, worker: str, at: int) -> None:
    scene.ready(worker)
    scene.switch(scene.last("a", m.Propose).view, at)


def joiner_dies(scene: Scene, worker: str, at: int, after: int, reason: str = KILL, apart: float = APART) -> None:
    joins(scene, worker, at)
    beat(scene, at + after)
    die(scene, worker, reason)
    scene.say("a", stopped(scene, at + after)) if scene.coordinator.stopping else None
    for other in scene.coordinator.stopping.waiting.copy() if scene.coordinator.stopping else ():
        scene.say(other, stopped(scene, at + after))
    pass_by(scene, apart)


@pytest.mark.parametrize(
    ("after", "joiners", "remark"),
    [
        ((1, 1, 1, 1), 4, "four: one more is started"),
        ((1, 1, 1, 1, 1), 5, "no more"),
        ((0, TRIAL, 1, 3, 2), 5, "within ten steps"),
        ((1, 1, 1, 1, TRIAL + 1), 0, "the last one had lived"),
        ((1, 1, TRIAL + 1, 1, 1), 2, "one in between had"),
    ],
)
def test_joiners_that_die_as_they_come(after: tuple[int, ...], joiners: int, remark: str) -> None:
    scene = trained("a", wanted=2)
    for number, steps in enumerate(after):
        joiner_dies(scene, f"j{number}", 100 * (number + 1), steps)
    assert scene.coordinator.losses.joiners == joiners, remark
    assert scene.coordinator.roster().losses == joiners, "the pool takes its time"
    assert scene.coordinator.roster().wanted == (1 if joiners == FATAL else 2)
    assert scene.coordinator.ending is None, "the run goes on"
    assert ("no replacements" in scene.events) == (joiners == FATAL)


@pytest.mark.parametrize("apart", [0.5, TOGETHER_S - 0.5, TOGETHER_S, APART])
def test_joiners_that_come_one_after_the_other_count_however_soon_they_die(apart: float) -> None:
    scene = trained("a", wanted=2)
    for number in range(FATAL):
        assert scene.coordinator.losses.joiners == number
        joiner_dies(scene, f"j{number}", 100 * (number + 1), 1, SEGV, apart)
    assert scene.coordinator.roster().wanted == 1
    assert scene.fields["no replacements"]["reason"].startswith("5 joiners in a row died")


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
    assert scene.coordinator.losses.joiners == joiners


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
    assert scene.coordinator.losses.joiners == 1


def test_it_is_said_and_scale_begins_anew() -> None:
    scene = trained("a", wanted=2)
    for number in range(FATAL):
        joiner_dies(scene, f"j{number}", 100 * (number + 1), 1, SEGV)
    assert scene.fields["no replacements"] == {
        "wanted": 1,
        "reason": "5 joiners in a row died within 10 steps of entering (signal 11)",
    }
    scene.coordinator.scale(2, scene.now)
    assert scene.coordinator.roster().wanted == 2
    assert scene.coordinator.losses.joiners == 0


def test_one_that_came_with_them_and_lives_breaks_the_row() -> None:
    scene = trained("a", wanted=3)
    joiner_dies(scene, "j0", 100, 1)
    joins(scene, "b", 200)
    for number in range(1, FATAL):
        joiner_dies(scene, f"j{number}", 100 * (number + 2), 1)
    assert scene.coordinator.losses.joiners == FATAL - 1, "j0 is not in it"


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
    assert scene.coordinator.ending.reason.endswith("and 1 of at least 2 workers are left")


def test_a_coordinator_that_comes_back_knows_of_joiners() -> None:
    scene = trained("a", wanted=2)
    for number in range(FATAL - 1):
        joiner_dies(scene, f"j{number}", 100 * (number + 1), 1)
    joins(scene, "last", 900)
    scene = scene.restarted()
    scene.back("a", "last")
    scene.coordinator.from_pool("pool", "h-last", m.Exited(worker="last", reason=SEGV), scene.now)
    scene.close("last")
    assert scene.coordinator.losses.joiners == FATAL
    assert scene.coordinator.roster().wanted == 1
