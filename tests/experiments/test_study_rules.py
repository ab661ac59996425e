"""The study's own rules, and what its runs write."""

from __future__ import annotations

import torch

from experiments.dynamic_sgd import throughput
from experiments.dynamic_sgd.cases import (
    ADAPTIVE,
    BASE,
    FULL,
    MICRO,
    POLICIES,
    by_samples,
    steps,
)
from experiments.dynamic_sgd.measures import (
    condense,
)
from experiments.dynamic_sgd.rules import RootOfRate, WholeWindow
from farandole.plan.batch import PerWorkerBatch
from farandole.plan.rules import Facts
from farandole.training.learning_rate import LearningRate
from tests.support.walked import walked


def factors(policy: str, history: str) -> list[tuple[int, float]]:
    """(samples seen, factor) of every step, by the product's own arithmetic."""
    batch = POLICIES[policy](BASE, MICRO)
    assert isinstance(batch, PerWorkerBatch)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([weight]) if policy in ADAPTIVE else torch.optim.SGD([weight], lr=1.0, momentum=0.9)
    rates, found = LearningRate(batch, {"optimizer": optimizer}), []
    changes = by_samples(history, FULL.total, 0)
    told = steps(changes, batch, length=FULL.samples, epochs=FULL.epochs)
    for seen, workers, taken in walked(told, policy, FULL.samples, FULL.epochs):
        rates.step_ended(taken, batch.samples(workers), None)
        found.append((seen, rates.factor))
    return found


def test_the_whole_window_is_compensation_up_to_the_first_window_that_is_shorter_than_the_ramp_is_high() -> None:
    """In steps of 384 from 24,000 samples on, 60,000 are preceded by a window of 32."""
    differ = [
        (seen, short, whole)
        for (seen, short), (_, whole) in zip(factors("compensation", "jump12"), factors("whole", "jump12"), strict=True)
        if short != whole
    ]
    assert [seen for seen, _, _ in differ] == [60_000 - 32, 80_000 - 32, 100_000 - 32, 120_000 - 32]
    assert [short for _, short, _ in differ] == [1] * 4
    assert all(whole > 11 for _, _, whole in differ)


def test_half_of_the_square_root_is_its_factor_at_once_and_acts_on_the_rate_alone() -> None:
    assert RootOfRate().factor({}, Facts(k=9, base=32)) == (3, {})
    assert RootOfRate().acts_on == "rate"
    half, whole = factors("halfroot", "updown"), factors("root", "updown")
    assert {factor for _, factor in half} <= {1, 2**0.5, 2, *(factor for _, factor in whole)}
    assert all(ramped <= at_once for (_, at_once), (_, ramped) in zip(half, whole, strict=True))


def test_the_whole_window_remembers_the_largest() -> None:
    rule = WholeWindow()
    memory = rule.begin()
    for k in (1, 4, *[4] * 40):
        _, memory = rule.factor(memory, Facts(k=k, base=32, momentum=0.9))
    assert rule.factor(memory, Facts(k=1, base=32, momentum=0.9))[0] == 4


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
