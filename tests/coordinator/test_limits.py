"""Limits as arithmetic: what a bucket lets through over any time, and that no event is lost from the counts."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from farandole.coordinator.connection import BURST, RATE
from farandole.coordinator.listener import LINES, WINDOW_S, EventLimiter, TokenBucket

gaps = st.floats(0.0, 10.0)


@given(st.lists(st.tuples(gaps, st.integers(1, 50)), min_size=1, max_size=50))
def test_who_waits_as_told_never_gets_more_than_burst_and_rate(arrivals: list[tuple[float, int]]) -> None:
    """In any span of time, however long it was idle before."""
    bucket, now = TokenBucket(rate=10, burst=100), 0.0
    through: list[tuple[float, float]] = []  # when a span may begin, and what came through before
    total = 0.0
    for gap, cost in arrivals:
        now += gap
        now += bucket.take(cost, now)
        through.append((now, total))
        total += cost
        assert all(total - before <= 100 + 10 * (now - began) + 1e-6 for began, before in through)


def test_who_was_idle_for_a_day_has_its_burst_and_no_more() -> None:
    bucket = TokenBucket(rate=10, burst=100)
    assert bucket.take(100, 0.0) == 0.0
    assert bucket.take(100, 86_400.0) == 0.0
    assert bucket.take(5, 86_400.0) == 0.5


def test_an_honest_worker_is_never_slowed() -> None:
    """The worst of them: back from an outage with all its lines, then in view after view of 64 with its keys, while it
    beats twice a second. A view takes a second at the least (the joiners start processes)."""
    bucket, now = TokenBucket(RATE, BURST), 0.0
    assert bucket.take(1 + 4 * 1024 * 1024 // 4096, now) == 0.0
    for _ in range(100):
        waits = [bucket.take(1, now) for _ in range(3 * 64)]
        waits += [bucket.take(1, now + 0.5), bucket.take(1, now + 1.0)]
        assert not any(waits)
        now += 1.0


def test_of_what_never_stops_each_window_has_a_few_lines_and_the_number_of_the_others() -> None:
    sparing = EventLimiter()
    lines: Counter[int] = Counter()
    counts: list[dict[str, int]] = []
    for second in range(10 * int(WINDOW_S)):
        counts += filter(None, [sparing.take_unrecorded(float(second))])
        lines[second // int(WINDOW_S)] += sparing.admit("a")
    assert lines == dict.fromkeys(range(10), LINES)
    assert counts == [{"a": int(WINDOW_S) - LINES}] * 9


@given(st.lists(st.tuples(gaps, st.sampled_from("ab")), max_size=200))
def test_lines_and_counts_add_up_to_everything(events: list[tuple[float, str]]) -> None:
    sparing, now = EventLimiter(), 1000.0
    sparing.take_unrecorded(now)
    happened: Counter[str] = Counter()
    told: Counter[str] = Counter()
    lines: list[tuple[float, str]] = []
    for gap, kind in events:
        now += gap
        told.update(sparing.take_unrecorded(now))
        happened[kind] += 1
        if sparing.admit(kind):
            told[kind] += 1
            lines.append((now, kind))
    told.update(sparing.take_unrecorded(math.inf))
    assert told == happened
    for at, kind in lines:
        assert sum(1 for other, k in lines if k == kind and at <= other < at + WINDOW_S) <= 2 * LINES
