"""A history of workers, step by step, as the study walks it."""

from __future__ import annotations

from experiments.dynamic_sgd.cases import (
    BASE,
    MICRO,
    POLICIES,
)
from farandole.plan.shards import History


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
