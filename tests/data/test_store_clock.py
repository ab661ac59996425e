"""The clock of those who make samples: phases that add up, requests of any thread, and what comes home of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from farandole.data import object_store
from farandole.data.loader import Key, Loader
from farandole.data.object_store import Making, Makings
from farandole.plan.batch import GlobalBatch

KEYS = [Key(epoch=0, step=n, shard=0, start=4 * n, stop=4 * n + 4) for n in range(4)]


class Now:
    def __init__(self) -> None:
        self.now = 5.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Iterator[Now]:
    monkeypatch.setattr(object_store, "_clock", None)  # put back at the end
    clock = Now()
    object_store.start(clock)
    return clock


def test_the_innermost_phase_counts_and_all_add_up(now: Now) -> None:
    now.now += 100  # before anything is made
    with object_store.making():
        now.now += 1
        with object_store.time_reading():
            now.now += 2
            with object_store.fetching():
                now.now += 4
            now.now += 8
        now.now += 16
        with object_store.collating():
            now.now += 32
    now.now += 100
    found = object_store.take(3)
    assert found == Making(samples=3, computing=17, reading=10, fetching=4, collating=32)
    assert found.seconds == 63
    assert object_store.take(0) == Making(), "what was taken is gone"


def test_who_raises_within_a_phase_leaves_it(now: Now) -> None:
    def fail() -> None:
        with object_store.making(), object_store.fetching():
            now.now += 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    now.now += 100
    with object_store.making():
        now.now += 2
    assert object_store.take(1) == Making(samples=1, fetching=1, computing=2)


def test_another_thread_has_no_phase_but_its_requests_count(now: Now) -> None:
    def ahead() -> None:
        with object_store.fetching(), object_store.request("s3://a/b") as request:
            now.now += 1
            request.bytes = 7

    with object_store.making():
        thread = threading.Thread(target=ahead)
        thread.start()
        thread.join()
    found = object_store.take(1)
    assert (found.fetching, found.computing) == (0, 1)
    assert (found.requests, found.bytes, found.url) == (1, 7, "s3://a/b")


def test_nothing_is_counted_where_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "_clock", None)
    with object_store.time_reading(), object_store.fetching(), object_store.request("x") as request:
        request.bytes = 1
    object_store.start()
    assert object_store.take(0) == Making()


def test_who_waited_for_the_store_is_summed_apart() -> None:
    waited, not_waited = Making(samples=2, fetching=1, computing=3), Making(samples=5, computing=4)
    both = Makings().plus(waited).plus(not_waited).plus(waited)
    assert both == Makings(cold=Making(samples=4, fetching=2, computing=6), warm=not_waited)
    assert both.plus(both).warm.samples == 10


class Stored(Dataset[torch.Tensor]):
    """Each sample is a request of 10 bytes; samples from 8 on are there already."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        with object_store.time_reading():
            if index < 8:
                with object_store.fetching(), object_store.request(f"s3://{index}") as request:
                    request.bytes = 10
        return torch.full((1000,), index)


@pytest.mark.processes
@pytest.mark.parametrize(
    "options",
    [{"num_workers": 0}, {}, pytest.param({"multiprocessing_context": "spawn"}, marks=pytest.mark.long)],
    ids=["here", "forked", "spawned"],
)
def test_it_comes_home_with_each_micro_batch(
    make: Callable[..., Loader], monkeypatch: pytest.MonkeyPatch, options: dict[str, object]
) -> None:
    monkeypatch.setattr(object_store, "_clock", None)
    plain = [batch.clone() for batch in _all(make(Stored(), GlobalBatch(4, micro=4), shuffle=False, **options))]
    loader = make(Stored(), GlobalBatch(4, micro=4), shuffle=False, **options)
    loader.measure(Direct(), making=True)
    assert all(torch.equal(a, b) for a, b in zip(_all(loader), plain, strict=True)), "the same samples"
    cold, warm = loader.making.cold, loader.making.warm
    assert (cold.samples, cold.requests, cold.bytes, warm.samples, warm.requests) == (8, 8, 80, 8, 0)
    assert warm.fetching == 0
    for each in (cold, warm):
        assert min(each.reading, each.computing, each.collating, each.handing_over) > 0


class Direct:
    """A hook that fetches what it is asked for."""

    def fetch(self, key: Key, direct: Callable[[Key], Any]) -> Any:
        return direct(key)


def _all(loader: Loader) -> Iterator[torch.Tensor]:
    loader.expect(KEYS)
    for key in KEYS:
        yield loader.fetch(key)
