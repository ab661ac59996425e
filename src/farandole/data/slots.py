"""How a loader process hands tensors over: through memory that both sides have mapped.

torch sends a shared-memory file for each tensor, by a connection of its own, and a page fault each 4 KiB; the
training step waits for that. Here a tensor is copied into the request's slot and out of it again: what arrives is the
receiver's own, 64-byte aligned, with the same values and strides. `farandole probe examples/cifar10.py` showed 1.9 ms
of waiting for each micro-batch of 32 images, and shows 0.6.

A slot is free again when its result was received. At most `places` requests are on their way, and the pipeline asks for
one more before it hands over what it received: `places + 1` slots in turn are enough.

The memory has no name: it goes with the last process. Its pages are taken only where they were written. A forked
process has it already; to one that is started anew it goes as an open file, which needs Linux (memfd_create(2)).
Left out, and sent torch's way: tensors that are not plain CPU memory or lie in other containers than dict, list and
tuple, what is larger than a slot's rest, processes that are not forked elsewhere than on Linux, and pinning (torch's
thread receives ahead).
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable, Iterator
from itertools import cycle
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple, cast

import torch

ALIGNMENT = 64  # bytes

GO_ANYWHERE = sys.platform == "linux"  # elsewhere to forked processes only

_SIZE = 16 << 20  # bytes of a slot


class Placed(NamedTuple):
    """Stands for a tensor that lies in a slot."""

    offset: int  # bytes, from the beginning of the mapping
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Slots:
    """Memory for the results that are on their way; made before the loader processes are."""

    def __init__(self, places: int, file: int = -1) -> None:
        """`file` is open and theirs: given where another process has made them."""
        self._places = places
        self._file = file
        size = (places + 1) * _SIZE
        if GO_ANYWHERE and file == -1:
            self._file = os.memfd_create("farandole-slots")
            os.truncate(self._file, size)
        self._memory = mmap.mmap(self._file, size)

    def __reduce__(self) -> Any:
        return _opened, (self._places, DupFd(self._file))

    def __del__(self) -> None:
        if self._file != -1:
            os.close(self._file)

    def numbers(self) -> Iterator[int]:
        """The slot of each request in turn."""
        return cycle(range(self._places + 1))

    def put(self, slot: int, batch: Any) -> Any:
        """In the loader process: `batch` with its tensors in `slot`, as far as they fit."""
        offset, end = slot * _SIZE, (slot + 1) * _SIZE

        def place(tensor: torch.Tensor) -> Any:
            nonlocal offset
            if not (is_plain(tensor) and 0 < tensor.nbytes <= end - offset and _is_dense(tensor)):
                return tensor
            placed = Placed(offset, tensor.shape, tensor.stride(), tensor.dtype)
            self._view(placed).copy_(tensor)
            offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
            return placed

        return _each(batch, torch.Tensor, place)

    def take(self, batch: Any) -> Any:
        """In the training process: `batch` with what lies in its slot copied out."""
        return _each(batch, Placed, self._copy)

    def _copy(self, placed: Placed) -> torch.Tensor:
        return torch.empty_strided(placed.shape, placed.stride, dtype=placed.dtype).copy_(self._view(placed))

    def _view(self, placed: Placed) -> torch.Tensor:
        flat = torch.frombuffer(self._memory, dtype=placed.dtype, count=placed.shape.numel(), offset=placed.offset)
        return flat.as_strided(placed.shape, placed.stride)


def _opened(places: int, file: Any) -> Slots:
    return Slots(places, file.detach())


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is nothing but values in CPU memory."""
    ordinary = type(tensor) is torch.Tensor and tensor.is_cpu and tensor.layout == torch.strided
    return ordinary and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill as much memory as there are elements, in whichever order of dimensions."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _each(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, kind):
        return change(value)
    if type(value) is dict:
        return {name: _each(inner, kind, change) for name, inner in cast("dict[Any, Any]", value).items()}
    if type(value) in (list, tuple):
        return type(value)([_each(inner, kind, change) for inner in value])
    return value
