"""Random schedules through the real state machines; and mutants, to show that the schedules would find a bug.

Each mutant breaks one rule of the protocol and must be caught within `WITHIN` schedules. FARANDOLE_SEEDS=100000 runs
more schedules than the default; `make simulate` does so on all cores.
"""

from __future__ import annotations

import os
from collections import Counter
from types import ModuleType
from typing import Any

import pytest

from farandole.membership import drift
from farandole.simulate.replica import alone
from farandole.simulate.witness import Violation
from tests.protocol.checking_bugs import CHECKING
from tests.protocol.decisions import PATCHES
from tests.protocol.driver_bugs import DRIVER
from tests.protocol.mutants import MUTANTS
from tests.protocol.planted_bugs import PLANTED
from tests.protocol.schedule import simulate
from tests.support.planted import planted

SEEDS = int(os.environ.get("FARANDOLE_SEEDS", "1500"))
PARTS = 6
WITHIN = 1500


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated runs are."""
    monkeypatch.setattr(drift, "EVERY", 2)


@pytest.mark.parametrize("part", range(PARTS))
def test_schedules(part: int) -> None:
    for seed in range(part, SEEDS, PARTS):
        simulate(seed)


def test_a_replica_that_drifts_ends_the_run_whatever_else_happens() -> None:
    """Unless its worker is alone, goes before its words are there, or is a joiner on trial."""
    worlds = [simulate(seed, drift=True) for seed in range(SEEDS // 6)]
    drifted = [world for world in worlds if world.drifted]
    told = [world for world in drifted if world.records["replicas differ"] or world.records["refused"]]
    assert len(drifted) > len(worlds) // 2
    assert len(told) > len(drifted) // 2
    ended = [world for world in told if world.records["replicas differ"] and world.coordinator.over]
    assert sum("first in" in world.coordinator.over.reason for world in ended) > len(ended) // 2
    assert any(world.records["refused"] for world in told), "a joiner goes, and the run goes on"


def test_where_replicas_may_drift_they_are_given_the_state_again() -> None:
    worlds = [simulate(seed, drift=True, bits="any") for seed in range(SEEDS // 15)]
    told = sum((world.records for world in worlds), Counter[str]())
    assert told["renewed"] > len(worlds) // 4
    assert told["drifting"] > len(worlds) // 4
    assert not told["replicas differ"]


def test_a_machine_that_computes_wrong_leaves_and_nobody_else() -> None:
    worlds = [simulate(seed, errs=True) for seed in range(SEEDS // 6)]
    told = sum((world.records for world in worlds), Counter[str]())
    assert told["refused"] > len(worlds) // 3
    assert told["computes wrong"] > len(worlds) // 60
    assert told["undecided"]


def test_a_schedule_is_repeatable() -> None:
    first, second = simulate(7), simulate(7)
    assert (first.events, first.now, first.records) == (second.events, second.now, second.records)


def test_the_reference_depends_on_every_step() -> None:
    assert len({alone(steps) for steps in range(10)}) == 10


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: next(iter(mutant.values())).__name__)
def test_a_mutant_is_caught(mutant: dict[str, Any]) -> None:
    assert caught(**mutant) is not None


@pytest.mark.parametrize(("place", "name", "mutate", "options"), PATCHES, ids=[patch[2].__name__ for patch in PATCHES])
def test_a_wrong_decision_is_caught(
    monkeypatch: pytest.MonkeyPatch, place: Any, name: str, mutate: Any, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(place, name, mutate(getattr(place, name)))
    assert caught(**options) is not None


@pytest.mark.parametrize(("module", "place", "by", "options"), [*PLANTED, *DRIVER, *CHECKING])
def test_a_planted_bug_is_caught(module: ModuleType, place: str, by: str, options: dict[str, Any]) -> None:
    with planted(module, place, by):
        assert caught(**options) is not None


def caught(first: int = 0, **world: Any) -> int | None:
    """The first seed, from `first` on, with which the schedules find it; a crash of the machines comes out as a
    Violation too. `first` of a bug that few schedules find is one that did.
    """
    return next((seed for seed in range(first, first + WITHIN) if violates(seed, **world)), None)


def violates(seed: int, **world: Any) -> bool:
    try:
        simulate(seed, **world)
    except Violation as violation:
        if "positional argument" in str(violation) or "keyword argument" in str(violation):
            raise  # a mutant that is called in another way now: it proves nothing
        return True
    return False
