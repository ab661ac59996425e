"""Workers as threads of one process that exchange over real Gloo connections, or in memory; their sums by hand.

The rendezvous is in memory and the agreement a fake that knows no coordinator.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache, partial

import torch
from torch import nn

from farandole.collective.arena import Arena, Memory, Ordinary
from farandole.collective.buckets import Bucket, Layout, Partials
from farandole.collective.codec import NONE, Codec
from farandole.collective.compression import Compressed, Payoff
from farandole.collective.exchange import Exchange, WaitRecord
from farandole.collective.fake import FakeNetwork
from farandole.collective.transport import Links
from farandole.plan.shards import assign
from farandole.protocol.view import CommitMessage, Lineage, View
from tests.support.linking import Counting, by_host, connect, cut, in_memory, kill, measured

DEADLINE_S = 30.0
SHAPES = [(33, 7), (5,), (600, 500), (2, 3, 4), (1,)]  # two buckets and the lanes
LANES = 4
HOST = torch.device("cpu")


def parameters_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]


class Agreement:
    """What a member does about words when nothing happens to its view: it goes on, and remembers who was lost."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.round = 0
        self.lost_peers: list[tuple[int, str]] = []
        self.stopped = False
        self.asked = (
            0  # how often for a word, which is the last thing that this worker does before it waits for others'
        )
        self.commits: list[CommitMessage] = []
        self._changed = threading.Condition()

    def commit_message(self, *, view: int, round_: int, compute_us: int, shards: int) -> CommitMessage | None:
        self.asked += 1
        if self.stopped or (view, round_) != (self.view.number, self.round):
            return None
        return CommitMessage(view=self.view.number, round=self.round, prepared=0, compute_us=compute_us, shards=shards)

    def end_round(self, commits: Sequence[CommitMessage]) -> bool:
        self.commits = list(commits)
        if self.stopped or any((w.view, w.round) != (self.view.number, self.round) for w in commits):
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


class Worker:
    """One rank of a test: its parameters, its partial sums, its exchange."""

    def __init__(
        self,
        name: str,
        links: Links | None,
        shapes: list[tuple[int, ...]] = SHAPES,
        device: torch.device = HOST,
        memory: Memory | None = None,
        address: str = "",
        codec: Codec = NONE,
    ) -> None:
        self.name = name
        self.memory = memory or Ordinary()
        self._address = address
        self.links = Counting(links) if links else None
        self.device, self._codec = device, codec
        self.reshape(shapes)
        self.waits = WaitRecord()
        self.agreement: Agreement
        self.exchange: Exchange
        self.done: set[int] = set()
        self.stage: bool | None = None

    def reshape(self, shapes: list[tuple[int, ...]]) -> None:
        """It trains other parameters from now on."""
        parameters = [nn.Parameter(torch.zeros(shape, device=self.device)) for shape in shapes]
        self.layout = Layout(parameters, LANES, codec=self._codec)
        self.partials = Partials(self.layout, self.memory)

    def enter(self, view: View, *, stage: bool | None = None) -> None:
        self.agreement = Agreement(view)
        self.stage = stage
        memory, waits = self.memory, self.waits
        self.exchange = Exchange(view, self.name, self.links, self.agreement, stage=stage, memory=memory, waits=waits)

    @property
    def stands(self) -> bool:
        """It has said its word, and waits for another's."""
        return self.agreement.asked > 0 and self.exchange.waiting_for is not None

    def die(self) -> None:
        """What the kernel does to the connections of a process that is killed. Of Gloo's it needs its own address."""
        if self.links is not None:
            cut(self.links.links)
        if self._address:
            kill(self._address)

    def begin(self, number: int, shards: int, lineage: tuple[tuple[str, ...], ...]) -> None:
        self.exchange.begin(number, self.partials, shards, Lineage(sets=lineage))
        self.todo = [s for s in assign(shards, lineage)[self.name] if s not in self.done]
        if not self.todo:
            self.exchange.submit_all()

    def compute(self, step: int, *, only: int | None = None) -> None:
        """The shards that are due; with `only`, no more than so many buckets of the last one are submitted."""
        for shard in self.todo:
            last = shard == self.todo[-1]
            told = iter(range(len(self.layout.buckets) if only is None else only))

            def submit_next(bucket: int, told: Iterator[int] = told, exchange: Exchange = self.exchange) -> None:
                if next(told, None) is not None:
                    exchange.submit(bucket)

            self.partials.complete = submit_next if last else ignore
            self.partials.open(shard)
            for index in sorted(self.layout.where, reverse=True):
                value = gradient(self.layout, step, shard, index)
                if value is not None:
                    self.partials.add_gradient(index, value.to(self.device))
            self.partials.close(lanes(step, shard))
            self.done.add(shard)

    def step(self, step: int, shards: int, lineage: tuple[tuple[str, ...], ...]) -> list[torch.Tensor]:
        """A whole undisturbed round. Returns the reduced buckets, in host memory."""
        self.done = set()
        self.partials.begin(shards, step)
        self.begin(step, shards, lineage)
        self.compute(step)
        self.exchange.on_all_submitted()
        self.agreement.until(lambda: self.exchange.ended)
        return [flat.to(HOST, copy=True) for flat in self.exchange.reduced(self.layout)]


def ignore(bucket: int) -> None:
    del bucket


def gradient(layout: Layout, step: int, shard: int, index: int) -> torch.Tensor | None:
    """Of a shard, over many orders of magnitude so that the order of additions shows; every fifth does not use it."""
    if (step + shard + index) % 5 == 0 and index != 2:
        return None
    return drawn(step * 1_000_000 + shard * 1000 + index, layout.parameters[index].shape).clone()


@lru_cache(maxsize=128)
def drawn(seed: int, shape: torch.Size) -> torch.Tensor:
    """Each rank and each reference asks for the same values, and to draw them is most of a test's time."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).mul(15).exp2()


def lanes(step: int, shard: int) -> torch.Tensor:
    return torch.tensor([0.1 * shard + step, 1.0, 10.0**shard, -0.3], dtype=torch.float64)


def quantized(layout: Layout, bucket: Bucket, step: int, shard: int) -> torch.Tensor:
    numbers = torch.zeros(bucket.numbers_before(bucket.numel))
    for index, place in layout.views(bucket, numbers).items():
        value = gradient(layout, step, shard, index)
        if value is not None:
            place.copy_(value)
    return bucket.quantize(numbers, torch.empty(bucket.numel, dtype=bucket.dtype), step)


def quantized_sum(bucket: Bucket, step: int, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return bucket.add(left, right, torch.empty_like(left), 0, step)


def tree_sum(
    values: list[torch.Tensor], add: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.add
) -> torch.Tensor:
    while len(values) > 1:
        pairs = [add(values[i], values[i + 1]) for i in range(0, len(values) - 1, 2)]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]


def expected(layout: Layout, step: int, shards: int) -> list[torch.Tensor]:
    """The reduced buckets, by hand."""
    result: list[torch.Tensor] = []
    for bucket in layout.buckets:
        flat = torch.zeros(bucket.numel, dtype=bucket.dtype)
        if bucket.quantization is not None:
            leaves = [quantized(layout, bucket, step, shard) for shard in range(shards)]
            result.append(tree_sum(leaves, partial(quantized_sum, bucket, step)))
            continue
        for index, place in layout.views(bucket, flat).items():
            of_shards = [gradient(layout, step, shard, index) for shard in range(shards)]
            leaves = [torch.zeros(place.shape) if g is None else g for g in of_shards]
            place.copy_(tree_sum([layout.codec.encode(leaf) for leaf in leaves]))
        if not bucket.params:
            flat[:LANES] = tree_sum([lanes(step, shard) for shard in range(shards)])
        result.append(flat)
    return result


def decoded(layout: Layout, buckets: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The numbers of reduced buckets: equal ones may be quantized to different bytes."""
    result: list[torch.Tensor] = []
    for bucket, flat in zip(layout.buckets, buckets, strict=True):
        numbers = flat
        if bucket.quantization is not None:
            numbers = torch.empty(bucket.numbers_before(bucket.numel))
            bucket.quantization.dequantize(flat, numbers)
        result.append(numbers)
    return result


def assert_same(buckets: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> None:
    for number, (got, wanted) in enumerate(zip(buckets, reference, strict=True)):
        assert got.view(torch.uint8).equal(wanted.view(torch.uint8)), f"bucket {number}"


@contextmanager
def workers(
    count: int,
    *,
    stage: bool | None = None,
    shapes: list[tuple[int, ...]] = SHAPES,
    doomed: Sequence[int] = (),
    network: FakeNetwork | None = None,
    device: torch.device = HOST,
    hosts: Sequence[str] = (),
    apart: Sequence[int] = (),
    codec: Codec = NONE,
    zones: Sequence[str] = (),
) -> Iterator[list[Worker]]:
    """Over Gloo; in memory through `network`; or else through memory that those of one of the `hosts` share.

    `zones`: those of their hosts. `doomed`: the ranks that will die, in this order; `apart`: those that share no
    memory, wherever they are.
    """
    names = [f"w{rank}" for rank in range(count)]
    view = View(number=1, members=tuple(names), group=1, hosts=tuple(hosts), zones=tuple(zones))
    addresses = {rank: f"127.0.0.{2 + place}" for place, rank in enumerate(doomed)}
    share = set(range(count)).difference(apart) if hosts and not network else ()
    memory: list[Memory] = [Arena() if rank in share else Ordinary() for rank in range(count)]
    links: Sequence[Links | None] = [None]
    if count > 1 and hosts and not network:
        interfaces = [addresses.get(rank, "127.0.0.9") for rank in range(count)]
        links = by_host(view, memory, interfaces, codec.compressed)
    elif count > 1:
        links = in_memory(network, view) if network else connect(names, doomed)
        if codec.compressed is not None:
            payoff = Payoff() if codec.adapts else None
            links = [Compressed(measured(each), codec.compressed, payoff) for each in links]
    everyone = [
        Worker(name, links[rank], shapes, device, memory[rank], addresses.get(rank, ""), codec)
        for rank, name in enumerate(names)
    ]
    for worker in everyone:
        worker.enter(view, stage=stage)
    try:
        yield everyone
    finally:
        for worker in everyone:
            worker.exchange.close()


def until(condition: Callable[[], bool]) -> None:
    """For what tells nobody that it has come about."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "it does not come about"
        time.sleep(0.005)


def on_all(everyone: Sequence[Worker], action: Callable[[Worker], object]) -> list[object]:
    with ThreadPoolExecutor(len(everyone)) as pool:
        futures = [pool.submit(action, worker) for worker in everyone]
        return [future.result(DEADLINE_S) for future in futures]
