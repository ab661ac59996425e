"""A view's own memory for its exchange (R3): the sums of the buckets, and where partial sums of others land.

Nothing of it is used by another view, so that what is still under way in an abandoned one spoils nothing.
"""

from __future__ import annotations

import hashlib
from weakref import WeakKeyDictionary

import torch

from farandole.collective.arena import Arena, Memory
from farandole.collective.buckets import Bucket, Layout
from farandole.collective.order import LANDINGS, Add, Message
from farandole.collective.round import Round
from farandole.collective.staging import Staging
from farandole.collective.sums import Alone, Copied, InPlace, Sum
from farandole.collective.tags import PARTIAL, WORD
from farandole.collective.transport import Room
from farandole.membership.view import WORD_LENGTH, View
from farandole.plan.tree import combine, root


class Buffers:
    """See the module's head. `near`: a peer shares memory with this worker; `far`: one does not."""

    def __init__(self, view: View, worker: str, memory: Memory, stage: bool | None, *, near: bool, far: bool) -> None:
        self._rank, self._ranks = view.rank(worker), view.size
        self._memory, self._stage = memory, stage
        name = repr((view.group, view.number, view.members)).encode()
        self._stamp = int.from_bytes(hashlib.sha256(name).digest()[:7], "little") | 1
        self._near, self._far = near, far
        self.staging = Staging(memory, stage)
        self._sums: WeakKeyDictionary[Layout, list[Sum]] = WeakKeyDictionary()
        self._used: list[InPlace] = []  # of the last training round, by all
        self._rests = False
        self._landings: dict[tuple[torch.dtype, int, int], torch.Tensor] = {}

    def allocate(self, layout: Layout) -> None:
        if layout not in self._sums:
            self._sums[layout] = [self._sum(bucket) for bucket in layout.buckets]

    def warm(self, layout: Layout) -> None:
        """Allocate and touch what a round needs in which each worker has one partial sum."""
        self.allocate(layout)
        for bucket in layout.buckets:
            start, stop = bucket.slice(self._rank, self._ranks)
            for k in range(1, self._ranks - 1 if self._far else 0):
                self._landing(bucket, k, stop - start)

    def begin(self, layout: Layout) -> None:
        self.allocate(layout)
        sums = self._sums[layout]
        for each in sums:
            each.begin()
        used = [each for each in sums if isinstance(each, InPlace)]
        if used and used != self._used:
            self.rest()
            self._used, self._rests = used, False

    def rest(self) -> None:
        """Nothing new is summed up where the last training round's sums are; others may use those. Idempotent."""
        if isinstance(self._memory, Arena) and not self._rests:
            self._rests = True
            for each in self._used:
                self._memory.rest(each)

    def woken(self) -> None:
        """All have begun a later training round than the one that what rests is of."""
        if isinstance(self._memory, Arena):
            self._memory.wake()

    @property
    def stood(self) -> bool:
        """The sums in use are what they were."""
        return all(each.stood for each in self._used)

    def reduced(self, layout: Layout) -> list[torch.Tensor]:
        """The reduced buckets of the round that ended, each of shape (bucket.numel,)."""
        return [each.flat for each in self._sums[layout]]

    def complete(self, layout: Layout) -> None:
        """All slices of all buckets are here."""
        for each in self._sums[layout]:
            each.complete()

    def put(self, layout: Layout, message: Message, there: torch.Tensor) -> bool:
        """The slice that a message tells of lies there. False: it did, and its owner has given the memory back."""
        return self._sums[layout][message.bucket].put(message.start, message.stop, there)

    def room(self, layout: Layout, message: Message) -> Room:
        """Where a message may land."""
        if message.kind == WORD:
            return Room(WORD_LENGTH, torch.int64, lambda: torch.empty(WORD_LENGTH, dtype=torch.int64))
        dtype = layout.buckets[message.bucket].dtype
        return Room(message.stop - message.start, dtype, lambda: self.where(layout, message))

    def where(self, layout: Layout, message: Message) -> torch.Tensor:
        """Where a partial sum or a slice lands, or the sum that is gathered lies."""
        bucket = layout.buckets[message.bucket]
        if message.kind == PARTIAL and message.landing:
            return self._landing(bucket, message.landing, message.stop - message.start)
        return self._sums[layout][message.bucket].place(message.start, message.stop)

    def add(self, round_: Round, act: Add) -> None:
        """Sum up this rank's slice of a bucket, in the order of the tree over shards."""
        bucket = round_.layout.buckets[act.bucket]
        sum_ = self._sums[round_.layout][act.bucket]
        own = round_.own[act.bucket]
        if isinstance(sum_, Alone):
            sum_.flat = own[root(round_.order.shards)]
            return
        values = {node: self.staging.host(flat, bucket)[act.start : act.stop] for node, flat in own.items()}
        taken = {message.node: round_.here[message.peer, message.place] for message in act.taken}
        # What has landed here may be overwritten. Partial sums may not: a redo needs them; nor what others have lent.
        spare = {id(taken[message.node]) for message in act.taken if round_.landed(message)}
        target = sum_.place(act.start, act.stop)

        def add(left: torch.Tensor, right: torch.Tensor, last: bool) -> torch.Tensor:
            if last:
                return torch.add(left, right, out=target)
            if id(left) in spare:
                return left.add_(right)
            if id(right) in spare:
                return right.add_(left)
            result = torch.add(left, right)
            spare.add(id(result))
            return result

        total = combine(values | taken, round_.order.shards, add)
        if total is not target:
            target.copy_(total)

    def _sum(self, bucket: Bucket) -> Sum:
        if self._ranks == 1:
            return Alone()
        in_place = self._near and bucket.large and not self.staging.serves(bucket)
        if in_place and isinstance(self._memory, Arena) and self._memory.works:
            return InPlace(bucket, self._rank, self._ranks, self._memory, self._stamp)
        return Copied(bucket, self._stage)

    def _landing(self, bucket: Bucket, k: int, numel: int) -> torch.Tensor:
        """Memory for the k-th partial sum from elsewhere; `LANDINGS` buckets share it in turn."""
        key = (bucket.dtype, bucket.index % LANDINGS, k)
        found = self._landings.get(key)
        if found is None or found.numel() < numel:
            found = self._landings[key] = torch.zeros(numel, dtype=bucket.dtype)
        return found[:numel]
