"""Adam and RMSprop with a batch that changes, by their papers' definitions, one weight and no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

GRADIENTS = [1.0, -0.5, 2.0, 1.0, 3.0, 1.0, -2.0, 0.25, 1.5, -1.0]
RATE, EPS, DECAY = 0.1, 1e-2, 0.3


def adam(ks: Sequence[float], *, decoupled: bool, amsgrad: bool, gradients: Sequence[float] = GRADIENTS) -> list[float]:
    """By the paper's definition, and v made up for where it is of larger batches than this one."""
    weight, m, v, left1, left2, highest = 1.0, 0.0, 0.0, 1.0, 1.0, 0.0
    found: list[float] = []
    for number, (k, gradient) in enumerate(zip(ks, gradients, strict=True)):
        lacks = lacking(ks[:number], k, 0.99)
        b1, b2 = max(1 - k * (1 - 0.9), 0.0), 1 - k * (1 - 0.99)
        if decoupled:
            weight *= 1 - k * RATE * DECAY
        v, highest = v * lacks, highest * lacks
        m, v = b1 * m + (1 - b1) * gradient, b2 * v + (1 - b2) * gradient**2
        left1, left2, highest = left1 * b1, left2 * b2, max(highest, v)
        used = highest if amsgrad else v
        weight -= math.sqrt(k) * RATE * (m / (1 - left1)) / (math.sqrt(used / (1 - left2)) + EPS / math.sqrt(k))
        found.append(weight)
    return found


def lacking(past: Sequence[float], k: float, beta: float) -> float:
    """What v is to be multiplied by: from the share that each square has in it, after it was multiplied before."""
    shares: list[float] = []  # of v
    units: list[float] = []  # 1 / the k that each square now stands for
    for number, each in enumerate(past):
        lacks = lacking(past[:number], each, beta)
        shares = [share * (1 - each * (1 - beta)) for share in shares] + [each * (1 - beta)]
        units = [unit * lacks for unit in units] + [1 / each]
    if not past:
        return 1.0
    mean = sum(map(math.prod, zip(shares, units, strict=True))) / sum(shares)
    return max(1 / k / mean, 1.0)


def rmsprop(ks: Sequence[float]) -> list[float]:
    weight, v, found = 1.0, 0.0, []
    for number, (k, gradient) in enumerate(zip(ks, GRADIENTS, strict=True)):
        alpha = 1 - k * (1 - 0.99)
        v = lacking(ks[:number], k, 0.99) * v
        v = alpha * v + (1 - alpha) * gradient**2
        weight -= math.sqrt(k) * RATE * gradient / (math.sqrt(v) + EPS / math.sqrt(k))
        found.append(weight)
    return found
