"""Memory of this process that the other workers of its host can map and read, so that a message need not be copied.

It consists of *segments*: files without a name, which go with the last process that has them. A segment is sealed
against shrinking, so that no reader gets SIGBUS; its pages are there before it is handed to anybody. A tensor takes a
block of a segment, and gives it back when the last reference to it is gone: a block that is used again has its pages,
so views that come and go do not pay for them. Of segments in which nothing is any more one is kept, others are given
back to the system; who has mapped one keeps it for as long as its connection stands.

One process writes a segment, its own. Others map it as private copies: what they wrote there would be theirs alone.

What others may use while nobody says so can *rest*: it is not given back before this worker knows better (`sums`).

Where memory of this kind is not to be had (no memfd, a small limit for files), tensors get ordinary memory, and that is
said once.
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
from typing import Protocol, TypeVar

import torch

from farandole.errors import FarandoleError

_log = logging.getLogger(__name__)

SEGMENT_BYTES = 64 << 20
PAGE = mmap.PAGESIZE
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # madvise(2), since Linux 5.14
_ADD_SEALS, _GET_SEALS, _SHRINK, _GROW = 1033, 1034, 2, 4  # fcntl(2)


class Memory(Protocol):
    """Where flat host memory comes from."""

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Of shape (numel,), 64-byte aligned, its pages there; what is in it is anything."""
        ...


class Ordinary:
    """This process's own memory."""

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype)  # touched once: page faults cost more than an exchange


class Unusable(FarandoleError):
    """What another process has handed over can't be mapped, or may go away under a reader."""


class Segment:
    """One file of memory. `free`: the blocks of it that are not taken, as (start, stop) in order; bytes."""

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
        self._there = 0  # up to here pages are

    @property
    def unused(self) -> bool:
        return self.free == [(0, self.size)]

    def take(self, size: int) -> tuple[int, int] | None:
        """The first free block that is large enough, cut to `size`.

        Raises:
            OSError: there are no pages for it.
        """
        for at, (start, stop) in enumerate(self.free):
            if stop - start >= size:
                self._populate(start + size)
                self.free[at : at + 1] = [(start + size, stop)] if start + size < stop else []
                return start, start + size
        return None

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
        if stop > self._there:
            size = stop - self._there
            os.posix_fallocate(self.file, self._there, size)
            try:
                self.map.madvise(_POPULATE_WRITE, self._there, size)
            except OSError:  # an older kernel: the first who writes touches them
                torch.frombuffer(self.map, dtype=torch.uint8, count=size, offset=self._there).zero_()
            self._there = stop


class Resting(Protocol):
    def give_back(self) -> None: ...


class Arena:
    """See the module's head. Any thread may take memory, and let go of it.

    `copies_sums`: the training loop writes into its gradients, so this worker has sums in memory of its own.
    """

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._returned: deque[tuple[Segment, tuple[int, int]]] = deque()  # by finalizers, which may come in anywhere
        self._resting: list[Resting] = []
        self._complaint = ""
        self.copies_sums = False
        self.empty(1, torch.uint8)  # to see whether such memory is to be had at all

    @property
    def works(self) -> bool:
        """No tensor has had to take ordinary memory."""
        return not self._complaint

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if not self.works or not numel:
            return Ordinary().empty(numel, dtype)
        try:
            with self._lock:
                segment, (start, stop) = self._take(-(-numel * dtype.itemsize // PAGE) * PAGE)
        except (OSError, AttributeError) as error:  # AttributeError: another system than Linux
            self._complaint = str(error)
            _log.warning("no memory that workers of one host could share (%s): they exchange over the network", error)
            return self.empty(numel, dtype)
        held = memoryview(segment.map)[start:stop]
        weakref.finalize(held, self._returned.append, (segment, (start, stop))).atexit = False
        return torch.frombuffer(held, dtype=dtype, count=numel)

    def find(self, tensor: torch.Tensor) -> tuple[Segment, int] | None:
        """Where a tensor lies: its segment, and the offset there in bytes. None: in other memory."""
        return _find(self.segments, tensor)

    def rest(self, thing: Resting) -> None:
        with self._lock:
            self._resting.append(thing)

    def wake(self) -> None:
        """Nobody of the run uses what rests."""
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
    """Another process's segment, to be read. Two that are mapped from the same file are one: see `mapped`.

    `file`: open for as long as this is there. `address`: where it is mapped.
    """

    def __init__(self, file: int) -> None:
        """Takes over the open `file`.

        Raises:
            Unusable: it is none.
        """
        try:
            if not fcntl.fcntl(file, _GET_SEALS) & _SHRINK:
                raise Unusable("its owner could take it away")
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
        """What lies there, of shape (nbytes / itemsize,).

        Raises:
            Unusable: it is not within the segment.
        """
        if not 0 <= offset <= offset + nbytes <= self.size or nbytes % dtype.itemsize or offset % dtype.itemsize:
            raise Unusable(f"{nbytes} bytes of {dtype} at {offset} do not lie in its {self.size}")
        if not nbytes:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=nbytes // dtype.itemsize, offset=offset)


_Some = TypeVar("_Some", Segment, Mapped)
_mapped: weakref.WeakValueDictionary[tuple[int, int], Mapped] = weakref.WeakValueDictionary()
_mapping = threading.Lock()


def mapped(file: int) -> Mapped:
    """The segment that is open as `file`, which is taken over: mapped once, however many connections hand it over.

    Raises:
        Unusable: it is none.
    """
    found = os.fstat(file)
    with _mapping:
        known = _mapped.get((found.st_dev, found.st_ino))
        if known is not None:
            os.close(file)
            return known
        return _mapped.setdefault((found.st_dev, found.st_ino), Mapped(file))


def lent(tensor: torch.Tensor) -> tuple[Mapped, int] | None:
    """Where a tensor lies in another process's segment: the offset there in bytes. None: in other memory."""
    with _mapping:
        return _find(_mapped.values(), tensor)


def _find(segments: Iterable[_Some], tensor: torch.Tensor) -> tuple[_Some, int] | None:
    address = tensor.data_ptr()
    for segment in segments:
        if segment.address <= address < segment.address + segment.size:
            return segment, address - segment.address
    return None
