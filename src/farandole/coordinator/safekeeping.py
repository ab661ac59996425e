"""The coordinator's books a second time, in memory that `farandole run` holds.

The journal is on a disk that may be full, and in a folder that somebody may clear: a coordinator that is killed then
leaves books behind that are too old, or none, and one that went on from those would give numbers of views out twice
and send workers away that hold the newest state. Of everything that the coordinator's process has, only what its parent
holds outlives it for as long as the run: so the books are written there too, before the journal, and so before anyone
is told. Who comes back believes this copy; it is never older than the journal.

The memory is a file without a name and takes turns with two slots, so that whoever is killed while writing one leaves
the other whole:

    sequence number, CRC-32 and length of the books, then the books as JSON
"""

from __future__ import annotations

import contextlib
import os
import struct
import sys
import tempfile
import zlib

HEAD = struct.Struct(">QIQ")
SLOT = 1 << 30  # bytes from one slot to the next; what is never written takes no memory


def allot() -> int:
    """A descriptor of such memory, for a coordinator to inherit. Elsewhere than on Linux it is a file."""
    if sys.platform == "linux":
        return os.memfd_create("farandole-books")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Safekeeping:
    """`descriptor` is one of `allot`'s."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._sequence, self._books = max(self._read(0), self._read(1))

    @property
    def books(self) -> bytes:
        """The newest that the process before this one has put in; b"" for none."""
        return self._books

    def put(self, books: bytes) -> None:
        """Where there is no memory for it, nothing is left of those before either: they would be believed."""
        self._sequence += 1
        record = HEAD.pack(self._sequence, zlib.crc32(books), len(books)) + books
        written = 0
        with contextlib.suppress(OSError):
            written = os.pwrite(self._descriptor, record, SLOT * (self._sequence % 2))
        if written < len(record):
            os.ftruncate(self._descriptor, 0)

    def _read(self, slot: int) -> tuple[int, bytes]:
        head = os.pread(self._descriptor, HEAD.size, SLOT * slot)
        if len(head) < HEAD.size:
            return 0, b""
        sequence, checksum, length = HEAD.unpack(head)
        books = os.pread(self._descriptor, length, SLOT * slot + HEAD.size) if length < SLOT else b""
        return (sequence, books) if zlib.crc32(books) == checksum and len(books) == length else (0, b"")
