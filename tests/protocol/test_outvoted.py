"""Which of several reports contradict each other: as pair by pair, though only one report of each kind is compared."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from farandole.protocol.coordinator.disputes import contradiction, outvoted
from farandole.protocol.messages import Call, Stopped
from farandole.protocol.view import Lineage, View

WORKERS = tuple(f"w{number}" for number in range(12))
OLDER = View(number=1, members=WORKERS[3:], group=1)
NEWER = View(number=2, members=WORKERS[:9], joining=WORKERS[:3], group=2)
OTHER = Lineage(sets=(OLDER.members, OLDER.members[1:]))


def drawn(rng: random.Random, strange: float) -> dict[str, Stopped]:
    """Reports that mostly agree; `strange`: how often a field differs."""

    def other(usual: object, rare: object) -> object:
        return rare if rng.random() < strange else usual

    reports: dict[str, Stopped] = {}
    for worker in WORKERS:
        view = NEWER if worker in NEWER.joining else OLDER if worker not in NEWER.members else other(NEWER, OLDER)
        assert isinstance(view, View)
        reports[worker] = Stopped(
            stop=1,
            view=view,
            round=other(4, 5),
            step=3,
            has_result=other(True, False),
            synced=other(True, False),
            lineage=other(view.lineage(view.members), OTHER),
            call=Call(doing="step 3", number=other(7, 0) if view == NEWER else other(0, 7)),
            prepared=other(2, 1),
            cannot_end=other(False, True),
        )  # type: ignore[arg-type]
    return reports


def test_whoever_contradicts_another_is_found_and_the_rest_agree() -> None:
    rng, agreed = random.Random(0), 0
    for _ in range(3000):
        reports = drawn(rng, rng.choice((0.0, 0.02, 0.05)))
        proposed = rng.choice((None, NEWER))
        synced = [worker for worker, report in reports.items() if report.synced]
        pairs = [
            (one, other)
            for one, other in combinations(synced, 2)
            if contradiction(one, reports[one], other, reports[other], proposed)
        ]
        out = {each.worker for each in outvoted(reports, proposed)}
        assert bool(out) == bool(pairs)
        assert all(out.intersection(pair) for pair in pairs)
        agreed += not pairs
    assert 300 < agreed < 2700, "both happen"


@pytest.mark.parametrize(
    ("call", "contradicts"),
    [
        ("step 3", True),  # a worker switches before it begins a step
        ("step 3, of which other parameters are trained", False),  # in a call round it does not
        ("evaluate", False),
    ],
)
def test_a_leaving_worker_has_not_switched_before_a_round_that_another_began_as_a_step(
    call: str, *, contradicts: bool
) -> None:
    older, newer = View(number=1, members=("a", "b", "c"), group=1), View(number=2, members=("a", "b"), group=1)

    def report(view: View, call: Call) -> Stopped:
        return Stopped(
            stop=1, view=view, round=4, step=3, has_result=False, synced=True, prepared=2, call=call,
            lineage=view.lineage(view.members),
        )  # fmt: skip

    trains, left = report(older, Call.of(call)), report(newer, Call())
    assert bool(contradiction("b", trains, "c", left, newer)) == contradicts
    assert bool(contradiction("c", left, "b", trains, newer)) == contradicts


def test_two_say_the_same_and_only_one_of_them_contradicts_a_third() -> None:
    """Both lack a result that `a` must have had from each member of its view; `c` is none."""
    older, newer = View(number=1, members=("a", "b", "c"), group=1), View(number=2, members=("a", "b"), group=1)

    def report(view: View, round_: int, *, has_result: bool) -> Stopped:
        return Stopped(
            stop=1, view=view, round=round_, step=3, has_result=has_result, synced=True, prepared=2,
            lineage=view.lineage(view.members),
        )  # fmt: skip

    without = report(older, 4, has_result=False)
    reports = {"a": report(newer, 5, has_result=True), "b": without, "c": without}
    assert [each.worker for each in outvoted(reports, newer)] == ["b"]
