"""Bugs planted in the threads and tensors of the exchange are caught by one loss in one round, over links in memory.

Three workers, five steps; in the third one of them is lost after its first bucket. Those that are planted in the order
that the exchange follows are caught by the schedules (`tests/protocol/planted_bugs.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import ModuleType

import pytest
import torch

from farandole.collective import arena, shm
from farandole.collective import exchange as buffers
from farandole.collective.fake import FakeNetwork
from farandole.protocol.view import View
from tests.support import exchanging
from tests.support.exchanging import Worker, assert_same, expected, on_all, until, workers
from tests.support.planted import planted

SHARDS = 7
LIMIT_S = 3.0  # for what takes a hundredth of that
PLANTED = [  # a module, a place in it, a bug
    (buffers, "    self._send(round_, self._nothing(round_, message), message)", "    del message"),
    (buffers, "round_.order.unsent(round_.scattered, round_.served)", "round_.order.unsent([True] * 9, round_.served)"),
    (buffers, "            round_.scattered[bucket] = True\n", "            round_.scattered = [True] * 9\n"),
    (buffers, "        if round_ is None or self._abandoned:\n", "        if round_ is None or bucket == 1:\n"),
    (buffers, "round_.tag | message.place))", "round_.tag))"),
    (buffers, "self._agreement.lost(self.view.number, lost.peer, lost.reason)", "del lost"),
    (buffers, "cached = orders.get((shards, lineage))", "cached = next(iter(orders.values()), None)"),
    (buffers, "flat[start - begins : stop - begins]", "flat[: stop - start]"),
    (buffers, "= tensor = borrowing.wait()", "= tensor = self.received[message.peer, message.place][1].memory"),
    (
        buffers,
        "{id(taken[message.node]) for message in act.taken if round_.landed(message)}",
        "{id(flat) for flat in (values | taken).values()}",
    ),
    (buffers, "bucket.index % LANDINGS, -2, k)", "0, 1)"),
    (buffers, "            target.copy_(total)\n", "            pass\n"),
]


IN_SHARED_MEMORY = [
    (buffers, "self._buffers.put(round_.layout, message, tensor)", "True"),
    (buffers, "self.received[key][1].holds(self.arrived[key])", "True"),
    (shm, "return content if self.borrows else", "return self.buffer.memory if self.borrows else"),
    (shm, "file=segment.file", "file=-1"),
    (shm, "(offset, size, DTYPES[dtype])", "(0, size, DTYPES[dtype])"),
    (shm, "                    self._reading = False\n", "                    pass\n"),
    (shm, "if packet else CLOSED", "if packet else ''"),
    (arena, "return segment, address - segment.address", "return segment, 0"),
]


IN_ZONES = [
    (buffers, "in_place = isinstance(act, HostSum) and not number", "in_place = not number"),
    (buffers, "start = act.start if isinstance(act, ZoneSum) else -1", "start = -1"),
    (buffers, "if memory is None or memory.numel() < numel:", "if memory is None:"),
    (buffers, "if first <= start and stop <= last)", "if False)"),
]


def run_through(hosts: str = "") -> None:
    """Raises, or does not come to its end, if anything is wrong."""
    network, before = FakeNetwork(), set(threading.enumerate())
    with workers(3, network=None if hosts else network, hosts=hosts) as everyone:
        first = View(number=1, members=("w0", "w1", "w2"), group=1)
        for step, shards in enumerate((SHARDS, 1)):
            buckets = on_all(everyone, lambda w, step=step, shards=shards: w.step(step, shards, (first.members,)))
            check(buckets, everyone[0], step, shards)
        lost, survivors = everyone[2], everyone[:2]
        lost.agreement.stopped = True

        def third(worker: Worker) -> None:
            worker.done = set()
            worker.partials.begin(SHARDS)
            worker.begin(2, SHARDS, (first.members,))
            worker.compute(2, only=1 if worker is lost else None)

        sent = {w.name: sends_of(w) for w in survivors}
        on_all(everyone, third)
        # The survivors have sent all that they can send now. So only a read can find the loss, not a send.
        until(lambda: all(sends_of(w) == sent[w.name] + 3 * 2 + 2 and waits_for(w) == "w2" for w in survivors))
        lost.die() if hosts else network.lose("w2")
        until(lambda: any(worker.agreement.lost_peers == [(1, "w2")] for worker in survivors))
        lost.exchange.close()
        second = View(number=2, members=("w0", "w1"), group=1)
        lineage = (first.members, second.members)
        for worker in survivors:
            worker.agreement.stopped = True

        def again(worker: Worker) -> list[torch.Tensor]:
            old = worker.exchange
            worker.enter(second)
            worker.agreement.round = 2
            old.close()
            old.release_peers()
            worker.begin(2, SHARDS, lineage)
            worker.compute(2)
            worker.agreement.until(lambda: worker.exchange.ended)
            return [flat.clone() for flat in worker.exchange.reduced(worker.layout)]

        check(on_all(survivors, again), survivors[0], 2, SHARDS)
        check(on_all(survivors, lambda w: w.step(3, SHARDS, (second.members,))), survivors[0], 3, SHARDS)
        stopped_in_the_middle(survivors)
    until(lambda: not any(thread.name.startswith("view-") for thread in set(threading.enumerate()) - before))


def stopped_in_the_middle(survivors: list[Worker]) -> None:
    """One has handed in all but the last bucket; the other one's thread waits for what it will not send any more."""

    def begin(worker: Worker) -> None:
        worker.agreement.stopped, worker.done = True, set()
        worker.partials.begin(SHARDS)
        worker.begin(4, SHARDS, (("w0", "w1"),))
        worker.compute(4, only=2 if worker is survivors[0] else None)

    waiting = survivors[1]
    sent = sends_of(waiting)
    on_all(survivors, begin)
    until(lambda: sends_of(waiting) == sent + 3 * 2 + 2 and waits_for(waiting) == survivors[0].name)
    for worker in survivors:
        worker.exchange.close()
    for worker in survivors:
        worker.exchange.release_peers()


def sends_of(worker: Worker) -> int:
    """Of a bucket two partial sums, and one slice once it is reduced."""
    return worker.links.sends if worker.links else 0


def waits_for(worker: Worker) -> str:
    peer, _ = worker.exchange.waiting_for or ("", 0.0)
    return peer


def check(everyone: list[object], worker: Worker, step: int, shards: int) -> None:
    for flats in everyone:
        assert_same(flats, expected(worker.layout, step, shards))  # type: ignore[arg-type]


@pytest.mark.parametrize("hosts", ["", "aaa"])
def test_without_one_all_is_well(hosts: str) -> None:
    run_through(hosts)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("module", "place", "by"), IN_SHARED_MEMORY, ids=[by.strip() for *_, by in IN_SHARED_MEMORY])
def test_a_bug_planted_for_memory_that_is_shared_is_caught(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, place: str, by: str
) -> None:
    monkeypatch.setattr(exchanging, "DEADLINE_S", LIMIT_S)
    monkeypatch.setattr(shm, "LIMIT_S", LIMIT_S)
    with planted(module, place, by), pytest.raises(Exception):  # noqa: B017, PT011  of whatever kind
        run_through("aaa")


def between_zones() -> None:
    """Raises, or does not come to its end, if anything is wrong. Sums of a host and of a zone come in several parts."""
    shapes: list[tuple[int, ...]] = [(600, 50), (70, 30), (1500, 150)]
    for hosts, zones in (("aabbcc", "eeeeww"), ("aabcdd", "eeewww")):
        with workers(6, network=FakeNetwork(), hosts=hosts, zones=zones, shapes=shapes) as everyone:
            lineage = (everyone[0].exchange.view.members,)
            for number, shards in enumerate((11, 1, 9, 13)):
                for worker in everyone:
                    worker.reshape(shapes[: 1 + number % 2 * len(shapes)])
                step = partial(Worker.step, step=number, shards=shards, lineage=lineage)
                buckets = on_all(everyone, step)
                check(buckets, everyone[0], number, shards)


def test_without_a_bug_all_is_well_between_zones() -> None:
    between_zones()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("run", "module", "place", "by"),
    [*((run_through, *bug) for bug in PLANTED), *((between_zones, *bug) for bug in IN_ZONES)],
    ids=[by.strip() for *_, by in (*PLANTED, *IN_ZONES)],
)
def test_a_planted_bug_is_caught(
    monkeypatch: pytest.MonkeyPatch, run: Callable[[], None], module: ModuleType, place: str, by: str
) -> None:
    monkeypatch.setattr(exchanging, "DEADLINE_S", LIMIT_S)
    with planted(module, place, by), pytest.raises(Exception):  # noqa: B017, PT011  of whatever kind
        run()
