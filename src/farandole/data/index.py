"""What `index.json` says of a folder of shards: the `wids` package's format, in which unknown fields are passed over.

Who made a folder of shards may be a stranger. So a shard is a plain name beside the index (no way out of the folder, no
URL of somebody else's, nothing that a cache's file name could not hold), a digest is one, and numbers are numbers of
something. Names are told once: two entries of one file would be two claims about it.

`classes` and `samples` are ours: the classes' names by label, and the file that says where each sample lies and what
its bytes are (`samples.py`), which that format has no place for.
"""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from farandole.data.store import filesystem
from farandole.errors import ShardError

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
