"""The sum of one bucket in one view at one worker: the slice that it computes for all, and the slices of the others.

`Copied` is private memory, into which the slices of others are copied or received. `InPlace` is for large buckets that
workers of one host exchange: each slice is read in the memory of its owner, and on CPUs it is used there, as `.grad` of
the parameters. Its rules:

- *How long a slice is used.* It is used until the update is done, and no message reports that. But a worker that begins
  the next training round has done its update, and signals this by its partial sums, which an owner receives before it
  writes (`schedule.order`). So one place is enough if each worker has partial sums and all are on one host
  (`all_begun`).
  A worker without a shard sends no partial sum, so it signals this only with its commit message. And slices from other
  hosts are received in the place, possibly from `release_peers`, long before their time. Then the owner uses two places
  in turn (`_turn`), one for each round, and may overwrite the first one when it has all commit messages of the second
  round. Partial sums are received in neither of them.
- *A view is left.* The sums in use may be of a round of the view before. Those places rest (`Arena.rest`) until this
  worker has all commit messages of a training round in a later view: all members of that view have begun that round.
- *An evicted worker* that was frozen may resume too late: the memory that it reads may be overwritten, although it has
  all commit messages. So each place has a *stamp*, a number of its view, which is erased before the place is freed. A
  worker that does not find the stamp with a slice treats the peer as lost, and sends no commit message. A worker that
  does not find it after its update has an invalid replica (`sums_intact`). Small buckets are sent and not lent, so this
  can't happen to them.
- *Buckets of an accelerator.* The slices are copied into a mirror in pinned memory, and from there to the device. So
  nothing is mapped, and no slice is used after this worker's commit message.
- *Loops that write.* Gradient clipping writes into `.grad`. Then the kernel copies page by page (`Row`): no other
  worker sees the change, but that is slow, and the page no longer shows its file. Before a row shows the next sums,
  this worker checks it: after the first write that it finds, it copies its sums.
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
# A contiguous address range. Each part of it can map (show) a part of a memory file: this worker's arena, or a peer's.
#
# So one tensor spans parts that other workers made, without a copy. The mappings are private: the kernel copies a page
# when this worker writes to it, so other workers do not see the write, and that page no longer shows its file.
# `written` reports whether that happened; the kernel's page map has the exact answer.

_PAGE_BYTES = mmap.PAGESIZE
_FIXED = 0x10
_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE
_ENTRY = 8  # bytes a page in the page map
_PAGE_MAP = "/proc/self/pagemap"


class SharedFile(Protocol):
    """A segment of memory. `file` is open as long as the segment is referenced."""

    file: int


class Row:
    """An address range of `numel` elements; see above. A part that shows no file is own memory, at first 0."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self._itemsize = dtype.itemsize
        size = max(-(-numel * dtype.itemsize // _PAGE_BYTES) * _PAGE_BYTES, _PAGE_BYTES)
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.tensor = torch.frombuffer(self._map, dtype=dtype, count=numel)
        self._address = self.tensor.data_ptr()
        self._shown: dict[int, tuple[int, SharedFile, int]] = {}  # by first byte: length, file, offset

    def show(self, start: int, numel: int, memory: SharedFile, offset: int) -> None:
        """Maps `numel` elements from `start` on to `memory` at `offset` bytes. Both must begin at a page boundary.

        Raises:
            OSError: one does not, or the mapping fails.
        """
        at, size = start * self._itemsize, numel * self._itemsize
        if self._shown.get(at) != (size, memory, offset):
            self._map_there(at, size, mmap.MAP_PRIVATE, memory.file, offset)
            self._shown[at] = size, memory, offset

    def own(self, start: int) -> None:
        """Makes the part that begins with element `start` the row's own memory again."""
        shown = self._shown.pop(start * self._itemsize, None)
        if shown is not None:
            self._map_there(start * self._itemsize, shown[0], mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)

    @property
    def written(self) -> bool:
        """True if this worker wrote to a part that shows a file, or if that is unknown."""
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
            raise OSError(f"can't map {size} bytes at {offset} of a segment to byte {at}: not at page boundaries")
        if _libc.mmap(where, size, _PROTECTION, flags | _FIXED, file, offset) != where:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))


def _has_copies(pages: int, address: int, size: int) -> bool:
    """Returns True if one of the pages is present or swapped and does not belong to a file."""
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


class OwnRow:
    """A row of private memory: all slices are copied into it."""

    written = False

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def own(self, start: int) -> None: ...


# --- sums -------------------------------------------------------------------------------------------------------------

STAMP = torch.int64


class Sum(Protocol):
    """The sum of one bucket; see the docstring of the module. Elements `[start, stop)` are always a whole slice."""

    @property
    def flat(self) -> torch.Tensor:
        """The whole sum, of shape (bucket.numel,), after `complete`."""
        ...

    def begin(self, *, all_begun: bool) -> None:
        """Begins a training round, or another round over the same buckets. `all_begun`: see `schedule.Routes`."""
        ...

    def place(self, start: int, stop: int) -> torch.Tensor:
        """Returns host memory in which this worker computes its slice, or another worker's slice is received."""
        ...

    def put(self, start: int, stop: int, tensor: torch.Tensor) -> bool:
        """Takes `tensor` as a slice. Returns False if its owner has already freed that memory."""
        ...

    def complete(self) -> None:
        """Completes the sum; all slices of other workers have been `put`."""
        ...


class SingleProcessSums:
    """The sum of a single process (`world_size=1`)."""

    def __init__(self) -> None:
        self.flat = torch.empty(0)

    def begin(self, *, all_begun: bool) -> None: ...

    def place(self, start: int, stop: int) -> torch.Tensor:
        return self.flat[start:stop]

    def put(self, start: int, stop: int, tensor: torch.Tensor) -> bool:
        raise AssertionError(f"a single process got elements {start} to {stop} in {tensor.nbytes} bytes of a peer")

    def complete(self) -> None: ...


class Copied:
    """A bucket's sum in private memory of this worker."""

    def __init__(self, bucket: Bucket, stage: bool | None) -> None:
        self._bucket = bucket
        self._staging = Staging(Ordinary(), stage)
        self.flat = flat(bucket, Ordinary())

    def begin(self, *, all_begun: bool) -> None: ...

    def place(self, start: int, stop: int) -> torch.Tensor:
        return self._staging.host(self.flat, self._bucket)[start:stop]

    def put(self, start: int, stop: int, tensor: torch.Tensor) -> bool:
        self.place(start, stop).copy_(tensor)
        return True

    def complete(self) -> None:
        self._staging.back(self.flat, self._bucket)


class InPlace:
    """A bucket's sum in the memory of the workers that compute its slices.

    `own` is the range `[start, stop)` of elements that this worker provides to the others of its host: the sums that it
    computes, and those that it receives from other hosts. `stamp` is equal for all places of this view and different
    from that of any other view; it is not 0. `staging` has mirrors of the bucket if it is on an accelerator.
    """

    def __init__(self, bucket: Bucket, own: tuple[int, int], arena: Arena, stamp: int, staging: Staging) -> None:
        numel = own[1] - own[0]
        self._bucket = bucket
        self._arena = arena
        self._staging = staging
        self._on_device = flat(bucket, Ordinary()) if staging.serves(bucket) else None
        self._own = own
        self._stamp = stamp
        self._new_place = lambda: _Place(numel, bucket.dtype, arena, stamp)
        self._places = [self._new_place()]
        self._rows: list[Row] | list[OwnRow]
        if self._on_device is None:
            self._rows = [Row(bucket.numel, bucket.dtype) for _ in range(2)]
        else:
            self._rows = [OwnRow(staging.host(self._on_device, bucket))] * 2
        self._turn = 0
        self._begun = False
        self._row: Row | OwnRow = self._rows[0]
        self._looked = False
        self._stamps: list[torch.Tensor] = []  # of the slices in use

    @property
    def flat(self) -> torch.Tensor:
        return self._row.tensor if self._on_device is None else self._on_device

    @property
    def _copies(self) -> bool:
        return self._on_device is not None or self._arena.copies_sums

    def begin(self, *, all_begun: bool) -> None:
        if not all_begun and self._begun:
            self._turn = 1 - self._turn
            if len(self._places) == self._turn:
                self._places.append(self._new_place())
        self._begun = True
        if self._copies:  # no commit message is sent before all is copied: one place is enough
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

    def put(self, start: int, stop: int, tensor: torch.Tensor) -> bool:
        if start == stop:
            return True
        if not self._looked:
            self._looked = True
            self._arena.copies_sums = self._arena.copies_sums or self._row.written
        theirs = lent(tensor)
        if self._copies or not self._show(start, tensor, theirs or self._arena.find(tensor)):
            self._row.own(start)
            self._row.tensor[start:stop].copy_(tensor)
        if theirs is not None:
            self._stamps.append(theirs[0].tensor(theirs[1] + _whole(tensor.nbytes), STAMP.itemsize, STAMP))
        return self.sums_intact

    def complete(self) -> None:
        self.put(*self._own, self._places[self._turn].slice)
        if self._on_device is not None:
            self._staging.back(self._on_device, self._bucket)

    @property
    def sums_intact(self) -> bool:
        """True if no slice in use has been overwritten."""
        return all(stamp.item() == self._stamp for stamp in self._stamps)

    def give_back(self) -> None:
        """Erases the stamps: no worker of the run uses this worker's slices, and their memory is reused soon."""
        for place in self._places:
            place.stamp.zero_()

    def _show(self, start: int, tensor: torch.Tensor, location: tuple[Mapped | Segment, int] | None) -> bool:
        """Maps the tensor into the row. Returns False on failure. `location` is its segment and offset there."""
        if location is None or isinstance(self._row, OwnRow):
            return False
        try:
            self._row.show(start, tensor.numel(), *location)
        except OSError:  # pages of another size, or too many maps
            return False
        return True


class _Place:
    """The memory in which a worker computes its slice for all workers, followed by the stamp."""

    def __init__(self, numel: int, dtype: torch.dtype, arena: Arena, stamp: int) -> None:
        end = _whole(numel * dtype.itemsize)
        block = arena.empty(end + STAMP.itemsize, torch.uint8)
        self.slice = block[: numel * dtype.itemsize].view(dtype)
        self.stamp = block[end:].view(STAMP)
        self.stamp.fill_(stamp)


def _whole(size: int) -> int:
    """Returns `size` bytes rounded up to whole pages."""
    return -(-size // PAGE) * PAGE
