"""Gradient buckets: the memory layout of a round's gradients, and this worker's partial sums of them.

The layout depends on the model and the codec alone: flat buckets in reverse parameter order (the order in which a
backward pass produces gradients). The first bucket is small so that traffic starts early. Each parameter is at a
64-byte aligned offset; quantized, at the beginning of a group (`quantization.py`). So every worker has the same
buckets, for any number of workers. A model whose gradients do not fit into `MOST_BUCKETS` buckets of the usual size has
larger buckets. One more bucket of float64 *lanes* carries the other sums over the shards: the loss, the sample count,
the flags of the used parameters, the buffers.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import torch

from farandole.collective.arena import Arena, Memory, Ordinary
from farandole.collective.codec import NONE, Codec
from farandole.collective.quantization import GROUP_BYTES, Place, Quantization
from farandole.collective.schedule import MOST_BUCKETS, MOST_PIECES
from farandole.numerics import settings
from farandole.plan.shards import Node, exists, parent, root, sibling

# --- buckets ----------------------------------------------------------------------------------------------------------

ALIGNMENT = 64  # bytes
FIRST_BUCKET_BYTES = 1 << 20  # of gradients in their own dtype, before a codec
BUCKET_BYTES = 8 << 20
LARGE_BYTES = 256 << 10  # from this size on, slices of a bucket begin at page boundaries
CUT_BYTES = 16 << 10  # a multiple of the page size on most machines
PIECE_BYTES = 512 << 10  # a piece of a slice is about this large or larger


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """One flat bucket of `numel` elements, summed in `dtype`; the parameter `params[k]` is at element `offsets[k]`.

    Attributes:
        quantization: how its numbers are quantized; None if an element is a number. Else an element is a byte.
    """

    index: int
    dtype: torch.dtype
    device: torch.device
    params: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int
    quantization: Quantization | None = None

    def slice(self, part: int, parts: int) -> tuple[int, int]:
        """Returns the elements `[start, stop)` of slice `part` of `parts`.

        Slices begin at 64-byte boundaries; in a large bucket at page boundaries, so that each slice can be mapped by
        itself. A slice of quantized numbers has whole groups. The last slice takes the remainder.
        """
        unit = self._unit
        units = self.numel // unit
        stop = self.numel if part == parts - 1 else units * (part + 1) // parts * unit
        return units * part // parts * unit, stop

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Returns a slice `[start, stop)`, cut into at most `MOST_PIECES` pieces of about `PIECE_BYTES` or more.

        Each begins where a slice may begin.
        """
        parts = min(max((stop - start) * self.dtype.itemsize // PIECE_BYTES, 1), MOST_PIECES)
        units = (stop - start) // self._unit
        cuts = [start + units * part // parts * self._unit for part in range(parts)]
        return list(pairwise([*cuts, stop]))

    @property
    def _unit(self) -> int:
        """The elements in the smallest part of a slice."""
        small = ALIGNMENT if self.quantization is None else GROUP_BYTES
        return (CUT_BYTES if self.large else small) // self.dtype.itemsize

    @property
    def large(self) -> bool:
        return self.numel * self.dtype.itemsize >= LARGE_BYTES

    def numbers_before(self, element: int) -> int:
        """Returns how many numbers are before an element: the first of a slice or parameter, or the bucket's end."""
        return element if self.quantization is None else self.quantization.numbers_before(element)

    def quantize(self, numbers: torch.Tensor, out: torch.Tensor, step: int) -> torch.Tensor:
        """Writes the elements of float32 `numbers`, shape (numbers_before(numel),), to `out`. Returns `out`."""
        assert self.quantization is not None
        return self.quantization.quantize(numbers, out, Place(step, self.index))

    def add(self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, start: int, step: int) -> torch.Tensor:
        """Writes the sum of two tensors of elements to `out`, which may be one of them. Returns `out`.

        `start`: the first element's place in the bucket; `step`: the training step. Quantized sums depend on them.
        """
        if self.quantization is None:
            return torch.add(left, right, out=out)
        return self.quantization.add(left, right, out, Place(step, self.index, start))


class Layout:
    """The buckets of `parameters` (only those with `requires_grad`) and of `lanes` float64 lanes.

    There are at most `most` buckets. Gradients are summed in the format of `codec`.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], lanes: int, *, most: int = MOST_BUCKETS, codec: Codec = NONE
    ) -> None:
        self.parameters = list(parameters)
        self.codec = codec
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
        """A SHA-256 digest, as hex, of the sizes of a round's messages and the parameters in them."""
        sizes = [(str(bucket.dtype), bucket.numel, bucket.params) for bucket in self.buckets]
        return hashlib.sha256(repr(sizes).encode()).hexdigest()

    def _cut(self, most: int) -> None:
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index in reversed(range(len(self.parameters))):
            parameter = self.parameters[index]
            if parameter.requires_grad:
                kinds.setdefault((parameter.dtype, parameter.device), []).append(index)
        total = sum(p.nbytes for p in self.parameters if p.requires_grad)
        enough = -(-total // max(most - len(kinds) - 2, 1))  # spare: one a kind, the first one, the lanes
        for (own, device), indexes in kinds.items():
            dtype = self.codec.wire(own)
            params: list[int] = []
            offsets: list[int] = []
            numel = size = 0
            for index in indexes:
                params.append(index)
                offsets.append(numel)
                size += self.parameters[index].nbytes
                numel += self._padded(self.parameters[index]) // dtype.itemsize
                limit = max(BUCKET_BYTES, enough) if self.buckets else FIRST_BUCKET_BYTES
                if size >= limit or index == indexes[-1]:
                    bucket = Bucket(
                        index=len(self.buckets),
                        dtype=dtype,
                        device=device,
                        params=tuple(params),
                        offsets=tuple(offsets),
                        numel=numel,
                        quantization=self.codec.quantizes(own),
                    )
                    self.buckets.append(bucket)
                    self.where.update(dict.fromkeys(params, bucket.index))
                    params, offsets, numel, size = [], [], 0, 0

    def _padded(self, parameter: torch.Tensor) -> int:
        """Returns the bytes of a parameter in a bucket."""
        quantization = self.codec.quantizes(parameter.dtype)
        if quantization is not None:
            return quantization.bytes_of(parameter.numel())
        return -(-parameter.numel() * self.codec.wire(parameter.dtype).itemsize // ALIGNMENT) * ALIGNMENT

    def elements(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """Returns `tensor`, which has the shape of parameter `index`, flat and in the bucket's element order."""
        if _channels_last(self.parameters[index]):
            tensor = tensor.permute(0, 2, 3, 1)
        return tensor.detach().reshape(-1)

    def views(self, bucket: Bucket, flat: torch.Tensor) -> dict[int, torch.Tensor]:
        """Returns views into a bucket's numbers by parameter index, with each parameter's shape and memory format.

        `flat`: the bucket's memory; if its numbers are quantized, their values in float32.
        """
        views: dict[int, torch.Tensor] = {}
        for index, offset in zip(bucket.params, bucket.offsets, strict=True):
            parameter = self.parameters[index]
            strides = (
                parameter.stride()
                if _channels_last(parameter)
                else torch.empty(parameter.shape, device="meta").stride()
            )
            views[index] = flat.as_strided(parameter.shape, strides, bucket.numbers_before(offset))
        return views


def _channels_last(parameter: torch.Tensor) -> bool:
    return parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last)


def flat(bucket: Bucket, memory: Memory) -> torch.Tensor:
    """Returns memory for a bucket on its device, 64-byte aligned (as torch's own allocators align on a device)."""
    if bucket.device.type == "cpu":
        return memory.empty(bucket.numel, bucket.dtype)
    return torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device)


# --- partials ---------------------------------------------------------------------------------------------------------
#
# This worker's partial sums of a round's gradients. It adds them upward in the summation tree as far as it can.
#
# The cost of a shard beside its backward pass is memory traffic. So a gradient stays in the memory in which autograd
# made it, and goes all the way up at once, parameter by parameter: it is added in place to the sum that waits for its
# shard, and so on upward. That reads and writes as much memory as plain accumulation into `.grad`. Only the sums that
# are exchanged, those of the maximal nodes, go into a slot of memory that peers can read: for the last shard at once,
# otherwise at the first use. At most about `2 * log2(shards)` sums are held at a time.
#
# Quantization takes long, so on the CPU a thread of its own quantizes and adds, bucket by bucket in their order, beside
# the rest of the backward pass. A device computes beside the training thread anyway.


class Slot:
    """The memory for one node's sum of one bucket. `views`: by parameter; none of quantized numbers."""

    __slots__ = ("flat", "views")

    def __init__(self, layout: Layout, bucket: Bucket, memory: Memory) -> None:
        self.flat = flat(bucket, memory)
        self.flat.zero_()  # padding between parameters stays zero
        self.views = layout.views(bucket, self.flat) if bucket.quantization is None else {}


class ShardSum:
    """The sum of some shards' gradients in one bucket: one tensor for each parameter, or all in one slot.

    `parts` has no entry for a parameter that none of the shards used; its sum is zero.
    """

    __slots__ = ("_new", "parts", "slot")

    def __init__(self, new: Callable[[], Slot]) -> None:
        self._new = new
        self.slot: Slot | None = None
        self.parts: dict[int, torch.Tensor] = {}

    @property
    def flat(self) -> torch.Tensor:
        """The whole sum in a slot, of shape (bucket.numel,)."""
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
    """The partial sums of this worker in one round; see the comment above.

    For each shard in turn, call `open(shard)`, then `add_gradient` for each gradient as the backward pass produces it,
    then `close()`, which adds zeros for the parameters without a gradient. The attribute `complete` is called with the
    bucket's number when a bucket has all of the shard's gradients; for a quantized bucket by the thread that quantizes.
    """

    def __init__(self, layout: Layout, memory: Memory | None = None) -> None:
        """`memory` allocates the slots; None: ordinary memory of this process."""
        self.layout = layout
        self._memory = memory or Ordinary()
        self.nodes: list[dict[Node, ShardSum]] = [{} for _ in layout.buckets]
        self._free: list[list[Slot]] = [[] for _ in layout.buckets]
        self._numbers: dict[int, _Numbers] = {}  # by bucket
        self._quantizing: ThreadPoolExecutor | None = None
        self._ways: list[_BucketPath | _QuantizedPath] = []
        self._missing: list[set[int]] = [set() for _ in layout.buckets]
        self._all = [frozenset(bucket.params) for bucket in layout.buckets]
        self.shard = -1
        self.shards = 0
        self.step = 0
        self.complete: Callable[[int], None] = _nobody

    def warm(self) -> None:
        """Allocates one slot for each bucket, so that a joiner's first step does not wait for page faults."""
        for bucket, free in enumerate(self._free):
            free.append(self._new(bucket))

    def begin(self, shards: int, step: int = 0) -> None:
        """Begins a new round of `shards` shards in training step `step`, and frees the sums of the last round."""
        self.wait_until_quantized()
        self.shards, self.step = shards, step
        for bucket, nodes in enumerate(self.nodes):
            self._give_back(bucket, *nodes.values())
            nodes.clear()

    def open(self, shard: int, *, last: bool = False) -> None:
        """Begins `shard`, whose gradients come next. `last`: the sums that it completes are exchanged next."""
        assert self.shard < 0, f"shard {self.shard} is still open"
        self.shard = shard
        self._missing = [set(params) for params in self._all]
        node, others = self._climb(shard)
        self._ways = [self._way(bucket, node, others, last=last) for bucket in range(len(self.nodes))]

    def add_gradient(self, index: int, gradient: torch.Tensor) -> None:
        """Adds the open shard's complete gradient of parameter `index`. This object owns the tensor from now on."""
        bucket = self.layout.where[index]
        missing = self._missing[bucket]
        missing.remove(index)
        self._ways[bucket].add(index, self.layout.codec.encode(gradient))
        if not missing:
            self._merge(bucket)

    def has_gradient(self, index: int) -> bool:
        return index not in self._missing[self.layout.where[index]]

    def close(self, lanes: torch.Tensor | None) -> None:
        """Ends the open shard after its backward passes. `lanes`: its float64 lanes, of shape (lanes,)."""
        for bucket in self.layout.buckets:
            missing = self._missing[bucket.index]
            if not bucket.params:
                way = self._ways[bucket.index]
                assert lanes is not None
                assert isinstance(way, _BucketPath), "lanes are not quantized"
                way.add_lanes(lanes)
                self._merge(bucket.index)
            elif missing:
                for index in missing:
                    self._ways[bucket.index].add(index, None)
                missing.clear()
                self._merge(bucket.index)
        self.shard = -1

    def wait_until_quantized(self) -> None:
        """Waits for the sums of the closed shards. Call it before you read them without having been told by `complete`.

        Raises:
            Exception: an error of the thread that quantizes.
        """
        for numbers in self._numbers.values():
            numbers.wait()

    def _climb(self, shard: int) -> tuple[Node, list[Node]]:
        """Returns the node that the shard reaches, and the nodes that are added on its way; the same in all buckets."""
        sums, others = self.nodes[0] if self.nodes else {}, list[Node]()
        node, top = (0, shard), root(self.shards)
        while node != top:
            other = sibling(node)
            if other in sums:
                others.append(other)
            elif exists(other, self.shards):
                break
            node = parent(node)
        return node, others

    def _way(self, bucket: int, node: Node, siblings: list[Node], *, last: bool) -> _BucketPath | _QuantizedPath:
        nodes = self.nodes[bucket]
        others = [nodes.pop(sibling) for sibling in siblings]
        held = others[0] if others else ShardSum(lambda: self._new(bucket))
        if self.layout.buckets[bucket].quantization is not None:
            numbers = self._numbers.get(bucket) or self._numbers.setdefault(bucket, _Numbers(self.layout, bucket))
            return _QuantizedPath(numbers, self.step, node, held, others, None if others else self._new(bucket))
        slotted = held.slot is None and (last or not self._all[bucket])
        return _BucketPath(node, held, others, self._new(bucket) if slotted else None)

    def _merge(self, bucket: int) -> None:
        """Stores the sum of a bucket that has all of the shard's gradients."""
        way = self._ways[bucket]
        self.nodes[bucket][way.node] = way.held
        complete = self.complete

        def finish() -> None:
            way.finish()
            self._give_back(bucket, *way.others[1:])
            complete(bucket)

        if isinstance(way, _QuantizedPath) and self.layout.buckets[bucket].device.type == "cpu":
            way.numbers.reader = self._quantize(finish)
        else:
            finish()

    def _quantize(self, finish: Callable[[], None]) -> Future[None]:
        """Calls `finish` in the thread that quantizes, which takes denormal numbers as this one does."""
        if self._quantizing is None:
            self._quantizing = ThreadPoolExecutor(1, thread_name_prefix="quantization")
        flushes = settings.flushes()

        def work() -> None:
            settings.flush_as(flushes)
            finish()

        return self._quantizing.submit(work)

    def _give_back(self, bucket: int, *held: ShardSum) -> None:
        self._free[bucket] += [each.slot for each in held if each.slot is not None]

    def _new(self, bucket: int) -> Slot:
        free = self._free[bucket]
        return free.pop() if free else Slot(self.layout, self.layout.buckets[bucket], self._memory)


class _BucketPath:
    """The path from the open shard up to `node` in one bucket, on which the `others` are added.

    The sum ends in `held`, which is the first of `others` if there is one; and in `slot` if that is given.
    """

    def __init__(self, node: Node, held: ShardSum, others: list[ShardSum], slot: Slot | None) -> None:
        self.node = node
        self.held = held
        self.others = others
        self.slot = slot

    def add(self, index: int, gradient: torch.Tensor | None) -> None:
        """Adds one parameter's gradient; None is zero."""
        total = gradient
        last = len(self.others) - 1
        place = self.slot.views[index] if self.slot is not None else None
        for number, other in enumerate(self.others):
            part = other.parts.get(index)
            into = place if number == last else None
            if into is None and total is None and number and other.slot is not None and part is not None:
                into = torch.empty_like(part)  # that slot is freed afterwards
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

    def finish(self) -> None:
        """All gradients of the shard are added."""
        if self.slot is not None:
            self.held.lie_in(self.slot)


class _Numbers:
    """The numbers of one shard's gradients in a bucket, in float32, before they are quantized.

    `reader`: the task that reads them in another thread; None if there is none.
    """

    def __init__(self, layout: Layout, number: int) -> None:
        self.reader: Future[None] | None = None
        self.bucket = bucket = layout.buckets[number]
        self.flat = torch.zeros(bucket.numbers_before(bucket.numel), device=bucket.device)
        self.views = layout.views(bucket, self.flat)

    def wait(self) -> None:
        """Wait for the reader. Its error is raised each time, since the sums are wrong."""
        if self.reader is not None:
            self.reader.result()
            self.reader = None


class _QuantizedPath:
    """The path of a bucket of quantized numbers; see `_BucketPath`.

    The sum is in memory that peers can read. The bucket is quantized and added as a whole, since many small
    computations would take longer.
    """

    def __init__(
        self, numbers: _Numbers, step: int, node: Node, held: ShardSum, others: list[ShardSum], slot: Slot | None
    ) -> None:
        self.numbers = numbers
        self._step = step
        self.node = node
        self.held = held
        self.others = others
        self._slot = slot

    def add(self, index: int, gradient: torch.Tensor | None) -> None:
        self.numbers.wait()  # of the shard before
        _lay(gradient, self.numbers.views[index])

    def finish(self) -> None:
        """All gradients of the shard are here: quantizes them, and adds the other sums."""
        bucket, flat = self.numbers.bucket, self.numbers.flat
        if self._slot is not None:
            bucket.quantize(flat, self._slot.flat, self._step)
            self.held.lie_in(self._slot)
            return
        total = self.held.flat
        bucket.add(total, bucket.quantize(flat, torch.empty_like(total), self._step), total, 0, self._step)
        for other in self.others[1:]:
            bucket.add(total, other.flat, total, 0, self._step)


def _plus(left: torch.Tensor | None, right: torch.Tensor | None, into: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the sum, in the memory of `left` if `into` is None.

    None is zero. Zero is really added, because that turns -0.0 into 0.0, as on every other worker.
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


# --- staging ----------------------------------------------------------------------------------------------------------
#
# Buckets of an accelerator go through pinned host memory where the device's own collective library is not used.
#
# Each flat tensor of the device has one mirror in host memory, allocated once. The exchange sends, receives and adds
# in the mirrors. Peers of this host read those that are in the arena. A bucket in host memory is its own mirror.


class Staging:
    """The mirrors of device tensors in host memory. `force=True` also stages host memory, to test without a device."""

    def __init__(self, memory: Memory, force: bool | None = None) -> None:
        self._memory = memory
        self._force = force
        self._mirrors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id of the device tensor; kept alive here

    def host(self, flat: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        """Returns the host memory that is sent in place of `flat`, of shape (bucket.numel,)."""
        if not self.serves(bucket):
            return flat
        if id(flat) not in self._mirrors:
            if flat.device.type != "cuda":
                mirror = self._memory.empty(flat.numel(), flat.dtype)
            elif isinstance(self._memory, Arena) and self._memory.works:
                mirror = self._memory.empty(flat.numel(), flat.dtype)
                self._memory.pin(mirror)
            else:
                mirror = torch.zeros(flat.numel(), dtype=flat.dtype, pin_memory=True)
            self._mirrors[id(flat)] = (flat, mirror)
        return self._mirrors[id(flat)][1]

    def out(self, flat: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        """Copies `flat` to the host. Waits for the device, because the copy is sent next."""
        mirror = self.host(flat, bucket)
        return mirror if mirror is flat else mirror.copy_(flat)

    def back(self, flat: torch.Tensor, bucket: Bucket) -> None:
        """Copies `flat` back from the host. Waits for the device, because the next round writes to the mirror."""
        mirror = self.host(flat, bucket)
        if mirror is not flat:
            flat.copy_(mirror)

    def serves(self, bucket: Bucket) -> bool:
        """Returns True if the bucket has mirrors."""
        return bucket.device.type != "cpu" if self._force is None else self._force
