"""This worker's partial sums of a round's gradients, which it adds upward in the summation tree as far as it can.

For each bucket there is one slot of memory for each maximal node, nothing else: at most about `2 * log2(shards)` slots.

A gradient is in memory of autograd's when it is complete. Of two shards that are added to each other and computed one
after the other, the first one's gradients stay there (a `Leaf`) until the second one's are; both are read and their sum
is written, once. That is what plain accumulation into `.grad` does, no more: to copy each gradient into a slot cost a
quarter of a step of small shards. Whoever asks for a leaf before gets it laid into a slot.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from farandole.collective.arena import Memory, Ordinary
from farandole.collective.buckets import Bucket, Layout, flat
from farandole.plan.tree import Node, exists, parent, root, sibling


class Slot:
    """Memory for one node of one bucket."""

    __slots__ = ("flat", "views")

    def __init__(self, layout: Layout, bucket: Bucket, memory: Memory) -> None:
        self.flat = flat(bucket, memory)
        self.flat.zero_()  # padding between parameters stays zero
        self.views = layout.views(bucket, self.flat)


class Leaf:
    """One shard's gradients of one bucket, by the parameter's index: none for a parameter that it did not use."""

    __slots__ = ("_new", "gradients", "slot")

    def __init__(self, new: Callable[[], Slot]) -> None:
        self.gradients: dict[int, torch.Tensor] = {}
        self.slot: Slot | None = None
        self._new = new

    @property
    def flat(self) -> torch.Tensor:
        if self.slot is None:
            self.slot = slot = self._new()
            for index, place in slot.views.items():
                gradient = self.gradients.pop(index, None)
                place.zero_() if gradient is None else place.copy_(gradient)
        return self.slot.flat


class Partials:
    """See the module's head.

    For each shard in turn: `open(shard)`, then `fold` for each gradient as the backward pass produces it, then
    `close()`, which adds zeros for the parameters that got none. `complete(bucket)` is called when a bucket has all of
    the shard's gradients.
    """

    def __init__(self, layout: Layout, memory: Memory | None = None) -> None:
        """`memory`: where they lie; None for this process's own."""
        self.layout = layout
        self._memory = memory or Ordinary()
        self.nodes: list[dict[Node, Slot | Leaf]] = [{} for _ in layout.buckets]
        self._free: list[list[Slot]] = [[] for _ in layout.buckets]
        self._target: list[Slot | Leaf | None] = [None] * len(layout.buckets)
        self._adding = [False] * len(layout.buckets)
        self._first: list[dict[int, torch.Tensor] | None] = [None] * len(layout.buckets)  # a leaf's, to be added
        self._missing: list[set[int]] = [set() for _ in layout.buckets]
        self._all = [frozenset(bucket.params) for bucket in layout.buckets]
        self.shard = -1
        self.shards = 0
        self.complete: Callable[[int], None] = _nobody

    def begin(self, shards: int) -> None:
        """A new round of `shards` shards: what was kept for the last one is given up."""
        self.shards = shards
        for nodes, free in zip(self.nodes, self._free, strict=True):
            free.extend(slot for slot in map(_slot, nodes.values()) if slot is not None)
            nodes.clear()

    def open(self, shard: int, *, then: int = -1) -> None:
        """The gradients of `shard` come next, and after them those of `then`, -1 if that is not known."""
        assert self.shard < 0, f"shard {self.shard} is still open"
        self.shard = shard
        paired = sibling((0, shard)) == (0, then)
        for bucket in range(len(self.layout.buckets)):
            self._missing[bucket] = set(self._all[bucket])
            other = self.nodes[bucket].pop(sibling((0, shard)), None)
            slot = _slot(other)
            self._adding[bucket] = slot is not None
            self._first[bucket] = other.gradients if isinstance(other, Leaf) and slot is None else None
            if slot is None and other is None and paired and self._all[bucket]:
                self._target[bucket] = Leaf(lambda bucket=bucket: self._new(bucket))
            else:
                self._target[bucket] = slot or self._new(bucket)

    def fold(self, index: int, gradient: torch.Tensor) -> None:
        """The gradient of parameter `index` for the open shard, complete for this shard; it is the sums' own now."""
        bucket = self.layout.where[index]
        missing = self._missing[bucket]
        missing.remove(index)
        self._put(bucket, index, gradient)
        if not missing:
            self._merge(bucket)

    def folded(self, index: int) -> bool:
        return index not in self._missing[self.layout.where[index]]

    def close(self, lanes: torch.Tensor | None) -> None:
        """The shard's backward passes are done. `lanes`: its float64 lanes, shape (lanes,)."""
        for bucket in self.layout.buckets:
            missing = self._missing[bucket.index]
            if not bucket.params:
                slot = self._target[bucket.index]
                assert lanes is not None
                assert isinstance(slot, Slot)
                place = slot.flat[: self.layout.lanes]
                place.add_(lanes) if self._adding[bucket.index] else place.copy_(lanes)
                self._merge(bucket.index)
            elif missing:
                for index in missing:
                    self._put(bucket.index, index, None)
                missing.clear()
                self._merge(bucket.index)
        self.shard = -1

    def _put(self, bucket: int, index: int, gradient: torch.Tensor | None) -> None:
        """One parameter's part. None is zero, and adding that is not nothing: it turns -0.0 into 0.0, here as on any
        other worker.
        """
        target, first = self._target[bucket], self._first[bucket]
        if isinstance(target, Leaf):
            if gradient is not None:
                target.gradients[index] = gradient
            return
        assert target is not None
        place = target.views[index]
        if self._adding[bucket]:
            place.add_(0.0 if gradient is None else gradient)
        elif first is None:
            place.zero_() if gradient is None else place.copy_(gradient)
        else:
            before = first.pop(index, None)
            if before is not None:
                torch.add(before, 0.0 if gradient is None else gradient, out=place)
            elif gradient is not None:
                torch.add(gradient, 0.0, out=place)
            else:
                place.zero_()

    def _merge(self, bucket: int) -> None:
        """Carry the finished shard upward as long as its sibling is held or does not exist."""
        target = self._target[bucket]
        assert target is not None
        self._target[bucket] = None
        nodes = self.nodes[bucket]
        node: Node = (0, self.shard)
        if isinstance(target, Leaf):
            nodes[node] = target  # its sibling comes next
            return
        if self._adding[bucket] or self._first[bucket] is not None:
            node = parent(node)
        top = root(self.shards)
        while node != top:
            other = nodes.pop(sibling(node), None)
            if other is not None:
                target.flat.add_(other.flat)  # a + b == b + a, bit for bit
                self._free[bucket] += [slot for slot in [_slot(other)] if slot is not None]
            elif exists(sibling(node), self.shards):
                break
            node = parent(node)
        nodes[node] = target
        self.complete(bucket)

    def _new(self, bucket: int) -> Slot:
        free = self._free[bucket]
        return free.pop() if free else Slot(self.layout, self.layout.buckets[bucket], self._memory)


def _slot(held: Slot | Leaf | None) -> Slot | None:
    return held.slot if isinstance(held, Leaf) else held


def _nobody(bucket: int) -> None:
    del bucket
