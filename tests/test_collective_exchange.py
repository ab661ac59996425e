"""The exchange over real Gloo connections: several workers as threads of one process.

The rendezvous is in memory and the agreement a fake that knows no coordinator. What must come out is computed by hand
from plain tensors: the tree sum over shards, the same bits on every rank.
"""

from __future__ import annotations

import os
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
import torch
from torch import nn

from farandole.collective import exchange as exchanges
from farandole.collective.buckets import FIRST_BUCKET_BYTES, Layout, Partials
from farandole.collective.exchange import Exchange
from farandole.collective.group import WORD, Group, PeerLost, Pending, Rendezvous, tag
from farandole.errors import FarandoleError
from farandole.membership.view import Lineage, View, Word
from farandole.plan.shards import assign

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="several loopback addresses, /proc/self/fd")

DEADLINE_S = 30.0
SHAPES = [(33, 7), (5,), (600, 500), (2, 3, 4), (1,)]  # two buckets and the lanes
LANES = 4


class Agreement:
    """What a member does about words when nothing happens to its view: it goes on, and remembers who was lost."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.round = 0
        self.lost_peers: list[tuple[int, str]] = []
        self.stopped = False
        self.words: list[Word] = []
        self._changed = threading.Condition()

    def word(self, *, view: int, round_: int, compute_us: int, shards: int) -> Word | None:
        if self.stopped or (view, round_) != (self.view.number, self.round):
            return None
        return Word(view=self.view.number, round=self.round, prepared=0, compute_us=compute_us, shards=shards)

    def end_round(self, words: Sequence[Word]) -> bool:
        self.words = list(words)
        if self.stopped or any((w.view, w.round) != (self.view.number, self.round) for w in words):
            return False
        self.round += 1
        return True

    def lost(self, view: int, peer: str, reason: str) -> None:
        del reason
        with self._changed:
            self.lost_peers.append((view, peer))
            self._changed.notify_all()

    def changed(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def until(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, DEADLINE_S), "nothing happened before the deadline"


class Counting:
    """A group that counts what is sent through it: bytes by receiving peer."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.bytes: Counter[str] = Counter()
        self.sends = 0

    @property
    def graveyard(self) -> list[object]:
        return self._group.graveyard

    def send(self, tensor: torch.Tensor, peer: str, key: int) -> Pending:
        self.bytes[peer] += tensor.numel() * tensor.element_size()
        self.sends += 1
        return self._group.send(tensor, peer, key)

    def receive(self, tensor: torch.Tensor, peer: str, key: int) -> Pending:
        return self._group.receive(tensor, peer, key)


class Worker:
    """One rank of a test: its parameters, its partial sums, its exchange."""

    def __init__(self, name: str, group: Group | None, shapes: list[tuple[int, ...]] = SHAPES) -> None:
        self.name = name
        self.group = Counting(group) if group else None
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        self.layout = Layout(parameters, LANES)
        self.partials = Partials(self.layout)
        self.agreement: Agreement
        self.exchange: Exchange
        self.done: set[int] = set()
        self.stage: bool | None = None

    def enter(self, view: View, *, stage: bool | None = None) -> None:
        self.agreement = Agreement(view)
        self.stage = stage
        self.exchange = Exchange(view, self.name, self.group, self.agreement, stage=stage)  # type: ignore[arg-type]

    def begin(self, number: int, shards: int, lineage: tuple[tuple[str, ...], ...]) -> None:
        self.exchange.begin(number, self.partials, shards, Lineage(sets=lineage))
        self.todo = [s for s in assign(shards, lineage)[self.name] if s not in self.done]
        if not self.todo:
            for bucket in range(len(self.layout.buckets)):
                self.exchange.ready(bucket)

    def compute(self, step: int, *, only: int | None = None) -> None:
        """The shards that are due; with `only`, no more than so many buckets of the last one are handed in."""
        for shard in self.todo:
            last = shard == self.todo[-1]
            told = iter(range(len(self.layout.buckets) if only is None else only))

            def hand_in(bucket: int, told: Iterator[int] = told) -> None:
                if next(told, None) is not None:
                    self.exchange.ready(bucket)

            self.partials.complete = hand_in if last else ignore
            self.partials.open(shard)
            for index in reversed(range(len(self.layout.parameters))):
                value = gradient(self.layout, step, shard, index)
                if value is not None:
                    self.partials.fold(index, value)
            self.partials.close(lanes(step, shard))
            self.done.add(shard)

    def step(self, step: int, shards: int, lineage: tuple[tuple[str, ...], ...]) -> list[torch.Tensor]:
        """A whole undisturbed round. Returns the reduced buckets."""
        self.done = set()
        self.partials.begin(shards)
        self.begin(step, shards, lineage)
        self.compute(step)
        self.exchange.finish()
        self.agreement.until(lambda: self.exchange.ended)
        return [flat.clone() for flat in self.exchange.reduced(self.layout)]


def ignore(bucket: int) -> None:
    del bucket


def gradient(layout: Layout, step: int, shard: int, index: int) -> torch.Tensor | None:
    """Of a shard, over many orders of magnitude so that the order of additions shows; every fifth does not use it."""
    if (step + shard + index) % 5 == 0 and index != 2:
        return None
    generator = torch.Generator().manual_seed(step * 1_000_000 + shard * 1000 + index)
    shape = layout.parameters[index].shape
    return torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).mul(15).exp2()


def lanes(step: int, shard: int) -> torch.Tensor:
    return torch.tensor([0.1 * shard + step, 1.0, 10.0**shard, -0.3], dtype=torch.float64)


def tree_sum(values: list[torch.Tensor]) -> torch.Tensor:
    while len(values) > 1:
        pairs = [values[i] + values[i + 1] for i in range(0, len(values) - 1, 2)]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]


def expected(layout: Layout, step: int, shards: int) -> list[torch.Tensor]:
    """The reduced buckets, by hand."""
    result: list[torch.Tensor] = []
    for bucket in layout.buckets:
        flat = torch.zeros(bucket.numel, dtype=bucket.dtype)
        for index, place in layout.views(bucket, flat).items():
            of_shards = [gradient(layout, step, shard, index) for shard in range(shards)]
            place.copy_(tree_sum([torch.zeros(place.shape) if g is None else g for g in of_shards]))
        if not bucket.params:
            flat[:LANES] = tree_sum([lanes(step, shard) for shard in range(shards)])
        result.append(flat)
    return result


def assert_same(buckets: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> None:
    for number, (got, wanted) in enumerate(zip(buckets, reference, strict=True)):
        assert got.view(torch.uint8).equal(wanted.view(torch.uint8)), f"bucket {number}"


def connect(names: Sequence[str], doomed: Sequence[int] = ()) -> list[Group]:
    """Groups of all, each on an address of its own. `doomed`: the ranks that `kill` will be used on, in this order.

    Of two Gloo peers the one with the lower address listens, and only that end of a connection shows whose it is.
    """
    addresses = {rank: f"127.0.0.{2 + place}" for place, rank in enumerate(doomed)}
    stores: dict[str, Rendezvous] = {}

    def publish(name: str) -> Callable[[str, bytes], None]:
        return lambda key, value: [stores[other].put(key, value) for other in names if other != name] and None

    for name in names:
        stores[name] = Rendezvous(publish(name))
    with ThreadPoolExecutor(len(names)) as pool:
        made = [
            pool.submit(Group, 1, name, tuple(names), stores[name], addresses.get(rank, "127.0.0.9"))
            for rank, name in enumerate(names)
        ]
        return [future.result(DEADLINE_S) for future in made]


def kill(address: str) -> None:
    """What the kernel does to a killed process's connections, done to those at `address` of this process."""
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(descriptor))) as connection:
                    if connection.family == socket.AF_INET and connection.getsockname()[0] == address:
                        connection.getpeername()  # raises for the listening one, whose end would abort the process
                        connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def workers(
    count: int,
    *,
    stage: bool | None = None,
    shapes: list[tuple[int, ...]] = SHAPES,
    doomed: Sequence[int] = (),
) -> Iterator[list[Worker]]:
    names = [f"w{rank}" for rank in range(count)]
    groups = connect(names, doomed) if count > 1 else [None]
    view = View(number=1, members=tuple(names), group=1)
    everyone = [Worker(name, group, shapes) for name, group in zip(names, groups, strict=True)]
    for worker in everyone:
        worker.enter(view, stage=stage)
    try:
        yield everyone
    finally:
        for worker in everyone:
            worker.exchange.close()


def on_all(everyone: Sequence[Worker], action: Callable[[Worker], object]) -> list[object]:
    with ThreadPoolExecutor(len(everyone)) as pool:
        futures = [pool.submit(action, worker) for worker in everyone]
        return [future.result(DEADLINE_S) for future in futures]


# --- undisturbed -----------------------------------------------------------------------------------------------

TABLE = [
    (1, 5, "a world of one goes through the same tree"),
    (2, 1, "more ranks than shards: one has nothing to send"),
    (2, 8, "each holds an aligned subtree: one partial sum each"),
    (3, 7, "three do not divide seven"),
    (3, 2, "more ranks than shards, among three"),
    (4, 13, "four ranks, several partial sums each"),
]


@pytest.mark.parametrize("stage", [None, True], ids=["direct", "staged"])
@pytest.mark.parametrize(("count", "shards", "remark"), TABLE)
def test_every_rank_has_the_bits_of_the_reference_in_every_round(
    count: int, shards: int, remark: str, stage: bool | None
) -> None:
    with workers(count, stage=stage) as everyone:
        lineage = (tuple(worker.name for worker in everyone),)
        for step in range(5):  # rounds count modulo 4 in the tags
            reduced = on_all(everyone, lambda w, step=step: w.step(step, shards, lineage))
            for buckets in reduced:
                assert_same(buckets, expected(everyone[0].layout, step, shards))  # type: ignore[arg-type]
        assert not any(worker.agreement.lost_peers for worker in everyone), remark


def test_a_plain_sum_over_ranks_would_give_other_bits() -> None:
    """The evidence above is worth something only if the order shows in these values."""
    layout = Worker("w0", None).layout
    wanted = expected(layout, 0, 7)[0]
    flat = torch.zeros_like(wanted)
    for shard in range(7):
        for index, place in layout.views(layout.buckets[0], flat).items():
            value = gradient(layout, 0, shard, index)
            if value is not None:
                place.add_(value)
    assert not flat.equal(wanted)


def test_late_and_early_ranks_wait_for_each_other() -> None:
    with workers(3) as everyone:
        lineage = (tuple(worker.name for worker in everyone),)

        def slow(worker: Worker) -> list[torch.Tensor]:
            time.sleep(0.2 * int(worker.name[1]))
            return worker.step(0, 6, lineage)

        for buckets in on_all(everyone, slow):
            assert_same(buckets, expected(everyone[0].layout, 0, 6))  # type: ignore[arg-type]


def test_less_than_a_slice_for_each_rank() -> None:
    """Two parameters fill two aligned units, so of four ranks two own nothing of that bucket."""
    with workers(4, shapes=[(3,), (2,)]) as everyone:
        assert everyone[0].layout.buckets[0].numel == 32
        lineage = (tuple(worker.name for worker in everyone),)
        shapes_expected = expected(everyone[0].layout, 0, 6)
        for buckets in on_all(everyone, lambda w: w.step(0, 6, lineage)):
            assert_same(buckets, shapes_expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_bytes_on_the_wire_are_a_ring_all_reduces_where_each_rank_holds_one_partial_sum(count: int) -> None:
    """2 (n - 1) / n of the buckets a rank, and a word to each peer. Power-of-two ranges are single nodes."""
    shards = {2: 8, 3: 3, 4: 8}[count]
    with workers(count) as everyone:
        lineage = (tuple(worker.name for worker in everyone),)
        on_all(everyone, lambda w: w.step(0, shards, lineage))
        total = sum(bucket.numel * bucket.dtype.itemsize for bucket in everyone[0].layout.buckets)
        words = 5 * 8 * (count - 1)
        slack = 2 * 64 * (count - 1) * len(everyone[0].layout.buckets)  # cuts are rounded to 64 bytes
        sent = [sum(worker.group.bytes.values()) for worker in everyone if worker.group]
        assert sum(sent) == 2 * (count - 1) * total + count * words
        for one in sent:
            assert abs(one - words - 2 * (count - 1) / count * total) <= slack
        buckets = len(everyone[0].layout.buckets)
        assert [w.group.sends for w in everyone if w.group] == [(count - 1) * (2 * buckets + 1)] * count


def test_words_carry_what_each_member_said() -> None:
    with workers(3) as everyone:
        lineage = (tuple(worker.name for worker in everyone),)
        on_all(everyone, lambda w: w.step(0, 8, lineage))
        for worker in everyone:
            assert Counter(word.shards for word in worker.agreement.words) == Counter([2, 3, 3])
            assert all(word.compute_us > 0 for word in worker.agreement.words)


def test_a_joiner_that_may_not_word_yet_holds_the_round_and_nothing_else() -> None:
    """It has no shards in its first round, takes part in the sums, and the round ends when it holds the state."""
    with workers(3) as everyone:
        joiner = everyone[2]
        lineage = (("w0", "w1"),)

        def first_round(worker: Worker) -> list[torch.Tensor]:
            if worker is not joiner:
                return worker.step(0, 6, lineage)
            worker.exchange.may_word.clear()
            worker.partials.begin(6)
            worker.exchange.begin(0, worker.partials, 6, Lineage(sets=lineage))
            for bucket in range(len(worker.layout.buckets)):
                worker.exchange.ready(bucket)
            time.sleep(0.3)
            assert not any(w.exchange.ended for w in everyone)
            worker.exchange.may_word.set()
            worker.agreement.until(lambda: worker.exchange.ended)
            return [flat.clone() for flat in worker.exchange.reduced(worker.layout)]

        for buckets in on_all(everyone, first_round):
            assert_same(buckets, expected(joiner.layout, 0, 6))  # type: ignore[arg-type]


# --- a peer is lost --------------------------------------------------------------------------------------------

FIRST = View(number=1, members=("w0", "w1", "w2"), group=1)


def until_somebody_reports(survivors: Sequence[Worker]) -> list[tuple[int, str]]:
    """One report is enough for the coordinator. Others may wait for what the reporter will not send any more."""
    deadline = time.monotonic() + DEADLINE_S
    while not any(worker.agreement.lost_peers for worker in survivors):
        assert time.monotonic() < deadline, "nobody noticed"
        time.sleep(0.01)
    return [lost for worker in survivors for lost in worker.agreement.lost_peers]


def follow(worker: Worker, view: View, round_: int) -> None:
    """What Rounds does on Resume: the old exchange closes and settles, the next view's takes the same partial sums."""
    old = worker.exchange
    worker.enter(view, stage=worker.stage)
    worker.agreement.round = round_
    old.close()
    old.settle()


def redo(worker: Worker, view: View, step: int, shards: int, lineage: tuple[tuple[str, ...], ...]) -> object:
    follow(worker, view, step)
    worker.begin(step, shards, lineage)
    worker.compute(step)
    worker.agreement.until(lambda: worker.exchange.ended)
    return [flat.clone() for flat in worker.exchange.reduced(worker.layout)]


@pytest.mark.parametrize("stage", [None, True], ids=["direct", "staged"])
@pytest.mark.parametrize("handed_in", [0, 1, 2, 3])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_survivors_redo_the_round_on_the_same_connections(victim: int, handed_in: int, stage: bool | None) -> None:
    """The victim dies in step 2 after `handed_in` of its buckets; the others inherit its shards and go on."""
    shards = 7
    with workers(3, stage=stage, doomed=[victim]) as everyone:
        for step in range(2):
            on_all(everyone, lambda w, step=step: w.step(step, shards, (FIRST.members,)))
        dead = everyone[victim]
        survivors = [worker for worker in everyone if worker is not dead]

        def third(worker: Worker) -> None:
            worker.done = set()
            worker.partials.begin(shards)
            worker.begin(2, shards, (FIRST.members,))
            worker.compute(2, only=handed_in if worker is dead else None)

        dead.agreement.stopped = True  # whatever it has handed in, it does not get to say its word
        on_all(everyone, third)
        kill("127.0.0.2")
        reports = until_somebody_reports(survivors)
        assert set(reports) == {(1, dead.name)}
        assert not any(worker.exchange.ended for worker in survivors)

        view = View(number=2, members=tuple(w.name for w in survivors), group=1)
        lineage = (FIRST.members, view.members)
        for buckets in on_all(survivors, lambda w: redo(w, view, 2, shards, lineage)):
            assert_same(buckets, expected(survivors[0].layout, 2, shards))  # type: ignore[arg-type]
        for step in (3, 4):
            for worker in survivors:
                worker.agreement.round = step
            for buckets in on_all(survivors, lambda w, step=step: w.step(step, shards, (view.members,))):
                assert_same(buckets, expected(survivors[0].layout, step, shards))  # type: ignore[arg-type]


def test_two_losses_in_one_round_down_to_one() -> None:
    shards = 6
    with workers(3, doomed=[2, 1]) as everyone:
        a, b, c = everyone

        def begin(worker: Worker) -> None:
            worker.partials.begin(shards)
            worker.begin(0, shards, (FIRST.members,))
            worker.compute(0, only=0 if worker is c else None)

        on_all(everyone, begin)
        kill("127.0.0.2")
        assert set(until_somebody_reports([a, b])) == {(1, "w2")}

        second = View(number=2, members=("w0", "w1"), group=1)
        lineage: tuple[tuple[str, ...], ...] = (FIRST.members, second.members)

        def again(worker: Worker) -> None:
            follow(worker, second, 0)
            worker.begin(0, shards, lineage)
            worker.compute(0, only=0 if worker is b else None)

        on_all([a, b], again)
        kill("127.0.0.3")
        assert until_somebody_reports([a]) == [(2, "w1")]

        third = View(number=3, members=("w0",), group=1)
        follow(a, third, 0)
        a.begin(0, shards, (*lineage, third.members))
        a.compute(0)
        a.exchange.finish()
        assert a.exchange.ended
        assert_same(a.exchange.reduced(a.layout), expected(a.layout, 0, shards))


def test_a_stopped_view_ends_no_round_although_every_byte_is_there() -> None:
    """Stop has been answered: `word` refuses, and the buckets wait for what the coordinator decides."""
    with workers(2) as everyone:
        lineage = (tuple(worker.name for worker in everyone),)
        everyone[1].agreement.stopped = True

        def attempt(worker: Worker) -> None:
            worker.partials.begin(4)
            worker.begin(0, 4, lineage)
            worker.compute(0)

        on_all(everyone, attempt)
        time.sleep(0.3)
        assert not any(worker.exchange.ended for worker in everyone)
        view = View(number=2, members=lineage[0], group=1)
        for buckets in on_all(everyone, lambda w: redo(w, view, 0, 4, (lineage[0], lineage[0]))):
            assert_same(buckets, expected(everyone[0].layout, 0, 4))  # type: ignore[arg-type]


def test_a_lost_peer_is_an_error_of_ours_that_names_it() -> None:
    left, right = connect(["left", "right"], doomed=[1])
    wait = left.receive(torch.zeros(4), "right", tag(1, 0, WORD))
    kill("127.0.0.2")
    with pytest.raises(PeerLost, match=r"^right: ") as caught:
        wait.wait()
    assert caught.value.peer == "right"
    assert isinstance(caught.value, FarandoleError)
    with pytest.raises(PeerLost):
        left.send(torch.zeros(4), "right", tag(1, 0, WORD)).wait()
    del right


def test_tags_tell_views_rounds_kinds_buckets_and_nodes_apart() -> None:
    order = random.Random(0)
    seen: dict[int, tuple[int, ...]] = {}
    for _ in range(20_000):
        parts = tuple(order.randrange(limit) for limit in (512, 4, 4, 1024, 128))
        assert seen.setdefault(tag(*parts), parts) == parts
    assert max(seen) < 1 << 31
    for bucket, node in [(1024, 0), (0, 128)]:
        with pytest.raises(AssertionError, match="at most"):
            tag(1, 0, 0, bucket, node)


def test_the_layout_of_these_tests_has_two_buckets_and_lanes() -> None:
    assert SHAPES[2][0] * SHAPES[2][1] * 4 > FIRST_BUCKET_BYTES
    assert len(Worker("w0", None).layout.buckets) == 3
    assert exchanges.WORD_LENGTH == 5
