"""The reproducible exchange of one view: every member gets the same sums, in the tree's order, whoever held what.

For each bucket, as soon as this worker's last shard has filled it:

(a) scatter  every rank sends each other rank its partial sums for the slice that the other owns;
(b) sum      the owner adds them in the order of the tree over shards;
(c) gather   the owner sends the sum to everyone.

Then, when every bucket is reduced, (d) words: the control words go round (R1) and the round ends.

The training thread does (a) from the backward pass; a thread of the view does the rest, because a wait on a peer that
is frozen can't be woken. The training thread waits for "ended or view lost" instead. Receives are posted ahead.
Latency is two hops; bytes on the wire are those of a ring all-reduce.

Fault contract: a lost peer is reported through `Protocol.lost`, the round then never ends here. The partial sums are
untouched and serve the next view's exchange; the reduced buckets are garbage unless `Protocol.word` was called; the
receive buffers are never used again (R3). `settle` lets the peers' pending receives complete once everyone has
abandoned the view.

A world of one runs the same phases, with nobody to send to, on the training thread; its reduced bucket is the slot of
the tree's root.
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

from farandole.collective.buckets import Bucket, Layout, Partials, aligned_empty
from farandole.collective.round import Round
from farandole.collective.staging import Staging
from farandole.collective.transport import OTHER, PARTIAL, REDUCED, TRAINING, WORD, Group, PeerLost, Pending, tag
from farandole.membership.view import WORD_LENGTH, Lineage, View, Word
from farandole.plan.tree import combine, root

LANDINGS = 2  # buckets whose partial sums may be arriving at a time: bounds the memory for them


class Agreement(Protocol):
    """What the exchange needs of the member's state machine."""

    def word(self, *, view: int, round_: int, compute_us: int, shards: int) -> Word | None: ...

    def end_round(self, words: Sequence[Word]) -> bool: ...

    def lost(self, view: int, peer: str, reason: str) -> None: ...

    def changed(self) -> None: ...


class Exchange:
    """The exchange of one view. `group` may be None for a world of one."""

    def __init__(
        self, view: View, worker: str, group: Group | None, agreement: Agreement, *, stage: bool | None = None
    ) -> None:
        self.view = view
        self.worker = worker
        self._group = group
        self._agreement = agreement
        self._staging = Staging(stage)
        self._ranks = view.size
        self._rank = view.rank(worker)
        self._peers = [m for m in view.members if m != worker]
        self._reduced: WeakKeyDictionary[Layout, list[torch.Tensor]] = WeakKeyDictionary()
        self._landings: dict[tuple[torch.dtype, int, int], torch.Tensor] = {}
        self._round: Round | None = None
        self._abandoned = False
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self.waiting_for: tuple[str, float] | None = None  # peer, since (monotonic seconds)
        self.may_word = threading.Event()  # cleared while this worker does not hold the state yet
        self.may_word.set()

    # --- the training thread's side ----------------------------------------------------------------------------

    def warm(self, layout: Layout) -> None:
        """Allocate and touch what a round needs, and start the thread, ahead of the switch."""
        self._allocate(layout)
        self._start_thread()
        for bucket in layout.buckets:
            start, stop = bucket.slice(self._rank, self._ranks)
            for k in range(1, len(self._peers)):
                self._landing(bucket, k, stop - start)

    def begin(self, number: int, partials: Partials, shards: int, lineage: Lineage, *, training: bool = True) -> None:
        """Start a round, of a training step or for something else: post its receives. Buckets follow by `ready`."""
        round_ = Round(number, self.worker, partials, shards, lineage, TRAINING if training else OTHER)
        self._allocate(round_.layout)
        self._round = round_
        if not self._peers:
            return
        try:
            self._post(round_)
        except PeerLost as lost:
            self._lose(lost)
            return
        self._start_thread()
        with self._wake:
            self._wake.notify_all()

    def ready(self, bucket: int) -> None:
        """All of this worker's shards are in `bucket`: phase (a)."""
        round_ = self._round
        if round_ is None or self._abandoned:
            return
        if self._peers:
            try:
                self._scatter(round_, round_.layout.buckets[bucket])
            except PeerLost as lost:
                self._lose(lost)
                return
        with self._wake:
            round_.ready[bucket] = True
            self._wake.notify_all()

    def finish(self) -> None:
        """Everything is handed in; a world of one does its phases now, others' thread is at it."""
        if not self._peers and self._round and not self._round.ended:
            self._run(self._round)

    @property
    def ended(self) -> bool:
        return self._round is not None and self._round.ended

    def reduced(self, layout: Layout) -> list[torch.Tensor]:
        """The reduced buckets of the round that ended, each of shape (bucket.numel,)."""
        return self._reduced[layout]

    def abandon(self) -> None:
        """The view was stopped."""
        with self._wake:
            self._abandoned = True
            self._wake.notify_all()
        self.may_word.set()

    def close(self) -> None:
        """The view is over, in order: its thread ends."""
        self.abandon()

    def settle(self) -> None:
        """Send what the abandoned round still owes, contents aside, so that nobody's receive hangs for ever.

        Only after every survivor has abandoned the view: nobody takes what arrives for a result.
        """
        round_ = self._round
        if round_ is None or round_.ended or not self._peers:
            return
        assert self._group is not None
        self._group.graveyard.append(self)
        for bucket in round_.layout.buckets:
            for peer in self._peers:
                with contextlib.suppress(PeerLost):
                    if not round_.scattered[bucket.index]:
                        start, stop = bucket.slice(self.view.rank(peer), self._ranks)
                        for k in range(len(round_.nodes.get(self.worker, ()))):
                            nothing = torch.zeros(stop - start, dtype=bucket.dtype)
                            self._send(round_, nothing, peer, PARTIAL, bucket.index, k)
                    if not round_.gathered[bucket.index]:
                        start, stop = bucket.slice(self._rank, self._ranks)
                        nothing = torch.zeros(stop - start, dtype=bucket.dtype)
                        self._send(round_, nothing, peer, REDUCED, bucket.index)
        if not round_.worded:
            for peer in self._peers:
                with contextlib.suppress(PeerLost):
                    self._send(round_, torch.full((WORD_LENGTH,), -1, dtype=torch.int64), peer, WORD)

    # --- the phases --------------------------------------------------------------------------------------------

    def _post(self, round_: Round) -> None:
        for bucket in round_.layout.buckets[:LANDINGS]:
            self._post_partials(round_, bucket)
        reduced = self._reduced[round_.layout]
        for bucket in round_.layout.buckets:
            for peer in self._peers:
                start, stop = bucket.slice(self.view.rank(peer), self._ranks)
                place = self._staging.host(reduced[bucket.index], bucket)[start:stop]
                round_.slices.append((peer, self._receive(round_, place, peer, REDUCED, bucket.index)))
        for peer in self._peers:
            word = torch.empty(WORD_LENGTH, dtype=torch.int64)
            round_.words.append((peer, word, self._receive(round_, word, peer, WORD)))

    def _post_partials(self, round_: Round, bucket: Bucket) -> None:
        """Where the peers' partial sums of this rank's slice land: the first in the slice's own place."""
        start, stop = bucket.slice(self._rank, self._ranks)
        place = self._staging.host(self._reduced[round_.layout][bucket.index], bucket)[start:stop]
        arrivals = round_.arrivals[bucket.index]
        for peer in self._peers:
            for k, node in enumerate(round_.nodes.get(peer, ())):
                buffer = self._landing(bucket, len(arrivals), stop - start) if arrivals else place
                arrivals.append((node, buffer, peer, self._receive(round_, buffer, peer, PARTIAL, bucket.index, k)))

    def _scatter(self, round_: Round, bucket: Bucket) -> None:
        nodes = round_.partials.nodes[bucket.index]
        for k, node in enumerate(round_.nodes.get(self.worker, ())):
            flat = self._staging.out(nodes[node].flat, bucket)
            for peer in self._peers:
                start, stop = bucket.slice(self.view.rank(peer), self._ranks)
                self._send(round_, flat[start:stop], peer, PARTIAL, bucket.index, k)
        round_.scattered[bucket.index] = True

    def _serve(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._abandoned or (self._round is not None and not self._round.ended))
                if self._abandoned:
                    return
                round_ = self._round
            assert round_ is not None
            if not self._run(round_):
                return

    def _run(self, round_: Round) -> bool:
        """Phases (b) to (d). False: the view is lost."""
        try:
            for bucket in round_.layout.buckets:
                with self._wake:
                    self._wake.wait_for(lambda b=bucket: self._abandoned or round_.ready[b.index])
                    if self._abandoned:
                        return False
                self._sum(round_, bucket)
                self._gather(round_, bucket)
            for peer, pending in round_.slices:
                self._wait(pending, peer)
            for bucket in round_.layout.buckets if self._peers else ():
                self._staging.back(self._reduced[round_.layout][bucket.index], bucket)
            return self._words(round_)
        except PeerLost as lost:
            self._lose(lost)
            return False
        finally:
            self.waiting_for = None
            self._agreement.changed()

    def _sum(self, round_: Round, bucket: Bucket) -> None:
        start, stop = bucket.slice(self._rank, self._ranks)
        reduced = self._reduced[round_.layout]
        own = round_.partials.nodes[bucket.index]
        if not self._peers:
            reduced[bucket.index] = own[root(round_.shards)].flat
            return
        values = {
            node: self._staging.host(own[node].flat, bucket)[start:stop] for node in round_.nodes.get(self.worker, ())
        }
        scratch: set[int] = set()  # what may be overwritten; partial sums may not, a redo needs them
        for node, buffer, peer, pending in round_.arrivals[bucket.index]:
            self._wait(pending, peer)
            values[node] = buffer
            scratch.add(id(buffer))
        target = self._staging.host(reduced[bucket.index], bucket)[start:stop]

        def add(left: torch.Tensor, right: torch.Tensor, last: bool) -> torch.Tensor:
            if last:
                return torch.add(left, right, out=target)
            if id(left) in scratch:
                return left.add_(right)
            if id(right) in scratch:
                return right.add_(left)
            result = torch.add(left, right)
            scratch.add(id(result))
            return result

        total = combine(values, round_.shards, add)
        if total is not target:
            target.copy_(total)
        if bucket.index + LANDINGS < len(round_.layout.buckets):
            self._post_partials(round_, round_.layout.buckets[bucket.index + LANDINGS])

    def _gather(self, round_: Round, bucket: Bucket) -> None:
        if self._peers:
            start, stop = bucket.slice(self._rank, self._ranks)
            place = self._staging.host(self._reduced[round_.layout][bucket.index], bucket)[start:stop]
            for peer in self._peers:
                self._send(round_, place, peer, REDUCED, bucket.index)
        round_.gathered[bucket.index] = True

    def _words(self, round_: Round) -> bool:
        self.may_word.wait()
        if self._abandoned:  # what arrived last may have been a settlement, which is no result
            return False
        compute_us = int((time.monotonic() - round_.begun_at) * 1e6)
        word = self._agreement.word(
            view=self.view.number, round_=round_.number, compute_us=compute_us, shards=round_.mine
        )
        if word is None or self._abandoned:
            return False
        mine = torch.tensor(msgspec.structs.astuple(word), dtype=torch.int64)
        for peer in self._peers:
            self._send(round_, mine, peer, WORD)
        round_.worded = True
        words = [word]
        for peer, tensor, pending in round_.words:
            self._wait(pending, peer)
            words.append(msgspec.convert(tensor.tolist(), Word))
        if not self._agreement.end_round(words):
            return False
        round_.ended = True
        return True

    def _start_thread(self) -> None:
        if self._thread is None and self._peers:
            self._thread = threading.Thread(target=self._serve, name=f"view-{self.view.number}", daemon=True)
            self._thread.start()

    # --- small things ------------------------------------------------------------------------------------------

    def _lose(self, lost: PeerLost) -> None:
        self.abandon()
        self._agreement.lost(self.view.number, lost.peer, lost.reason)

    def _wait(self, pending: Pending, peer: str) -> None:
        self.waiting_for = (peer, time.monotonic())
        pending.wait()
        self.waiting_for = None

    def _send(self, round_: Round, tensor: torch.Tensor, peer: str, kind: int, bucket: int = 0, node: int = 0) -> None:
        assert self._group is not None
        round_.sent.append(self._group.send(tensor, peer, self._tag(round_, kind, bucket, node)))

    def _receive(
        self, round_: Round, tensor: torch.Tensor, peer: str, kind: int, bucket: int = 0, node: int = 0
    ) -> Pending:
        assert self._group is not None
        return self._group.receive(tensor, peer, self._tag(round_, kind, bucket, node))

    def _tag(self, round_: Round, kind: int, bucket: int, node: int) -> int:
        return tag(self.view.number, round_.number, kind, bucket, node, purpose=round_.purpose)

    def _allocate(self, layout: Layout) -> None:
        if layout not in self._reduced:
            flats = [aligned_empty(b.numel, b.dtype, b.device) for b in layout.buckets]
            if self._peers:
                for flat in flats:
                    flat.zero_()  # touched once: page faults cost more than the exchange
            self._reduced[layout] = flats

    def _landing(self, bucket: Bucket, k: int, numel: int) -> torch.Tensor:
        """Memory for the k-th partial sum from elsewhere; `LANDINGS` buckets share it in turn."""
        key = (bucket.dtype, bucket.index % LANDINGS, k)
        found = self._landings.get(key)
        if found is None or found.numel() < numel:
            found = self._landings[key] = torch.zeros(numel, dtype=bucket.dtype)
        return found[:numel]
