"""Addresses in a row, of which each part may show what lies in a file of memory: this worker's arena, or a peer's.

So a tensor over parts that others have made needs no copy of them. What is shown is a private copy: the kernel copies a
page when it is written, so nobody else sees what is written here, and a part that was written does not follow its file
any more. `written` says whether that has happened; the kernel's page map tells it exactly.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Protocol

import torch

PAGE = mmap.PAGESIZE
_FIXED = 0x10
_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE
_ENTRY = 8  # bytes a page in the page map
_PAGE_MAP = "/proc/self/pagemap"


class File(Protocol):
    """A segment of memory. `file`: open for as long as it is referred to."""

    file: int


class Row:
    """See the module's head. Of `numel` elements; what is not shown is memory of this row's own, which is zero."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self._itemsize = dtype.itemsize
        size = max(-(-numel * dtype.itemsize // PAGE) * PAGE, PAGE)
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.tensor = torch.frombuffer(self._map, dtype=dtype, count=numel)
        self._address = self.tensor.data_ptr()
        self._shown: dict[int, tuple[int, File, int]] = {}  # by its first byte: its length, and what is shown there

    def show(self, start: int, numel: int, memory: File, offset: int) -> None:
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
        if where % PAGE or offset % PAGE:
            raise OSError(f"{size} bytes at {offset} of a segment are to begin with byte {at}, which is no whole page")
        if _libc.mmap(where, size, _PROTECTION, flags | _FIXED, file, offset) != where:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))


def _has_copies(pages: int, address: int, size: int) -> bool:
    """Whether one of the pages there is neither a file's nor missing."""
    first, count = address // PAGE, -(-size // PAGE)
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
