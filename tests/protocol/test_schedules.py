"""Random schedules through the real state machines; and mutants, to show that the schedules would find a bug.

Each bug breaks one rule of the protocol and must be caught within `bugs.WITHIN` schedules. FARANDOLE_SEEDS=100000 runs
more schedules than the default; `make simulate` does so on all cores.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest

from farandole.collective.schedule import Levels
from farandole.protocol.worker import state_machine
from farandole.simulate.replica import alone
from tests.protocol.bugs import BUGS
from tests.protocol.caught_by import CAUGHT_BY
from tests.protocol.schedule import simulate
from tests.protocol.unfed import NOBODY_FED

SEEDS = int(os.environ.get("FARANDOLE_SEEDS", "750"))
PARTS = 6


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated runs are."""
    monkeypatch.setattr(state_machine, "EVERY", 2)


@pytest.mark.parametrize("part", [0, 1, *(pytest.param(part, marks=pytest.mark.long) for part in range(2, PARTS))])
def test_schedules(part: int) -> None:
    for seed in range(part, SEEDS, PARTS):
        simulate(seed)


def test_schedules_of_hosts_in_two_zones() -> None:
    worlds = [simulate(seed, zones=True) for seed in range(SEEDS // 10)]
    views = [view for world in worlds for view in (world.coordinator.view,) if view]
    assert any(len(Levels.of(view).zones) > 1 for view in views)


def test_schedules_of_slices_in_pieces() -> None:
    worlds = [simulate(seed, pieces=True) for seed in range(SEEDS // 10)]
    views = [view for world in worlds for view in (world.coordinator.view,) if view]
    assert any(len(Levels.of(view).hosts) > 1 for view in views)


def test_a_replica_that_drifts_ends_the_run_whatever_else_happens() -> None:
    """Unless its worker is alone, goes before its words are there, or is a joiner on trial."""
    worlds = [simulate(seed, drift=True) for seed in range(SEEDS // 5)]
    drifted = [world for world in worlds if world.drifted]
    told = [world for world in drifted if world.records["replicas differ"] or world.records["refused"]]
    assert len(drifted) > len(worlds) // 2
    assert len(told) > len(drifted) // 2
    ended = [world for world in told if world.records["replicas differ"] and world.coordinator.over]
    assert sum("first in" in world.coordinator.over.reason for world in ended) > len(ended) // 2
    assert any(world.records["refused"] for world in told), "a joiner goes, and the run goes on"


def test_a_replica_whose_pair_with_its_sender_is_broken_reports_it() -> None:
    """As the thread that receives a state does. Nobody else would: no sum goes over that pair."""
    world = simulate(62077951, drift=True, bits="any")
    assert world.records["drifting"]
    assert world.records["lost"]


def test_where_replicas_may_drift_they_are_given_the_state_again() -> None:
    worlds = [simulate(seed, drift=True, bits="any") for seed in range(SEEDS * 2 // 15)]
    told = sum((world.records for world in worlds), Counter[str]())
    assert told["renewed"] > len(worlds) // 4
    assert told["drifting"] > len(worlds) // 4
    assert not told["replicas differ"]


def test_a_machine_that_computes_wrong_leaves_and_nobody_else() -> None:
    worlds = [simulate(SEEDS + seed, errs=True) for seed in range(SEEDS // 5)]
    told = sum((world.records for world in worlds), Counter[str]())
    assert told["refused"] > len(worlds) // 3
    assert told["computes wrong"] > len(worlds) // 60
    assert told["undecided"]


def test_workers_whose_host_can_not_feed_them_cost_nobody_but_the_last() -> None:
    """Of those that hold the state. See `unfed.py` for what must not be."""
    worlds = [simulate(seed, starves=True) for seed in range(SEEDS // 5)]
    told = sum((world.records for world in worlds), Counter[str]())
    ended = [world for world in worlds if world.coordinator.over and NOBODY_FED in world.coordinator.over.reason]
    assert told["unfed"] > len(worlds)
    assert len(worlds) // 10 < len(ended) < len(worlds) * 2 // 3, "some ran out of workers, and many did not"
    assert any(world.records["unfed"] > 2 and world not in ended for world in worlds)


def test_a_schedule_is_repeatable() -> None:
    first, second = simulate(7), simulate(7)
    assert (first.events, first.now, first.records) == (second.events, second.now, second.records)


def test_the_reference_depends_on_every_step() -> None:
    assert len({alone(steps) for steps in range(10)}) == 10


@pytest.mark.parametrize(("seed", "world"), [(2_089_539, {}), (1_072_351, {"drift": True, "bits": "any"})])
def test_a_worker_that_was_evicted_while_it_received_the_state_never_saves_it(seed: int, world: dict[str, Any]) -> None:
    """It was frozen, the coordinator died, and it ends the round by commit messages that came before."""
    simulate(seed, **world)


def test_a_run_ends_where_the_worker_that_has_saved_for_the_previous_coordinator_is_lost() -> None:
    """A script has ended early, the others still switch to the empty view, and they are asked to save as well."""
    simulate(1_121_863, drift=True, bits="any")


def test_no_run_is_saved_by_one_member_while_another_one_has_joined_unseen() -> None:
    """A coordinator is killed that has not heard of the newest view, and so is the next one, with that member."""
    world = simulate(62_083_350, drift=True)
    assert world.coordinator.over
    assert world.coordinator.over.code == 0
    assert not world.records["state lost"]


@pytest.mark.parametrize(
    ("seed", "world"),
    [(3_010_822, {"drift": True}), (3_014_797, {"errs": True}), (6_010_038, {"drift": True})],
)
def test_a_round_that_cannot_end_is_not_committed_since_one_says_that_it_has_ended(
    seed: int, world: dict[str, Any]
) -> None:
    """A replica drifts or a machine computes wrong, and another worker reports a later round than it is in."""
    simulate(seed, **world)


def test_results_of_different_steps_refuse_nobody() -> None:
    """A worker reports that a proposed view is in force, and its results are those of the step before."""
    simulate(7_000_401)


def test_replicas_of_different_steps_are_not_compared() -> None:
    """A worker reports that the replicas of two others differ, and one that leaves is some steps behind them."""
    simulate(7_056_830, drift=True)


def test_a_checkpoint_of_a_saver_that_was_followed_meanwhile_is_known() -> None:
    """A coordinator that was frozen hears all at once: one saver failed, and wrote two checkpoints afterwards."""
    simulate(7_083_034)


def test_a_worker_stays_in_the_round_in_which_it_has_answered_a_stop() -> None:
    """It reports a later one to the next stop, after those who could contradict it were removed."""
    simulate(8_023_333)


def test_a_worker_that_goes_for_a_broken_pair_has_not_gone_by_a_false_accusation() -> None:
    """The connection of two workers breaks, and the third one accuses both."""
    simulate(8_009_865)


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_caught(name: str) -> None:
    assert BUGS[name].caught(first=CAUGHT_BY.get(name, 0)) is not None


def test_a_round_is_not_committed_by_one_that_is_left_of_three_of_whom_two_were_to_be_compared() -> None:
    """A joiner computes wrong; it and the worker that it was compared with die while there is no coordinator."""
    simulate(11_009_229, errs=True)


def test_a_state_is_lost_whose_view_the_coordinator_knew_only_from_one_answer() -> None:
    """It was killed with the first view proposed; the next run's reports of step 0 were taken for outdated."""
    simulate(10_039_293, errs=True)


def test_a_joiner_reports_a_broken_connection_over_which_the_header_of_the_state_has_not_come() -> None:
    """Its sender's part of the state has come."""
    simulate(11_023_539)


def test_a_round_that_a_killed_worker_has_ended_may_be_redone_by_the_others() -> None:
    """Its results were to be compared with another's; the redone round is then committed by a decision."""
    simulate(63_062_098)


def test_a_round_that_was_redone_with_another_checker_may_be_redone_again() -> None:
    """The second checker has ended the round and was killed, before the other one could end it."""
    simulate(65_029_336, zones=True)


def test_a_round_that_a_killed_worker_has_committed_is_redone_to_the_same_result() -> None:
    """One of the two others says that it does not hold it, as it said before that it does."""
    simulate(67_095_878, drift=True)


def test_a_leaving_worker_that_reports_a_switch_too_early_moves_nobody() -> None:
    """The others have begun a step of that round in the view before."""
    simulate(63_046_254, drift=True)


def test_a_switch_to_a_step_far_ahead_hides_no_difference_of_results() -> None:
    """All three members report the difference, and one of them had reported a step that is far ahead."""
    simulate(63_045_397, errs=True)


def test_a_wrong_result_is_committed_only_by_a_false_report_of_the_longest_standing_worker() -> None:
    """It reports a later round, and the joiner whose results are wrong, and who is not there, has to go."""
    simulate(90_001_670, errs=True, focus=("mistake",))
