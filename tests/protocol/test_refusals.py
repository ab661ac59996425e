"""Joiners that are refused, one after the other: what counts, and when no more are started."""

from __future__ import annotations

import pytest

from farandole.protocol import messages as m
from farandole.protocol.coordinator.failures import ANY, FATAL, JOINER_TRIAL_STEPS, LIKELY
from farandole.protocol.messages import MICRO_BATCH, UPDATES, Computed
from tests.support.deaths import KILL, beat, die, pass_by
from tests.support.scene import FACTS, Scene, trained

OTHER = (*FACTS[:-1], ("weight", "(2, 4) float32"))  # another model
ELSEWHERE = (("torch version", "2.13"), ("intra-op threads", "2"), FACTS[-1])  # other numerics


def computed(holder: str, value: int, what: str = "the loss") -> Computed:
    return Computed(owner=holder, shards=(0,), names=(f"shard 0: {what}",), digests=(value,))


def answer(scene: Scene, worker: str, step: int, held: Computed, checked: Computed, *, new: bool) -> None:
    view = scene.coordinator.view
    assert view is not None
    scene.say(
        worker,
        m.Stopped(
            stop=scene.coordinator.stops, view=view, round=step, step=step, has_result=False, synced=True,
            lineage=scene.dealt(view, step), own_results=held, check_results=checked, unchecked=new,
        ),
    )  # fmt: skip


def fails_its_proof(
    scene: Scene, worker: str, step: int, *, pool: str = "pool", after: int = 0, what: str = "the loss"
) -> None:
    """`worker` joins "a", and finds something else in a shard, so many steps later."""
    scene.ready(worker, pool=pool)
    scene.switch(scene.last("a", m.Propose).view, step)
    beat(scene, step + after)
    for each in ("a", worker):
        scene.say(each, m.ShardsDiffer(step=step + after))
    answer(scene, "a", step + after, computed("a", 1, what), Computed(), new=False)
    answer(scene, worker, step + after, Computed(), computed("a", 2, what), new=True)
    ends(scene, worker, pool)


def ends(scene: Scene, worker: str, pool: str = "pool") -> None:
    if pool:
        scene.coordinator.on_pool_message(
            pool, f"h-{worker}", m.WorkerProcessExited(worker=worker, reason="exited with code 1"), scene.now
        )
    scene.close(worker)


def asks_in_and_differs(scene: Scene, worker: str, facts: tuple[tuple[str, str], ...] = OTHER) -> None:
    scene.ready(worker, facts=facts)
    ends(scene, worker)


def wanted(scene: Scene) -> int:
    return scene.coordinator.roster().wanted


@pytest.mark.failure(
    "Processes, signals and crash loops",
    (
        "every joiner is refused: the dataset has its own generator, a scheduler is not replicated, data was drawn "
        "before `join()`"
    ),
    seen="an event for each, with the first difference; after the fifth in a row, the likely cause",
    outcome=(
        "no more are started; `farandole scale` tries again; with fewer than `--min`, exit code 1; external workers "
        "do not count"
    ),
)
def test_five_refused_joiners_in_a_row_are_the_last() -> None:
    scene = trained("a", wanted=2)
    for number in range(FATAL):
        assert (scene.coordinator.crash_loop.joiners, wanted(scene)) == (number, 2)
        fails_its_proof(scene, f"j{number}", 10 * number)
    assert wanted(scene) == 1
    assert scene.coordinator.roster().losses == FATAL, "the pool took its time between them"
    assert scene.coordinator.ending is None, "the run goes on"
    assert scene.events.count("no replacements") == 1
    assert ANY in scene.fields["no replacements"]["reason"]
    assert (scene.coordinator.crash_loop.joiners, scene.coordinator.crash_loop.refusals) == (FATAL, FATAL)


def test_a_row_counts_its_refusals_apart_from_its_deaths() -> None:
    scene = trained("a", wanted=2)
    fails_its_proof(scene, "j0", 0)
    scene.ready("j1", pool="pool")
    scene.switch(scene.last("a", m.Propose).view, 10)
    beat(scene, 10)
    die(scene, "j1", "signal 11")
    assert (scene.coordinator.crash_loop.joiners, scene.coordinator.crash_loop.refusals) == (2, 1)


@pytest.mark.parametrize("what", [MICRO_BATCH, UPDATES])
def test_the_likely_cause_follows_from_what_differs(what: str) -> None:
    scene = trained("a", wanted=2)
    for number in range(FATAL):
        fails_its_proof(scene, f"j{number}", 10 * number, what=what)
    assert LIKELY[what] in scene.fields["no replacements"]["reason"]


def test_who_was_in_for_long_counts_as_well() -> None:
    """A digest looks at a part of the replica in each step."""
    scene = trained("a", wanted=2)
    for number in range(FATAL):
        fails_its_proof(scene, f"j{number}", 1000 * number, after=300)
    assert wanted(scene) == 1


def test_several_at_once_count_one_by_one() -> None:
    scene = trained("a", wanted=FATAL + 1)
    for number in range(FATAL):
        asks_in_and_differs(scene, f"j{number}")
    assert wanted(scene) == 1


def test_a_difference_that_shows_when_they_ask_in_counts_once_a_worker() -> None:
    scene = trained("a", wanted=2, startup_failures=100)
    for number in range(FATAL):
        asks_in_and_differs(scene, f"j{number}")
        assert scene.coordinator.startup_failures == {}, "it is in one row only"
    assert wanted(scene) == 1
    assert scene.events.count("no replacements") == 1
    assert "weight" in scene.fields["no replacements"]["reason"]


def test_other_numerics_are_the_hosts() -> None:
    scene = trained("a", wanted=2, startup_failures=100)
    for number in range(2 * FATAL):
        asks_in_and_differs(scene, f"j{number}", ELSEWHERE)
    assert (scene.coordinator.crash_loop.joiners, wanted(scene)) == (0, 2)


@pytest.mark.failure(
    "Processes, signals and crash loops",
    (
        "every joiner is refused: the dataset has its own generator, a scheduler is not replicated, data was drawn "
        "before `join()`"
    ),
)
def test_refused_external_workers_stop_no_replacements() -> None:
    scene = trained("a", wanted=2)
    for number in range(2 * FATAL):
        fails_its_proof(scene, f"g{number}", 10 * number, pool="")
    assert (scene.coordinator.crash_loop.joiners, wanted(scene)) == (0, 2)


def test_external_workers_that_die_stop_none_either() -> None:
    scene = trained("a", wanted=2)
    for number in range(2 * FATAL):
        external_worker, at = f"g{number}", 100 * (number + 1)
        scene.ready(external_worker, pool="")
        scene.switch(scene.last("a", m.Propose).view, at)
        beat(scene, at + 1)
        scene.lose(external_worker)
        scene.report("a", at + 1)
        pass_by(scene, 3.0)
    assert (scene.coordinator.crash_loop.joiners, wanted(scene)) == (0, 2)


@pytest.mark.failure(
    "Processes, signals and crash loops",
    (
        "every joiner is refused: the dataset has its own generator, a scheduler is not replicated, data was drawn "
        "before `join()`"
    ),
)
@pytest.mark.parametrize(("pool", "joiners"), [("pool", 1), ("", FATAL - 1)])
def test_a_worker_of_a_pool_that_stays_in_ends_the_row(pool: str, joiners: int) -> None:
    scene = trained("a", wanted=3)
    for number in range(FATAL - 2):
        fails_its_proof(scene, f"j{number}", 10 * number)
    scene.ready("b", pool=pool)
    scene.switch(scene.last("a", m.Propose).view, 100)
    beat(scene, 100 + JOINER_TRIAL_STEPS + 1)
    asks_in_and_differs(scene, "last")
    assert scene.coordinator.crash_loop.joiners == joiners


@pytest.mark.failure(
    "Processes, signals and crash loops",
    (
        "every joiner is refused: the dataset has its own generator, a scheduler is not replicated, data was drawn "
        "before `join()`"
    ),
)
def test_scale_begins_anew() -> None:
    scene = trained("a", wanted=2)
    for number in range(FATAL):
        fails_its_proof(scene, f"j{number}", 10 * number)
    scene.coordinator.scale(2, scene.now)
    assert (scene.coordinator.crash_loop.joiners, wanted(scene)) == (0, 2)
    fails_its_proof(scene, "again", 1000)
    assert wanted(scene) == 2


@pytest.mark.failure(
    "Processes, signals and crash loops",
    (
        "every joiner is refused: the dataset has its own generator, a scheduler is not replicated, data was drawn "
        "before `join()`"
    ),
)
def test_a_run_that_gets_no_first_view_for_it_ends_with_that_reason() -> None:
    scene = Scene(wanted=2, minimum=2)
    scene.ready("a")
    for number in range(FATAL):
        assert scene.coordinator.over is None
        asks_in_and_differs(scene, f"j{number}")
    assert scene.coordinator.over is not None
    assert scene.coordinator.over.code == 1
    assert "weight" in scene.coordinator.over.reason
    assert ANY in scene.coordinator.over.reason


def test_too_few_without_them_end_the_run_with_the_state_saved() -> None:
    scene = trained("a", "b", wanted=2)
    die(scene, "b", KILL)
    scene.report("a", 5)
    for number in range(FATAL):
        assert scene.coordinator.ending is None
        asks_in_and_differs(scene, f"j{number}")
    scene.report("a", 6)
    assert scene.last("a", m.End).save
    assert scene.coordinator.ending is not None
    assert ANY in scene.coordinator.ending.reason


def test_the_next_coordinator_knows_the_row() -> None:
    scene = trained("a", wanted=2)
    for number in range(FATAL - 1):
        fails_its_proof(scene, f"j{number}", 10 * number)
    scene = scene.restarted()
    scene.back("a")
    asks_in_and_differs(scene, "last")
    assert wanted(scene) == 1
