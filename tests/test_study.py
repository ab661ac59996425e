"""The study of batches that follow the workers: its histories, its figures; that its page says what its results say.

No training here: `python -m experiments.dynamic_sgd run --quick` goes through all of it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.dynamic_sgd import measures, page, shelf, throughput
from experiments.dynamic_sgd.cases import (
    BASE,
    FULL,
    LETTERS,
    MICRO,
    PAIRS,
    POLICIES,
    QUICK,
    SMALL,
    TASKS,
    BySamples,
    Case,
    by_samples,
    cases,
    growths,
    steps,
)
from experiments.dynamic_sgd.measures import Result, binned, condense, spike, summary, worst_spike
from farandole.plan.history import History

# --- histories -----------------------------------------------------------------------------------------------------


def walked(history: History, policy: str, length: int, epochs: int) -> list[tuple[int, int, int]]:
    """(samples seen, workers, samples) of every step, by nothing but: an epoch ends where its samples do."""
    found, step, batch = [], 0, POLICIES[policy](BASE, MICRO)
    for epoch in range(epochs):
        offset = 0
        while offset < length:
            workers = history.workers(step)
            taken = min(batch.samples(workers), length - offset)
            found.append((epoch * length + offset, workers, taken))
            offset, step = offset + taken, step + 1
    return found


def test_a_jump_by_hand() -> None:
    """100 samples an epoch in batches of 32 are 4 steps, the last of 4 samples; 150 samples are in the second step of
    the second epoch, so the third is the first one to begin after it; 64 samples begin a step and count at once."""
    assert steps(((0, 1), (150, 12)), POLICIES["linear"](32, 16), length=100, epochs=3).changes == ((0, 1), (6, 12))
    assert steps(((0, 1), (64, 12)), POLICIES["linear"](32, 16), length=100, epochs=3).changes == ((0, 1), (2, 12))


@pytest.mark.parametrize("policy", POLICIES)
@settings(deadline=None)
@given(
    gaps=st.lists(st.tuples(st.integers(1, 900), st.integers(1, 12)), max_size=8),
    length=st.integers(1, 700),
    epochs=st.integers(1, 4),
)
def test_every_step_has_the_workers_of_its_samples(
    policy: str, gaps: list[tuple[int, int]], length: int, epochs: int
) -> None:
    changes, seen = [(0, 3)], 0
    for gap, workers in gaps:
        seen += gap
        changes.append((seen, workers))
    history = steps(tuple(changes), POLICIES[policy](BASE, MICRO), length=length, epochs=epochs)
    for begun, workers, _ in walked(history, policy, length, epochs):
        assert workers == [count for start, count in changes if start <= begun][-1]


def test_the_same_samples_whatever_the_policy() -> None:
    for history in ("jump12", "random", "updown"):
        changes = by_samples(history, FULL.total, 1)
        for policy in POLICIES:
            walk = walked(
                steps(changes, POLICIES[policy](BASE, MICRO), length=FULL.samples, epochs=FULL.epochs),
                policy,
                FULL.samples,
                FULL.epochs,
            )
            assert sum(taken for _, _, taken in walk) == FULL.total


def test_random_histories_differ_by_seed_and_only_by_seed() -> None:
    drawn = [by_samples("random", FULL.total, seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert {workers for changes in drawn for _, workers in changes} <= set(range(1, 13))


def test_growths_reach_to_the_next_change() -> None:
    assert growths(((0, 1), (10, 4), (20, 4), (30, 2), (40, 3))) == [(10, 20), (40, 1 << 62)]
    assert growths(((0, 4),)) == []


def test_the_cases_have_a_place_each() -> None:
    for scale in (FULL, QUICK, SMALL):
        wanted = list(dict.fromkeys(case for letter in LETTERS if letter != "D" for case in cases(letter, scale)))
        assert len({case.name for case in wanted}) == len(wanted)


def test_every_pair_is_of_a_policy_and_a_history() -> None:
    assert {policy for pairs in PAIRS.values() for _, policy in pairs} == set(POLICIES) - {"constant"}
    for pairs in PAIRS.values():
        for history, _ in pairs:
            assert by_samples(history, FULL.total, 0)[0][0] == 0


# --- figures -------------------------------------------------------------------------------------------------------


def test_losses_are_means_over_samples_not_over_steps() -> None:
    """32 samples at 4 and 96 at 1: the first 64 have a mean of 2.5, the next 64 of 1."""
    assert binned([4.0, 1.0], [32, 96], 64) == pytest.approx([2.5, 1.0])
    assert binned([4.0, 1.0], [32, 95], 64) == pytest.approx([2.5]), "a rest that fills no bin is left out"


@settings(deadline=None)
@given(
    steps_=st.lists(st.tuples(st.integers(1, 400), st.floats(0, 9)), min_size=1, max_size=60), size=st.integers(1, 99)
)
def test_binning_loses_nothing(steps_: list[tuple[int, float]], size: int) -> None:
    taken, values = [n for n, _ in steps_], [value for _, value in steps_]
    by_sample = [value for n, value in steps_ for _ in range(n)]
    expected = [sum(by_sample[at : at + size]) / size for at in range(0, len(by_sample) - size + 1, size)]
    assert binned(values, taken, size) == pytest.approx(expected, abs=1e-9)


def test_a_spike_is_the_rise_of_the_moving_mean() -> None:
    loss = [1.0] * 20 + [1.0, 5.0, 1.0, 1.0] + [0.5] * 20
    assert spike(loss, 10, 200, 1 << 62) == pytest.approx(1.0), "one bin of 5 among four: a mean of 2"
    assert spike(loss, 10, 240, 1 << 62) == pytest.approx(0.5 - 1.5), "before it seven bins of 1 and one of 5"
    assert spike([*loss[:21], None, *loss[22:]], 10, 200, 1 << 62) == math.inf
    assert spike([1.0] * 24 + [9.0] * 9, 10, 200, 240) == 0, "what comes after the next change is not this one's"


def result(loss: list[float], accuracy: float) -> Result:
    tests = ((len(loss) * 10, 0.5, accuracy),)
    return Result(bin=10, loss=tuple(loss), factor=(), tests=tests, steps=1, seconds=1.0, fingerprint="")


def test_a_summary_holds_a_rule_against_the_static_runs_at_the_same_places() -> None:
    flat, rising = [1.0] * 60, [1.0] * 30 + [1.2] * 30
    changes: BySamples = ((0, 1), (300, 12))
    found = summary(
        [result(flat, 0.90), result(rising, 0.92)],
        {"calm": {0: result([1.0] * 60, 0.91)}, "wild": {0: result([1.0] * 30 + [9.0] * 30, 0.80)}},
        {0: changes},
    )
    assert found.static.spikes == pytest.approx((0.0, 0.2))
    assert not found.spikes("calm")
    assert found.spikes("wild")
    assert found.loses("calm") == 0
    assert found.loses("wild") == pytest.approx(0.10)
    assert worst_spike(result(rising, 0.9), ((0, 1), (300, 4), (310, 5))) < 0.2 + 1e-9, "no room for a moving mean"


def test_condense_takes_what_a_run_has_written() -> None:
    lines = [
        {"event": "joined"},
        {"step": 0, "samples": 10, "loss": 2.0, "seconds": 0.5, "factor": 1.0},
        {"event": "log", "step": 0, "seen": 10, "test_loss": 2.5, "accuracy": 0.25},
        {"step": 1, "samples": 20, "loss": None, "seconds": 0.25, "factor": 3.0},
        {"event": "log", "step": 1, "seen": 30, "test_loss": None, "accuracy": 0.1},
        {"event": "log", "step": 1, "fingerprint": "abc"},
    ]
    found = condense(lines, 10)
    assert found.loss == (2.0, None, None), "a loss that is no number any more"
    assert found.factor == (1.0, 3.0, 3.0)
    assert found.tests == ((10, 2.5, 0.25), (30, None, 0.1))
    assert (found.steps, found.seconds, found.fingerprint, found.accuracy) == (2, 0.8, "abc", 0.1)


def test_the_pace_leaves_out_the_first_steps() -> None:
    lines = [{"samples": 64, "time": time} for time in (0.0, 50.0, 51.0, 52.0)]
    assert throughput.pace([{"event": "joined"}, *lines], first=1) == 64.0


# --- the shelf and the page ----------------------------------------------------------------------------------------


def test_what_is_put_on_the_shelf_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf, "RESULTS", tmp_path)
    case = Case(task="cifar", history="jump12", policy="linear", seed=2, rate=0.3)
    assert shelf.get(case, QUICK) is None
    shelf.put(case, QUICK, result([1.0, 2.0], 0.5))
    assert shelf.get(case, QUICK) == result([1.0, 2.0], 0.5)
    other = shelf.path(case, FULL)
    other.parent.mkdir(parents=True)
    other.write_text(shelf.path(case, QUICK).read_text())
    with pytest.raises(SystemExit, match="was made with"):
        shelf.get(case, FULL)


def test_the_page_says_what_the_results_say() -> None:
    text = page.PAGE.read_text()
    assert page.filled(text, FULL) == text, "run `python -m experiments.dynamic_sgd plot`"
    assert {name.split()[0] for name in page.blocks(text)} == set(page.TABLES), "a table that the page does not show"


def test_the_results_are_those_of_the_cases() -> None:
    """Nothing on the shelf that no experiment asks for: a figure that nobody could make again."""
    trained = [letter for letter in LETTERS if letter != "D"]
    for scale, letters in ((FULL, [each for each in trained if each != "M"]), (QUICK, trained), (SMALL, ["M"])):
        known = {shelf.path(case, scale) for letter in letters for case in cases(letter, scale, TASKS)}
        there = {place for task in TASKS for place in (shelf.RESULTS / scale.name / task).glob("*.json")}
        assert there <= known
        for place in there:
            assert set(json.loads(place.read_text())) == {"case", "sizes", "result"}
    assert measures.HORIZON * FULL.bin <= FULL.total // 2
    assert sum(place.stat().st_size for place in shelf.RESULTS.rglob("*") if place.is_file()) < 2_000_000
