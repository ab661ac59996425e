"""What a tar holds, entry by entry, as WebDataset groups it: entries one after the other of the same key are a sample.

An entry's key is its name up to the first dot behind the last slash, and the rest is the name of a field: of
`some/folder/7.seg.png` the key is `some/folder/7`, and the field `seg.png`. What has no key or no field is passed over,
as WebDataset does, and so are `__names__` like this, which it keeps for itself.

Invariant: each entry lies behind the one before it, so that a tar which leads back is an error, and no loop. An entry
may claim to be longer than its file: who reads it looks. No list of entries is kept here.
"""

from __future__ import annotations

import contextlib
import mmap
import tarfile
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple, cast

UNREADABLE = (tarfile.TarError, ValueError, OverflowError, RecursionError)  # what comes of a tar that is none
LEAST = 512  # bytes that a sample takes in a tar: the head of one field


class Entry(NamedTuple):
    """A field of a sample: `size` bytes from `offset` on, if the file is that long."""

    key: str
    field: str
    offset: int
    size: int


def entries(archive: tarfile.TarFile) -> Iterator[Entry]:
    """All fields that `archive` holds, in their order. Raises any of `UNREADABLE`."""
    end = 0
    while (member := archive.next()) is not None:
        cast(Any, archive).members.clear()  # a kilobyte each, for as long as the archive is open
        if member.size < 0 or member.offset_data <= end:
            raise ValueError(f"entry {member.name!r} leads back")
        end = member.offset_data
        if not member.isfile():
            continue
        folder, slash, name = member.name.rpartition("/")
        stem, _, field = name.partition(".")
        if stem and field:
            yield Entry(f"{folder}{slash}{stem}", field.lower(), end, member.size)


@contextlib.contextmanager
def mapped(descriptor: int) -> Generator[tarfile.TarFile, None, None]:
    """The archive that is open as `descriptor`. Raises any of `UNREADABLE`.

    Mapped, since a descriptor's position is shared with the processes that were forked since it was opened.
    """
    with (
        mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as file,
        tarfile.open(fileobj=cast(Any, file), mode="r:") as archive,
    ):
        yield archive
