"""`farandole data index` writes an index for tars of other tools, so that each of their samples can be read directly.

    1. *list*   the folder's tars, by name
    2. *read*   each in a process, once from begin to end: its number of samples, its length, its MD5
    3. *write*  the index, last of all

The result for a tar is noted on this machine as soon as the tar was read (`Notes`). So if the command ends early, also
by `kill -9`, the next start reads only the other tars. A note is valid for a tar of the same name, length and time of
change, or ETag.

Invariant: an index is written only if all tars could be read; otherwise the error names all that could not. Nothing in
a tar is decoded, and no sample is kept in memory.
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
    """A tar in the folder. `changed`: its store's metadata that change with the content."""

    name: str
    size: int
    changed: str


class IndexedTar(msgspec.Struct, frozen=True):
    """The note about one tar: its identity, and its entry for the index."""

    tar: Tar
    shard: Shard


@dataclass(frozen=True, kw_only=True)
class Read:
    """The result of one tar. `is_noted`: from a note of an earlier start. `bad`: the reason if it can't be read."""

    tar: Tar
    shard: Shard | None = None
    is_noted: bool = False
    bad: str = ""


class Notes:
    """The results of earlier starts and of this one: one line per tar, in a file of this machine for this `url`."""

    def __init__(self, url: str) -> None:
        name = hashlib.sha256(url.encode()).hexdigest()[:32]
        self._path = NOTES.expanduser() / f"{name}.jsonl"
        self.shards: dict[Tar, Shard] = {}
        try:
            lines = self._path.read_bytes().splitlines()
        except FileNotFoundError:
            return
        for line in lines:
            try:
                note = msgspec.json.decode(line, type=IndexedTar)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue  # a line of a process that was killed while it wrote
            self.shards[note.tar] = note.shard

    def add(self, tar: Tar, shard: Shard) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(b"\n" + msgspec.json.encode(IndexedTar(tar, shard)) + b"\n")

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def listing(url: str) -> list[Tar]:
    """Runs phase 1: returns the tars of the folder `url`, by name.

    Raises:
        UsageError: there are no tars, or the name of one is not allowed in an index.
        ShardError: the folder can't be listed.
    """
    with reading(url):
        files, path = filesystem(url)
        details: list[dict[str, Any]] = files.ls(path, detail=True)
    tars: list[Tar] = []
    for each in details:
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
    on_result: Callable[[Read], None],
) -> Index:
    """Runs phases 2 and 3: writes the index of the folder `url` to `output`, and returns it.

    Each process first calls `begin` with this process's id; `on_result` is called with the result of each tar.

    Raises:
        BadSample: some tars can't be read; the others are noted.
        FarandoleError: a process was killed.
        UsageError: the system refuses the resources for several processes.
        ShardError: `output` can't be written.
    """
    notes = Notes(url)
    results: dict[str, Read] = {}

    def record(result: Read) -> None:
        results[result.tar.name] = result
        if result.shard is not None and not result.is_noted:
            notes.add(result.tar, result.shard)
        on_result(result)

    to_read: list[Tar] = []
    for tar in tars:
        if (shard := notes.shards.get(tar)) is not None:
            record(Read(tar=tar, shard=shard, is_noted=True))
        else:
            to_read.append(tar)
    make_all(partial(_read, url), to_read, processes, begin, record)
    in_order = [results[name] for name in sorted(results)]
    bad = [f"{result.tar.name}: {result.bad}" for result in in_order if result.bad]
    if bad:
        more = f"\n  and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
        raise BadSample(
            f"{len(bad)} of {len(in_order)} tars in {url} can't be read; repair or remove them and start again, which "
            f"reads only the remaining ones:\n  " + "\n  ".join(bad[:_NAMED]) + more
        )
    index = Index(shardlist=tuple(result.shard for result in in_order if result.shard is not None))
    with reading(output):
        put(output, io.BytesIO(msgspec.json.format(msgspec.json.encode(index))))
    notes.remove()
    return index


class _Digesting:
    """A file that is read once from begin to end; `length` and `md5` cover the bytes read so far."""

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
        """True if the bytes read end with zeros, as a tar does. Python's reader takes a cut in a header for the end."""
        return self._last == bytes(LEAST)


def _read(url: str, tar: Tar) -> Read:
    """Runs phase 2 for one tar."""
    try:
        with reading(f"{url}/{tar.name}"):
            files, path = filesystem(url)
            with files.open(f"{path.rstrip('/')}/{tar.name}", "rb", block_size=8 * _BLOCK) as opened:
                file = _Digesting(opened)
                try:
                    samples = _samples(file)
                except UNREADABLE as error:
                    return Read(tar=tar, bad=f"it is not a tar file, or damaged ({error})")
                while file.read(_BLOCK):
                    pass
    except FarandoleError as error:
        return Read(tar=tar, bad=str(error))
    if file.length != tar.size:
        return Read(
            tar=tar,
            bad=f"it had {tar.size} bytes when it was listed, and {file.length} now; does another process write to it?",
        )
    if not file.ends:
        return Read(tar=tar, bad="it does not end like a tar: it is truncated")
    return Read(tar=tar, shard=Shard(url=tar.name, nsamples=samples, filesize=file.length, md5sum=file.md5.hexdigest()))


def _samples(file: _Digesting) -> int:
    samples, last = 0, ""
    with tarfile.open(fileobj=cast(Any, file), mode="r|", bufsize=_BLOCK) as archive:
        for entry in entries(archive):
            if entry.key != last:
                samples, last = samples + 1, entry.key
    return samples


def output_for(url: str, output: str | None) -> str:
    """Returns the place of the index of `url`: beside the tars by default."""
    return f"{url}/index.json" if output is None else str(Path(output)) if "://" not in output else output
