"""How long a worker may be silent: properties of the judge, and recorded pauses of a busy machine."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.protocol.failure_detector import (
    DAY_S,
    FACTOR,
    FLOOR_S,
    HALF_LIFE_S,
    OWN_PAUSE_S,
    STOCK,
    FailureDetector,
    Silence,
)
from tests.support.record_silences import Recorded

RECORDED = Path(__file__).with_name("silences.json")
BEAT_S, CEILING_S, TICK_S = 0.5, 5.0, 0.1
SHORTEST_S = BEAT_S + FLOOR_S


class Watched:
    """The judge of some workers, who beat as they are told."""

    def __init__(self, workers: int, beat_s: float = BEAT_S) -> None:
        self.judge = FailureDetector(beat_s, CEILING_S)
        self.now = 0.0
        self.silences = [Silence() for _ in range(workers)]
        for silence in self.silences:
            self.judge.begin(silence, 0.0)
            self.judge.hear(silence, 0.0, learns=True)

    def tick(self, *, steady: bool = True) -> dict[int, float]:
        """Who has passed which limit."""
        self.judge.tick(self.now, self.silences)
        passed = {i: self.judge.passed_s(silence, steady=steady) for i, silence in enumerate(self.silences)}
        return {i: limit for i, limit in passed.items() if limit}

    def beat(self, *workers: int) -> None:
        for worker in workers:
            self.judge.hear(self.silences[worker], self.now, learns=True)

    def run(self, seconds: float, *alive: int) -> dict[int, float]:
        """Those beat on time. Returns the first limit that each has passed."""
        first: dict[int, float] = {}
        for tick in range(1, round(seconds / TICK_S) + 1):
            self.now += TICK_S
            if tick % round(BEAT_S / TICK_S) == 0:
                self.beat(*alive)
            first = self.tick() | first
        return first


# --- always ------------------------------------------------------------------------------------------------------


@given(
    workers=st.integers(1, 4),
    inputs=st.lists(st.tuples(st.floats(0.0, 9.0), st.integers(-1, 3), st.booleans()), max_size=80),
)
def test_never_before_the_floor_nor_after_the_ceiling(workers: int, inputs: list[tuple[float, int, bool]]) -> None:
    watched = Watched(workers)
    for seconds, worker, steady in inputs:
        watched.now += seconds
        if 0 <= worker < workers:
            watched.beat(worker)
        passed = watched.tick(steady=steady)
        for i, silence in enumerate(watched.silences):
            lasts = watched.judge.lasts_s(silence)
            assert i not in passed or SHORTEST_S <= passed[i] < lasts
            assert i in passed or lasts <= CEILING_S
            assert i not in passed or steady or passed[i] == CEILING_S
            assert SHORTEST_S <= watched.judge.limit_s(silence) <= CEILING_S


@given(st.lists(st.floats(0.0, FLOOR_S - 0.01), max_size=50), st.integers(1, 5))
def test_whoever_stands_still_for_less_than_the_floor_is_never_suspected(lates: list[float], workers: int) -> None:
    watched = Watched(workers)
    for late in lates:
        for _ in range(int((BEAT_S + late) / TICK_S)):
            watched.now += TICK_S
            watched.beat(*range(1, workers))
            assert not watched.tick()
        watched.beat(0)


@given(st.lists(st.tuples(st.floats(0.0, 60.0), st.floats(0.0, OWN_PAUSE_S)), max_size=20), st.booleans())
def test_a_coordinator_that_stands_still_suspects_nobody(pauses: list[tuple[float, float]], read_first: bool) -> None:
    """What they sent meanwhile is read before its first tick, or soon after it. Next to nothing is learned from it."""
    watched = Watched(3)
    for pause, runs in pauses:
        watched.now += pause
        if read_first:
            watched.beat(0, 1, 2)
        assert not watched.tick()
        watched.now += runs
        watched.beat(0, 1, 2)
        assert not watched.tick()
    assert watched.judge.limit_s(watched.silences[0]) <= BEAT_S + FACTOR * (2 * OWN_PAUSE_S - BEAT_S)


def test_a_coordinator_that_always_comes_late_goes_by_the_ceiling() -> None:
    watched = Watched(2)
    gone = 0.0
    while not (passed := watched.tick()):
        watched.now += OWN_PAUSE_S + 0.3
        gone += OWN_PAUSE_S
        watched.beat(1)
    assert passed == {0: CEILING_S}
    assert gone <= CEILING_S + 2 * OWN_PAUSE_S


# --- what is usual -----------------------------------------------------------------------------------------------


def test_where_heartbeats_are_on_time_one_that_falls_silent_is_suspected_after_the_floor() -> None:
    watched = Watched(3)
    assert watched.run(60.0, 0, 1, 2) == {}
    assert watched.run(SHORTEST_S - 0.1, 1, 2) == {}
    assert watched.run(0.3, 1, 2) == {0: SHORTEST_S}


def test_who_is_often_late_has_more_time_and_so_have_all_where_most_are() -> None:
    watched = Watched(3)
    late = 0.8
    watched.run(0.4, 0, 1, 2)
    watched.now += 0.4
    watched.judge.passes(watched.now)
    watched.now += BEAT_S
    watched.beat(0)
    own, other = (watched.judge.limit_s(watched.silences[i]) for i in (0, 1))
    assert own == pytest.approx(BEAT_S + FACTOR * late)
    assert other == SHORTEST_S, "one of three says nothing of the rest"
    watched.beat(1)
    assert watched.judge.limit_s(watched.silences[2]) == pytest.approx(own), "two of three do"
    watched.beat(2)
    watched.run(HALF_LIFE_S, 0, 1, 2)
    assert watched.judge.limit_s(watched.silences[0]) == pytest.approx(BEAT_S + FACTOR * late / 2, abs=0.05)
    watched.run(2 * HALF_LIFE_S, 0, 1, 2)
    assert watched.judge.limit_s(watched.silences[0]) == SHORTEST_S


def test_what_silences_most_of_them_at_once_is_none_of_them() -> None:
    watched = Watched(4)
    watched.run(10.0, 0, 1, 2, 3)
    assert watched.run(CEILING_S - 0.2, 3) == {}
    watched.run(0.5, 0, 1, 2, 3)
    watched.run(20 * HALF_LIFE_S, 0, 1, 2, 3)
    assert watched.run(3.0, 2, 3) == {0: SHORTEST_S, 1: SHORTEST_S}, "of a host, say, with half of the workers"


def test_false_suspicions_are_bounded_by_a_stock() -> None:
    watched = Watched(4)
    early = 0
    for _ in range(STOCK + 3):
        passed = watched.run(CEILING_S + 1.0, 1, 2, 3)
        early += passed == {0: SHORTEST_S}
        watched.silences[0] = Silence()  # another one in its place, of which nothing is known
        watched.judge.begin(watched.silences[0], watched.now)
        watched.beat(0)
    assert early == STOCK
    assert watched.run(CEILING_S + 1.0, 1, 2, 3) == {0: CEILING_S}
    watched.beat(0)
    watched.silences[0].late_s = 0.0
    watched.judge.time += DAY_S / 4
    for silence in watched.silences:
        silence.since = watched.judge.time
    assert watched.run(CEILING_S + 1.0, 1, 2, 3) == {0: SHORTEST_S}, "one a worker-day"


# --- recorded pauses ---------------------------------------------------------------------------------------------


def inputs(recorded: Recorded) -> Iterator[tuple[float, int]]:
    """Arrivals by worker, and ticks, -1, in order of time in seconds."""
    arrivals = [[(at / 1000, i) for at in accumulate(gaps)] for i, gaps in enumerate(recorded.gaps)]
    long, ticks, at, until = dict(recorded.long_ticks), list[tuple[float, int]](), 0, max(a[-1][0] for a in arrivals)
    began = sorted(long)
    while at < 1000 * until:
        if began and began[0] < at + recorded.tick_ms:
            at = max(at, began[0]) + long[began.pop(0)]
        else:
            at += recorded.tick_ms
        ticks.append((at / 1000, -1))
    return heapq.merge(*arrivals, ticks)


def test_recorded_pauses_of_a_busy_machine() -> None:
    """`tests/support/record_silences.py` says how they were made. Observed, not bounded: none of these workers is
    suspected, although each is taken to be waited for at any time. It takes a lateness of a third of the floor for
    the limit to rise at all.
    """
    recorded = Recorded.load(RECORDED)
    watched = Watched(len(recorded.gaps), recorded.heartbeat_ms / 1000)
    suspected: Counter[int] = Counter()
    highest = 0.0
    for watched.now, worker in inputs(recorded):
        if worker >= 0:
            watched.beat(worker)
        else:
            suspected.update(watched.tick())
            highest = max(highest, *map(watched.judge.limit_s, watched.silences))
    worker_days = sum(map(sum, recorded.gaps)) / 1000 / DAY_S
    print(f"{len(suspected)} false suspicions in {worker_days:.3f} worker-days; the highest limit was {highest:.2f} s")
    assert not suspected
    assert worker_days > 0.03


def test_the_same_pauses_with_a_frozen_worker_among_them() -> None:
    recorded = Recorded.load(RECORDED)
    watched = Watched(len(recorded.gaps), recorded.heartbeat_ms / 1000)
    frozen_at, passed = 60.0, dict[int, float]()
    for watched.now, worker in inputs(recorded):
        if worker > 0 or (worker == 0 and watched.now < frozen_at):
            watched.beat(worker)
        elif worker < 0 and (passed := watched.tick()):
            break
    assert list(passed) == [0]
    assert passed[0] < CEILING_S / 2
