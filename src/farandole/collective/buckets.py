"""Gradient buckets: where a round's gradients live, and this worker's partial sums of them.

A layout is fixed by the model alone: flat buckets in reverse parameter order (the order in which a backward pass
produces gradients), the first one small so that traffic starts early, each parameter at a 64-byte aligned offset. So
every worker has the same buckets, however many there are; a model of more gradients than `MOST_BUCKETS` of the usual
size hold has larger ones. One more bucket of float64 *lanes* carries what else is
summed over the shards: the loss, the sample count, which parameters were used, buffers.

`Partials` adds each shard's gradients upward in the summation tree as far as this worker's shards allow. For each
bucket it keeps one slot of memory for each maximal node, nothing else: at most about `2 * log2(shards)` slots.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from farandole.collective.arena import Memory, Ordinary
from farandole.collective.tags import MOST_BUCKETS
from farandole.plan.tree import Node, exists, parent, root, sibling

ALIGNMENT = 64  # bytes
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """One flat bucket: `numel` elements of `dtype`; member `k` of `params` lives at `offsets[k]`."""

    index: int
    dtype: torch.dtype
    device: torch.device
    params: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int

    def slice(self, rank: int, ranks: int) -> tuple[int, int]:
        """The part `[start, stop)` that one rank sums up, cut at 64 byte boundaries."""
        unit = ALIGNMENT // self.dtype.itemsize
        units = self.numel // unit
        return units * rank // ranks * unit, units * (rank + 1) // ranks * unit


class Layout:
    """The buckets of `parameters` (active ones only have gradients exchanged) and of `lanes` float64 lanes.

    There are at most `most` of them.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], lanes: int, *, most: int = MOST_BUCKETS) -> None:
        self.parameters = list(parameters)
        self.lanes = lanes
        self.buckets: list[Bucket] = []
        self.where: dict[int, int] = {}  # index of parameter -> index of bucket
        self._cut(most)
        if lanes:
            unit = ALIGNMENT // 8
            self.buckets.append(
                Bucket(
                    index=len(self.buckets),
                    dtype=torch.float64,
                    device=torch.device("cpu"),
                    params=(),
                    offsets=(),
                    numel=-(-lanes // unit) * unit,
                )
            )

    @functools.cached_property
    def sizes(self) -> str:
        """What stands for how large a round's messages are, and of which parameters; as hex."""
        sizes = [(str(bucket.dtype), bucket.numel, bucket.params) for bucket in self.buckets]
        return hashlib.sha256(repr(sizes).encode()).hexdigest()

    def _cut(self, most: int) -> None:
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index in reversed(range(len(self.parameters))):
            parameter = self.parameters[index]
            if parameter.requires_grad:
                kinds.setdefault((parameter.dtype, parameter.device), []).append(index)
        total = sum(_padded(p) for p in self.parameters if p.requires_grad)
        enough = -(-total // max(most - len(kinds) - 2, 1))  # one more for each kind, the first one and the lanes
        for (dtype, device), indexes in kinds.items():
            unit = ALIGNMENT // dtype.itemsize
            params: list[int] = []
            offsets: list[int] = []
            numel = 0
            for index in indexes:
                params.append(index)
                offsets.append(numel)
                numel += -(-self.parameters[index].numel() // unit) * unit
                limit = max(BUCKET_BYTES, enough) if self.buckets else FIRST_BUCKET_BYTES
                if numel * dtype.itemsize >= limit or index == indexes[-1]:
                    bucket = Bucket(
                        index=len(self.buckets),
                        dtype=dtype,
                        device=device,
                        params=tuple(params),
                        offsets=tuple(offsets),
                        numel=numel,
                    )
                    self.buckets.append(bucket)
                    self.where.update(dict.fromkeys(params, bucket.index))
                    params, offsets, numel = [], [], 0

    def views(self, bucket: Bucket, flat: torch.Tensor) -> dict[int, torch.Tensor]:
        """The parameters' places in a bucket's memory, in each parameter's own shape and memory format."""
        views: dict[int, torch.Tensor] = {}
        for index, offset in zip(bucket.params, bucket.offsets, strict=True):
            parameter = self.parameters[index]
            channels_last = parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
            strides = parameter.stride() if channels_last else torch.empty(parameter.shape, device="meta").stride()
            views[index] = flat.as_strided(parameter.shape, strides, offset)
        return views


def _padded(parameter: torch.Tensor) -> int:
    return -(-parameter.numel() * parameter.element_size() // ALIGNMENT) * ALIGNMENT


def flat(bucket: Bucket, memory: Memory) -> torch.Tensor:
    """Room for a bucket where it lives, 64-byte aligned (as torch's own allocators do on a device)."""
    if bucket.device.type == "cpu":
        return memory.empty(bucket.numel, bucket.dtype)
    return torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device)


class Slot:
    """Memory for one node of one bucket."""

    __slots__ = ("flat", "views")

    def __init__(self, layout: Layout, bucket: Bucket, memory: Memory) -> None:
        self.flat = flat(bucket, memory)
        self.flat.zero_()  # padding between parameters stays zero
        self.views = layout.views(bucket, self.flat)


class Partials:
    """This worker's partial sums of one round, for every bucket. See the module's head.

    For each shard in turn: `open(shard)`, then `fold` for each gradient as the backward pass produces it, then
    `close()`, which adds zeros for the parameters that got none. `complete(bucket)` is called when a bucket has all of
    the shard's gradients.
    """

    def __init__(self, layout: Layout, memory: Memory | None = None) -> None:
        """`memory`: where they lie; None for this process's own."""
        self.layout = layout
        self._memory = memory or Ordinary()
        self.nodes: list[dict[Node, Slot]] = [{} for _ in layout.buckets]
        self._free: list[list[Slot]] = [[] for _ in layout.buckets]
        self._target: list[Slot | None] = [None] * len(layout.buckets)
        self._adding = [False] * len(layout.buckets)
        self._missing: list[set[int]] = [set() for _ in layout.buckets]
        self._all = [frozenset(bucket.params) for bucket in layout.buckets]
        self.shard = -1
        self.shards = 0
        self.complete: Callable[[int], None] = _nobody

    def begin(self, shards: int) -> None:
        """A new round of `shards` shards: what was kept for the last one is given up."""
        self.shards = shards
        for nodes, free in zip(self.nodes, self._free, strict=True):
            free.extend(nodes.values())
            nodes.clear()

    def open(self, shard: int) -> None:
        """The gradients of `shard` come next."""
        assert self.shard < 0, f"shard {self.shard} is still open"
        self.shard = shard
        for bucket in range(len(self.layout.buckets)):
            self._missing[bucket] = set(self._all[bucket])
            other = self.nodes[bucket].pop(sibling((0, shard)), None)
            self._adding[bucket] = other is not None
            self._target[bucket] = other or self._slot(bucket)

    def fold(self, index: int, gradient: torch.Tensor) -> None:
        """The gradient of parameter `index` for the open shard, complete for this shard."""
        bucket = self.layout.where[index]
        missing = self._missing[bucket]
        missing.remove(index)
        slot = self._target[bucket]
        assert slot is not None
        if self._adding[bucket]:
            slot.views[index].add_(gradient)
        else:
            slot.views[index].copy_(gradient)
        if not missing:
            self._merge(bucket)

    def folded(self, index: int) -> bool:
        return index not in self._missing[self.layout.where[index]]

    def close(self, lanes: torch.Tensor | None) -> None:
        """The shard's backward passes are done. `lanes`: its float64 lanes, shape (lanes,)."""
        for bucket in self.layout.buckets:
            missing = self._missing[bucket.index]
            slot = self._target[bucket.index]
            if not bucket.params:
                assert lanes is not None
                assert slot is not None
                place = slot.flat[: self.layout.lanes]
                place.add_(lanes) if self._adding[bucket.index] else place.copy_(lanes)
                self._merge(bucket.index)
            elif missing:
                assert slot is not None
                for index in missing:  # adding zero is not nothing: it turns -0.0 into 0.0, here as on any other worker
                    slot.views[index].add_(0.0) if self._adding[bucket.index] else slot.views[index].zero_()
                missing.clear()
                self._merge(bucket.index)
        self.shard = -1

    def _merge(self, bucket: int) -> None:
        """Carry the finished shard upward as long as its sibling is held or does not exist."""
        slot = self._target[bucket]
        assert slot is not None
        self._target[bucket] = None
        nodes = self.nodes[bucket]
        node: Node = (0, self.shard)
        if self._adding[bucket]:
            node = parent(node)
        top = root(self.shards)
        while node != top:
            other = nodes.pop(sibling(node), None)
            if other is not None:
                slot.flat.add_(other.flat)  # a + b == b + a, bit for bit
                self._free[bucket].append(other)
            elif exists(sibling(node), self.shards):
                break
            node = parent(node)
        nodes[node] = slot
        self.complete(bucket)

    def _slot(self, bucket: int) -> Slot:
        free = self._free[bucket]
        return free.pop() if free else Slot(self.layout, self.layout.buckets[bucket], self._memory)


def _nobody(bucket: int) -> None:
    del bucket
