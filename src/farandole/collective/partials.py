"""This worker's partial sums of a round's gradients, which it adds upward in the summation tree as far as it can.

What a shard costs beside its backward pass is memory traffic. So a gradient stays where autograd has made it, and goes
all the way up at once, parameter by parameter: it is added to what waits for its shard there, and so on upward, in
place. That reads and writes what plain accumulation into `.grad` does. Only what is exchanged, the sums of the maximal
nodes, goes into a slot of memory that peers can read; with the last shard at once, else when it is asked for. At most
about `2 * log2(shards)` sums are held at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from farandole.collective.arena import Memory, Ordinary
from farandole.collective.buckets import Bucket, Layout, flat
from farandole.plan.shards import Node, exists, parent, root, sibling


class Slot:
    """Memory for one node of one bucket."""

    __slots__ = ("flat", "views")

    def __init__(self, layout: Layout, bucket: Bucket, memory: Memory) -> None:
        self.flat = flat(bucket, memory)
        self.flat.zero_()  # padding between parameters stays zero
        self.views = layout.views(bucket, self.flat)


class Held:
    """The sum of some shards' gradients of one bucket: of each parameter in memory of its own, or all in one slot.

    `parts` has none for a parameter that none of the shards has used: zero.
    """

    __slots__ = ("_new", "parts", "slot")

    def __init__(self, new: Callable[[], Slot]) -> None:
        self._new = new
        self.slot: Slot | None = None
        self.parts: dict[int, torch.Tensor] = {}

    @property
    def flat(self) -> torch.Tensor:
        """In a slot, shape (bucket.numel,)."""
        if self.slot is None:
            slot = self._new()
            for index, place in slot.views.items():
                _lay(self.parts.get(index), place)
            self.lie_in(slot)
            return slot.flat
        return self.slot.flat

    def lie_in(self, slot: Slot) -> None:
        self.slot, self.parts = slot, slot.views


class Partials:
    """See the module's head.

    For each shard in turn: `open(shard)`, then `fold` for each gradient as the backward pass produces it, then
    `close()`, which adds zeros for the parameters that got none. `complete(bucket)` is called when a bucket has all of
    the shard's gradients.
    """

    def __init__(self, layout: Layout, memory: Memory | None = None) -> None:
        """`memory`: where the slots lie; None for this process's own."""
        self.layout = layout
        self._memory = memory or Ordinary()
        self.nodes: list[dict[Node, Held]] = [{} for _ in layout.buckets]
        self._free: list[list[Slot]] = [[] for _ in layout.buckets]
        self._ways: list[_Way] = []
        self._missing: list[set[int]] = [set() for _ in layout.buckets]
        self._all = [frozenset(bucket.params) for bucket in layout.buckets]
        self.shard = -1
        self.shards = 0
        self.complete: Callable[[int], None] = _nobody

    def warm(self) -> None:
        """Have a slot of each bucket: else a joiner's first step of its own would wait for its page faults."""
        for bucket, free in enumerate(self._free):
            free.append(self._new(bucket))

    def begin(self, shards: int) -> None:
        """A new round of `shards` shards: what was kept for the last one is given up."""
        self.shards = shards
        for bucket, nodes in enumerate(self.nodes):
            self._give_back(bucket, *nodes.values())
            nodes.clear()

    def open(self, shard: int, *, last: bool = False) -> None:
        """The gradients of `shard` come next. `last`: the sums that it completes are exchanged next."""
        assert self.shard < 0, f"shard {self.shard} is still open"
        self.shard = shard
        self._missing = [set(params) for params in self._all]
        node, others = self._climb(shard)
        self._ways = [self._way(bucket, node, others, last=last) for bucket in range(len(self.nodes))]

    def fold(self, index: int, gradient: torch.Tensor) -> None:
        """The gradient of parameter `index` for the open shard, complete for this shard; it is the sums' own now."""
        bucket = self.layout.where[index]
        missing = self._missing[bucket]
        missing.remove(index)
        self._ways[bucket].add(index, gradient)
        if not missing:
            self._merge(bucket)

    def folded(self, index: int) -> bool:
        return index not in self._missing[self.layout.where[index]]

    def close(self, lanes: torch.Tensor | None) -> None:
        """The shard's backward passes are done. `lanes`: its float64 lanes, shape (lanes,)."""
        for bucket in self.layout.buckets:
            missing = self._missing[bucket.index]
            if not bucket.params:
                assert lanes is not None
                self._ways[bucket.index].add_lanes(lanes)
                self._merge(bucket.index)
            elif missing:
                for index in missing:
                    self._ways[bucket.index].add(index, None)
                missing.clear()
                self._merge(bucket.index)
        self.shard = -1

    def _climb(self, shard: int) -> tuple[Node, list[Node]]:
        """How far up the shard comes, and the nodes that it is added to on its way. All buckets have the same ones."""
        there, others = self.nodes[0] if self.nodes else {}, list[Node]()
        node, top = (0, shard), root(self.shards)
        while node != top:
            other = sibling(node)
            if other in there:
                others.append(other)
            elif exists(other, self.shards):
                break
            node = parent(node)
        return node, others

    def _way(self, bucket: int, node: Node, siblings: list[Node], *, last: bool) -> _Way:
        nodes = self.nodes[bucket]
        others = [nodes.pop(sibling) for sibling in siblings]
        held = others[0] if others else Held(lambda: self._new(bucket))
        slotted = held.slot is None and (last or not self._all[bucket])
        return _Way(node, held, others, self._new(bucket) if slotted else None)

    def _merge(self, bucket: int) -> None:
        """All of the shard is in."""
        way = self._ways[bucket]
        if way.slot is not None:
            way.held.lie_in(way.slot)
        self._give_back(bucket, *way.others[1:])
        self.nodes[bucket][way.node] = way.held
        self.complete(bucket)

    def _give_back(self, bucket: int, *held: Held) -> None:
        self._free[bucket] += [each.slot for each in held if each.slot is not None]

    def _new(self, bucket: int) -> Slot:
        free = self._free[bucket]
        return free.pop() if free else Slot(self.layout, self.layout.buckets[bucket], self._memory)


class _Way:
    """Upward from the open shard in one bucket: to `node`, by adding the `others`.

    The sum ends in `held`, which is the first of them if there is one; in its `slot` if that is given.
    """

    def __init__(self, node: Node, held: Held, others: list[Held], slot: Slot | None) -> None:
        self.node = node
        self.held = held
        self.others = others
        self.slot = slot

    def add(self, index: int, gradient: torch.Tensor | None) -> None:
        """One parameter's part; None is zero."""
        total = gradient
        last = len(self.others) - 1
        place = self.slot.views[index] if self.slot is not None else None
        for number, other in enumerate(self.others):
            part = other.parts.get(index)
            into = place if number == last else None
            if into is None and total is None and number and other.slot is not None and part is not None:
                into = torch.empty_like(part)  # that slot is given back
            total = _plus(total, part, into) if number else _plus(part, total, into)
        if place is not None and (last < 0 or total is None):
            _lay(total, place)
        elif place is None and self.held.slot is None and total is not None:
            self.held.parts[index] = total

    def add_lanes(self, lanes: torch.Tensor) -> None:
        count = lanes.numel()
        if self.slot is not None:
            self.slot.flat[:count].copy_(lanes)
            return
        total = self.held.flat[:count].add_(lanes)
        for other in self.others[1:]:
            total.add_(other.flat[:count])  # a + b == b + a, bit for bit


def _plus(left: torch.Tensor | None, right: torch.Tensor | None, into: torch.Tensor | None) -> torch.Tensor | None:
    """Their sum, in the place of the left one if no other is given. None is zero, and adding that is not nothing: it
    turns -0.0 into 0.0, here as on any other worker.
    """
    if left is None:
        left, right = right, None
    if left is None:
        return None
    return torch.add(left, 0.0 if right is None else right, out=left if into is None else into)


def _lay(part: torch.Tensor | None, place: torch.Tensor) -> None:
    place.zero_() if part is None else place.copy_(part)


def _nobody(bucket: int) -> None:
    del bucket
