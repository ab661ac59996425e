"""`Copies` reads remote files for the processes of a machine: from their copies in the cache, or by range without one.

- *A copy* is opened once in each process, after it was compared with its MD5 (`cache_folder.py`).
- *No copy yet*: the fetcher reads the requested ranges of the file from the store (`fetcher.py`). Meanwhile it copies
  the files that the order needs next. A loader requests all pieces of a micro-batch at once (`ahead`), so that
  neighbouring pieces become one request.
- *Checked*: the caller passes the expected checksum of the bytes. If a copy has other bytes, it is removed, and the
  bytes are read from the store. If the store returns the same wrong bytes twice, they are bad at their source, for all
  hosts alike.

A file of this machine is opened where it is. There is no other source, so wrong bytes are damage on this machine, and
an error.
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
GAP_BYTES = 64 << 10  # the largest gap between two pieces that share one request
_OPEN = 128  # descriptors that one process keeps open; the usual limit is 1024

Piece = tuple[int, int]  # offset and size, in bytes


class BadAtSource(ValueError):
    """The store returns the same bytes each time, and they differ from the indexed ones."""


class Copies:
    """The cache in `folder`, of at most `limit_bytes`. Picklable; each process keeps its own descriptors.

    `deadline_s`: the limit for one request to the store in seconds, all retries included.
    """

    def __init__(self, folder: str | os.PathLike[str], limit_bytes: int, deadline_s: float = DEADLINE_S) -> None:
        self.folder = Folder(folder, limit_bytes)
        self._deadline_s = deadline_s
        self._fetching = Fetching(self.folder.path, limit_bytes, deadline_s)
        self._store: ObjectStore | None = None  # this process's own client, for stores that a fetcher does not know
        self._forget()

    def _forget(self) -> None:
        self._open: OrderedDict[str, int] = OrderedDict()
        self._pieces: dict[str, dict[Piece, tuple[int, int]]] = {}  # requested: number of the request, offset in it
        self._results: dict[int, bytes] = {}

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

    # --- prefetching ---------------------------------------------------------------------------------------------

    def begin(self, url: str) -> None:
        """Announces that files at `url` will be read. Does not wait."""
        if self._is_fetched(url):
            self._fetching.begin(url)

    def expect(self, files: Sequence[RemoteFile]) -> None:
        """Replaces the list of wanted files: they are copied in this order, while there is room. Does not wait."""
        remote = [file for file in files if self._is_fetched(file.url)]
        if remote:
            self._fetching.expect(remote)

    def settle(self, at_most_s: float) -> bool:
        """Waits until all wanted files are copied, as far as there is room. Returns False after `at_most_s` seconds."""
        return self._fetching.settle(at_most_s)

    def ahead(self, needed_pieces: Sequence[tuple[RemoteFile, Piece]]) -> None:
        """Requests those of these pieces that have no copy here. Drops the results of earlier calls. Does not wait."""
        if self._pieces:
            self._fetching.drop()
        self._pieces, self._results = {}, {}
        absent: dict[str, list[Piece]] = {}
        for file, piece in needed_pieces:
            if file.url in absent:
                absent[file.url].append(piece)
            elif self._is_fetched(file.url) and self._descriptor(file) is None:
                absent[file.url] = [piece]
        for url, pieces in absent.items():
            for start, stop, within in _together(pieces):
                number = self._fetching.request(url, start, stop)
                self._pieces.setdefault(url, {}).update({piece: (number, piece[0] - start) for piece in within})

    # --- reading ---------------------------------------------------------------------------------------------

    def open(self, url: str, size: int, md5: str) -> int:
        """Returns a descriptor of the file at `url`, for `os.pread`. The cache owns it and closes it.

        A local file is opened where it is. Waits for the copy of a remote one.

        Raises:
            ShardError: the file does not exist, or has other content than the index states.
            UsageError: it is larger than the cache.
        """
        file = RemoteFile(url, size, md5)
        descriptor = self._descriptor(file)
        if descriptor is None:
            if self._is_fetched(url):
                self._fetching.whole(file)
            else:
                self._fetch_here(file)
            descriptor = self._descriptor(file)
        if descriptor is None:
            raise ShardError(f"the copy of {url} in {self.folder.path} was removed again; raise cache_bytes")
        return descriptor

    def read(self, file: RemoteFile, piece: Piece, expected: int) -> bytes:
        """Returns that piece of the file, after comparing its checksum with `expected`.

        Raises:
            BadAtSource: the source returns other bytes, the same ones each time.
            ShardError: it can't be read; or a local file has other bytes, or the store returns different bytes on each
                read.
        """
        number, at = self._pieces.get(file.url, {}).pop(piece, (0, 0))
        descriptor = None if number else self._descriptor(file)
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
        checksums: set[int] = set()
        for _ in range(2):
            data = self._from_store(file.url, piece)
            if (received := checksum(data)) == expected:
                return data
            checksums.add(received)
        if len(checksums) > 1:
            raise ShardError("the store returns different bytes on each read; check this host's network path")
        raise BadAtSource("its bytes differ from the indexed ones, and its source returns the same bytes each time")

    def name(self, file: RemoteFile, offset: int) -> str:
        """Returns the name of the tar entry whose content begins at `offset`, for a message; "" if it can't be read."""
        try:
            descriptor = self._descriptor(file)
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
        if number not in self._results:
            self._results[number] = self._fetching.take(number)
        return self._results[number]

    def _from_store(self, url: str, piece: Piece) -> bytes:
        start, stop = piece[0], sum(piece)
        if self._is_fetched(url):
            return self._fetching.take(self._fetching.request(url, start, stop))
        return self._read_here(url, start, stop)

    def _discard(self, file: RemoteFile) -> None:
        """Removes a damaged copy. Raises `ShardError` for a local file, which is no copy."""
        os.close(self._open.pop(file.url))
        if local_path(file.url) is not None:
            raise ShardError(
                f"shard {file.url} is damaged: its bytes differ from the indexed ones; copy it here again, or run "
                f"`farandole data prepare` again"
            )
        self.folder.remove(file.name)

    def _descriptor(self, file: RemoteFile) -> int | None:
        descriptor = self._open.get(file.url)
        if descriptor is not None:
            self._open.move_to_end(file.url)
            return descriptor
        for other in [url for url, opened in self._open.items() if os.fstat(opened).st_nlink == 0]:
            os.close(self._open.pop(other))  # another process removed the copy for room: closing it frees the room
        if len(self._open) >= _OPEN:
            os.close(self._open.popitem(last=False)[1])
        local = local_path(file.url)
        descriptor = self.folder.open_copy(file) if local is None else _open_local(local, file.size)
        if descriptor is not None:
            self._open[file.url] = descriptor
        return descriptor

    # --- stores that only this process can read --------------------------------------------------------------------

    def _is_fetched(self, url: str) -> bool:
        """Returns True if the fetcher process can read `url`. Stores that the script has registered, it can't read."""
        return local_path(url) is None and not _of_this_process(url.partition("://")[0])

    def _fetch_here(self, file: RemoteFile) -> None:
        try:
            self.folder.fetch(file, lambda start, stop: self._read_here(file.url, start, stop), None, waits=True)
        except OSError as error:
            raise ShardError(f"no copy of {file.url} in {self.folder.path}: {error.strerror or error}") from error

    def _read_here(self, url: str, start: int, stop: int) -> bytes:
        """Reads with this process's client. Restores Python's generator: a client may draw from it when it retries."""
        self._store = self._store or ObjectStore(self._deadline_s)
        state = random.getstate()
        try:
            return self._store.read(url, start, stop)
        finally:
            random.setstate(state)


def _of_this_process(protocol: str) -> bool:
    """Returns True if another process would have another client for `protocol`, or none."""
    registered, implementation = registry.get(protocol), known_implementations.get(protocol, {}).get("class", "")
    if protocol == "memory" or not implementation:
        return True
    package, name = implementation.partition(".")[0], implementation.rpartition(".")[2]
    return registered is not None and (registered.__module__.partition(".")[0], registered.__name__) != (package, name)


def _together(pieces: Sequence[Piece]) -> list[tuple[int, int, list[Piece]]]:
    """Joins pieces of one file into requests: the begin and end of each, and its pieces."""
    requests: list[tuple[int, int, list[Piece]]] = []
    for offset, size in sorted(pieces):
        if requests:
            start, stop, within = requests[-1]
            if offset - stop <= GAP_BYTES and offset + size - start <= PIECE_BYTES:
                requests[-1] = start, max(stop, offset + size), [*within, (offset, size)]
                continue
        requests.append((offset, offset + size, [(offset, size)]))
    return requests


def _open_local(path: str, size: int) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # opening a FIFO would block for ever
    except FileNotFoundError:
        raise missing(path) from None
    except OSError as error:
        raise ShardError(f"shard {path} can't be read: {error.strerror}") from None
    length = os.fstat(descriptor).st_size
    if length != size:
        os.close(descriptor)
        raise torn(path, f"it has {length} bytes where the index says {size}")
    return descriptor
