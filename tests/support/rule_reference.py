"""What every rule gives, step by step, by hand: for the shipped rules, and for those with a bug planted in them.

A row is a history of batches, told in k, with what the shards show of the noise in each step, and the factors that the
equation in the rule's docstring gives. `rules` is `farandole.plan.rules`, or a copy of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

BASE = 32
Noises = Sequence[tuple[float, float] | None]  # (variance of a sample, squared norm of the true gradient)


def factors(
    rules: ModuleType, rule: Any, history: Sequence[float], noises: Noises | None = None, momentum: float = 0.9
) -> list[float]:
    memory, found = rule.begin(), []
    for k, noise in zip(history, noises or [None] * len(history), strict=True):
        facts = rules.Facts(k=k, base=BASE, momentum=momentum, noise=noise and shown(rules, k, *noise))
        factor, memory = rule.factor(memory, facts)
        found.append(factor)
    return found


def shown(rules: ModuleType, k: float, variance: float, square: float) -> Any:
    """What shards show on average, of a batch of k bases."""
    samples = round(k * BASE)
    return rules.Noise(variance=variance, square=square + variance / samples, samples=samples)


def ada(variance: float, square: float, k: float) -> float:
    """AdaScale's gain. `variance`: of a base batch."""
    return (variance + square) / (variance / k + square)


Row = tuple[str, Callable[[ModuleType], list[float]], list[float]]


def rows() -> Iterator[Row]:
    def compensation(history: list[float], expected: list[float], remark: str, **options: Any) -> Row:
        momentum = options.pop("momentum", 0.9)
        return (
            remark,
            lambda rules: factors(rules, rules.MomentumCompensation(**options), history, momentum=momentum),
            expected,
        )

    def adascale(history: list[float], noises: Noises, expected: list[float], remark: str, **options: Any) -> Row:
        return remark, lambda rules: factors(rules, rules.AdaScale(**options), history, noises), expected

    one, four = 1.0 * BASE, 4.0 * BASE
    yield (
        "linear: at once, both ways",
        lambda rules: factors(rules, rules.LinearScaling(), [1, 1, 4, 4, 2]),
        [1, 1, 4, 4, 2],
    )
    yield (
        "buffer: the rest is the optimizer's part",
        lambda rules: factors(rules, rules.RateInBuffer(), [1, 4, 2]),
        [1, 4, 2],
    )
    yield (
        "root: of k as the ramp has it",
        lambda rules: factors(rules, rules.SquareRoot(steps=1), [1, 4, 4, 4, 4, 4, 1, 0.25]),
        [1, 1, 1.75**0.5, 2.5**0.5, 3.25**0.5, 2, 1, 0.5],
    )
    yield (
        "root: a beta1 of 0.9 is 8 steps times the growth",
        lambda rules: factors(rules, rules.SquareRoot(), [1, 2, 2]),
        [1, 1, (1 + 1 / 16) ** 0.5],
    )
    yield compensation([1, 2, 2, 2, 2, 2], [1, 1, 1.25, 1.5, 1.75, 2], "1 to 2 in 2 * 2 steps", steps=2)
    yield compensation([1, 4, 4, 4, 4, 4], [1, 1, 1.75, 2.5, 3.25, 4], "1 to 4 in 4 steps", steps=1)
    yield compensation([4, 4, 4, 4, 4, 1], [1, 1.75, 2.5, 3.25, 4, 1], "the first size is a change from 1", steps=1)
    yield compensation([0.5, 0.5, 1, 1], [0.5, 0.5, 0.5, 0.75], "a first size below the base is at once", steps=1)
    yield compensation([1, 4, 4, 3, 3, 3], [1, 1, 1.75, 2.5, 2.5 + 0.5 / 1.2, 3], "from what is in force", steps=1)
    yield compensation([2, 2, 4, 4, 4], [1, 1.5, 2, 3, 4], "the ratio counts: 2 to 4 in 2 steps", steps=1)
    yield compensation([1, 4, 4, 4, 2], [1, 1, 1.75, 2.5, 2], "a shrink below what is in force", steps=1)
    yield compensation([1, 4, 2], [1, 4, 2], "no steps: linear scaling", steps=0)
    yield compensation([1, 2, 2, 2], [1, 1, 1 + 1 / 16, 1 + 2 / 16], "0.8 / (1 - 0.9) is 8 steps times the growth")
    yield compensation([1, 2, 2, 2], [1, 1, 1 + 1 / 160, 1 + 2 / 160], "a momentum of 0.99 is 80 steps", momentum=0.99)
    yield compensation([1, 2, 2, 2], [1, 1, 1.625, 2], "no momentum: 0.8 steps", momentum=0.0)
    yield adascale([1, 4, 2], [None] * 3, [1, 1, 1], "nothing measured: no gain")
    yield adascale(
        [4, 4, 4],
        [(3 * one, 1.0), (math.inf, 1.0), (math.nan, math.nan)],
        [ada(3, 1, 4)] * 3,
        "what is no number is not measured",
    )
    yield adascale([4], [(3 * one, 1.0)], [ada(3, 1, 4)], "3 a base batch and 1: 16 / 7")
    yield adascale([4], [(0.0, 2.0)], [1], "no noise")
    yield adascale([4], [(1e12, 2.0)], [4], "nothing but noise")
    yield adascale([4], [(one, -1.0)], [4], "a gradient that is smaller than its own noise")
    yield adascale(
        [1, 1, 4], [(8 * one, 1.0), (one, 4.0), None], [1, 1, ada(4.5, 2.5, 4)], "the first two: plain means"
    )
    yield adascale(
        [4, 4, 4],
        [(8 * one, 1.0), (2 * one, 3.0), (four, 3.0)],
        [ada(8, 1, 4), ada(5, 2, 4), ada(5 + 0.4 * (4 - 5), 2 + 0.4 * (3 - 2), 4)],
        "from step 10 / 4 on with 4 / 10 for the newest",
        memory_steps=10,
    )
    yield adascale([20, 20], [(one, 1.0), (four, 2.0)], [ada(1, 1, 20), ada(4, 2, 20)], "never over 1", memory_steps=10)
    yield (
        "noise: three shards of 2 samples",
        lambda rules: [vars(rules.Noise.estimate(squares=30.0, square=4.0, samples=6, shards=3))["variance"]],
        [3.0],
    )
    yield (
        "noise: never below nothing",
        lambda rules: [vars(rules.Noise.estimate(squares=20.0, square=4.0, samples=6, shards=3))["variance"]],
        [0.0],
    )


ROWS = list(rows())


def wrong(rules: ModuleType) -> list[str]:
    """The rows that do not hold."""
    found: list[str] = []
    for remark, compute, expected in ROWS:
        try:
            values = compute(rules)
            holds = len(values) == len(expected) and all(map(_close, values, expected))
        except Exception:  # noqa: BLE001  a planted bug may raise whatever it likes
            holds = False
        if not holds:
            found.append(remark)
    return found


def _close(found: float, expected: float) -> bool:
    return math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-12)
