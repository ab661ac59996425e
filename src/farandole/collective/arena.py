"""A memory arena that the other workers of the host can map and read, so that messages need no copy.

The arena consists of *segments*: files without a name (memfd), which disappear with the last process that holds them.
A segment is sealed against shrinking, so that no reader gets SIGBUS. Its pages are allocated before the segment is
passed to any other process. A tensor takes a block of a segment, and the block is freed with the last reference to the
tensor. A reused block already has its pages, so a change of view does not pay for page faults. One empty segment is
kept; the others are given back to the system. A process that has mapped a segment keeps it until its connection ends.

Only the process that owns a segment writes to it. Other processes map it as private copies, so their writes would be
visible to themselves alone.

Memory that peers may still use without a message about it can *rest*: it is not reused before this worker knows that
no peer uses it (see `shm_sums`).

Where the system has no such memory (no memfd, a small limit for files), tensors get ordinary memory, and one warning
is logged.
"""

from __future__ import annotations

import bisect
import fcntl
import itertools
import logging
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

import torch

from farandole.errors import FarandoleError

_log = logging.getLogger(__name__)

SEGMENT_BYTES = 64 << 20
PAGE = mmap.PAGESIZE
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # madvise(2), since Linux 5.14
_ADD_SEALS, _GET_SEALS, _SHRINK, _GROW = 1033, 1034, 2, 4  # fcntl(2)


class Memory(Protocol):
    """An allocator of flat host memory."""

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor of shape (numel,), 64-byte aligned, with its pages allocated and its values undefined."""
        ...


class Ordinary:
    """The allocator of ordinary process memory."""

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype)  # touched once: page faults cost more than an exchange


class Unusable(FarandoleError):
    """Memory that another process handed over can't be mapped, or could disappear while it is read."""


class Segment:
    """One memory file. `free` lists its free blocks in order, as (start, stop) in bytes."""

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size
        self.file = os.memfd_create("farandole", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.file, size)
            fcntl.fcntl(self.file, _ADD_SEALS, _SHRINK | _GROW)
            self.map = mmap.mmap(self.file, size)
        except OSError:
            os.close(self.file)
            raise
        weakref.finalize(self, os.close, self.file)
        self.address = torch.frombuffer(self.map, dtype=torch.uint8).data_ptr()
        self.free = [(0, size)]
        self._populated = 0  # pages are allocated up to this byte
        self._pinned = False

    @property
    def unused(self) -> bool:
        return self.free == [(0, self.size)]

    def take(self, size: int) -> tuple[int, int] | None:
        """Takes `size` bytes of the first free block that is large enough; None if there is no such block.

        Raises:
            OSError: the system has no pages for it.
        """
        for at, (start, stop) in enumerate(self.free):
            if stop - start >= size:
                self._populate(start + size)
                self.free[at : at + 1] = [(start + size, stop)] if start + size < stop else []
                return start, start + size
        return None

    def pin(self) -> None:
        """Lock the pages in memory for transfers of CUDA. Idempotent. If the system refuses, transfers are slower."""
        if self._pinned:
            return
        self._pinned = True
        try:
            self._populate(self.size)
        except OSError:  # no pages for the part that is not used yet
            return
        cuda: Any = torch.cuda.cudart()
        if not int(cuda.cudaHostRegister(self.address, self.size, 0)):
            weakref.finalize(self, cuda.cudaHostUnregister, self.address).atexit = False

    def give_back(self, block: tuple[int, int]) -> None:
        at = bisect.bisect(self.free, block)
        start, stop = block
        if at < len(self.free) and self.free[at][0] == stop:
            stop = self.free.pop(at)[1]
        if at and self.free[at - 1][1] == start:
            at -= 1
            start = self.free.pop(at)[0]
        self.free.insert(at, (start, stop))

    def _populate(self, stop: int) -> None:
        if stop > self._populated:
            size = stop - self._populated
            os.posix_fallocate(self.file, self._populated, size)
            try:
                self.map.madvise(_POPULATE_WRITE, self._populated, size)
            except OSError:  # an older kernel: the first write allocates the pages
                torch.frombuffer(self.map, dtype=torch.uint8, count=size, offset=self._populated).zero_()
            self._populated = stop


class Resting(Protocol):
    def give_back(self) -> None: ...


class Arena:
    """The memory arena of this process; see the docstring of the module. Any thread may allocate and free memory.

    `copies_sums` is True if the training loop writes into its gradients, so that this worker copies sums into private
    memory.
    """

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._returned: deque[tuple[Segment, tuple[int, int]]] = deque()  # by finalizers, which may run at any point
        self._resting: list[Resting] = []
        self._complaint = ""
        self.copies_sums = False
        self.empty(1, torch.uint8)  # checks that the system has such memory

    @property
    def works(self) -> bool:
        """True as long as no tensor had to take ordinary memory."""
        return not self._complaint

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if not self.works or not numel:
            return Ordinary().empty(numel, dtype)
        try:
            with self._lock:
                segment, (start, stop) = self._take(-(-numel * dtype.itemsize // PAGE) * PAGE)
        except (OSError, AttributeError) as error:  # AttributeError: another system than Linux
            self._complaint = str(error)
            _log.warning("workers of this host can't share memory (%s): they exchange over the network", error)
            return self.empty(numel, dtype)
        held = memoryview(segment.map)[start:stop]
        weakref.finalize(held, self._returned.append, (segment, (start, stop))).atexit = False
        return torch.frombuffer(held, dtype=dtype, count=numel)

    def find(self, tensor: torch.Tensor) -> tuple[Segment, int] | None:
        """Returns the segment of a tensor and its offset there in bytes; None if it is in other memory."""
        return _find(self.segments, tensor)

    def pin(self, tensor: torch.Tensor) -> None:
        """Lock the pages of the tensor's segment, so that a GPU copies to it at full speed. Others stay as they are."""
        found = self.find(tensor)
        if found:
            with self._lock:
                found[0].pin()

    def rest(self, thing: Resting) -> None:
        with self._lock:
            self._resting.append(thing)

    def wake(self) -> None:
        """Frees all resting memory: no worker of the run uses it any more."""
        with self._lock:
            resting, self._resting = self._resting, []
        for thing in resting:
            thing.give_back()

    def _take(self, size: int) -> tuple[Segment, tuple[int, int]]:
        while self._returned:
            segment, block = self._returned.popleft()
            segment.give_back(block)
            if segment.unused and any(other.unused for other in self.segments if other is not segment):
                self.segments = [other for other in self.segments if other is not segment]
        for segment in self.segments:
            block = segment.take(size)
            if block:
                return segment, block
        segment = Segment(next(self._numbers), max(SEGMENT_BYTES, size))
        self.segments = [*self.segments, segment]
        block = segment.take(size)
        assert block
        return segment, block


class Mapped:
    """A segment of another process, mapped for reading. Each file is mapped once: see `mapped`.

    `file` stays open as long as this object lives. `address` is the start of the mapping.
    """

    def __init__(self, file: int) -> None:
        """Takes ownership of the open `file`.

        Raises:
            Unusable: the file is not a sealed segment, or can't be mapped.
        """
        try:
            if not fcntl.fcntl(file, _GET_SEALS) & _SHRINK:
                raise Unusable("its owner could shrink the shared memory: it is not sealed")
            self.size = os.fstat(file).st_size
            self._map = mmap.mmap(file, self.size, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            os.close(file)
            raise Unusable(str(error)) from error
        except Unusable:
            os.close(file)
            raise
        self.file = file
        self.address = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        weakref.finalize(self, os.close, file)

    def tensor(self, offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns the tensor at `offset`, of shape (nbytes / itemsize,).

        Raises:
            Unusable: the range is not within the segment, or not aligned to the element size.
        """
        if not 0 <= offset <= offset + nbytes <= self.size or nbytes % dtype.itemsize or offset % dtype.itemsize:
            raise Unusable(f"{nbytes} bytes of {dtype} at offset {offset} are not within its segment of {self.size}")
        if not nbytes:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=nbytes // dtype.itemsize, offset=offset)


_Some = TypeVar("_Some", Segment, Mapped)
_mapped: weakref.WeakValueDictionary[tuple[int, int], Mapped] = weakref.WeakValueDictionary()
_mapping = threading.Lock()


def mapped(file: int) -> Mapped:
    """Returns the segment that is open as `file`. It is mapped once, even if several connections hand it over.

    Takes ownership of `file`.

    Raises:
        Unusable: the file is not a sealed segment, or can't be mapped.
    """
    status = os.fstat(file)
    with _mapping:
        segment = _mapped.get((status.st_dev, status.st_ino))
        if segment is not None:
            os.close(file)
            return segment
        return _mapped.setdefault((status.st_dev, status.st_ino), Mapped(file))


def lent(tensor: torch.Tensor) -> tuple[Mapped, int] | None:
    """Returns another process's segment that holds the tensor, and its offset in bytes; None for other memory."""
    with _mapping:
        return _find(_mapped.values(), tensor)


def _find(segments: Iterable[_Some], tensor: torch.Tensor) -> tuple[_Some, int] | None:
    address = tensor.data_ptr()
    for segment in segments:
        if segment.address <= address < segment.address + segment.size:
            return segment, address - segment.address
    return None
