"""The reproducible exchange of one view: every member gets the same sums, added in the tree's order, for any assignment
of the shards.

`schedule.order` returns the sends, receives and additions as a value, and its module explains them. This module has the
threads and tensors that execute that value. The training thread sends from the backward pass. A thread of the view does
the rest, and the training thread waits for "ended or view lost" meanwhile. The latency is two hops; the bytes on the
wire are those of a ring all-reduce.

Fault contract: a lost peer is reported through `Agreement.lost`, and then the round never ends on this worker. The
partial sums are unchanged, and the next view's exchange uses them. The reduced buckets are garbage unless
`Agreement.commit_message` was called. The receive buffers are never used again (R3). `release_peers` lets the peers'
pending receives complete after every worker has abandoned the view.

A single process (`world_size=1`) runs the same acts on the training thread, without peers.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

import msgspec
import torch

from farandole.collective.arena import Arena, Memory, Ordinary
from farandole.collective.buckets import Bucket, Layout, Partials, Staging
from farandole.collective.schedule import (
    COMMIT,
    LANDINGS,
    OTHER,
    PARTIAL,
    REDUCED,
    TRAINING,
    Act,
    Add,
    Await,
    ExchangeMessage,
    ExchangeOrder,
    HostSum,
    Levels,
    MakeCommitMessage,
    PostReceives,
    RoundEnd,
    SendMessages,
    Take,
    ZoneSum,
    of_round,
    order,
)
from farandole.collective.shm_sums import Copied, InPlace, SingleProcessSums, Sum
from farandole.collective.transport import Borrowing, Links, PeerLost, Pending, ReceiveBuffer
from farandole.numerics import settings
from farandole.plan.shards import Node, combine, root
from farandole.protocol.view import COMMIT_FIELDS, CommitMessage, Lineage, View

# --- waits ------------------------------------------------------------------------------------------------------------
#
# The waits of a worker's exchanges for its peers: their sums always, each one only during a trace (`farandole trace`).
#
# There is one object for all of a worker's exchanges, over all views. The threads of the views append to its list, and
# the training thread takes the whole list, so no lock is needed.

SHORTEST_NS = 20_000  # a shorter wait means that the message had already arrived


class Wait(NamedTuple):
    """A wait for a message of `peer`; times are in nanoseconds of the monotonic clock."""

    peer: str
    began_ns: int
    ended_ns: int


class WaitRecord:
    """The record of waits.

    Attributes:
        total_ns: the nanoseconds of all waits so far, by peer. It is kept without a trace too.
        recorded: the waits since the trace began, at most `most`; None if there is no trace.
    """

    def __init__(self) -> None:
        self.total_ns: dict[str, int] = {}
        self.recorded: list[Wait] | None = None
        self.most = 0

    def add(self, peer: str, began_ns: int, ended_ns: int) -> None:
        if ended_ns - began_ns < SHORTEST_NS:
            return
        self.total_ns[peer] = self.total_ns.get(peer, 0) + ended_ns - began_ns  # only the view in force waits
        kept = self.recorded
        if kept is not None and len(kept) < self.most:
            kept.append(Wait(peer, began_ns, ended_ns))


# --- round ------------------------------------------------------------------------------------------------------------
#
# The state of one round's exchange at one worker: its order and its progress.


Sums = dict[Node, tuple[int, torch.Tensor]]  # by node: the bucket's element with which the tensor begins, the tensor


class Round:
    """One round's exchange. `tag` is common to all its messages. `is_step` is True for the round of a training step.

    Attributes:
        scattered: for each bucket, True if this worker's partial sums of it are sent; set by the thread that submits.
        sums: for each bucket, the sums that this worker has: first its own partial sums, in the memory of the training
            thread's `Partials`, then those of its host. Each sum has the bucket's element with which it begins.
        zone_sums: for each bucket, the elements `[start, stop)` for which this worker has the sums of its zone, and
            these sums.
        served: the number of acts of the order that are done; set by the view's thread.
        received: pending receives and their buffers, by sender and place.
        arrived: the tensors of the messages that have arrived, by sender and place.
        flushes: True if the training thread, which makes this object, flushes denormal numbers to zero. It is read
            each time the thread submits a bucket, because the script may change that mode in the loop's body.
        sent: pending sends; peers may read their tensors for as long as the round lasts.
        commits: the commit messages by worker; this worker's own after it is made.
    """

    def __init__(self, number: int, order: ExchangeOrder, partials: Partials, tag: int, *, is_step: bool) -> None:
        self.number = number
        self.is_step = is_step
        self.order = order
        self.partials = partials
        self.layout = partials.layout
        self.tag = tag
        self.begun_at = time.monotonic()
        self.flushes = settings.flushes()
        self.scattered = [False] * len(self.layout.buckets)
        self.sums: list[Sums] = [{} for _ in self.layout.buckets]
        self.zone_sums: list[list[tuple[int, int, Sums]]] = [[] for _ in self.layout.buckets]
        self.served = 0
        self.received: dict[tuple[str, int], tuple[Borrowing, ReceiveBuffer]] = {}
        self.arrived: dict[tuple[str, int], torch.Tensor] = {}
        self.sent: list[Pending] = []
        self.commits: dict[str, torch.Tensor] = {}
        self.ended = False

    def take(self, message: ExchangeMessage) -> torch.Tensor:
        """Blocks until a message has arrived. Returns its tensor.

        Raises:
            PeerLost: the message can never arrive.
        """
        borrowing, _ = self.received[message.peer, message.place]
        self.arrived[message.peer, message.place] = tensor = borrowing.wait()
        if message.kind == COMMIT:
            self.commits[message.whose] = tensor
        return tensor

    def landed(self, message: ExchangeMessage) -> bool:
        """Returns True if a message that has arrived is in this worker's own receive buffer, not in shared memory."""
        key = message.peer, message.place
        return self.received[key][1].holds(self.arrived[key])

    def sums_for(self, bucket: int, start: int, stop: int) -> Sums:
        """Returns the sums that this worker has of the elements `[start, stop)`: those of its zone, if it made them."""
        of_zone = (sums for first, last, sums in self.zone_sums[bucket] if first <= start and stop <= last)
        return next(of_zone, self.sums[bucket])

    def sum_of(self, node: Node, bucket: int, start: int, stop: int) -> torch.Tensor:
        """Returns the elements `[start, stop)` of a sum that this worker has."""
        begins, flat = self.sums_for(bucket, start, stop)[node]
        return flat[start - begins : stop - begins]


# --- buffers ----------------------------------------------------------------------------------------------------------
#
# The memory of one view's exchange (R3): the sums of the buckets, and the receive buffers for partial sums of others.
#
# No other view uses this memory, so pending messages of an abandoned view can't corrupt another view.


class ExchangeBuffers:
    """The memory of one view's exchange; see above. `lends` is True if a peer shares memory with this worker."""

    def __init__(self, view: View, worker: str, memory: Memory, stage: bool | None, *, lends: bool) -> None:
        self._levels, self._worker, self._alone = Levels.of(view), worker, view.size == 1
        self._memory, self._stage = memory, stage
        name = repr((view.group, view.number, view.members)).encode()
        self._stamp = int.from_bytes(hashlib.sha256(name).digest()[:7], "little") | 1
        self._lends = lends
        self.staging = Staging(memory, stage)
        self._sums: WeakKeyDictionary[Layout, list[Sum]] = WeakKeyDictionary()
        self._used: list[InPlace] = []  # by all workers, in the last training round
        self._rests = False
        self._more_memory: dict[tuple[torch.dtype, int, int, int], torch.Tensor] = {}  # see `_more` and `_landing`

    def allocate(self, layout: Layout) -> None:
        if layout not in self._sums:
            self._sums[layout] = [self._sum(bucket) for bucket in layout.buckets]

    def warm(self, layout: Layout, arrivals: Iterable[ExchangeMessage]) -> None:
        """Allocates and touches the memory that a round needs to receive these messages."""
        self.allocate(layout)
        for message in arrivals:
            if message.kind == PARTIAL:
                self.where(layout, message)

    def begin(self, layout: Layout, *, all_begun: bool) -> None:
        self.allocate(layout)
        sums = self._sums[layout]
        for each in sums:
            each.begin(all_begun=all_begun)
        used = [each for each in sums if isinstance(each, InPlace)]
        if used and used != self._used:
            self.rest()
            self._used, self._rests = used, False

    def rest(self) -> None:
        """Stops writing to the sums of the last training round, because peers may still use them. Idempotent."""
        if isinstance(self._memory, Arena) and not self._rests:
            self._rests = True
            for each in self._used:
                self._memory.rest(each)

    def woken(self) -> None:
        """Frees the resting memory: all workers have begun a later training round than the one that used it."""
        if isinstance(self._memory, Arena):
            self._memory.wake()

    @property
    def sums_intact(self) -> bool:
        """True if no peer has overwritten the sums in use."""
        return all(each.sums_intact for each in self._used)

    def reduced(self, layout: Layout) -> list[torch.Tensor]:
        """The reduced buckets of the round that ended, each of shape (bucket.numel,)."""
        return [each.flat for each in self._sums[layout]]

    def complete(self, layout: Layout) -> None:
        """Completes the sums: all slices of all buckets have arrived."""
        for each in self._sums[layout]:
            each.complete()

    def put(self, layout: Layout, message: ExchangeMessage, tensor: torch.Tensor) -> bool:
        """Takes `tensor` as the slice of a message. Returns False if its owner has already freed that memory."""
        return self._sums[layout][message.bucket].put(message.start, message.stop, tensor)

    def receive_buffer(self, layout: Layout, message: ExchangeMessage) -> ReceiveBuffer:
        """Returns the receive buffer of a message."""
        if message.kind == COMMIT:
            return ReceiveBuffer(COMMIT_FIELDS, torch.int64, lambda: torch.empty(COMMIT_FIELDS, dtype=torch.int64))
        dtype = layout.buckets[message.bucket].dtype
        return ReceiveBuffer(message.stop - message.start, dtype, lambda: self.where(layout, message))

    def where(self, layout: Layout, message: ExchangeMessage) -> torch.Tensor:
        """Returns the memory of a received partial sum or slice, or of the sum that is sent in (g), (h) and (i)."""
        bucket, sum_ = layout.buckets[message.bucket], self._sums[layout][message.bucket]
        if message.kind == PARTIAL and (message.landing or isinstance(sum_, InPlace)):
            return self._landing(bucket, message.landing, message.stop - message.start)
        return sum_.place(message.start, message.stop)

    def sum_up(self, round_: Round, act: HostSum | ZoneSum | Add) -> None:
        """Executes an act, adding in the order of the tree over shards."""
        match act:
            case HostSum():
                round_.sums[act.bucket] = self._sums_of_level(round_, act)
            case ZoneSum():
                round_.zone_sums[act.bucket].append((act.start, act.stop, self._sums_of_level(round_, act)))
            case Add():
                self._add(round_, act)

    def _sums_of_level(self, round_: Round, act: HostSum | ZoneSum) -> Sums:
        """Computes the sums of this worker's host, or of its zone, of a part of a bucket.

        The host's first one is made where the bucket's sum will be: whoever sends that sum has received this one, or
        the zone's sum in which it is. The zone's sums are made from the host's, so they have other memory.
        """
        bucket, sum_ = round_.layout.buckets[act.bucket], self._sums[round_.layout][act.bucket]
        values, landed = self._values(round_, act)
        totals: Sums = {}
        for number, node in enumerate(act.nodes):
            in_place = isinstance(act, HostSum) and not number
            target = sum_.place(act.start, act.stop) if in_place else self._more(bucket, number, act)
            total = _total(values, landed, round_, act, node, target)
            totals[node] = act.start, target.copy_(total) if id(total) in landed else total
        return totals

    def _add(self, round_: Round, act: Add) -> None:
        """Computes the sum of a slice of a bucket."""
        sum_ = self._sums[round_.layout][act.bucket]
        if isinstance(sum_, SingleProcessSums):
            (sum_.flat,) = (flat for _, flat in round_.sums[act.bucket].values())
            return
        target = sum_.place(act.start, act.stop)
        values, landed = self._values(round_, act)
        total = _total(values, landed, round_, act, root(round_.order.shards), target)
        if total.data_ptr() != target.data_ptr():
            target.copy_(total)

    def _values(self, round_: Round, act: HostSum | ZoneSum | Add) -> tuple[dict[Node, torch.Tensor], set[int]]:
        """Returns the addends of an act by node, in host memory, and the ids of those in this worker's receive buffers.

        The latter may be overwritten. Partial sums may not, because a retry needs them; nor shared memory of peers.
        """
        cut = act.bucket, act.start, act.stop
        values = {node: round_.sum_of(node, *cut) for node in round_.sums_for(*cut)}
        taken = {message.node: round_.arrived[message.peer, message.place] for message in act.taken}
        return values | taken, {id(taken[message.node]) for message in act.taken if round_.landed(message)}

    def _sum(self, bucket: Bucket) -> Sum:
        if self._alone:
            return SingleProcessSums()
        if self._lends and bucket.large and isinstance(self._memory, Arena) and self._memory.works:
            own = self._levels.stretch(bucket, self._worker)
            return InPlace(bucket, own, self._memory, self._stamp, Staging(Ordinary(), self._stage))
        return Copied(bucket, self._stage)

    def _more(self, bucket: Bucket, number: int, act: HostSum | ZoneSum) -> torch.Tensor:
        """Returns memory for one more sum of the host or the zone, for as long as the round lasts."""
        start = act.start if isinstance(act, ZoneSum) else -1
        return self._memory_for((bucket.dtype, bucket.index, start, number), act.stop - act.start)

    def _landing(self, bucket: Bucket, k: int, numel: int) -> torch.Tensor:
        """Returns memory for the k-th partial sum from other workers; `LANDINGS` buckets share it in turn."""
        return self._memory_for((bucket.dtype, bucket.index % LANDINGS, -2, k), numel)

    def _memory_for(self, key: tuple[torch.dtype, int, int, int], numel: int) -> torch.Tensor:
        memory = self._more_memory.get(key)
        if memory is None or memory.numel() < numel:
            memory = self._more_memory[key] = torch.zeros(numel, dtype=key[0])
        return memory[:numel]


def _total(
    values: dict[Node, torch.Tensor], spare: set[int], round_: Round, act: HostSum | ZoneSum | Add, node: Node,
    target: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Returns a node's sum: `target`, or one of the values itself. `spare`: ids of values that may be overwritten."""
    spare, bucket = set(spare), round_.layout.buckets[act.bucket]

    def add(left: torch.Tensor, right: torch.Tensor, last: bool) -> torch.Tensor:
        out = target if last else left if id(left) in spare else right if id(right) in spare else torch.empty_like(left)
        spare.add(id(out))
        return bucket.add(left, right, out, act.start, round_.partials.step)

    return combine(values, round_.order.shards, add, node)


# --- exchange ---------------------------------------------------------------------------------------------------------


class Agreement(Protocol):
    """The part of the worker's state machine that the exchange needs."""

    def commit_message(self, *, view: int, round_: int, compute_us: int, shards: int) -> CommitMessage | None: ...

    def end_round(self, commits: Sequence[CommitMessage]) -> bool: ...

    def lost(self, view: int, peer: str, reason: str) -> None: ...

    def changed(self) -> None: ...


class Exchange:
    """The exchange of one view. `links` may be None for a single process; `waits` records the waits for peers.

    The training thread calls all public methods. The thread that quantizes (`buckets.py`) calls `submit`, too.
    """

    def __init__(
        self, view: View, worker: str, links: Links | None, agreement: Agreement, *, stage: bool | None = None,
        memory: Memory | None = None, waits: WaitRecord | None = None,
    ) -> None:  # fmt: skip
        self.view = view
        self.worker = worker
        self._links = links
        self._agreement = agreement
        self._waits = waits or WaitRecord()
        self._peers = [member for member in view.members if member != worker]
        self._shared = {peer for peer in self._peers if links is not None and links.shares(peer)}
        self._buffers = ExchangeBuffers(view, worker, memory or Ordinary(), stage, lends=bool(self._shared))
        self._orders: WeakKeyDictionary[Layout, dict[tuple[int, Lineage], ExchangeOrder]] = WeakKeyDictionary()
        self._round: Round | None = None
        self._abandoned = False
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self.waiting_for: tuple[str, float] | None = None  # peer, since (monotonic seconds)
        self._may_commit = threading.Event()
        self._may_commit.set()

    # --- the training thread's side ----------------------------------------------------------------------------

    def warm(self, layout: Layout) -> None:
        """Starts the thread, and allocates and touches the memory of a round of one shard each, before the switch."""
        usual = self._order(layout, self.view.size, self.view.lineage(self.view.members))
        self._buffers.warm(layout, [message for message in usual.arrivals if message.peer not in self._shared])
        self._start_thread()

    def begin(self, number: int, partials: Partials, shards: int, lineage: Lineage, *, is_step: bool = True) -> None:
        """Starts a round of a training step, or of anything else: posts its receives. Call `ready` for each bucket."""
        if self._peers and self._links is None:  # its connections are closed: another view is in force meanwhile
            return
        layout = partials.layout
        tag = of_round(self.view, number, TRAINING if is_step else OTHER)
        self._round = round_ = Round(number, self._order(layout, shards, lineage), partials, tag, is_step=is_step)
        self._buffers.begin(layout, all_begun=round_.order.all_begun)
        try:
            self._post(round_, round_.order.begin)
        except PeerLost as lost:
            self._lose(lost)
            return
        self._start_thread()
        with self._wake:
            self._wake.notify_all()

    def submit(self, bucket: int) -> None:
        """Sends `bucket`, which has the gradients of all of this worker's shards."""
        round_ = self._round
        if round_ is None or self._abandoned:
            return
        round_.flushes = settings.flushes()
        try:
            self._scatter(round_, bucket)
        except PeerLost as lost:
            self._lose(lost)
            return
        with self._wake:
            round_.scattered[bucket] = True
            self._wake.notify_all()

    def submit_all(self) -> None:
        """Sends all buckets of a round in which this worker has no more shards to compute."""
        if self._round is not None:
            self._round.partials.wait_until_quantized()
            for bucket in range(len(self._round.layout.buckets)):
                self.submit(bucket)

    def withhold(self) -> None:
        """Delays the commit message until `release`, because this worker does not hold the state yet."""
        self._may_commit.clear()

    def release(self) -> None:
        self._may_commit.set()

    def on_all_submitted(self) -> None:
        """All buckets are submitted. A single process executes its acts now; otherwise the view's thread does."""
        if self._round:
            self._round.partials.wait_until_quantized()
            self._round.flushes = settings.flushes()
            if not self._peers and not self._round.ended:
                self._serve(self._round)

    @property
    def ended(self) -> bool:
        return self._round is not None and self._round.ended

    def reduced(self, layout: Layout) -> list[torch.Tensor]:
        """The reduced buckets of the round that ended, each of shape (bucket.numel,)."""
        return self._buffers.reduced(layout)

    @property
    def sums_intact(self) -> bool:
        """True if the reduced buckets are not overwritten. They are if this worker was evicted while it was frozen."""
        return self._buffers.sums_intact

    def close(self) -> None:
        """Ends the view, after success or failure. Its thread ends, unless it waits for a peer."""
        with self._wake:
            self._abandoned = True
            self._wake.notify_all()
        self._may_commit.set()
        self._buffers.rest()

    def release_peers(self) -> None:
        """Sends what the abandoned round still owes, with any contents, so that no peer's receive hangs forever.

        Call it only after every survivor has abandoned the view: then no worker takes the contents for a result.
        """
        round_ = self._round
        if round_ is None or round_.ended or self._links is None:
            return
        try:
            round_.partials.wait_until_quantized()  # the thread that quantizes may be sending
        finally:
            self._links.keep_alive(self)
            for message in round_.order.unsent(round_.scattered, round_.served):
                with contextlib.suppress(PeerLost):
                    self._send(round_, self._nothing(round_, message), message)

    # --- following the order -----------------------------------------------------------------------------------

    def _follow(self) -> None:
        """The body of the view's thread."""
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._abandoned or (self._round is not None and not self._round.ended))
                if self._abandoned:
                    return
                round_ = self._round
            assert round_ is not None
            if not self._serve(round_):
                return

    def _serve(self, round_: Round) -> bool:
        """Executes the round's acts. Returns False if the view is lost, or stopped."""
        try:
            for act in round_.order.serve:
                if not self._do(round_, act):
                    return False
                round_.served += 1
            return True
        except PeerLost as lost:
            self._lose(lost)
            return False
        finally:
            self.waiting_for = None
            self._agreement.changed()

    def _do(self, round_: Round, act: Act) -> bool:
        match act:
            case Await(bucket):
                with self._wake:
                    self._wake.wait_for(lambda: self._abandoned or round_.scattered[bucket])
                    return not self._abandoned
            case Take(messages):
                for message in messages:
                    self._wait(round_, message)
            case HostSum() | ZoneSum() | Add():
                settings.flush_as(round_.flushes)
                self._buffers.sum_up(round_, act)
            case PostReceives(messages):
                self._post(round_, messages)
            case SendMessages(messages):
                for message in messages:
                    self._send(round_, self._content(round_, message), message)
            case MakeCommitMessage():
                self._buffers.complete(round_.layout)
                return self._make_commit_message(round_)
            case RoundEnd():
                round_.ended = self._agreement.end_round(
                    [
                        msgspec.convert(round_.commits[whose].tolist(), CommitMessage)
                        for whose in (self.worker, *self._peers)
                    ]
                )
                if round_.ended and round_.is_step:
                    self._buffers.woken()
                return round_.ended
        return True

    def _make_commit_message(self, round_: Round) -> bool:
        self._may_commit.wait()
        if self._abandoned:  # the last message may have come from `release_peers`, and is no result
            return False
        compute_us = int((time.monotonic() - round_.begun_at) * 1e6)
        message = self._agreement.commit_message(
            view=self.view.number, round_=round_.number, compute_us=compute_us, shards=round_.order.mine
        )
        if message is None or self._abandoned:
            return False
        round_.commits[self.worker] = torch.tensor(msgspec.structs.astuple(message), dtype=torch.int64)
        return True

    def _scatter(self, round_: Round, bucket: int) -> None:
        for node in round_.order.own:
            flat = round_.partials.nodes[bucket][node].flat
            if self._peers:
                flat = self._buffers.staging.out(flat, round_.layout.buckets[bucket])
            round_.sums[bucket][node] = 0, flat
        for message in round_.order.scatter[bucket]:
            self._send(round_, self._content(round_, message), message)

    # --- helpers -----------------------------------------------------------------------------------------------

    def _order(self, layout: Layout, shards: int, lineage: Lineage) -> ExchangeOrder:
        """Returns the order of a round, cached for rounds with the same arguments."""
        orders = self._orders.setdefault(layout, {})
        cached = orders.get((shards, lineage))
        if cached is None:
            cached = orders[shards, lineage] = order(self.view, self.worker, layout.buckets, shards, lineage)
        return cached

    def _start_thread(self) -> None:
        if self._thread is None and self._peers:
            self._thread = threading.Thread(target=self._follow, name=f"view-{self.view.number}", daemon=True)
            self._thread.start()

    def _lose(self, lost: PeerLost) -> None:
        self.close()
        self._agreement.lost(self.view.number, lost.peer, lost.reason)

    def _wait(self, round_: Round, message: ExchangeMessage) -> None:
        began_ns = time.monotonic_ns()
        self.waiting_for = (message.peer, began_ns / 1e9)
        tensor = round_.take(message)
        self.waiting_for = None
        self._waits.add(message.peer, began_ns, time.monotonic_ns())
        if message.kind != REDUCED or round_.landed(message):
            return
        if not self._buffers.put(round_.layout, message, tensor):
            raise PeerLost(message.peer, "it continued without this worker")

    def _send(self, round_: Round, tensor: torch.Tensor, message: ExchangeMessage) -> None:
        assert self._links is not None
        round_.sent.append(self._links.lend(tensor, message.peer, round_.tag | message.place))

    def _content(self, round_: Round, message: ExchangeMessage) -> torch.Tensor:
        """Returns the tensor to send for a message."""
        if message.kind == COMMIT:
            return round_.commits[message.whose]
        if message.kind == PARTIAL:
            return round_.sum_of(message.node, message.bucket, message.start, message.stop)
        return self._buffers.where(round_.layout, message)

    def _nothing(self, round_: Round, message: ExchangeMessage) -> torch.Tensor:
        """Returns a tensor of a message's size that is not a result."""
        if message.kind == COMMIT:
            return torch.full((COMMIT_FIELDS,), -1, dtype=torch.int64)
        return self._buffers.where(round_.layout, message)

    def _post(self, round_: Round, messages: Sequence[ExchangeMessage]) -> None:
        for message in messages:
            assert self._links is not None
            buffer = self._buffers.receive_buffer(round_.layout, message)
            borrowing = self._links.borrow(buffer, message.peer, round_.tag | message.place)
            round_.received[message.peer, message.place] = (borrowing, buffer)
