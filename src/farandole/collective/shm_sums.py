"""The sum of one bucket in one view, at one worker: its own slice, which it makes for all, and those of the others.

`Copied` is one piece of memory, to which the slices of others are copied, or where they land. `InPlace` is for large
buckets that workers of one host exchange: each slice is used where its owner has made it, as `.grad` of the parameters.
Who knows what when:

- *Until when a slice stays.* It is used until the update is over, of which no word tells. But who begins the next
  training round has done its update, and says so by its partial sums, which an owner has before it writes (`order`).
  So one place is enough where each has some, and all are on one host (`heard`). Where one has none, only its word
  tells; and what other hosts share lands in the place, maybe as a settlement, long before its time. Then the owner
  makes the slices of one round in one place and those of the next in another (`_turn`), and may write the first again
  when it has all words of the second. Partial sums land in neither.
- *A view is left.* What is in use may be of a round of the view before. Those places rest (`arena.rest`) until this
  worker has all words of a training round in a later view. All its members have begun that one.
- *Who was given up* while it stood still may go on too late: what it is told of may have been overwritten, though all
  words are here. So each place has a *stamp*, a number of its view, which is wiped before the place is given back. Who
  does not find it with a slice takes the peer for lost, and says no word; who does not find it after its update has a
  replica that is no use (`stood`). Small buckets are sent, not lent: nothing can happen to those.
- *Loops that write.* Clipping writes into `.grad`. The kernel copies page by page then (`row`): nobody else sees it,
  but that is slow, and the page does not follow its file any more. Before a row shows the next sums it is looked at:
  from the first time on that anything was written, this worker copies its sums.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Protocol

import torch

from farandole.collective.arena import PAGE, Arena, Mapped, Ordinary, Segment, lent
from farandole.collective.buckets import Bucket, Staging, flat

# --- row --------------------------------------------------------------------------------------------------------------
#
# Addresses in a row, of which each part may show what lies in a file of memory: this worker's arena, or a peer's.
#
# So a tensor over parts that others have made needs no copy of them. What is shown is a private copy: the kernel
# copies a page when it is written, so nobody else sees what is written here, and a part that was written does not
# follow its file any more. `written` says whether that has happened; the kernel's page map tells it exactly.

_PAGE_BYTES = mmap.PAGESIZE
_FIXED = 0x10
_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE
_ENTRY = 8  # bytes a page in the page map
_PAGE_MAP = "/proc/self/pagemap"


class SharedFile(Protocol):
    """A segment of memory. `file`: open for as long as it is referred to."""

    file: int


class Row:
    """See the module's head. Of `numel` elements; what is not shown is memory of this row's own, which is zero."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self._itemsize = dtype.itemsize
        size = max(-(-numel * dtype.itemsize // _PAGE_BYTES) * _PAGE_BYTES, _PAGE_BYTES)
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.tensor = torch.frombuffer(self._map, dtype=dtype, count=numel)
        self._address = self.tensor.data_ptr()
        self._shown: dict[
            int, tuple[int, SharedFile, int]
        ] = {}  # by its first byte: its length, and what is shown there

    def show(self, start: int, numel: int, memory: SharedFile, offset: int) -> None:
        """Let elements from `start` on be what lies in `memory` at `offset` bytes. Both begin with a page.

        Raises:
            OSError: they do not, or it can't be mapped.
        """
        at, size = start * self._itemsize, numel * self._itemsize
        if self._shown.get(at) != (size, memory, offset):
            self._map_there(at, size, mmap.MAP_PRIVATE, memory.file, offset)
            self._shown[at] = size, memory, offset

    def own(self, start: int) -> None:
        """Let the part that begins with element `start` be memory of this row's own again."""
        shown = self._shown.pop(start * self._itemsize, None)
        if shown is not None:
            self._map_there(start * self._itemsize, shown[0], mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)

    @property
    def written(self) -> bool:
        """Whether anything was written to what is shown. True if that can't be told."""
        try:
            with open(_PAGE_MAP, "rb", buffering=0) as pages:
                return any(
                    _has_copies(pages.fileno(), self._address + at, size) for at, (size, *_) in self._shown.items()
                )
        except OSError:
            return True

    def _map_there(self, at: int, size: int, flags: int, file: int, offset: int) -> None:
        where = self._address + at
        if where % _PAGE_BYTES or offset % _PAGE_BYTES:
            raise OSError(f"{size} bytes at {offset} of a segment are to begin with byte {at}, which is no whole page")
        if _libc.mmap(where, size, _PROTECTION, flags | _FIXED, file, offset) != where:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))


def _has_copies(pages: int, address: int, size: int) -> bool:
    """Whether one of the pages there is neither a file's nor missing."""
    first, count = address // _PAGE_BYTES, -(-size // _PAGE_BYTES)
    entries = bytearray(os.pread(pages, count * _ENTRY, first * _ENTRY))
    if len(entries) != count * _ENTRY:
        raise OSError(f"the page map has {len(entries)} bytes for {count} pages")
    kinds = torch.frombuffer(entries, dtype=torch.uint8)[_ENTRY - 1 :: _ENTRY] >> 5  # present, swapped, a file's
    return bool(((kinds != 0) & (kinds & 1 == 0)).any())


def _mmap() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_size_t
    libc.mmap.argtypes = [
        ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_ssize_t,
    ]  # fmt: skip
    return libc


_libc = _mmap()


# --- sums -------------------------------------------------------------------------------------------------------------

STAMP = torch.int64


class Sum(Protocol):
    """See the module's head. Elements `[start, stop)` are always a whole slice."""

    @property
    def flat(self) -> torch.Tensor:
        """The whole sum, shape (bucket.numel,), once all slices are `put`."""
        ...

    def begin(self, *, heard: bool) -> None:
        """A training round begins, or another one over the same buckets. `heard`: see the module's head."""
        ...

    def place(self, start: int, stop: int) -> torch.Tensor:
        """Host memory in which this worker makes its slice, or another's may land."""
        ...

    def put(self, start: int, stop: int, there: torch.Tensor) -> bool:
        """That slice lies `there`. False: it did, and its owner has given the memory back."""
        ...

    def complete(self) -> None:
        """All slices are there."""
        ...


class SingleProcessSums:
    """What a world of one has summed up by itself."""

    def __init__(self) -> None:
        self.flat = torch.empty(0)

    def begin(self, *, heard: bool) -> None: ...

    def place(self, start: int, stop: int) -> torch.Tensor:
        return self.flat[start:stop]

    def put(self, start: int, stop: int, there: torch.Tensor) -> bool:
        raise AssertionError(f"elements {start} to {stop} in {there.nbytes} bytes of a peer's, and there is none")

    def complete(self) -> None: ...


class Copied:
    """A bucket's sum in memory that is this worker's alone."""

    def __init__(self, bucket: Bucket, stage: bool | None) -> None:
        self._bucket = bucket
        self._staging = Staging(Ordinary(), stage)
        self.flat = flat(bucket, Ordinary())

    def begin(self, *, heard: bool) -> None: ...

    def place(self, start: int, stop: int) -> torch.Tensor:
        return self._staging.host(self.flat, self._bucket)[start:stop]

    def put(self, start: int, stop: int, there: torch.Tensor) -> bool:
        self.place(start, stop).copy_(there)
        return True

    def complete(self) -> None:
        self._staging.back(self.flat, self._bucket)


class InPlace:
    """A bucket's sum in the memory of those who make it. `own`: the elements `[start, stop)` that this worker has for
    the others of its host: what it has summed up, and what has come for them from other hosts.

    `stamp`: of all places of this view, and of no other's. Not 0.
    """

    def __init__(self, bucket: Bucket, own: tuple[int, int], arena: Arena, stamp: int) -> None:
        numel = own[1] - own[0]
        self._arena = arena
        self._own = own
        self._stamp = stamp
        self._new_place = lambda: _Place(numel, bucket.dtype, arena, stamp)
        self._places = [self._new_place()]
        self._rows = [Row(bucket.numel, bucket.dtype) for _ in range(2)]
        self._turn = 0
        self._begun = False
        self._row = self._rows[0]
        self._looked = False
        self._stamps: list[torch.Tensor] = []  # of the slices in use

    @property
    def flat(self) -> torch.Tensor:
        return self._row.tensor

    def begin(self, *, heard: bool) -> None:
        if not heard and self._begun:
            self._turn = 1 - self._turn
            if len(self._places) == self._turn:
                self._places.append(self._new_place())
        self._begun = True
        if self._arena.copies_sums:  # no word is given before all is copied: one place is enough
            self._rows = self._rows[:1] * 2
        self._row = self._rows[self._turn]
        self._looked = False
        self._stamps.clear()

    def place(self, start: int, stop: int) -> torch.Tensor:
        first, last = self._own
        if first <= start and stop <= last:
            return self._places[self._turn].slice[start - first : stop - first]
        self._row.own(start)
        return self._row.tensor[start:stop]

    def put(self, start: int, stop: int, there: torch.Tensor) -> bool:
        if start == stop:
            return True
        if not self._looked:
            self._looked = True
            self._arena.copies_sums = self._arena.copies_sums or self._row.written
        theirs = lent(there)
        if self._arena.copies_sums or not self._show(start, there, theirs or self._arena.find(there)):
            self._row.own(start)
            self._row.tensor[start:stop].copy_(there)
        if theirs is not None:
            self._stamps.append(theirs[0].tensor(theirs[1] + _whole(there.nbytes), STAMP.itemsize, STAMP))
        return self.stood

    def complete(self) -> None:
        self.put(*self._own, self._places[self._turn].slice)

    @property
    def stood(self) -> bool:
        """What is in use has not been overwritten."""
        return all(stamp.item() == self._stamp for stamp in self._stamps)

    def give_back(self) -> None:
        """Nobody of the run uses what this worker has made. What is in the places is anything soon."""
        for place in self._places:
            place.stamp.zero_()

    def _show(self, start: int, there: torch.Tensor, found: tuple[Mapped | Segment, int] | None) -> bool:
        """Whether it could be done. `found`: in which segment it lies, and where."""
        if found is None:
            return False
        try:
            self._row.show(start, there.numel(), *found)
        except OSError:  # pages of another size, or too many maps
            return False
        return True


class _Place:
    """Where a worker makes its slice, for all to use, with its stamp behind it."""

    def __init__(self, numel: int, dtype: torch.dtype, arena: Arena, stamp: int) -> None:
        end = _whole(numel * dtype.itemsize)
        block = arena.empty(end + STAMP.itemsize, torch.uint8)
        self.slice = block[: numel * dtype.itemsize].view(dtype)
        self.stamp = block[end:].view(STAMP)
        self.stamp.fill_(stamp)


def _whole(size: int) -> int:
    """So many bytes in whole pages."""
    return -(-size // PAGE) * PAGE
