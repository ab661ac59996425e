"""The exchange of one view at a simulated worker: it executes the shipped order of `collective/schedule.py`.

`collective/exchange.py` does the same with threads and tensors. Here the view's thread may be late, and continues after
the training side has left the view.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from farandole.collective.schedule import (
    COMMIT,
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
    MakeCommitMessage,
    PostReceives,
    RoundEnd,
    SendMessages,
    Take,
    ZoneSum,
    of_round,
    order,
)
from farandole.plan.shards import Node
from farandole.protocol.view import CommitMessage, Lineage, View
from farandole.simulate.buffers import SimulatedBuffers
from farandole.simulate.links import NO_COMMIT, Landing, LostError, Memory, Parcel, size
from farandole.simulate.pieces import SimulatedBucket, SimulatedPiece, Sum, covered
from farandole.simulate.replica import GARBAGE, SHARDS

if TYPE_CHECKING:
    from farandole.simulate.data_plane import DataPlane


class SimulatedExchange:
    """The exchange of one view at one worker. It has the methods of `Exchange` in `collective/exchange.py`."""

    def __init__(self, worker: DataPlane, view: View) -> None:
        self.view = view
        self.lineage = Lineage(sets=())
        self.abandoned = False
        self.may_commit = True
        self.round, self.kind = -1, "idle"
        self.result: Any = None  # of the round, set when every slice has arrived
        self.ended = False
        self.in_use: list[tuple[str, Parcel]] = []  # sums in the memory of peers
        self._worker = worker
        self._peers = [peer for peer in view.members if peer != worker.name]
        self._buffers = SimulatedBuffers(worker.name, view)
        self._commits: Memory = {}
        self._orders: dict[tuple[str, Lineage], ExchangeOrder] = {}
        self._order = self._ordered()
        self._tag = 0
        self._scattered: list[bool] = []
        self._served = 0
        self._posted: dict[tuple[str, int], Landing] = {}
        self._is_scheduled = self._is_left = False
        self._over = True  # its thread has nothing to do, or has ended

    @property
    def shards(self) -> int:
        return SHARDS[self.kind]

    @property
    def _buckets(self) -> Sequence[SimulatedBucket]:
        return self._worker.world.buckets[self.kind]

    @property
    def commits(self) -> list[CommitMessage]:
        """The commit messages of the round that has ended."""
        return [self._commits[member] for member in (self._worker.name, *self._peers)]

    # --- the training thread's side ----------------------------------------------------------------------------

    def begin(self, number: int, kind: str, lineage: Lineage, *, is_step: bool) -> None:
        self._over = self._over and self.round >= 0 and not self.ended
        self.round, self.kind, self.lineage = number, kind, lineage
        self.result, self.ended = None, False
        self._order = self._ordered()
        self._tag = of_round(self.view, number, TRAINING if is_step else OTHER)
        self._buffers.begin(kind, self._buckets, self._order)
        self._scattered = [False] * len(self._buckets)
        self._commits, self._served, self._posted, self._is_scheduled = {}, 0, {}, False
        try:
            self._post(self._order.begin)
        except LostError as lost:
            self._lose(lost.peer)
        self.go_on()

    def submit(self, bucket: int) -> None:
        if self.abandoned:
            return
        self._worker.check_shards(self)
        own = {node: self._sum(node) for node in self._order.own}
        self._buffers.hold(bucket, own)
        try:
            for message in self._order.scatter[bucket]:
                key = (bucket, message.start, message.stop, message.node)
                self._worker.partials[key] = SimulatedPiece(bucket, message.start, message.stop, *own[message.node])
                self._send(message, self._worker.partials, key)
        except LostError as lost:
            self._lose(lost.peer)
            return
        self._scattered[bucket] = True
        self.go_on()

    def on_all_submitted(self) -> None: ...

    def withhold(self) -> None:
        self.may_commit = False

    def release(self) -> None:
        """Allows the commit message, because this worker holds the state."""
        self.may_commit = True
        if self._is_scheduled:
            self._make_commit_message(self.round)

    def use(self) -> None:
        """Begins the update, with the sums that it holds."""
        messages = [message for act in self._order.serve if isinstance(act, Take) for message in act.messages]
        sums = [message for message in messages if message.kind == REDUCED and message.start < message.stop]
        pieces = [(message.peer, self._buffers.memory.get(self._buffers.where(message))) for message in sums]
        self.in_use = [(peer, piece) for peer, piece in pieces if isinstance(piece, Parcel)]

    def close(self) -> None:
        self._abandon()
        self._is_left = True
        self._worker.resting.append(self)
        self._worker.leaves(self.view, self.round, self.kind)

    def give_back(self) -> None:
        """Frees its memory, which is then used for other data."""
        self._buffers.give_back()

    def release_peers(self) -> None:
        if self.ended or self.round < 0:
            return
        for message in self._order.unsent(self._scattered, self._served):
            nothing = NO_COMMIT if message.kind == COMMIT else GARBAGE
            with suppress(LostError):
                self._send(message, {"": nothing}, "")

    def _abandon(self) -> None:
        self.abandoned = True
        if self._is_scheduled and not self._over:
            self._worker.after(0.0, self._make_commit_message, self.round)  # its thread was waiting for the state
        self.go_on()

    # --- the view's thread -------------------------------------------------------------------------------------

    def go_on(self) -> None:
        """Executes acts until one has to wait."""
        try:
            while not self._over and self._do(self._order.serve[self._served]):
                self._served += 1
        except LostError as lost:
            self._over = True
            self._lose(lost.peer)
        if self._over and self._is_left:
            self._worker.exchanges.pop(self.view.number, None)

    def _do(self, act: Act) -> bool:
        """Executes an act. Returns False if it has to wait, or can't complete."""
        match act:
            case Await(bucket):
                self._over = self.abandoned
                return self._scattered[bucket] and not self._over
            case Take(messages):
                if self._missing(messages):
                    return False
                for message in messages:
                    if not self._posted[message.peer, message.place].use(later=message.kind == REDUCED):
                        raise LostError(message.peer)
            case HostSum():
                self._buffers.sum_on_host(act)
            case ZoneSum():
                self._buffers.sum_in_zone(act)
            case Add():
                self._buffers.add(act)
            case PostReceives(messages):
                self._post(messages)
            case SendMessages(messages):
                for message in messages:
                    memory = self._commits if message.kind == COMMIT else self._buffers.memory
                    self._send(message, memory, self._buffers.to_send(message))
            case MakeCommitMessage() | RoundEnd():
                if not self._is_scheduled:
                    self._is_scheduled = True
                    then = self._make_commit_message if isinstance(act, MakeCommitMessage) else self._end
                    self._worker.after(self._worker.world.delay(0.002), then, self.round)
                return False
        return True

    def _missing(self, messages: Iterable[ExchangeMessage]) -> str:
        """Returns the peer that it waits for, "" for none. Raises LostError if that peer is lost."""
        peer = self._awaited(messages)
        if (self.view.group, peer) in self._worker.broken:
            raise LostError(peer)
        return peer

    def _awaited(self, messages: Iterable[ExchangeMessage]) -> str:
        """Returns the first peer whose message is missing, in the order of the waits; it may be lost."""
        return next((each.peer for each in messages if not self._posted[each.peer, each.place].is_done), "")

    def _make_commit_message(self, round_: int) -> None:
        if self._is_past(round_, MakeCommitMessage) or not self._worker.may_commit(self):
            return
        message = self._worker.make_commit_message(self)
        if message is not None:  # otherwise the view was left, and messages may be from `release_peers`
            self.result = self._buffers.result(self.round)
        if message is None or self.abandoned:
            self._over = True
            return
        self._commits[self._worker.name] = message
        self._worker.world.maybe_inject_fault("commit", self._worker)
        self._is_scheduled, self._served = False, self._served + 1
        self.go_on()

    def _end(self, round_: int) -> None:
        if self._is_past(round_, RoundEnd):
            return
        self._over = True
        if self._worker.end_round(self.commits):
            self.ended = True
            self._worker.wake(self.kind)
            self._worker.world.witness.ended(self._worker, self)
            self._worker.world.maybe_inject_fault("end", self._worker)
        self._worker.changed()

    def _is_past(self, round_: int, act: type[Act]) -> bool:
        return self._over or self.round != round_ or not isinstance(self._order.serve[self._served], act)

    # --- helpers -----------------------------------------------------------------------------------------------

    def waits_for(self) -> str:
        act = None if self._over else self._order.serve[self._served]
        return self._awaited(act.messages) if isinstance(act, Take) else ""

    def _lose(self, peer: str) -> None:
        self._abandon()
        self._worker.lost_in(self.view, peer)

    def _post(self, messages: Iterable[ExchangeMessage]) -> None:
        for message in messages:
            memory = self._commits if message.kind == COMMIT else self._buffers.memory
            lends = message.kind == PARTIAL or (message.kind == REDUCED and self.kind == "train")
            lent = lends and self._worker.world.on_one_host(self._worker.name, message.peer)
            landing = Landing(memory, self._buffers.where(message), size(message), lent)
            self._posted[message.peer, message.place] = landing
            self._worker.receive(self.view.group, message.peer, self._tag | message.place, landing)

    def _send(self, message: ExchangeMessage, memory: Memory, key: Any) -> None:
        parcel = Parcel(memory, key, size(message), memory.get(key))
        self._worker.send(self.view.group, message.peer, self._tag | message.place, parcel)

    def _sum(self, node: Node) -> Sum:
        shards = covered(node, self.shards)
        return shards, tuple(self._worker.results[shard] for shard in shards)

    def _ordered(self) -> ExchangeOrder:
        key = (self.kind, self.lineage)
        if key not in self._orders:
            self._orders[key] = order(self.view, self._worker.name, self._buckets, self.shards, self.lineage)
        return self._orders[key]
