"""What `index.json` says of a folder of MDS shards, and how a shard is laid out.

    uint32 samples | uint32 offsets, samples + 1 of them, from the file's begin | the columns once more | the samples

A sample is the lengths, as uint32, of those of its columns that have no fixed one, and then all columns' bytes.

Who made a folder may be a stranger: names lead to files below the index and nowhere else, and numbers are numbers of
something. What the shard says of itself is believed no further than it is long.
"""

from __future__ import annotations

import re
import struct

import msgspec

from farandole.data.cache import filesystem
from farandole.data.index import MAX_INDEX_BYTES
from farandole.data.remote import reading
from farandole.errors import ShardError

_PART = re.compile(r"\w[\w .,+=@~-]*")
_LONGEST = 200
_MAX_BYTES = 1 << 32  # offsets are uint32
COMPRESSIONS = ("gz", "bz2", "zstd")


class File(msgspec.Struct, frozen=True, kw_only=True):
    """A shard as it lies there, or as it is when it is decompressed."""

    basename: str
    bytes: int
    hashes: dict[str, str] = {}

    def __post_init__(self) -> None:
        parts = self.basename.split("/")
        if not all(_PART.fullmatch(part) for part in parts) or len(self.basename.encode()) > _LONGEST:
            raise ValueError(f"basename {self.basename[:_LONGEST]!r} is not that of a file below the index")
        if not 0 <= self.bytes <= _MAX_BYTES:
            raise ValueError(f"bytes {self.bytes} of {self.basename} is not from 0 to 2^32")

    @property
    def md5(self) -> str:
        """Empty where the index has none, as it has unless its writer was asked for it."""
        found = self.hashes.get("md5", "")
        return found if re.fullmatch(r"[0-9a-f]{32}", found) else ""


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    column_names: tuple[str, ...]
    column_encodings: tuple[str, ...]
    column_sizes: tuple[int | None, ...]
    raw_data: File
    samples: int
    compression: str | None = None
    zip_data: File | None = None
    format: str = "mds"
    version: int = 2

    def __post_init__(self) -> None:
        name = self.raw_data.basename
        if self.format != "mds" or self.version != 2:
            raise ValueError(f"{name} is {self.format!r}, version {self.version}: only 'mds', version 2, is read")
        columns = len(self.column_names)
        if not columns == len(self.column_encodings) == len(self.column_sizes) == len(set(self.column_names)):
            raise ValueError(f"{name} has {columns} names of columns, and encodings and sizes of others")
        if any(size is not None and not 0 <= size <= _MAX_BYTES for size in self.column_sizes):
            raise ValueError(f"{name} has column_sizes {self.column_sizes}")
        if not 0 <= self.samples <= self.raw_data.bytes // 4:
            raise ValueError(f"{name} has {self.raw_data.bytes} bytes, too few for {self.samples} samples")
        if (self.zip_data is None) != (self.compression is None):
            raise ValueError(f"{name} has compression {self.compression!r} and zip_data {self.zip_data}")
        if self.compression is not None and self.algorithm not in COMPRESSIONS:
            raise ValueError(
                f"{name} is compressed with {self.compression!r}: of those {', '.join(COMPRESSIONS)} are read"
            )

    @property
    def algorithm(self) -> str:
        return (self.compression or "").partition(":")[0]

    @property
    def stored(self) -> File:
        """The file that is there."""
        return self.raw_data if self.zip_data is None else self.zip_data


class Index(msgspec.Struct, frozen=True, kw_only=True):
    shards: tuple[Shard, ...]
    version: int = 2

    def __post_init__(self) -> None:
        for shard in self.shards:
            if shard.column_names != self.shards[0].column_names:
                raise ValueError(f"{shard.raw_data.basename} has other columns than {self.shards[0].raw_data.basename}")


def read_index(place: str) -> Index:
    """The index at `place`. Raises `ShardError`: it is not there, is none, or names no samples."""
    with reading(place):
        files, path = filesystem(place)
        if (length := files.size(path) or 0) > MAX_INDEX_BYTES:
            raise ShardError(f"{place} has {length} bytes, and an index at most {MAX_INDEX_BYTES}; make larger shards")
        content = files.cat_file(path)
    try:
        index = msgspec.json.decode(content, type=Index)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ShardError(f"{place} is no index of MDS shards: {error}") from None
    if sum(shard.samples for shard in index.shards) == 0:
        raise ShardError(f"{place} names no samples")
    return index


def columns_of(data: bytes, sizes: tuple[int | None, ...]) -> list[bytes]:
    """The columns of one sample. Raises `ValueError` where their lengths are not the sample's."""
    without = sum(not size for size in sizes)  # as the format's own reader has it, 0 is none
    if 4 * without > len(data):
        raise ValueError(f"a sample of {len(data)} bytes, too few for the lengths of {without} columns")
    said = iter(struct.unpack_from(f"<{without}I", data))
    lengths = [size or next(said) for size in sizes]
    if (end := 4 * without + sum(lengths)) != len(data):
        raise ValueError(f"a sample of {len(data)} bytes, whose columns take {end}")
    found: list[bytes] = []
    at = 4 * without
    for length in lengths:
        found.append(data[at : at + length])
        at += length
    return found
