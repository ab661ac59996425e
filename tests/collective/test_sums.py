"""Sums that are used where their owners made them: for as long as anybody may use them, and whatever a loop does."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeout
from types import ModuleType

import pytest
import torch

from farandole.collective import arena, schedule, shm_sums
from farandole.collective import exchange as buffers
from farandole.collective.arena import Arena
from tests.support import exchanging
from tests.support.exchanging import Worker, on_all, until, workers
from tests.support.planted import planted
from tests.support.sums_in_use import (
    ALL,
    FEW,
    HOSTS,
    copies,
    enter,
    given_up,
    in_use,
    last_to_begin,
    next_view,
    one_shares_none,
    slow_across_views,
    slow_in_one_view,
    slow_over_an_evaluation,
    slow_with_other_buckets,
    too_late,
    written,
)

LIMIT_S = 3.0  # for what takes a hundredth of that


@pytest.mark.parametrize("run", [slow_in_one_view, slow_across_views, slow_over_an_evaluation, slow_with_other_buckets])
def test_a_sum_in_use_stays_as_it_is(run: Callable[[], None]) -> None:
    run()


def test_who_is_given_up_while_it_uses_a_sum_finds_that_it_is_another() -> None:
    given_up()


def test_who_is_given_up_before_it_has_looked_at_the_sums_ends_no_round() -> None:
    too_late()


def test_all_of_a_view_have_one_stamp_and_each_view_another() -> None:
    with workers(3, hosts=HOSTS) as everyone:
        stamps: list[set[int]] = []
        for view in (next_view(1), next_view(2), next_view(2, ("w2", "w1", "w0"))):
            for worker in everyone:
                enter(worker, view, 0)
            stamps.append({worker.exchange._buffers._stamp for worker in everyone})
        assert [len(each) for each in stamps] == [1, 1, 1]
        assert len(set.union(*stamps)) == 3


WRITES = [
    lambda flat: flat.mul_(0.5),
    lambda flat: flat.data.mul_(0.5),
    lambda flat: flat.numpy().__imul__(0.5),
    lambda flat: flat[-1:].fill_(3.0),
]


@pytest.mark.parametrize("write", WRITES, ids=["in place", "data", "numpy", "one element"])
def test_a_loop_that_writes_into_its_gradients_does_so_for_itself(write: Callable[[torch.Tensor], object]) -> None:
    written(write)


@pytest.mark.parametrize(("shards", "most"), [(7, 1), (FEW, 2)], ids=["each has a shard", "one has none"])
def test_a_loop_that_only_reads_has_its_sums_where_they_were_made(shards: int, most: int) -> None:
    with workers(3, hosts=HOSTS) as everyone:
        places: list[set[int]] = [set(), set(), set()]
        for step in range(5):
            on_all(everyone, lambda w, step=step: w.step(step, shards, (ALL,)))
            for worker, known in zip(everyone, places, strict=True):
                known.add(in_use(worker)[0].data_ptr())
        assert not any(copies(worker) for worker in everyone)
        assert [len(known) for known in places] == [most] * 3


@pytest.mark.parametrize("run", [last_to_begin, one_shares_none])
def test_a_place_is_written_again_when_all_have_begun_the_round(run: Callable[[], None]) -> None:
    run()


def test_views_that_come_and_go_use_the_same_memory() -> None:
    with workers(3, hosts=HOSTS) as everyone:
        before: list[int] = []
        for number in range(6):
            on_all(everyone, lambda w, number=number: w.step(number, 7, (ALL,)))
            for worker in everyone:
                enter(worker, next_view(number + 2), number + 1)
            if number == 1:
                gc.collect()
                before = [left(worker) for worker in everyone]
        until(lambda: gc.collect() >= 0 and all(map(int.__ge__, map(left, everyone), before)))


def left(worker: Worker) -> int:
    """Bytes of the worker's segments that nothing takes; those that come back are noticed when something is taken."""
    assert isinstance(worker.memory, Arena)
    worker.memory.empty(1, torch.uint8)
    return sum(stop - start for segment in worker.memory.segments for start, stop in segment.free)


PLANTED = [
    (shm_sums, "            self._turn = 1 - self._turn", "            pass", slow_in_one_view),
    (shm_sums, "        self._begun = True", "        pass", slow_in_one_view),
    (buffers, "(message.landing or isinstance(sum_, InPlace))", "message.landing", one_shares_none),
    (schedule, "self.one_host and all(", "self.one_host and any(", slow_in_one_view),
    (buffers, "                self._memory.rest(each)\n", "                pass\n", slow_across_views),
    (buffers, "        self._buffers.rest()\n", "        pass\n", slow_across_views),
    (buffers, "if round_.ended and round_.is_step", "if True", slow_over_an_evaluation),
    (buffers, "            self.rest()\n", "            pass\n", slow_with_other_buckets),
    (shm_sums, "place.stamp.zero_()", "pass", given_up),
    (shm_sums, "return self.sums_intact", "return True", too_late),
    (buffers, "if message.kind != REDUCED or", "if message.kind == COMMIT or", slow_in_one_view),
    (arena, "            thing.give_back()", "            pass", given_up),
    (shm_sums, "self._arena.copies_sums or self._row.written", "False", lambda: written(WRITES[1])),
    (shm_sums, "(kinds & 1 == 0)", "(kinds & 1 == 9)", lambda: written(WRITES[0])),
    (shm_sums, "mmap.MAP_PRIVATE, memory.file", "mmap.MAP_SHARED, memory.file", lambda: written(WRITES[0])),
]


@pytest.mark.parametrize(("module", "place", "by", "run"), PLANTED, ids=[place.strip() for _, place, *_ in PLANTED])
def test_a_planted_bug_is_caught(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, place: str, by: str, run: Callable[[], None]
) -> None:
    monkeypatch.setattr(exchanging, "DEADLINE_S", LIMIT_S)
    with planted(module, place, by), pytest.raises((AssertionError, FutureTimeout)):
        run()
