"""Files of elsewhere, as the processes of a machine read them: from their copies in the cache, and by range while there
is none.

- *A copy* is opened once a process, when it has been compared with its MD5 (`cache_folder.py`, `cache_folder.py`).
- *No copy yet*: what is wanted of the file is read from the store, by the fetcher (`fetcher.py`), which copies what the
  order wants meanwhile. A loader says what it wants of a micro-batch all at once (`ahead`): neighbours in one request.
- *Checked*: who knows what the bytes should be hands in their checksum. Where a copy gives others it is removed, and
  the bytes are read from the store; where the store gives others twice, they are bad at their source, for everyone
  alike.

A file of this machine is opened where it is. There is no other source, so bytes that are not what they should be are
this machine's fault, and an error.
"""

from __future__ import annotations

import os
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fsspec.registry import known_implementations, registry

from farandole.data.cache_folder import PIECE_BYTES, Folder, RemoteFile
from farandole.data.fetcher import Fetching
from farandole.data.index import checksum
from farandole.data.object_store import DEADLINE_S, ObjectStore, filesystem, local_path, missing, torn
from farandole.errors import FarandoleError, ShardError

__all__ = ["DEFAULT_FOLDER", "Copies", "filesystem", "local_path", "torn"]

DEFAULT_FOLDER = Path("~/.cache/farandole")
GAP_BYTES = 64 << 10  # between two pieces that are worth one request
_OPEN = 128  # descriptors that one process keeps; the usual limit is 1024

Piece = tuple[int, int]  # offset and size, in bytes


class BadAtSource(ValueError):
    """Bytes that the store gives alike each time, and that are not what was indexed."""


class Copies:
    """The cache in `folder`, of at most `limit_bytes`. Picklable; each process keeps its own descriptors.

    `deadline_s`: how long the store may take for one request, with all that is tried again.
    """

    def __init__(self, folder: str | os.PathLike[str], limit_bytes: int, deadline_s: float = DEADLINE_S) -> None:
        self.folder = Folder(folder, limit_bytes)
        self._deadline_s = deadline_s
        self._fetching = Fetching(self.folder.path, limit_bytes, deadline_s)
        self._store: ObjectStore | None = None  # of this process, for what a fetcher does not know
        self._forget()

    def _forget(self) -> None:
        self._open: OrderedDict[str, int] = OrderedDict()
        self._pieces: dict[str, dict[Piece, tuple[int, int]]] = {}  # on their way: number of the request, offset in it
        self._taken: dict[int, bytes] = {}

    def __getstate__(self) -> dict[str, Any]:
        fresh = Copies.__new__(Copies)
        fresh.__dict__.update(self.__dict__)
        fresh._forget()
        fresh._store = None
        return fresh.__dict__

    def close(self, close: Callable[[int], None] = os.close) -> None:  # at the interpreter's end `os` is gone
        while self._open:
            close(self._open.popitem()[1])

    def __del__(self) -> None:
        if "_open" in self.__dict__:
            self.close()

    # --- what comes next -----------------------------------------------------------------------------------------

    def begin(self, url: str) -> None:
        """Files of this place will be read. Does not wait."""
        if self._is_fetched(url):
            self._fetching.begin(url)

    def expect(self, files: Sequence[RemoteFile]) -> None:
        """These are wanted, in this order: they are copied as far as there is room. Does not wait."""
        elsewhere = [file for file in files if self._is_fetched(file.url)]
        if elsewhere:
            self._fetching.expect(elsewhere)

    def settle(self, at_most_s: float) -> bool:
        """Wait until all that is expected is here, as far as there is room. False: it takes longer."""
        return self._fetching.settle(at_most_s)

    def ahead(self, wanted: Sequence[tuple[RemoteFile, Piece]]) -> None:
        """Have these pieces of files on their way that are not here. What came of earlier ones is forgotten."""
        if self._pieces:
            self._fetching.drop()
        self._pieces, self._taken = {}, {}
        absent: dict[str, list[Piece]] = {}
        for file, piece in wanted:
            if file.url in absent:
                absent[file.url].append(piece)
            elif self._is_fetched(file.url) and self._here(file) is None:
                absent[file.url] = [piece]
        for url, pieces in absent.items():
            for start, stop, within in _together(pieces):
                number = self._fetching.ask(url, start, stop)
                self._pieces.setdefault(url, {}).update({piece: (number, piece[0] - start) for piece in within})

    # --- reading ---------------------------------------------------------------------------------------------

    def open(self, url: str, size: int, md5: str) -> int:
        """A descriptor of the file at `url`, for reading by `os.pread`; it stays the cache's, to close.

        A local file is opened where it is.

        Raises:
            ShardError: it is not there, or is not what it should be.
            UsageError: it is larger than the cache.
        """
        file = RemoteFile(url, size, md5)
        descriptor = self._here(file)
        if descriptor is None:
            if self._is_fetched(url):
                self._fetching.whole(file)
            else:
                self._fetch_here(file)
            descriptor = self._here(file)
        if descriptor is None:
            raise ShardError(f"the copy of {url} in {self.folder.path} has gone again; raise cache_bytes")
        return descriptor

    def read(self, file: RemoteFile, piece: Piece, expected: int) -> bytes:
        """That piece of the file, whose checksum is `expected`.

        Raises:
            BadAtSource: its source gives something else, and the same each time.
            ShardError: it can't be had; a local file gives something else, or the store others each time.
        """
        number, at = self._pieces.get(file.url, {}).pop(piece, (0, 0))
        descriptor = None if number else self._here(file)
        if descriptor is not None:
            offset, size = piece
            data = os.pread(descriptor, size, offset)
            if checksum(data) == expected:
                return data
            self._discard(file)
        elif number:
            data = self._take(number)[at : at + piece[1]]
            if checksum(data) == expected:
                return data
        found: set[int] = set()
        for _ in range(2):
            data = self._from_store(file.url, piece)
            if (given := checksum(data)) == expected:
                return data
            found.add(given)
        if len(found) > 1:
            raise ShardError("its bytes come from the store as others each time; see to this host's way there")
        raise BadAtSource("its bytes are not those that were indexed, and its source gives them so each time")

    def name(self, file: RemoteFile, offset: int) -> str:
        """Of the entry of a tar whose content begins at `offset`: for a message, so "" where it can't be had."""
        try:
            descriptor = self._here(file)
            begin = offset - 512
            head = (
                os.pread(descriptor, 100, begin) if descriptor is not None else self._from_store(file.url, (begin, 100))
            )
        except (FarandoleError, OSError):
            return ""
        return head.split(b"\0", 1)[0].decode(errors="replace")

    @staticmethod
    def is_local(url: str) -> bool:
        return local_path(url) is not None

    def _take(self, number: int) -> bytes:
        if number not in self._taken:
            self._taken[number] = self._fetching.take(number)
        return self._taken[number]

    def _from_store(self, url: str, piece: Piece) -> bytes:
        start, stop = piece[0], sum(piece)
        if self._is_fetched(url):
            return self._fetching.take(self._fetching.ask(url, start, stop))
        return self._read_here(url, start, stop)

    def _discard(self, file: RemoteFile) -> None:
        """A copy that is damaged. A local file is no copy."""
        os.close(self._open.pop(file.url))
        if local_path(file.url) is not None:
            raise ShardError(
                f"shard {file.url} is damaged: bytes are not those that were indexed; bring it here again, or run "
                f"`farandole data prepare` again"
            )
        self.folder.remove(file.name)

    def _here(self, file: RemoteFile) -> int | None:
        descriptor = self._open.get(file.url)
        if descriptor is not None:
            self._open.move_to_end(file.url)
            return descriptor
        for other in [other for other, known in self._open.items() if os.fstat(known).st_nlink == 0]:
            os.close(self._open.pop(other))  # removed by whoever needed the room: now it is room
        if len(self._open) >= _OPEN:
            os.close(self._open.popitem(last=False)[1])
        local = local_path(file.url)
        descriptor = self.folder.there(file) if local is None else _open_local(local, file.size)
        if descriptor is not None:
            self._open[file.url] = descriptor
        return descriptor

    # --- stores that only this process knows -----------------------------------------------------------------------

    def _is_fetched(self, url: str) -> bool:
        """Whether a process of its own can read it. What the script has registered only the script's can."""
        return local_path(url) is None and not _of_this_process(url.partition("://")[0])

    def _fetch_here(self, file: RemoteFile) -> None:
        try:
            self.folder.fetch(file, lambda start, stop: self._read_here(file.url, start, stop), None, waits=True)
        except OSError as error:
            raise ShardError(f"no copy of {file.url} in {self.folder.path}: {error.strerror or error}") from error

    def _read_here(self, url: str, start: int, stop: int) -> bytes:
        """What the client draws from Python's generator, which it may when it tries again, is taken back."""
        self._store = self._store or ObjectStore(self._deadline_s)
        drawn = random.getstate()
        try:
            return self._store.read(url, start, stop)
        finally:
            random.setstate(drawn)


def _of_this_process(protocol: str) -> bool:
    """Whether another process would find something else there, or nothing."""
    registered, known = registry.get(protocol), known_implementations.get(protocol, {}).get("class", "")
    if protocol == "memory" or not known:
        return True
    package, name = known.partition(".")[0], known.rpartition(".")[2]
    return registered is not None and (registered.__module__.partition(".")[0], registered.__name__) != (package, name)


def _together(pieces: Sequence[Piece]) -> list[tuple[int, int, list[Piece]]]:
    """Requests for pieces of one file: from where to where, and which are in each."""
    found: list[tuple[int, int, list[Piece]]] = []
    for offset, size in sorted(pieces):
        if found:
            start, stop, within = found[-1]
            if offset - stop <= GAP_BYTES and offset + size - start <= PIECE_BYTES:
                found[-1] = start, max(stop, offset + size), [*within, (offset, size)]
                continue
        found.append((offset, offset + size, [(offset, size)]))
    return found


def _open_local(path: str, size: int) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO would have it wait for ever
    except FileNotFoundError:
        raise missing(path) from None
    except OSError as error:
        raise ShardError(f"shard {path} can't be read: {error.strerror}") from None
    found = os.fstat(descriptor).st_size
    if found != size:
        os.close(descriptor)
        raise torn(path, f"it has {found} bytes where the index says {size}")
    return descriptor
