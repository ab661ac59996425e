"""Learning-rate rules: every rule enters one table. Reference values by hand, properties, and convergence."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.errors import UsageError
from farandole.plan import rules
from farandole.plan.batch import GlobalBatch, PerWorkerBatch
from farandole.plan.rules import (
    RULES,
    AdaScale,
    Facts,
    LinearScaling,
    MomentumCompensation,
    Noise,
    RateInBuffer,
    Rule,
    SquareRoot,
)
from tests.support.rule_reference import BASE, ROWS, factors

EVERY: list[Rule] = [LinearScaling(), MomentumCompensation(), RateInBuffer(), AdaScale(), SquareRoot()]


def under_noise(rule: Rule, history: Sequence[float]) -> list[float]:
    """A gradient of squared norm 1 whose samples have a variance of 3 bases."""
    return factors(rules, rule, history, [(3.0 * BASE, 1.0)] * len(history))


def test_every_rule_is_in_the_table() -> None:
    assert {type(rule) for rule in EVERY} == set(RULES)


# --- reference, by hand --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("remark", "compute", "expected"), ROWS, ids=[row[0] for row in ROWS])
def test_reference(remark: str, compute: Callable[[ModuleType], list[float]], expected: list[float]) -> None:
    del remark
    assert compute(rules) == pytest.approx(expected)


def test_noise_is_measured_without_bias_from_shards_of_any_sizes() -> None:
    """20,000 steps of samples with variance 5 * 0.7 around a gradient of squared norm 5 * 0.09."""
    rng, sizes = np.random.default_rng(1), np.array([16, 16, 16, 5])
    shards = 0.3 + rng.normal(size=(20_000, len(sizes), 5)) * np.sqrt(0.7 / sizes)[None, :, None]
    mean = (shards * sizes[None, :, None]).sum(1) / sizes.sum()
    found = [
        Noise.estimate(float((sizes * (g**2).sum(1)).sum()), float((m**2).sum()), int(sizes.sum()), len(sizes))
        for g, m in zip(shards, mean, strict=True)
    ]
    assert np.mean([n.variance for n in found if n.variance is not None]) == pytest.approx(3.5, rel=0.02)
    assert np.mean([n.square - n.variance / n.samples for n in found if n.variance is not None]) == pytest.approx(
        0.45, rel=0.02
    )


def test_one_shard_tells_no_variance() -> None:
    assert Noise.estimate(squares=8.0, square=1.0, samples=8, shards=1).variance is None


# --- properties ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", EVERY, ids=repr)
@given(steps=st.integers(1, 300))
def test_a_history_of_the_base_batch_changes_nothing(rule: Rule, steps: int) -> None:
    assert under_noise(rule, [1] * steps) == [1] * steps


@pytest.mark.parametrize("rule", EVERY, ids=repr)
@given(history=st.lists(st.integers(1, 12), max_size=40))
def test_it_comes_back_to_1(rule: Rule, history: list[int]) -> None:
    assert under_noise(rule, [*history, 1])[-1] == 1


@pytest.mark.parametrize("rule", EVERY, ids=repr)
@given(history=st.lists(st.integers(1, 12), min_size=1, max_size=40))
def test_it_never_leaves_what_the_sizes_span(rule: Rule, history: list[int]) -> None:
    found = under_noise(rule, history)
    assert all(1 <= factor <= max(history[: n + 1]) + 1e-9 for n, factor in enumerate(found))


@pytest.mark.parametrize("rule", EVERY, ids=repr)
@given(k=st.integers(2, 12))
def test_a_constant_size_settles(rule: Rule, k: int) -> None:
    found = under_noise(rule, [1] * 5 + [k] * (8 * k + 50))
    assert found[-1] == pytest.approx(found[-2])
    settled: dict[type[Rule], float] = {SquareRoot: math.sqrt(k), AdaScale: 4 / (3 / k + 1)}
    assert found[-1] == pytest.approx(settled.get(type(rule), k))


@pytest.mark.parametrize("rule", [r for r in EVERY if not isinstance(r, SquareRoot)], ids=repr)
def test_on_a_noisy_quadratic_a_growth_keeps_it_on_course(rule: Rule) -> None:
    """Loss w^2 / 2 with gradient noise that a batch averages out: 12 times the batch, with the rule's factor, ends no
    further from the minimum than 3 times the static run's own scatter."""
    rng, mu, eta, dimensions = np.random.default_rng(2), 0.9, 0.005, 2000

    def train(history: list[int]) -> float:
        w, u, memory, last = np.full(dimensions, 1.0), np.zeros(dimensions), rule.begin(), 1.0
        for k in history:
            g = w + rng.normal(size=dimensions) * 3 / math.sqrt(k)
            noise = Noise(variance=9.0 * dimensions * BASE, square=float((g**2).sum()), samples=k * BASE)
            factor, memory = rule.factor(memory, Facts(k=k, base=BASE, momentum=mu, noise=noise))
            if rule.acts_on == "buffer":
                u *= last / factor
            last = factor
            u = mu * u + g
            w -= eta * factor * u
        return float((w**2).mean())

    static = train([1] * 2000)
    assert train([1] * 400 + [12] * 400) < 3 * static


# --- policies --------------------------------------------------------------------------------------------------------


def test_the_batch_follows_the_workers_within_its_bounds() -> None:
    policy = PerWorkerBatch(32, micro=8, min_batch=64, max_batch=100)
    assert [policy.samples(workers) for workers in (1, 2, 3, 4)] == [64, 64, 96, 100]
    assert policy.base == 32
    assert PerWorkerBatch(32, micro=8, base=128).base == 128
    assert [GlobalBatch(96, micro=8).samples(workers) for workers in (1, 12)] == [96, 96]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PerWorkerBatch(0, micro=1), r"PerWorkerBatch\(size=0\)"),
        (lambda: PerWorkerBatch(4, micro=0), "micro=0"),
        (lambda: PerWorkerBatch(4, micro=5), r"size=4.*micro=5"),
        (lambda: PerWorkerBatch(4, micro=2, base=-1), "base=-1"),
        (lambda: PerWorkerBatch(4, micro=2, min_batch=9, max_batch=8), "min_batch=9.*max_batch=8"),
        (lambda: PerWorkerBatch(4, micro=2, max_factor=0), "max_factor=0"),
        (lambda: PerWorkerBatch(4, micro=2, rule="linear"), "rule='linear'.*MomentumCompensation"),  # type: ignore[arg-type]
        (lambda: MomentumCompensation(steps=-1), r"MomentumCompensation\(steps=-1\)"),
        (lambda: SquareRoot(steps=-1), r"SquareRoot\(steps=-1\)"),
        (lambda: AdaScale(memory_steps=0), "memory_steps=0"),
        (lambda: PerWorkerBatch(4, micro=2, rule=MomentumCompensation), r"rule=.*MomentumCompensation\(\)"),  # type: ignore[arg-type]
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()
