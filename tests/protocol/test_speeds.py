"""Speeds: what the heartbeats tell, when other shares are worth proposing, and that they do not go to and fro."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.plan.shards import split
from farandole.protocol.coordinator.state import RELEGATION_WINDOWS, WINDOW, Speeds, shares_for, stragglers
from farandole.protocol.messages import Heartbeat
from farandole.protocol.view import View

NAMES = tuple("abcdefgh")
Measure = Callable[[int, int], int]  # (worker, its shards) to the µs that one of them takes


class Fleet:
    """Workers under a `Speeds`, whose proposals come into force at once. `measure` gives each heartbeat's figure."""

    def __init__(self, workers: int, shards: int, measure: Measure) -> None:
        self.speeds = Speeds()
        self.shards = shards
        self.measure = measure
        self.view = View(number=1, members=NAMES[:workers], group=1)
        self.changes: list[int] = []  # the windows at whose end the shares changed
        self.windows = 0

    @property
    def counts(self) -> list[int]:
        return split(self.shards, self.view.size, self.view.shares)

    def run(self, windows: int) -> Fleet:
        for _ in range(windows):
            for _ in range(WINDOW):
                self.beat()
            self.windows += 1
            shares = self.speeds.due(self.view)
            assert self.speeds.due(self.view) is None, "a window is judged once"
            if shares is not None:
                self.changes.append(self.windows)
                self.put(self.view.members, shares)
        return self

    def beat(self, **fields: int) -> None:
        for rank, (worker, count) in enumerate(zip(self.view.members, self.counts, strict=True)):
            us = self.measure(rank, count) if count else 0
            values = {"view": self.view.number, "shard_us": us, "shards": count, "shards_total": self.shards, **fields}
            self.speeds.heard(worker, Heartbeat(**values), self.view)

    def put(self, members: tuple[str, ...], shares: tuple[int, ...]) -> None:
        self.view = View(number=self.view.number + 1, members=members, group=1, shares=shares)


def steady(*times: int) -> Measure:
    return lambda rank, _: times[rank]


def test_half_a_core_gets_half_the_work() -> None:
    fleet = Fleet(2, 15, steady(10_000, 20_000)).run(1)
    assert fleet.view.shares == (1000, 500)
    assert fleet.counts == [10, 5]
    assert fleet.run(200).changes == [1], "once, and no more"
    assert fleet.speeds.relative() == {"a": 1.0, "b": 0.5}
    assert stragglers(fleet.speeds.relative()) == {"b": 0.5}


@pytest.mark.parametrize(
    ("shards", "times", "counts", "remark"),
    [
        (16, (100, 100), [8, 8], "equal"),
        (16, (100, 110), [8, 8], "a tenth slower: 8.8 against 8.8 with one moved"),
        (16, (100, 150), [10, 6], "half as slow again"),
        (2, (100, 190), [1, 1], "two shards can't be dealt better"),
        (2, (100, 250), [1, 1], "not even here, since both are to be measured"),
        (3, (100, 250, 100, 100), [1, 0, 1, 1], "fewer shards than workers: the slow one gets none"),
        (64, (100, 100, 100, 400), [20, 20, 19, 5], "one of four at a quarter"),
        (1000, (1, 1_000_000), [999, 1], "share 1 is the least"),
    ],
)
def test_shares_that_are_worth_it(shards: int, times: tuple[int, ...], counts: list[int], remark: str) -> None:
    fleet = Fleet(len(times), shards, steady(*times)).run(40)
    assert fleet.counts == counts, remark
    assert len(fleet.changes) <= 1


def test_who_has_no_shards_any_more_holds_nobody_up() -> None:
    fleet = Fleet(4, 3, steady(100, 250, 100, 100)).run(1)
    assert fleet.counts == [1, 0, 1, 1]
    fleet.measure = steady(600, 250, 100, 100)
    assert fleet.run(1).counts == [0, 1, 1, 1], "its last figures count"


def test_a_worker_that_was_never_measured_counts_as_the_others_median() -> None:
    assert Fleet(5, 4, steady(100, 100, 300, 100, 100)).counts == [0, 1, 1, 1, 1]
    assert Fleet(5, 4, steady(0, 100, 300, 100, 100)).run(1).counts == [1, 1, 0, 1, 1]


def test_a_window_needs_figures_of_everyone_and_of_this_view() -> None:
    fleet = Fleet(2, 16, steady(100, 200))
    for _ in range(WINDOW - 1):
        fleet.beat()
    assert fleet.speeds.due(fleet.view) is None
    fleet.beat(view=7)
    fleet.beat(shard_us=0)
    assert fleet.speeds.due(fleet.view) is None, "of another view, and without a shard"
    fleet.put(fleet.view.members, ())
    fleet.beat()
    assert fleet.speeds.due(fleet.view) is None, "a new view begins a new window"
    for _ in range(WINDOW - 1):
        fleet.beat()
    assert fleet.speeds.due(fleet.view) == (1000, 500)


def test_a_worker_that_has_recovered_gets_its_shards_back_after_its_patience() -> None:
    fleet = Fleet(2, 16, steady(100, 200)).run(1)
    assert fleet.counts == [11, 5]
    fleet.measure = steady(100, 100)
    assert fleet.run(RELEGATION_WINDOWS).counts == [11, 5]
    assert fleet.run(1).counts == [8, 8]
    assert len(fleet.changes) == 2


def test_who_leaves_is_forgotten() -> None:
    fleet = Fleet(3, 16, steady(100, 200, 100)).run(1)
    fleet.put(("a", "c"), ())
    fleet.measure = steady(100, 100)
    assert fleet.run(1).speeds.relative() == {"a": 1.0, "c": 1.0}
    assert fleet.changes == [1]


# --- no going to and fro ---------------------------------------------------------------------------------------


def jitter(rng: random.Random, spread: float) -> Callable[[int], int]:
    return lambda us: max(1, round(us * rng.lognormvariate(0, spread)))


def outliers(rng: random.Random, often: float) -> Callable[[int], int]:
    """A pause now and then, many times as long as a shard."""
    return lambda us: us * 30 if rng.random() < often else us


def two_speeds(rng: random.Random, often: float) -> Callable[[int], int]:
    """A neighbour that takes the core for half of the heartbeats."""
    return lambda us: 2 * us if rng.random() < often else us


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("kind", "size"), [(jitter, 0.1), (jitter, 0.3), (jitter, 1.0), (outliers, 0.15), (two_speeds, 0.5)]
)
@pytest.mark.parametrize("times", [(100, 100), (100, 200), (100, 150, 120), (100,) * 6 + (150, 300)])
def test_noise_does_not_move_shards_to_and_fro(
    times: tuple[int, ...], kind: Callable[[random.Random, float], Callable[[int], int]], size: float, seed: int
) -> None:
    """Five hundred windows are more than an hour. One change, to what is there, or none, where nothing is plain."""
    noise = kind(random.Random(seed), size)
    fleet = Fleet(len(times), 16 * len(times), lambda rank, _: noise(1000 * times[rank])).run(500)
    assert len(fleet.changes) <= 1


def quota(full_us: int, quota: float, others_us: int) -> Callable[[int, int, int], int]:
    """A shard's time on a host that may compute for `quota` of the time, and does so at full speed until then.

    Within a step, which takes as long as the slower of the two, there is time for so many shards at full speed.
    """

    def shard_us(rank: int, count: int, shards: int) -> int:
        if rank == 0:
            return others_us
        free = quota * others_us * (shards - count) / full_us
        return full_us if count <= free else round(full_us / quota)

    return shard_us


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
@pytest.mark.parametrize("shards", [16, 40])
def test_a_quota_that_does_not_show_while_there_is_little_to_do(share: float, shards: int) -> None:
    """Relieved, it looks as fast as its peer. Given its shards back, it is slow again: ever less often."""
    host = quota(1000, share, 1000)
    fleet = Fleet(2, shards, lambda rank, count: host(rank, count, shards))
    relieved = 0
    for _ in range(4000):
        fleet.run(1)
        relieved += fleet.counts[1] < shards // 2
    assert relieved > 0.98 * 4000
    assert len(fleet.changes) <= 26, "it doubles seven times, up to an hour, and there are six hours more"


@given(st.lists(st.floats(1.0, 1e9), min_size=1, max_size=9))
def test_shares_are_in_bounds(times: Sequence[float]) -> None:
    shares = shares_for(times)
    assert not shares or (max(shares) == 1000 and min(shares) >= 1 and len(shares) == len(times))
