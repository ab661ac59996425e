"""Sums that are used where their owners have made them: for as long as anybody may use them, and whatever a loop does.

Workers are threads that share memory. Where one is slow, the others come as far as they can without it.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeout
from types import ModuleType

import pytest
import torch

from farandole.collective import arena, buffers, exchange, routes, row, sums
from farandole.collective.arena import Arena
from farandole.collective.buckets import Layout
from farandole.collective.partials import Partials
from farandole.membership.view import Lineage, View
from tests.support import exchanging
from tests.support.exchanging import LANES, Worker, assert_same, expected, on_all, until, workers
from tests.support.linking import Gated
from tests.support.planted import planted

HOSTS = "aaa"
LIMIT_S = 3.0  # for what takes a hundredth of that
ALL = ("w0", "w1", "w2")
FEW = 2  # shards: the first worker has none, so nobody needs it before the gather


def far_as_they_come(everyone: list[Worker], step: int) -> None:
    """The others begin a round in which the first, which has no shard, does not take part yet."""

    def begin(worker: Worker) -> None:
        worker.done = set()
        worker.partials.begin(FEW)
        worker.begin(step, FEW, (ALL,))
        gc.collect()
        worker.compute(step)
        until(lambda: (worker.exchange.waiting_for or ("", 0))[0] == "w0")

    on_all(everyone[1:], begin)


def catch_up(everyone: list[Worker], step: int) -> list[object]:
    """The first one comes, and the round ends."""

    def end(worker: Worker) -> list[torch.Tensor]:
        if worker is everyone[0]:
            return worker.step(step, FEW, (ALL,))
        worker.agreement.until(lambda: worker.exchange.ended)
        return [flat.clone() for flat in worker.exchange.reduced(worker.layout)]

    return on_all(everyone, end)


def enter(worker: Worker, view: View, round_: int) -> None:
    old = worker.exchange
    worker.agreement.stopped = True
    worker.enter(view)
    worker.agreement.round = round_
    old.close()
    old.settle()


def next_view(number: int, members: tuple[str, ...] = ALL) -> View:
    return View(number=number, members=members, group=1, hosts=("a",) * len(members))


def in_use(worker: Worker) -> list[torch.Tensor]:
    """As `.grad` has them: no copies."""
    return worker.exchange.reduced(worker.layout)


def slow(change: Callable[[Worker], object], *, step: int = 1, everybody: bool = False) -> None:
    """The first still uses the sums of a step when the others, after a `change`, have made those of `step`."""
    with workers(3, hosts=HOSTS) as everyone:
        on_all(everyone, lambda w: w.step(0, 7, (ALL,)))
        used, before = in_use(everyone[0])[:-1], expected(everyone[0].layout, 0, 7)[:-1]
        known = [weakref.ref(worker.layout) for worker in everyone[1:]]
        on_all(everyone if everybody else everyone[1:], change)
        far_as_they_come(everyone, step)
        now = [worker.layout for worker in everyone]
        until(lambda: gc.collect() >= 0 and all(layout() in (None, *now) for layout in known))
        taken = [take_what_is_free(worker) for worker in everyone[1:]]
        assert_same(used, before)
        assert everyone[0].exchange.stood
        taken.clear()
        if not everybody:
            change(everyone[0])
        for found in catch_up(everyone, step):
            assert_same(found, expected(everyone[0].layout, step, FEW))  # type: ignore[arg-type]


def slow_in_one_view() -> None:
    slow(id)


def slow_across_views() -> None:
    slow(lambda worker: enter(worker, next_view(2), 1))


def slow_over_an_evaluation() -> None:
    """All have evaluated in the next view, between a step's inner loop and its update."""
    slow(evaluate_in_the_next_view, step=2, everybody=True)


def slow_with_other_buckets() -> None:
    slow(freeze)


def evaluate_in_the_next_view(worker: Worker) -> None:
    enter(worker, next_view(2), 1)
    worker.exchange.begin(1, Partials(Layout([], 0)), 0, Lineage(sets=(ALL,)), training=False)
    worker.agreement.until(lambda: worker.exchange.ended)


def too_late() -> None:
    """The third stands still where the others' words are here and their slices are not looked at; they go on."""
    gate = threading.Event()
    with workers(3, hosts=HOSTS) as everyone:
        third = everyone[2]
        assert third.links is not None
        third.links = Gated(third.links.links, gate)
        third.enter(third.exchange.view)
        pair = ("w0", "w1")

        def begin(worker: Worker) -> None:
            worker.partials.begin(7)
            worker.begin(0, 7, (ALL,))
            worker.compute(0)

        on_all(everyone, begin)
        waiting = [lambda w=worker: (w.exchange.waiting_for or ("", 0))[0] == "w2" for worker in everyone[:2]]
        until(lambda: all(waits() for waits in waiting))  # for its word
        for worker in everyone[:2]:
            enter(worker, next_view(2, pair), 1)
        on_all(everyone[:2], lambda w: w.step(1, 7, (pair,)))
        taken = [take_what_is_free(worker) for worker in everyone[:2]]
        gate.set()
        until(lambda: third.exchange.ended or bool(third.agreement.lost_peers))
        assert not third.exchange.ended, "with sums that are none"
        taken.clear()


def take_what_is_free(worker: Worker) -> list[torch.Tensor]:
    """Other uses of the memory that the worker has got back, of blocks as large as places."""
    return [worker.memory.empty(100_000, torch.float32).fill_(7.0) for _ in range(8)]


def freeze(worker: Worker) -> None:
    parameters = worker.layout.parameters
    parameters[0].requires_grad_(False)
    worker.layout = Layout(parameters, LANES)
    worker.partials = Partials(worker.layout, worker.memory)


def given_up() -> None:
    """The third stands still in its update; the others go on without it."""
    with workers(3, hosts=HOSTS) as everyone:
        on_all(everyone, lambda w: w.step(0, 7, (ALL,)))
        on_all(everyone, lambda w: w.step(1, 7, (ALL,)))
        left = [worker.exchange for worker in everyone]
        pair = ("w0", "w1")
        for worker in everyone[:2]:
            enter(worker, next_view(2, pair), 2)
            assert left[2].stood, "nobody has overwritten anything yet"
        on_all(everyone[:2], lambda w: w.step(2, 7, (pair,)))
        assert not left[2].stood
        on_all(everyone[:2], lambda w: w.step(3, 7, (pair,)))
        assert all(worker.exchange.stood for worker in everyone[:2])


def written(write: Callable[[torch.Tensor], object]) -> None:
    """After each step the loop writes into its gradients."""
    with workers(3, hosts=HOSTS) as everyone:
        for step in range(6):

            def update(worker: Worker, step: int = step) -> None:
                found = worker.step(step, 7, (ALL,))
                assert_same(found, expected(worker.layout, step, 7))
                for flat in in_use(worker)[:-1]:
                    write(flat)
                assert_same(in_use(worker)[:-1], [write_to(flat, write) for flat in found[:-1]])

            on_all(everyone, update)
        assert all(copies(worker) for worker in everyone)


def write_to(flat: torch.Tensor, write: Callable[[torch.Tensor], object]) -> torch.Tensor:
    write(flat)
    return flat


def copies(worker: Worker) -> bool:
    assert isinstance(worker.memory, Arena)
    return worker.memory.copies_sums


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


def last_to_begin(*apart: int) -> None:
    """Each has a shard. The last still uses the sums of a step when the others have come as far as they can."""
    with workers(3, hosts=HOSTS, apart=apart) as everyone:
        on_all(everyone, lambda w: w.step(0, 7, (ALL,)))
        used, before = in_use(everyone[2])[:-1], expected(everyone[0].layout, 0, 7)[:-1]

        def begin(worker: Worker) -> None:
            worker.done = set()
            worker.partials.begin(7)
            worker.begin(1, 7, (ALL,))
            worker.compute(1)

        on_all(everyone[:2], begin)
        until(lambda: all((w.exchange.waiting_for or ("", 0))[0] == "w2" for w in everyone[:2]))
        assert_same(used, before)
        begin(everyone[2])
        for worker in everyone:
            worker.agreement.until(lambda worker=worker: worker.exchange.ended)
            assert_same(worker.exchange.reduced(worker.layout), expected(worker.layout, 1, 7))


def one_shares_none() -> None:
    """What it sends lands where the others' sums may be in use."""
    last_to_begin(0)


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
    (sums, "            self._turn = 1 - self._turn", "            pass", slow_in_one_view),
    (sums, "        self._begun = True", "        pass", slow_in_one_view),
    (buffers, "(message.landing or isinstance(sum_, InPlace))", "message.landing", one_shares_none),
    (routes, "self.one_host and all(", "self.one_host and any(", slow_in_one_view),
    (buffers, "                self._memory.rest(each)\n", "                pass\n", slow_across_views),
    (exchange, "        self._buffers.rest()\n", "        pass\n", slow_across_views),
    (exchange, "if round_.ended and round_.trains", "if True", slow_over_an_evaluation),
    (buffers, "            self.rest()\n", "            pass\n", slow_with_other_buckets),
    (sums, "place.stamp.zero_()", "pass", given_up),
    (sums, "return self.stood", "return True", too_late),
    (exchange, "if message.kind != REDUCED or", "if message.kind == WORD or", slow_in_one_view),
    (arena, "            thing.give_back()", "            pass", given_up),
    (sums, "self._arena.copies_sums or self._row.written", "False", lambda: written(WRITES[1])),
    (row, "(kinds & 1 == 0)", "(kinds & 1 == 9)", lambda: written(WRITES[0])),
    (row, "mmap.MAP_PRIVATE, memory.file", "mmap.MAP_SHARED, memory.file", lambda: written(WRITES[0])),
]


@pytest.mark.parametrize(("module", "place", "by", "run"), PLANTED, ids=[place.strip() for _, place, *_ in PLANTED])
def test_a_planted_bug_is_caught(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, place: str, by: str, run: Callable[[], None]
) -> None:
    monkeypatch.setattr(exchanging, "DEADLINE_S", LIMIT_S)
    with planted(module, place, by), pytest.raises((AssertionError, FutureTimeout)):
        run()
