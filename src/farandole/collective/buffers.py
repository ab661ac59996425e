"""A view's own memory for its exchange (R3): the reduced buckets, and where partial sums of others land.

Nothing of it is used by another view, so that what is still under way in an abandoned one spoils nothing.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch

from farandole.collective.arena import Memory
from farandole.collective.buckets import Bucket, Layout, flat
from farandole.collective.order import LANDINGS, Add, Message
from farandole.collective.round import Round
from farandole.collective.staging import Staging
from farandole.collective.tags import PARTIAL, WORD
from farandole.collective.transport import Room
from farandole.membership.view import WORD_LENGTH
from farandole.plan.tree import combine, root


class Buffers:
    """See the module's head. `alone`: a world of one, whose reduced bucket is the slot of the tree's root."""

    def __init__(self, staging: Staging, memory: Memory, *, alone: bool) -> None:
        self._staging = staging
        self._memory = memory
        self._alone = alone
        self._reduced: WeakKeyDictionary[Layout, list[torch.Tensor]] = WeakKeyDictionary()
        self._landings: dict[tuple[torch.dtype, int, int], torch.Tensor] = {}

    def allocate(self, layout: Layout) -> None:
        if layout not in self._reduced:
            self._reduced[layout] = [
                torch.empty(0) if self._alone else flat(bucket, self._memory) for bucket in layout.buckets
            ]

    def warm(self, layout: Layout, rank: int, ranks: int, *, lands: bool) -> None:
        """Allocate and touch what a round needs in which each worker has one partial sum, which `lands` here or not."""
        self.allocate(layout)
        for bucket in layout.buckets:
            start, stop = bucket.slice(rank, ranks)
            for k in range(1, ranks - 1 if lands else 0):
                self._landing(bucket, k, stop - start)

    def reduced(self, layout: Layout) -> list[torch.Tensor]:
        """The reduced buckets of the round that ended, each of shape (bucket.numel,)."""
        return self._reduced[layout]

    def back(self, layout: Layout) -> None:
        """All slices of all buckets are in host memory: bring them to where the buckets are."""
        for bucket in layout.buckets if not self._alone else ():
            self._staging.back(self._reduced[layout][bucket.index], bucket)

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
        return self._staging.host(self._reduced[layout][bucket.index], bucket)[message.start : message.stop]

    def add(self, round_: Round, act: Add) -> None:
        """Sum up this rank's slice of a bucket, in the order of the tree over shards."""
        bucket = round_.layout.buckets[act.bucket]
        reduced = self._reduced[round_.layout]
        own = round_.own[act.bucket]
        if self._alone:
            reduced[act.bucket] = own[root(round_.order.shards)]
            return
        values = {node: self._staging.host(flat, bucket)[act.start : act.stop] for node, flat in own.items()}
        taken = {message.node: round_.here[message.peer, message.place] for message in act.taken}
        # What has landed here may be overwritten. Partial sums may not: a redo needs them; nor what others have lent.
        spare = {id(taken[message.node]) for message in act.taken if round_.landed(message)}
        target = self._staging.host(reduced[act.bucket], bucket)[act.start : act.stop]

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

    def _landing(self, bucket: Bucket, k: int, numel: int) -> torch.Tensor:
        """Memory for the k-th partial sum from elsewhere; `LANDINGS` buckets share it in turn."""
        key = (bucket.dtype, bucket.index % LANDINGS, k)
        found = self._landings.get(key)
        if found is None or found.numel() < numel:
            found = self._landings[key] = torch.zeros(numel, dtype=bucket.dtype)
        return found[:numel]
