"""The study of batches that follow the workers: its histories, its figures, the rules of its own.

No training here: `python -m experiments.dynamic_sgd run --quick` goes through all of it.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.dynamic_sgd.cases import (
    BASE,
    FULL,
    LETTERS,
    MICRO,
    PAIRS,
    POLICIES,
    QUICK,
    SMALL,
    BySamples,
    by_samples,
    cases,
    growths,
    steps,
)
from experiments.dynamic_sgd.measures import (
    QUANTILES,
    Interval,
    Result,
    accuracy_verdict,
    binned,
    paired,
    rise,
    rise_verdict,
    shared,
    spike,
    worst_spike,
)
from tests.support.walked import walked

# --- histories -----------------------------------------------------------------------------------------------------


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


def test_pairs_are_by_seed_and_at_the_same_places() -> None:
    """Seed 0 falls from 1 to 0.8 where its rule's run rises by 0.2, seed 1 rises by 0.1 where that rises by 0.3; seed 2
    has no static run, seed 3 nothing else. One history for both, but for seed 4, which never grows."""
    changes: BySamples = ((0, 1), (300, 12))

    def stepped(after: float, accuracy: float) -> Result:
        return result([1.0] * 30 + [after] * 30, accuracy)

    found = paired(
        {0: stepped(1.2, 0.90), 1: stepped(1.3, 0.80), 2: stepped(9.0, 0.1), 4: stepped(5.0, 0.3)},
        {1: stepped(1.1, 0.82), 0: stepped(0.8, 0.85), 3: stepped(9.0, 0.2), 4: stepped(7.0, 0.4)},
        lambda seed: ((0, 4),) if seed == 4 else changes,
    )
    assert found.seeds == (0, 1, 4)
    assert found.rises == pytest.approx((0.2, 0.3))
    assert found.rises_more == pytest.approx((0.4, 0.2))
    assert found.accuracies == (0.90, 0.80, 0.3)
    assert found.accuracies_more == pytest.approx((0.05, -0.02, -0.1))
    assert worst_spike(stepped(1.2, 0.9), ((0, 1), (300, 4), (310, 5))) < 0.2 + 1e-9, "no room for a moving mean"


def test_an_interval_by_hand() -> None:
    """1, 2 and 6 have a mean of 3 and a variance of (4 + 1 + 9) / 2 = 7: 4.303 sqrt(7 / 3) to either side."""
    found = Interval.of([1.0, 2.0, 6.0])
    assert (found.mean, found.low, found.high) == pytest.approx((3, 3 - 6.573, 3 + 6.573), abs=1e-3)
    assert Interval.of([0.5]) == Interval(mean=0.5, low=-math.inf, high=math.inf), "one seed says nothing"
    assert Interval.of([0.5, math.inf]) == Interval(mean=math.inf, low=math.inf, high=math.inf)


def test_the_quantiles_are_those_of_student() -> None:
    """The density integrated from 0 to the quantile is 0.475, for every number of degrees."""
    for degrees, quantile in enumerate(QUANTILES, 1):
        scale = math.gamma((degrees + 1) / 2) / math.gamma(degrees / 2) / math.sqrt(degrees * math.pi)
        width = quantile / 4000
        places = ((n + 0.5) * width for n in range(4000))
        area = sum(scale * (1 + x * x / degrees) ** (-(degrees + 1) / 2) for x in places) * width
        assert area == pytest.approx(0.475, abs=2e-5)
    assert len(QUANTILES) >= FULL.static_seeds - 1


@pytest.mark.parametrize(
    ("low", "high", "accuracy", "loss"),
    [
        (-0.004, 0.100, "holds", "open"),
        (-0.004, -0.001, "holds", "calm"),  # a loss within the margin
        (-0.020, -0.001, "loses", "calm"),
        (-0.020, 0.001, "open", "calm"),
        (-0.020, 0.060, "open", "open"),  # though both means are within their margins
        (0.010, 0.040, "holds", "calm"),  # a rise within the margin
        (0.010, 0.060, "holds", "spikes"),
        (-math.inf, math.inf, "open", "open"),
        (math.inf, math.inf, "holds", "spikes"),  # of a loss: no number any more
    ],
)
def test_the_words_are_those_of_the_page(low: float, high: float, accuracy: str, loss: str) -> None:
    between = Interval(mean=(low + high) / 2, low=low, high=high)
    assert (accuracy_verdict(between), rise_verdict(between)) == (accuracy, loss)


def test_a_rise_is_between_the_means_of_both_sides() -> None:
    found = result([9.0, 1.0, 3.0, 4.0, 6.0, 9.0], 0.5)
    assert rise(found, 30, 20) == pytest.approx(5.0 - 2.0)
    assert rise(found, 30, 10) == pytest.approx(4.0 - 3.0)


def test_what_two_runs_share_ends_with_the_first_change() -> None:
    still, same, other = (result([1.0, 2.0, third, 4.0], 0.5) for third in (3.0, 3.0, 3.5))
    assert shared(other, still, ((0, 1), (20, 4)))
    assert not shared(other, still, ((0, 1), (30, 4)))
    assert shared(same, still, ((0, 1),))
    assert shared(other, still, ((0, 3), (30, 4))), "a first size of its own: nothing is shared, nothing to differ in"
