"""An index for tars that were made elsewhere, so that each of their samples can be reached: `farandole data index`.

    1. *list*   the folder's tars, by name
    2. *read*   each in a process, once from its begin to its end: how many samples it holds, its length, its MD5
    3. *write*  the index, last of all

What is known of a tar is noted on this machine as soon as it has been read (`Notes`), so that after whatever ended the
command, `kill -9` included, the next start reads only the others. A note counts for a tar of the same name, length and
time of change, or ETag.

Invariant: an index is written only if all tars could be read; those that could not are all named. Nothing in a tar is
decoded, and no sample is kept in memory.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec

from farandole.data.cache import DEFAULT_FOLDER, filesystem
from farandole.data.index import LEAST, UNREADABLE, Index, Shard, entries
from farandole.data.object_store import reading
from farandole.data.prepare.images import put
from farandole.data.prepare.shards import make_all
from farandole.errors import BadSample, FarandoleError, UsageError

NOTES = DEFAULT_FOLDER / "indexing"
_BLOCK = 1 << 20
_NAMED = 20  # bad tars in one message
_CHANGES = ("mtime", "LastModified", "ETag", "etag", "updated", "created")


class Tar(msgspec.Struct, frozen=True):
    """One that is there. `changed`: what its store tells of it that another content would change."""

    name: str
    size: int
    changed: str


class IndexedTar(msgspec.Struct, frozen=True):
    tar: Tar
    shard: Shard


@dataclass(frozen=True, kw_only=True)
class Read:
    """What became of one tar. `bad`: why it can't be read."""

    tar: Tar
    shard: Shard | None = None
    known: bool = False
    bad: str = ""


class Notes:
    """What an earlier start has found, and this one finds: a line a tar, in a file of this machine and this `url`."""

    def __init__(self, url: str) -> None:
        name = hashlib.sha256(url.encode()).hexdigest()[:32]
        self._path = NOTES.expanduser() / f"{name}.jsonl"
        self.found: dict[Tar, Shard] = {}
        try:
            lines = self._path.read_bytes().splitlines()
        except FileNotFoundError:
            return
        for line in lines:
            try:
                note = msgspec.json.decode(line, type=IndexedTar)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue  # of one that was killed while it wrote
            self.found[note.tar] = note.shard

    def add(self, tar: Tar, shard: Shard) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(b"\n" + msgspec.json.encode(IndexedTar(tar, shard)) + b"\n")

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def listing(url: str) -> list[Tar]:
    """Phase 1.

    Raises:
        UsageError: no tars there, or one whose name can't stand in an index.
        ShardError: the folder can't be listed.
    """
    with reading(url):
        files, path = filesystem(url)
        found: list[dict[str, Any]] = files.ls(path, detail=True)
    tars: list[Tar] = []
    for each in found:
        name = str(each["name"]).rstrip("/").rpartition("/")[2]
        if each.get("type") == "file" and name.endswith(".tar"):
            changed = " ".join(str(each[key]) for key in _CHANGES if key in each)
            tars.append(Tar(name, int(each["size"]), changed))
    if not tars:
        raise UsageError(
            f"{url} holds no file NAME.tar; compressed tars can't be read at random: decompress them first"
        )
    for tar in tars:
        try:
            Shard(url=tar.name, nsamples=0, filesize=tar.size, md5sum="0" * 32)
        except ValueError as error:
            raise UsageError(f"{url}: {error}; rename it") from None
    return sorted(tars, key=lambda tar: tar.name)


def make_index(
    url: str,
    tars: Iterable[Tar],
    output: str,
    *,
    processes: int,
    begin: Callable[[int], None],
    done: Callable[[Read], None],
) -> Index:
    """Phases 2 and 3: the index of the folder `url`, written to `output`.

    Each process first calls `begin` with this process's id; `done` hears of each tar.

    Raises:
        BadSample: tars that can't be read; the others are noted.
        FarandoleError: a process was killed.
        UsageError: the system refuses what several processes need.
        ShardError: the place of `output` can't be written.
    """
    notes = Notes(url)
    results: dict[str, Read] = {}

    def hear(result: Read) -> None:
        results[result.tar.name] = result
        if result.shard is not None and not result.known:
            notes.add(result.tar, result.shard)
        done(result)

    to_read: list[Tar] = []
    for tar in tars:
        if (shard := notes.found.get(tar)) is not None:
            hear(Read(tar=tar, shard=shard, known=True))
        else:
            to_read.append(tar)
    make_all(partial(_read, url), to_read, processes, begin, hear)
    in_order = [results[name] for name in sorted(results)]
    bad = [f"{result.tar.name}: {result.bad}" for result in in_order if result.bad]
    if bad:
        more = f"\n  and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
        raise BadSample(
            f"{len(bad)} of {len(in_order)} tars in {url} can't be read; mend or remove them and start again, which "
            f"reads only those that are left:\n  " + "\n  ".join(bad[:_NAMED]) + more
        )
    index = Index(shardlist=tuple(result.shard for result in in_order if result.shard is not None))
    with reading(output):
        put(output, io.BytesIO(msgspec.json.format(msgspec.json.encode(index))))
    notes.remove()
    return index


class _Digesting:
    """A file that is read once from begin to end: what of it has been read is in `length` and `md5`."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._last = b""
        self.length = 0
        self.md5 = hashlib.md5(usedforsecurity=False)

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self.length += len(data)
        self.md5.update(data)
        self._last = (self._last + data[-LEAST:])[-LEAST:]
        return data

    @property
    def ends(self) -> bool:
        """Whether it ends with zeros, as a tar does; Python's own reader takes a cut within a head for the end."""
        return self._last == bytes(LEAST)


def _read(url: str, tar: Tar) -> Read:
    """Phase 2, of one tar."""
    try:
        with reading(f"{url}/{tar.name}"):
            files, path = filesystem(url)
            with files.open(f"{path.rstrip('/')}/{tar.name}", "rb", block_size=8 * _BLOCK) as opened:
                file = _Digesting(opened)
                try:
                    samples = _samples(file)
                except UNREADABLE as error:
                    return Read(tar=tar, bad=f"it is no tar file, or torn ({error})")
                while file.read(_BLOCK):
                    pass
    except FarandoleError as error:
        return Read(tar=tar, bad=str(error))
    if file.length != tar.size:
        return Read(
            tar=tar, bad=f"it had {tar.size} bytes when it was listed, and {file.length} now; is it written to?"
        )
    if not file.ends:
        return Read(tar=tar, bad="it does not end as a tar does: it was cut off")
    return Read(tar=tar, shard=Shard(url=tar.name, nsamples=samples, filesize=file.length, md5sum=file.md5.hexdigest()))


def _samples(file: _Digesting) -> int:
    samples, last = 0, ""
    with tarfile.open(fileobj=cast(Any, file), mode="r|", bufsize=_BLOCK) as archive:
        for entry in entries(archive):
            if entry.key != last:
                samples, last = samples + 1, entry.key
    return samples


def output_for(url: str, output: str | None) -> str:
    """Where the index of `url` goes: beside the tars, if nothing else is said."""
    return f"{url}/index.json" if output is None else str(Path(output)) if "://" not in output else output
