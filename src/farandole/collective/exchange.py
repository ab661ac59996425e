"""The reproducible exchange of one view: every member gets the same sums, in the tree's order, whoever held what.

What is sent, received and added when, and why, is a value: `order`. Here are the threads and the tensors that follow
it. The training thread sends from the backward pass; a thread of the view does the rest, and the training thread waits
for "ended or view lost" instead. Latency is two hops; bytes on the wire are those of a ring all-reduce.

Fault contract: a lost peer is reported through `Agreement.lost`, the round then never ends here. The partial sums are
untouched and serve the next view's exchange; the reduced buckets are garbage unless `Agreement.word` was called; the
receive buffers are never used again (R3). `settle` lets the peers' pending receives complete once everyone has
abandoned the view.

A world of one runs the same acts, with nobody to send to, on the training thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

import msgspec
import torch

from farandole.collective.arena import Memory, Ordinary
from farandole.collective.buckets import Layout
from farandole.collective.buffers import Buffers
from farandole.collective.order import Act, Add, Await, End, Fold, Order, Post, Send, Take, Vouch, order
from farandole.collective.partials import Partials
from farandole.collective.round import Round
from farandole.collective.routes import Message
from farandole.collective.tags import OTHER, PARTIAL, REDUCED, TRAINING, WORD, of_round
from farandole.collective.transport import Links, PeerLost
from farandole.collective.waits import Waits
from farandole.membership.view import WORD_LENGTH, Lineage, View, Word
from farandole.numerics import settings


class Agreement(Protocol):
    """What the exchange needs of the member's state machine."""

    def word(self, *, view: int, round_: int, compute_us: int, shards: int) -> Word | None: ...

    def end_round(self, words: Sequence[Word]) -> bool: ...

    def lost(self, view: int, peer: str, reason: str) -> None: ...

    def changed(self) -> None: ...


class Exchange:
    """The exchange of one view. `links` may be None for a world of one; `waits` keeps whom it waits for."""

    def __init__(
        self, view: View, worker: str, links: Links | None, agreement: Agreement, *, stage: bool | None = None,
        memory: Memory | None = None, waits: Waits | None = None,
    ) -> None:  # fmt: skip
        self.view = view
        self.worker = worker
        self._links = links
        self._agreement = agreement
        self._waits = waits or Waits()
        self._peers = [member for member in view.members if member != worker]
        self._shared = {peer for peer in self._peers if links is not None and links.shares(peer)}
        self._buffers = Buffers(view, worker, memory or Ordinary(), stage, lends=bool(self._shared))
        self._orders: WeakKeyDictionary[Layout, dict[tuple[int, Lineage], Order]] = WeakKeyDictionary()
        self._round: Round | None = None
        self._abandoned = False
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self.waiting_for: tuple[str, float] | None = None  # peer, since (monotonic seconds)
        self._may_word = threading.Event()
        self._may_word.set()

    # --- the training thread's side ----------------------------------------------------------------------------

    def warm(self, layout: Layout) -> None:
        """Start the thread, and allocate and touch what a round of one shard each needs, ahead of the switch."""
        usual = self._order(layout, self.view.size, self.view.lineage(self.view.members))
        self._buffers.warm(layout, [message for message in usual.arrivals if message.peer not in self._shared])
        self._start_thread()

    def begin(self, number: int, partials: Partials, shards: int, lineage: Lineage, *, training: bool = True) -> None:
        """Start a round, of a training step or for something else: post its receives. Buckets follow by `ready`."""
        if self._peers and self._links is None:  # its connections are gone: another view is in force meanwhile
            return
        layout = partials.layout
        tag = of_round(self.view, number, TRAINING if training else OTHER)
        self._round = round_ = Round(number, self._order(layout, shards, lineage), partials, tag, trains=training)
        self._buffers.begin(layout, heard=round_.order.heard)
        try:
            self._post(round_, round_.order.begin)
        except PeerLost as lost:
            self._lose(lost)
            return
        self._start_thread()
        with self._wake:
            self._wake.notify_all()

    def ready(self, bucket: int) -> None:
        """All of this worker's shards are in `bucket`: it is scattered."""
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

    def withhold(self) -> None:
        """This worker does not hold the state yet: give no word before `release`."""
        self._may_word.clear()

    def release(self) -> None:
        self._may_word.set()

    def finish(self) -> None:
        """Everything is handed in; a world of one does its acts now, others' thread is at it."""
        if self._round:
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
    def stood(self) -> bool:
        """The reduced buckets are still what they were. If not, this worker was given up while it stood still."""
        return self._buffers.stood

    def close(self) -> None:
        """The view is over, in order or not: its thread ends, unless it waits for a peer."""
        with self._wake:
            self._abandoned = True
            self._wake.notify_all()
        self._may_word.set()
        self._buffers.rest()

    def settle(self) -> None:
        """Send what the abandoned round still owes, contents aside, so that nobody's receive hangs for ever.

        Only after every survivor has abandoned the view: nobody takes what arrives for a result.
        """
        round_ = self._round
        if round_ is None or round_.ended or self._links is None:
            return
        self._links.keep(self)
        for message in round_.order.owed(round_.scattered, round_.served):
            with contextlib.suppress(PeerLost):
                self._send(round_, self._nothing(round_, message), message)

    # --- following the order -----------------------------------------------------------------------------------

    def _follow(self) -> None:
        """The view's thread."""
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
        """False: the view is lost, or stopped."""
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
            case Fold() | Add():
                settings.flush_as(round_.flushes)
                self._buffers.sum_up(round_, act)
            case Post(messages):
                self._post(round_, messages)
            case Send(messages):
                for message in messages:
                    self._send(round_, self._content(round_, message), message)
            case Vouch():
                self._buffers.complete(round_.layout)
                return self._vouch(round_)
            case End():
                round_.ended = self._agreement.end_round(
                    [msgspec.convert(round_.words[whose].tolist(), Word) for whose in (self.worker, *self._peers)]
                )
                if round_.ended and round_.trains:
                    self._buffers.woken()
                return round_.ended
        return True

    def _vouch(self, round_: Round) -> bool:
        self._may_word.wait()
        if self._abandoned:  # what arrived last may have been a settlement, which is no result
            return False
        compute_us = int((time.monotonic() - round_.begun_at) * 1e6)
        word = self._agreement.word(
            view=self.view.number, round_=round_.number, compute_us=compute_us, shards=round_.order.mine
        )
        if word is None or self._abandoned:
            return False
        round_.words[self.worker] = torch.tensor(msgspec.structs.astuple(word), dtype=torch.int64)
        return True

    def _scatter(self, round_: Round, bucket: int) -> None:
        for node in round_.order.own:
            flat = round_.partials.nodes[bucket][node].flat
            if self._peers:
                flat = self._buffers.staging.out(flat, round_.layout.buckets[bucket])
            round_.held[bucket][node] = 0, flat
        for message in round_.order.scatter[bucket]:
            self._send(round_, self._content(round_, message), message)

    # --- small things ------------------------------------------------------------------------------------------

    def _order(self, layout: Layout, shards: int, lineage: Lineage) -> Order:
        """Made once for all rounds that are alike."""
        orders = self._orders.setdefault(layout, {})
        found = orders.get((shards, lineage))
        if found is None:
            found = orders[shards, lineage] = order(self.view, self.worker, layout.buckets, shards, lineage)
        return found

    def _start_thread(self) -> None:
        if self._thread is None and self._peers:
            self._thread = threading.Thread(target=self._follow, name=f"view-{self.view.number}", daemon=True)
            self._thread.start()

    def _lose(self, lost: PeerLost) -> None:
        self.close()
        self._agreement.lost(self.view.number, lost.peer, lost.reason)

    def _wait(self, round_: Round, message: Message) -> None:
        self.waiting_for = (message.peer, time.monotonic())
        began_ns = None if self._waits.kept is None else time.monotonic_ns()
        there = round_.take(message)
        self.waiting_for = None
        if began_ns is not None:
            self._waits.add(message.peer, began_ns, time.monotonic_ns())
        if message.kind != REDUCED or round_.landed(message):
            return
        if not self._buffers.put(round_.layout, message, there):
            raise PeerLost(message.peer, "it has gone on without this worker")

    def _send(self, round_: Round, tensor: torch.Tensor, message: Message) -> None:
        assert self._links is not None
        round_.sent.append(self._links.lend(tensor, message.peer, round_.tag | message.place))

    def _content(self, round_: Round, message: Message) -> torch.Tensor:
        """Of what is sent when the round's buckets have been scattered."""
        if message.kind == WORD:
            return round_.words[message.whose]
        if message.kind == PARTIAL:
            return round_.sum_held(message.node, message.bucket, message.start, message.stop)
        return self._buffers.where(round_.layout, message)

    def _nothing(self, round_: Round, message: Message) -> torch.Tensor:
        """Of a message's size, and no result."""
        if message.kind == WORD:
            return torch.full((WORD_LENGTH,), -1, dtype=torch.int64)
        return self._buffers.where(round_.layout, message)

    def _post(self, round_: Round, messages: Sequence[Message]) -> None:
        for message in messages:
            assert self._links is not None
            room = self._buffers.room(round_.layout, message)
            borrowing = self._links.borrow(room, message.peer, round_.tag | message.place)
            round_.received[message.peer, message.place] = (borrowing, room)
