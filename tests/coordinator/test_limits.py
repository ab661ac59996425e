"""Limits as arithmetic: what a bucket lets through over any time, and that no event is lost from the counts."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from farandole.coordinator.connection import BURST, RATE
from farandole.coordinator.limits import LINES, WINDOW_S, Bucket, Sparing

gaps = st.floats(0.0, 10.0)


@given(st.lists(st.tuples(gaps, st.integers(1, 50)), min_size=1, max_size=50))
def test_who_waits_as_told_never_gets_more_than_burst_and_rate(arrivals: list[tuple[float, int]]) -> None:
    bucket, now, through = Bucket(rate=10, burst=100), 0.0, 0.0
    for gap, cost in arrivals:
        now += gap
        now += bucket.take(cost, now)
        through += cost
        assert through <= 100 + 10 * now + 1e-6


def test_an_honest_worker_is_never_slowed() -> None:
    """The worst of them: back from an outage with all its lines, then in view after view of 64 with its keys, while it
    beats twice a second. A view takes a second at the least (the joiners start processes)."""
    bucket, now = Bucket(RATE, BURST), 0.0
    assert bucket.take(1 + 4 * 1024 * 1024 // 4096, now) == 0.0
    for _ in range(100):
        waits = [bucket.take(1, now) for _ in range(3 * 64)]
        waits += [bucket.take(1, now + 0.5), bucket.take(1, now + 1.0)]
        assert not any(waits)
        now += 1.0


@given(st.lists(st.tuples(gaps, st.sampled_from("ab")), max_size=200))
def test_lines_and_counts_add_up_to_everything(events: list[tuple[float, str]]) -> None:
    sparing, now = Sparing(), 1000.0
    sparing.due(now)
    happened: Counter[str] = Counter()
    told: Counter[str] = Counter()
    lines: list[tuple[float, str]] = []
    for gap, kind in events:
        now += gap
        told.update(sparing.due(now))
        happened[kind] += 1
        if sparing.admit(kind):
            told[kind] += 1
            lines.append((now, kind))
    told.update(sparing.due(math.inf))
    assert told == happened
    for at, kind in lines:
        assert sum(1 for other, k in lines if k == kind and at <= other < at + WINDOW_S) <= 2 * LINES
