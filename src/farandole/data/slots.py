"""How a loader process hands tensors over: through memory that both sides have mapped.

torch sends a shared-memory file for each tensor, by a connection of its own, and a page fault each 4 KiB; the
training step waits for that. Here a tensor is copied into the request's slot and out of it again: what arrives is the
receiver's own, 64-byte aligned, with the same values and strides. `farandole probe examples/cifar10.py` showed 1.9 ms
of waiting for each micro-batch of 32 images, and shows 0.6.

A slot is free again when its result was received. At most `places` requests are on their way, and the pipeline asks for
one more before it hands over what it received: `places + 1` slots in turn are enough.

A slot is a file without a name: it goes with the last process. It is as long as the largest micro-batch that it ever
held, and its pages are taken only where they were written. Who puts something there is the only one who uses the slot
then, so it makes the file longer without asking; each side maps it anew where its own map has become too short. What
was taken out of the shorter map is the taker's own by then. A forked process has the files already; to one that is
started anew they go as open files, which needs Linux (memfd_create(2)). Elsewhere slots are anonymous memory, 16 MiB.

Left out, and sent torch's way: tensors that are not plain CPU memory or lie in other containers than dict, list and
tuple, what finds no room (in anonymous memory; where addresses are rationed, `ulimit -v`), processes that are not
forked elsewhere than on Linux, and pinning (torch's thread receives ahead).
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple, cast

import torch

ALIGNMENT = 64  # bytes

GO_ANYWHERE = sys.platform == "linux"  # elsewhere to forked processes only

_SIZE = 16 << 20  # bytes of a slot at first


class Placed(NamedTuple):
    """Stands for a tensor that lies in a slot."""

    slot: int
    offset: int  # bytes, from the beginning of the slot
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Slots:
    """Memory for the results that are on their way; made before the loader processes are."""

    def __init__(self, places: int, files: Sequence[int] = ()) -> None:
        """`files` are open and theirs: given where another process has made them."""
        self._files = list(files)
        if GO_ANYWHERE and not files:
            try:
                for _ in range(places + 1):
                    self._files.append(os.memfd_create("farandole-slots"))
                    os.truncate(self._files[-1], _SIZE)
            except OSError:
                self.__del__()  # now: what tells of the error needs files as well
                raise
        self._maps = [_map(file) for file in self._files or [-1] * (places + 1)]

    def __reduce__(self) -> Any:
        return _opened, (len(self._maps) - 1, [DupFd(file) for file in self._files])

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at the interpreter's end `os` is gone
        while self._files:
            close(self._files.pop())

    def numbers(self) -> Iterator[int]:
        """The slot of each request in turn."""
        return cycle(range(len(self._maps)))

    def put(self, slot: int, batch: Any) -> Any:
        """In the loader process: `batch` with its tensors in `slot`, as far as there is room."""
        offset = 0

        def place(tensor: torch.Tensor) -> Any:
            nonlocal offset
            if not (is_plain(tensor) and tensor.nbytes and _is_dense(tensor)):
                return tensor
            if not self._has_room(slot, offset + tensor.nbytes):
                return tensor
            placed = Placed(slot, offset, tensor.shape, tensor.stride(), tensor.dtype)
            self._view(placed).copy_(tensor)
            offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
            return placed

        return _each(batch, torch.Tensor, place)

    def take(self, batch: Any) -> Any:
        """In the training process: `batch` with what lies in its slot copied out."""
        return _each(batch, Placed, self._copy)

    def _has_room(self, slot: int, size: int) -> bool:
        """Whether `slot` has `size` bytes, if need be from now on: then half as much again, for the next one."""
        if size <= len(self._maps[slot]):
            return True
        if not self._files:
            return False
        file = self._files[slot]
        try:
            if os.fstat(file).st_size < size:
                os.truncate(file, -(-(size + size // 2) // mmap.PAGESIZE) * mmap.PAGESIZE)
            self._maps[slot] = _map(file)
        except (OSError, ValueError):  # as mmap says it, of addresses or of a file's length
            return False
        return True

    def _copy(self, placed: Placed) -> torch.Tensor:
        return torch.empty_strided(placed.shape, placed.stride, dtype=placed.dtype).copy_(self._view(placed))

    def _view(self, placed: Placed) -> torch.Tensor:
        count = placed.shape.numel()
        if placed.offset + count * placed.dtype.itemsize > len(self._maps[placed.slot]):
            self._maps[placed.slot] = _map(self._files[placed.slot])
        memory = self._maps[placed.slot]
        flat = torch.frombuffer(memory, dtype=placed.dtype, count=count, offset=placed.offset)
        return flat.as_strided(placed.shape, placed.stride)


def _map(file: int) -> mmap.mmap:
    """All of the file; -1: of memory that forked processes share."""
    return mmap.mmap(file, _SIZE if file == -1 else os.fstat(file).st_size)


def _opened(places: int, files: list[Any]) -> Slots:
    return Slots(places, [file.detach() for file in files])


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
