"""What may happen to sums that are in use, played by workers as threads that share memory.

Where one is slow, the others come as far as they can without it.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import torch

from farandole.collective.arena import Arena
from farandole.collective.buckets import Layout, Partials
from farandole.protocol.view import Lineage, View
from tests.support.exchanging import LANES, Worker, assert_same, expected, on_all, until, workers
from tests.support.linking import Gated

HOSTS = "aaa"
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
    old.release_peers()


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
        assert everyone[0].exchange.sums_intact
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
    worker.exchange.begin(1, Partials(Layout([], 0)), 0, Lineage(sets=(ALL,)), is_step=False)
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
            assert left[2].sums_intact, "nobody has overwritten anything yet"
        on_all(everyone[:2], lambda w: w.step(2, 7, (pair,)))
        assert not left[2].sums_intact
        on_all(everyone[:2], lambda w: w.step(3, 7, (pair,)))
        assert all(worker.exchange.sums_intact for worker in everyone[:2])


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
