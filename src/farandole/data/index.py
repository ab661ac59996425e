"""The index of a folder of shards, `index.json`: the format of the `wids` package, in which unknown fields are ignored.

A folder of shards may come from an untrusted author. So the index is checked: a shard is a plain file name beside the
index (no path out of the folder, no foreign URL, no character that a cache's file name can't hold), a digest has the
form of an MD5, and numbers are in range. A name occurs once: two entries of one file would be two claims about it.

`classes` and `samples` are our additions: the classes' names by label, and the file with the place and checksum of each
sample (section "samples"), for which that format has no field.
"""

from __future__ import annotations

import contextlib
import mmap
import re
import tarfile
from collections.abc import Generator, Iterator
from typing import Any, Literal, NamedTuple, TypeVar, cast

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
_MAX_NAME = 200  # bytes: a cache adds a digest before it and a suffix after it
_DIGEST = re.compile(r"[0-9a-f]{32}")
_MAX = 1 << 53  # samples, and bytes


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """One tar file: its name beside the index, its number of samples, its length in bytes and its MD5 in hex."""

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
    """The file beside the index that holds the table of samples (section "samples")."""

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
        urls: set[str] = set()
        for number, shard in enumerate(self.shardlist):
            if shard.url in urls:
                raise ValueError(f"url {shard.url!r} of shardlist[{number}] repeats that of an earlier entry")
            urls.add(shard.url)


def read_index(place: str) -> Index:
    """Returns the index at `place`, a path or a URL.

    Raises:
        UsageError: the kind of URL is unknown.
        ShardError: the file does not exist, is not an index, or names no samples.
    """
    index = read_struct(
        place, Index, called="index of WebDataset shards",
        absent="`farandole data prepare` writes it last, so run it to its end. For tars made by other tools, "
        "`farandole data index` makes one",
    )  # fmt: skip
    if sum(shard.nsamples for shard in index.shardlist) == 0:
        raise ShardError(f"{place} names no samples")
    return index


def read_struct(place: str, kind: type[T], *, called: str, absent: str) -> T:
    """Returns the `kind` decoded from a JSON file of at most `MAX_INDEX_BYTES`.

    Error messages call the file `called`, and state the remedy `absent` if it does not exist.

    Raises:
        UsageError: the kind of URL is unknown.
        ShardError: the file does not exist, can't be read, or is no `kind`.
    """
    files, path = filesystem(place)
    try:
        length = files.size(path) or 0  # some servers don't report it
        if length > MAX_INDEX_BYTES:
            raise ShardError(f"{place} has {length} bytes, and an index at most {MAX_INDEX_BYTES}; make larger shards")
        return msgspec.json.decode(files.cat_file(path), type=kind)
    except FileNotFoundError:
        raise ShardError(f"{place} does not exist; {absent}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ShardError(f"{place} is not an {called}: {error}") from None
    except ShardError:
        raise
    except Exception as error:
        raise ShardError(
            f"{place} can't be read ({type(error).__name__}: {error}); check that this host can reach it"
        ) from error


def _check(url: str, md5sum: str) -> None:
    if _NAME.fullmatch(url) is None or len(url.encode()) > _MAX_NAME:
        raise ValueError(f"url {url[:_MAX_NAME]!r} is not the plain name of a file beside the index")
    if _DIGEST.fullmatch(md5sum) is None:
        raise ValueError(f"md5sum {md5sum[:_MAX_NAME]!r} of {url} is not 32 hexadecimal digits")


# --- samples ----------------------------------------------------------------------------------------------------------
#
# The place and checksum of each sample of a folder of shards: a table of four integers a sample.
#
#     offset, size    of the image within its shard, in bytes
#     label           the class's number
#     checksum        xxHash's XXH3 (64 bits) of the image as it is stored
#
# `farandole data prepare` writes it as one file beside the index, 32 bytes a sample, little-endian, in the order of the
# samples; the index has its MD5. It is mapped, not read: a table of 10^8 samples takes no memory of its own.
#
# The checksum is compared whenever a sample is read, from any source: 1.2 us for 45 kB in the cache. It detects damage
# by disks, copies and servers, not deliberate changes. We trust the author of the index about labels and contents, but
# not about lengths: a row that points outside its shard is refused.

NAME = "samples.bin"
COLUMNS = 4
ROW_BYTES = 8 * COLUMNS
OFFSET, SIZE, LABEL, CHECKSUM = range(COLUMNS)
Rows = npt.NDArray[np.int64]  # shape (samples, COLUMNS)


def require_xxhash() -> None:
    """Raises `UsageError` if xxHash is not installed; call it before work begins, not at the first sample."""
    try:
        import xxhash  # pyright: ignore[reportUnusedImport]  # noqa: F401
    except ImportError:
        raise UsageError(
            f"samples are checked with xxHash, which is not installed: {how_to_install('images')}"
        ) from None


def checksum(data: bytes | memoryview) -> int:
    """Returns the XXH3 checksum (64 bits) of a sample as it is stored; signed, so that it fits into a row."""
    import xxhash

    unsigned: int = xxhash.xxh3_64_intdigest(data)
    return unsigned - (1 << 64) if unsigned >> 63 else unsigned


def rows_of(content: Any, samples: int) -> Rows:
    """Returns the table in `content` as an array that shares its memory.

    Raises:
        ValueError: the length is not that of a table of `samples` rows.
    """
    length = memoryview(content).nbytes
    if length != samples * ROW_BYTES:
        raise ValueError(f"it has {length} bytes where {samples} samples take {samples * ROW_BYTES}")
    return np.frombuffer(content, dtype="<i8").reshape(samples, COLUMNS)


def to_bytes(rows: Rows) -> bytes:
    return np.ascontiguousarray(rows, dtype="<i8").tobytes()


def check(rows: Rows, length: int) -> None:
    """Checks that all samples lie within a shard of `length` bytes, and have a label.

    Raises:
        ValueError: a sample does not; names the first.
    """
    offset, size = rows[:, OFFSET], rows[:, SIZE]
    wrong = (offset < 0) | (size < 0) | (size > length) | (offset > length - size) | (rows[:, LABEL] < 0)
    if wrong.any():
        number = int(wrong.argmax())
        raise ValueError(
            f"its sample {number} should lie at {offset[number]}, with {size[number]} bytes and label "
            f"{rows[number, LABEL]}, and the shard has {length} bytes"
        )


# --- tars -------------------------------------------------------------------------------------------------------------
#
# The entries of a tar, grouped as WebDataset does: consecutive entries of the same key are one sample.
#
# An entry's key is its name up to the first dot after the last slash, and the rest is the name of a field:
# `some/folder/7.seg.png` has the key `some/folder/7`, and the field `seg.png`. Entries without a key or a field are
# ignored, as WebDataset does, and so are `__names__` like this, which it reserves.
#
# Invariant: each entry lies after the one before it, so a tar that points back is an error, and not an endless loop. An
# entry may claim to be longer than its file: the caller must check. No list of entries is kept here.

UNREADABLE = (tarfile.TarError, ValueError, OverflowError, RecursionError)  # errors of a file that is no valid tar
LEAST = 512  # minimum bytes of a sample in a tar: the header of one field


class FieldEntry(NamedTuple):
    """A field of a sample: `size` bytes from `offset` on. The file may be shorter."""

    key: str
    field: str
    offset: int
    size: int


def entries(archive: tarfile.TarFile) -> Iterator[FieldEntry]:
    """Yields all fields that `archive` holds, in their order. Raises any of `UNREADABLE`."""
    end = 0
    while (member := archive.next()) is not None:
        cast(Any, archive).members.clear()  # a kilobyte each, for as long as the archive is open
        if member.size < 0 or member.offset_data <= end:
            raise ValueError(f"entry {member.name!r} points back")
        end = member.offset_data
        if not member.isfile():
            continue
        folder, slash, name = member.name.rpartition("/")
        stem, _, field = name.partition(".")
        if stem and field:
            yield FieldEntry(f"{folder}{slash}{stem}", field.lower(), end, member.size)


@contextlib.contextmanager
def mapped(descriptor: int) -> Generator[tarfile.TarFile, None, None]:
    """Opens the archive of an open file `descriptor`. Raises any of `UNREADABLE`.

    The file is mapped, because processes forked since it was opened share the descriptor's position.
    """
    with (
        mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as file,
        tarfile.open(fileobj=cast(Any, file), mode="r:") as archive,
    ):
        yield archive


# --- tokens -----------------------------------------------------------------------------------------------------------
#
# The `index.json` of a folder of token shards (`tokens.py`). A shard is a file of token ids and nothing else,
# little-endian.
#
#     {"__kind__": "farandole-tokens-v1", "dtype": "uint16", "vocabulary": 50257, "end_of_document": 50256,
#      "tokenizer": "tiktoken:gpt2", "tokenizer_hash": "...", "documents": 1,
#      "shardlist": [{"url": "shard-000000.bin", "nsamples": 338025, "filesize": 676050, "md5sum": "..."}]}
#
# An entry has the format of a shard of images, with tokens as its samples; so `url` is the plain name of a
# file beside the index, and a train.bin of nanoGPT becomes a shard by an entry of its own.
#
# Invariant: an index that was read is consistent. Each shard has the length of its tokens, the dtype holds every id of
# the vocabulary, the end of a document is one of them, and there are tokens.

TOKENS_KIND = "farandole-tokens-v1"
ID_BYTES = {"uint16": 2, "uint32": 4}  # bytes per id


class TokenIndex(msgspec.Struct, frozen=True, kw_only=True):
    """All shards, in the order of their tokens. `vocabulary`: ids are below it. `tokenizer_hash`: SHA-256, in hex."""

    kind: Literal["farandole-tokens-v1"] = msgspec.field(name="__kind__")
    dtype: Literal["uint16", "uint32"]
    vocabulary: int
    end_of_document: int
    tokenizer: str
    tokenizer_hash: str
    documents: int
    shardlist: tuple[Shard, ...]

    def __post_init__(self) -> None:
        width = ID_BYTES[self.dtype]
        if not 1 <= self.vocabulary <= 1 << 8 * width:
            raise ValueError(
                f"vocabulary {self.vocabulary} does not fit: ids of {self.dtype} are from 0 to 2^{8 * width} - 1"
            )
        if not 0 <= self.end_of_document < self.vocabulary:
            raise ValueError(f"end_of_document {self.end_of_document} is not below the vocabulary, {self.vocabulary}")
        urls: set[str] = set()
        for shard in self.shardlist:
            if shard.url in urls:
                raise ValueError(f"url {shard.url!r} occurs in shardlist twice")
            urls.add(shard.url)
            if shard.filesize != shard.nsamples * width or not shard.nsamples:
                raise ValueError(
                    f"filesize {shard.filesize} of {shard.url} is not that of nsamples={shard.nsamples} tokens of "
                    f"{width} bytes, at least one"
                )
        if not self.shardlist:
            raise ValueError("shardlist names no tokens")

    @property
    def tokens(self) -> int:
        """The number of tokens in all shards."""
        return sum(shard.nsamples for shard in self.shardlist)


def dtype_for(vocabulary: int) -> Literal["uint16", "uint32"]:
    """Returns the narrowest dtype that holds ids below `vocabulary`."""
    return "uint16" if vocabulary <= 1 << 16 else "uint32"


def read_token_index(url: str) -> TokenIndex:
    """Returns the index in the folder `url`.

    Raises:
        ShardError: it does not exist, can't be read, or is no valid index.
        UsageError: the kind of URL is unknown.
    """
    return read_struct(
        f"{url}/{INDEX}", TokenIndex, called="index of token shards",
        absent="`farandole data prepare --tokens` writes it last, so run it to its end",
    )  # fmt: skip
