"""Gradient buckets: where a round's gradients live, and this worker's partial sums of them.

A layout is fixed by the model alone: flat buckets in reverse parameter order (the order in which a backward pass
produces gradients), the first one small so that traffic starts early, each parameter at a 64-byte aligned offset. So
every worker has the same buckets, however many there are; a model of more gradients than `MOST_BUCKETS` of the usual
size hold has larger ones. One more bucket of float64 *lanes* carries what else is
summed over the shards: the loss, the sample count, which parameters were used, buffers.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from farandole.collective.arena import Memory
from farandole.collective.tags import MOST_BUCKETS

ALIGNMENT = 64  # bytes
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 8 << 20
LARGE_BYTES = 256 << 10  # a bucket that is worth cutting where pages are
CUT_BYTES = 16 << 10  # of whole pages, on most machines


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """One flat bucket: `numel` elements of `dtype`; member `k` of `params` lives at `offsets[k]`."""

    index: int
    dtype: torch.dtype
    device: torch.device
    params: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int

    def slice(self, part: int, parts: int) -> tuple[int, int]:
        """One of so many parts, as `[start, stop)`, cut at 64 byte boundaries; a large bucket's between pages, so that
        each can be mapped by itself. The last one has what is left over.
        """
        unit = (CUT_BYTES if self.large else ALIGNMENT) // self.dtype.itemsize
        units = self.numel // unit
        stop = self.numel if part == parts - 1 else units * (part + 1) // parts * unit
        return units * part // parts * unit, stop

    @property
    def large(self) -> bool:
        return self.numel * self.dtype.itemsize >= LARGE_BYTES


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

    def elements(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of that parameter's shape, flat, in the order of the bucket's elements."""
        if _channels_last(self.parameters[index]):
            tensor = tensor.permute(0, 2, 3, 1)
        return tensor.detach().reshape(-1)

    def views(self, bucket: Bucket, flat: torch.Tensor) -> dict[int, torch.Tensor]:
        """The parameters' places in a bucket's memory, in each parameter's own shape and memory format."""
        views: dict[int, torch.Tensor] = {}
        for index, offset in zip(bucket.params, bucket.offsets, strict=True):
            parameter = self.parameters[index]
            strides = (
                parameter.stride()
                if _channels_last(parameter)
                else torch.empty(parameter.shape, device="meta").stride()
            )
            views[index] = flat.as_strided(parameter.shape, strides, offset)
        return views


def _channels_last(parameter: torch.Tensor) -> bool:
    return parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last)


def _padded(parameter: torch.Tensor) -> int:
    return -(-parameter.numel() * parameter.element_size() // ALIGNMENT) * ALIGNMENT


def flat(bucket: Bucket, memory: Memory) -> torch.Tensor:
    """Room for a bucket where it lives, 64-byte aligned (as torch's own allocators do on a device)."""
    if bucket.device.type == "cpu":
        return memory.empty(bucket.numel, bucket.dtype)
    return torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device)
