"""What `index.json` says of a folder of shards: the `wids` package's format, in which unknown fields are passed over.

Who made a folder of shards may be a stranger. So a shard is a plain name beside the index (no way out of the folder, no
URL of somebody else's, nothing that a cache's file name could not hold), a digest is one, and numbers are numbers of
something. Names are told once: two entries of one file would be two claims about it.

`classes` and `samples` are ours: the classes' names by label, and the file that says where each sample lies and what
its bytes are (`index.py`), which that format has no place for.
"""

from __future__ import annotations

import contextlib
import mmap
import re
import tarfile
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt

from farandole.data.object_store import filesystem
from farandole.errors import ShardError, UsageError
from farandole.platform.extras import how_to_install

# --- index ------------------------------------------------------------------------------------------------------------

T = TypeVar("T")
INDEX = "index.json"
MAX_INDEX_BYTES = 1 << 28  # a million shards take half of it
_NAME = re.compile(r"\w[\w .,+=@~-]*")
_MAX_NAME = 200  # bytes: a cache puts a digest before it and a suffix behind it
_DIGEST = re.compile(r"[0-9a-f]{32}")
_MAX = 1 << 53  # of samples, of bytes


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """One tar file: its name, beside the index, how many samples it has, its length and its MD5 in hex."""

    url: str
    nsamples: int
    filesize: int
    md5sum: str

    def __post_init__(self) -> None:
        _check(self.url, self.md5sum)
        for name, value in (("nsamples", self.nsamples), ("filesize", self.filesize)):
            if not 0 <= value <= _MAX:
                raise ValueError(f"{name} {value} of {self.url} is not from 0 to 2^53")


class SamplesFile(msgspec.Struct, frozen=True, kw_only=True):
    """The file, beside the index, of what each sample is."""

    url: str
    md5sum: str

    def __post_init__(self) -> None:
        _check(self.url, self.md5sum)


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """All shards, in the order of their samples."""

    kind: str = msgspec.field(default="wids-shard-index-v1", name="__kind__")
    wids_version: int = 1
    name: str = ""
    classes: tuple[str, ...] = ()
    shardlist: tuple[Shard, ...]
    samples: SamplesFile | None = None

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for number, shard in enumerate(self.shardlist):
            if shard.url in seen:
                raise ValueError(f"url {shard.url!r} of shardlist[{number}] is that of an entry before it")
            seen.add(shard.url)


def read_index(place: str) -> Index:
    """The index at `place`, a path or a URL.

    Raises:
        UsageError: there is no such kind of place.
        ShardError: it is not there, is none, or names no samples.
    """
    index = read_struct(
        place, Index, called="index of WebDataset shards",
        absent="`farandole data prepare` writes it last, so run it to its end. Of tars that were made by others, "
        "`farandole data index` makes one",
    )  # fmt: skip
    if sum(shard.nsamples for shard in index.shardlist) == 0:
        raise ShardError(f"{place} names no samples")
    return index


def read_struct(place: str, kind: type[T], *, called: str, absent: str) -> T:
    """A JSON file of somebody's, of at most `MAX_INDEX_BYTES`. `absent`: what to do where it is not there.

    Raises:
        UsageError: there is no such kind of place.
        ShardError: it is not there, can't be read, or is no `kind`, which is `called` that.
    """
    files, path = filesystem(place)
    try:
        length = files.size(path) or 0  # not every server says
        if length > MAX_INDEX_BYTES:
            raise ShardError(f"{place} has {length} bytes, and an index at most {MAX_INDEX_BYTES}; make larger shards")
        return msgspec.json.decode(files.cat_file(path), type=kind)
    except FileNotFoundError:
        raise ShardError(f"{place} is not there; {absent}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ShardError(f"{place} is no {called}: {error}") from None
    except ShardError:
        raise
    except Exception as error:
        raise ShardError(
            f"{place} can't be read ({type(error).__name__}: {error}); see that it can be reached from here"
        ) from error


def _check(url: str, md5sum: str) -> None:
    if _NAME.fullmatch(url) is None or len(url.encode()) > _MAX_NAME:
        raise ValueError(f"url {url[:_MAX_NAME]!r} is not the plain name of a file beside the index")
    if _DIGEST.fullmatch(md5sum) is None:
        raise ValueError(f"md5sum {md5sum[:_MAX_NAME]!r} of {url} is not 32 hexadecimal digits")


# --- samples ----------------------------------------------------------------------------------------------------------
#
# Where each sample of a folder of shards lies, and what its bytes are: a table of four whole numbers a sample.
#
#     offset, size    of the image within its shard, in bytes
#     label           the class's number
#     checksum        xxHash's XXH3 (64 bits) of the image as it is stored
#
# `farandole data prepare` writes it as one file beside the index, 32 bytes a sample, little-endian, in the order of the
# samples; the index has its MD5. It is mapped, not read: a table of 10^8 samples takes no memory of its own.
#
# The checksum is looked at whenever a sample is read, wherever from: 1.2 us for 45 kB that are in the cache. It finds
# what disks, copies and servers do to bytes, not what somebody does on purpose. What is on purpose is the index's
# author's, who is believed in what a sample is, but not in how long a shard is: a row that leads out of its shard is
# refused.

NAME = "samples.bin"
COLUMNS = 4
ROW_BYTES = 8 * COLUMNS
OFFSET, SIZE, LABEL, CHECKSUM = range(COLUMNS)
Rows = npt.NDArray[np.int64]  # shape (samples, COLUMNS)


def require_xxhash() -> None:
    """Raises `UsageError` where it is not installed: before anything is begun, not at the first sample."""
    try:
        import xxhash  # pyright: ignore[reportUnusedImport]  # noqa: F401
    except ImportError:
        raise UsageError(
            f"samples are checked with xxHash, which is not installed: {how_to_install('images')}"
        ) from None


def checksum(data: bytes | memoryview) -> int:
    """Of a sample as it is stored; signed, so that it fits into a row."""
    import xxhash

    unsigned: int = xxhash.xxh3_64_intdigest(data)
    return unsigned - (1 << 64) if unsigned >> 63 else unsigned


def rows_of(content: Any, samples: int) -> Rows:
    """The table in `content`, which stays what it is.

    Raises:
        ValueError: it is none of so many samples.
    """
    found = memoryview(content).nbytes
    if found != samples * ROW_BYTES:
        raise ValueError(f"it has {found} bytes where {samples} samples take {samples * ROW_BYTES}")
    return np.frombuffer(content, dtype="<i8").reshape(samples, COLUMNS)


def to_bytes(rows: Rows) -> bytes:
    return np.ascontiguousarray(rows, dtype="<i8").tobytes()


def check(rows: Rows, length: int) -> None:
    """All of them lie in a shard of `length` bytes, and have a label.

    Raises:
        ValueError: one does not; names the first.
    """
    offset, size = rows[:, OFFSET], rows[:, SIZE]
    wrong = (offset < 0) | (size < 0) | (size > length) | (offset > length - size) | (rows[:, LABEL] < 0)
    if wrong.any():
        number = int(wrong.argmax())
        raise ValueError(
            f"its sample {number} is said to lie at {offset[number]}, with {size[number]} bytes and label "
            f"{rows[number, LABEL]}, and the shard has {length} bytes"
        )


# --- tars -------------------------------------------------------------------------------------------------------------
#
# What a tar holds, entry by entry, as WebDataset groups it: entries one after the other of the same key are a sample.
#
# An entry's key is its name up to the first dot behind the last slash, and the rest is the name of a field: of
# `some/folder/7.seg.png` the key is `some/folder/7`, and the field `seg.png`. What has no key or no field is passed
# over, as WebDataset does, and so are `__names__` like this, which it keeps for itself.
#
# Invariant: each entry lies behind the one before it, so that a tar which leads back is an error, and no loop. An entry
# may claim to be longer than its file: who reads it looks. No list of entries is kept here.

UNREADABLE = (tarfile.TarError, ValueError, OverflowError, RecursionError)  # what comes of a tar that is none
LEAST = 512  # bytes that a sample takes in a tar: the head of one field


class FieldEntry(NamedTuple):
    """A field of a sample: `size` bytes from `offset` on, if the file is that long."""

    key: str
    field: str
    offset: int
    size: int


def entries(archive: tarfile.TarFile) -> Iterator[FieldEntry]:
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
            yield FieldEntry(f"{folder}{slash}{stem}", field.lower(), end, member.size)


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
