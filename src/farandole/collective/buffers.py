"""A view's own memory for its exchange (R3): the sums of the buckets, and where partial sums of others land.

Nothing of it is used by another view, so that what is still under way in an abandoned one spoils nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from weakref import WeakKeyDictionary

import torch

from farandole.collective.arena import Arena, Memory
from farandole.collective.buckets import Bucket, Layout
from farandole.collective.levels import Levels
from farandole.collective.order import LANDINGS, Add, Fold
from farandole.collective.round import Round
from farandole.collective.routes import Message
from farandole.collective.staging import Staging
from farandole.collective.sums import Alone, Copied, InPlace, Sum
from farandole.collective.tags import PARTIAL, WORD
from farandole.collective.transport import Room
from farandole.membership.view import WORD_LENGTH, View
from farandole.plan.shards import Node, combine, root


class Buffers:
    """See the module's head. `lends`: a peer shares memory with this worker."""

    def __init__(self, view: View, worker: str, memory: Memory, stage: bool | None, *, lends: bool) -> None:
        self._levels, self._worker, self._alone = Levels.of(view), worker, view.size == 1
        self._memory, self._stage = memory, stage
        name = repr((view.group, view.number, view.members)).encode()
        self._stamp = int.from_bytes(hashlib.sha256(name).digest()[:7], "little") | 1
        self._lends = lends
        self.staging = Staging(memory, stage)
        self._sums: WeakKeyDictionary[Layout, list[Sum]] = WeakKeyDictionary()
        self._used: list[InPlace] = []  # of the last training round, by all
        self._rests = False
        self._landings: dict[tuple[torch.dtype, int, int], torch.Tensor] = {}

    def allocate(self, layout: Layout) -> None:
        if layout not in self._sums:
            self._sums[layout] = [self._sum(bucket) for bucket in layout.buckets]

    def warm(self, layout: Layout, arrivals: Iterable[Message]) -> None:
        """Allocate and touch what a round needs in which these land here."""
        self.allocate(layout)
        for message in arrivals:
            if message.kind == PARTIAL:
                self.where(layout, message)

    def begin(self, layout: Layout, *, heard: bool) -> None:
        self.allocate(layout)
        sums = self._sums[layout]
        for each in sums:
            each.begin(heard=heard)
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
        bucket, sum_ = layout.buckets[message.bucket], self._sums[layout][message.bucket]
        if message.kind == PARTIAL and (message.landing or isinstance(sum_, InPlace)):
            return self._landing(bucket, message.landing, message.stop - message.start)
        return sum_.place(message.start, message.stop)

    def sum_up(self, round_: Round, act: Fold | Add) -> None:
        """In the order of the tree over shards."""
        if isinstance(act, Fold):
            self._fold(round_, act)
        else:
            self._add(round_, act)

    def _fold(self, round_: Round, act: Fold) -> None:
        """Make the host's sums of a stretch of a bucket. They are held from then on, instead of this worker's own.

        The first that takes adding up is made where the sum will be: its owner sends that when it has had this one.
        """
        bucket, sum_ = round_.layout.buckets[act.bucket], self._sums[round_.layout][act.bucket]
        values, landed = self._values(round_, act)
        made: dict[Node, tuple[int, torch.Tensor]] = {}
        for number, node in enumerate(act.nodes):
            target = self._more(bucket, number, act) if number else sum_.place(act.start, act.stop)
            total = _total(values, landed, round_.order.shards, node, target)
            made[node] = act.start, target.copy_(total) if id(total) in landed else total
        round_.held[act.bucket] = made

    def _add(self, round_: Round, act: Add) -> None:
        """Sum up a slice of a bucket."""
        sum_ = self._sums[round_.layout][act.bucket]
        if isinstance(sum_, Alone):
            (sum_.flat,) = (flat for _, flat in round_.held[act.bucket].values())
            return
        target = sum_.place(act.start, act.stop)
        values, landed = self._values(round_, act)
        total = _total(values, landed, round_.order.shards, root(round_.order.shards), target)
        if total.data_ptr() != target.data_ptr():
            target.copy_(total)

    def _values(self, round_: Round, act: Fold | Add) -> tuple[dict[Node, torch.Tensor], set[int]]:
        """What a sum of that stretch is made of, in host memory; and the ids of what has landed here.

        That may be overwritten. Partial sums may not: a redo needs them; nor what others have lent.
        """
        values = {node: round_.sum_held(node, act.bucket, act.start, act.stop) for node in round_.held[act.bucket]}
        taken = {message.node: round_.here[message.peer, message.place] for message in act.taken}
        return values | taken, {id(taken[message.node]) for message in act.taken if round_.landed(message)}

    def _sum(self, bucket: Bucket) -> Sum:
        if self._alone:
            return Alone()
        in_place = self._lends and bucket.large and not self.staging.serves(bucket)
        own = self._levels.stretch(bucket, self._worker)
        if in_place and isinstance(self._memory, Arena) and self._memory.works:
            return InPlace(bucket, own, self._memory, self._stamp)
        return Copied(bucket, self._stage)

    def _more(self, bucket: Bucket, number: int, act: Fold) -> torch.Tensor:
        """Memory for one more sum of the host's, for as long as the round lasts."""
        key = (bucket.dtype, bucket.index, -number)
        if key not in self._landings:
            self._landings[key] = torch.zeros(act.stop - act.start, dtype=bucket.dtype)
        return self._landings[key]

    def _landing(self, bucket: Bucket, k: int, numel: int) -> torch.Tensor:
        """Memory for the k-th partial sum from elsewhere; `LANDINGS` buckets share it in turn."""
        key = (bucket.dtype, bucket.index % LANDINGS, k)
        found = self._landings.get(key)
        if found is None or found.numel() < numel:
            found = self._landings[key] = torch.zeros(numel, dtype=bucket.dtype)
        return found[:numel]


def _total(
    values: dict[Node, torch.Tensor], spare: set[int], shards: int, node: Node, target: torch.Tensor
) -> torch.Tensor:
    """A node's sum: in `target`, or one of the values itself. `spare`: the ids of those that may be overwritten."""
    spare = set(spare)

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

    return combine(values, shards, add, node)
