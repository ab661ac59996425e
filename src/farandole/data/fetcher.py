"""The process that reads the store for a worker: `python -m farandole.data.fetcher ADDRESS LISTENER STARTER FOLDER
LIMIT DEADLINE`.

It does two things side by side. Shards that are wanted are copied to the cache, in the order in which the samples want
them (`cache_folder.py`), `WHOLE` at once, and fewer while somebody waits for a sample. And what is asked for by range,
samples whose shard is not here, is read at once, `RANGES` at a time. So a new host has its first samples after the time
of a few requests, and needs the store no more once the copies are there.

Why a process: clients of stores keep threads and locks, which forked loader processes would inherit, and draw from
Python's generator, which would show in what a sample's augmentation draws. LISTENER and STARTER are descriptors: of a
socket at ADDRESS, in a folder that is the user's alone, to which loader processes connect; and of the connection to the
process that has started this one, which ends with it.

Who knows what when: the list of what is wanted is the newest that anyone has sent. A copy counts once it is under its
name. One that could not be made is left alone for `AGAIN_S`, and its samples go on being read by range; so a full disk
costs speed, and is told. Memory: `RANGES` ranges and `WHOLE` pieces of 8 MB at most.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from farandole.data import object_store
from farandole.data.cache_folder import PIECE_BYTES, STAYS_S, Copy, Folder, Next, RemoteFile, choose
from farandole.data.object_store import ObjectStore, Torn, filesystem, unreached
from farandole.errors import FarandoleError, ShardError, UsageError
from farandole.platform.output import say

# --- frames -----------------------------------------------------------------------------------------------------------
#
# What a process and its fetcher say to each other, over a stream: typed messages, each headed by its length; nothing
# is unpickled. The bytes of a range follow their message as they are.

_HEAD = struct.Struct("<I")


class FileOf(msgspec.Struct, frozen=True, array_like=True):
    """A file elsewhere: where, its length in bytes, its MD5."""

    url: str
    size: int
    md5: str


class Soon(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To the fetcher: files of this place will be asked for; have the client of its store at hand."""

    url: str


class Expect(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To the fetcher: these are wanted, in this order; what was wanted before is not any more."""

    files: tuple[FileOf, ...]


class Range(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To the fetcher: bytes `[start, stop)`, now. `number` is the asker's own."""

    number: int
    url: str
    start: int
    stop: int


class Whole(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To the fetcher: a copy of the file, now."""

    number: int
    file: FileOf


class WantSettled(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To the fetcher: tell when there is nothing more to fetch of what is wanted."""

    number: int


class Data(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Of a range: so many bytes follow."""

    number: int
    size: int


class FetchDone(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The copy is there; or nothing more is to be fetched."""

    number: int


class Trying(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An attempt has failed, as `why` says; another one follows."""

    number: int
    why: str


class FetchFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """It can't be had. `usage`: for what was asked, not for what the store does."""

    number: int
    why: str
    usage: bool = False


Asked = Soon | Expect | Range | Whole | WantSettled
Answer = Data | FetchDone | Trying | FetchFailed
_encoder = msgspec.msgpack.Encoder()
read_request = msgspec.msgpack.Decoder(Asked)
answers = msgspec.msgpack.Decoder(Answer)
T = TypeVar("T")


def put(connection: socket.socket, message: Asked | Answer, content: bytes = b"") -> None:
    body = _encoder.encode(message)
    connection.sendall(
        _HEAD.pack(len(body)) + body + content if len(content) < 1 << 12 else _HEAD.pack(len(body)) + body
    )
    if len(content) >= 1 << 12:
        connection.sendall(content)


def get(connection: socket.socket, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """Raises EOFError where the other end is gone."""
    (size,) = _HEAD.unpack(exactly(connection, _HEAD.size))
    return decoder.decode(exactly(connection, size))


def exactly(connection: socket.socket, size: int) -> bytearray:
    found = bytearray(size)
    view, at = memoryview(found), 0
    while at < size:
        count = connection.recv_into(view[at:])
        if not count:
            raise EOFError
        at += count
    return found


# --- fetcher ----------------------------------------------------------------------------------------------------------

RANGES, WHOLE = 16, 8  # connections to the store at most: their sum
BESIDE = 2  # shards that are copied while somebody waits for a range
AFTER_S = 0.3  # for which copies wait behind an answer, for what is asked next
AGAIN_S = 30.0
ELSEWHERE_S = 0.5  # until it is looked again at what another process is fetching


class Fetcher:
    """Threads share it."""

    def __init__(self, folder: Folder, store: ObjectStore) -> None:
        self._folder, self._store = folder, store
        self._changed = threading.Condition()
        self._wanted: tuple[RemoteFile, ...] = ()
        self._mine: dict[str, Next] = {}  # what is being fetched here, by name
        self._later: dict[str, float] = {}  # names, and when they are tried again (monotonic seconds)
        self._asked = 0  # ranges that somebody waits for
        self._answered_at = 0.0  # the last of them (monotonic seconds)
        self._used_at = 0.0
        self._told: set[str] = set()
        self._ranges = ThreadPoolExecutor(RANGES, thread_name_prefix="range")
        for _ in range(WHOLE):
            threading.Thread(target=self._fetch_ahead, daemon=True).start()

    # --- what is asked -----------------------------------------------------------------------------------------

    def expect(self, files: tuple[FileOf, ...]) -> None:
        with self._changed:
            self._wanted = tuple(RemoteFile(*_plain(file)) for file in files)
            self._changed.notify_all()

    def range(self, asked: Range, told: Callable[[str], None], answer: Callable[[bytes], None],
              fail: Callable[[Exception], None]) -> None:  # fmt: skip
        def read() -> None:
            try:
                answer(self._store.read(asked.url, asked.start, asked.stop, told))
            except Exception as error:  # noqa: BLE001  whoever asked is to hear of it
                fail(error)
            with self._changed:
                self._asked -= 1
                self._answered_at = time.monotonic()
                if not self._asked:
                    self._changed.notify_all()

        with self._changed:
            self._asked += 1
        self._ranges.submit(read)

    def whole(self, file: RemoteFile, told: Callable[[str], None]) -> None:
        """A copy, before all others, and whoever it takes the room of. Raises what `Folder.fetch` and the store do."""
        self._fetch(file, None, told, waits=True)

    def settle(self) -> None:
        """Returns when nothing of what is wanted is to be fetched any more, for now."""
        with self._changed:
            self._changed.wait_for(lambda: not self._mine and self._next() is None)

    # --- copies, ahead of need ---------------------------------------------------------------------------------

    def _fetch_ahead(self) -> None:
        while True:
            with self._changed:
                while ((left := self._held_back()) and len(self._mine) >= BESIDE) or (found := self._next()) is None:
                    self._changed.wait(left or (STAYS_S / 3 if not self._later else ELSEWHERE_S))
                    self._use()
                self._mine[found.file.name] = found
            again_s = 0.0
            try:
                if not self._fetch(found.file, found.makes_way, None, waits=False):
                    again_s = ELSEWHERE_S
            except (FarandoleError, OSError) as error:
                again_s = AGAIN_S
                self._tell(f"{error}; samples are read from the store meanwhile")
            with self._changed:
                del self._mine[found.file.name]
                if again_s:
                    self._later[found.file.name] = time.monotonic() + again_s
                self._changed.notify_all()

    def _held_back(self) -> float:
        """Seconds for which samples that somebody waits for go before copies: the next ones are asked for soon."""
        return AFTER_S if self._asked else max(0.0, self._answered_at + AFTER_S - time.monotonic())

    def _next(self) -> Next | None:
        now = time.monotonic()
        self._later = {name: at for name, at in self._later.items() if at > now}
        if not self._wanted:
            return None
        copies = {copy.name: copy for copy in self._folder.copies()}
        for mine in self._mine.values():  # as it will be
            for name in mine.makes_way:
                copies.pop(name, None)
            copies[mine.file.name] = Copy(mine.file.name, mine.file.size, 0.0, coming=True)
        return choose(self._wanted, copies.values(), self._folder.limit_bytes, self._later.keys())

    def _use(self) -> None:
        """What is wanted, and here, does not make way for what others want."""
        if time.monotonic() - self._used_at > STAYS_S / 3:
            self._used_at = time.monotonic()
            for file in self._wanted:
                self._folder.use(file)

    def _fetch(
        self, file: RemoteFile, makes_way: tuple[str, ...] | None, told: Callable[[str], None] | None, *, waits: bool
    ) -> bool:
        """Once more, where what came is not the file."""
        for last in (False, True):
            whole = file.url.rpartition("/")[0] in self._store.ignores_ranges
            try:
                return self._folder.fetch(
                    file,
                    lambda start, stop: self._store.read(file.url, start, stop, told),
                    makes_way,
                    waits=waits,
                    piece=file.size if whole else PIECE_BYTES,
                )
            except Torn as error:
                if last:
                    raise
                self._tell(f"{error}; it is fetched once more")
        raise AssertionError("the second time returns, or raises")

    def _tell(self, line: str) -> None:
        """Once each."""
        if line not in self._told:
            self._told.add(line)
            say(f"farandole: {line}")


def _at_hand(url: str) -> None:
    """Its package is imported, and its client made."""
    with contextlib.suppress(Exception):  # whoever asks for a file is told
        filesystem(url)


def _plain(file: FileOf) -> tuple[str, int, str]:
    return file.url, file.size, file.md5


class Asker:
    """One connection. What comes in is done, and answered in whatever order it ends."""

    def __init__(self, connection: socket.socket, fetcher: Fetcher) -> None:
        self._connection, self._fetcher = connection, fetcher
        self._lock = threading.Lock()

    def serve(self) -> None:
        with contextlib.suppress(EOFError, OSError), self._connection:
            while True:
                asked: Asked = get(self._connection, read_request)
                match asked:
                    case Soon(url):
                        threading.Thread(target=_at_hand, args=(url,), daemon=True).start()
                    case Expect(files):
                        self._fetcher.expect(files)
                    case Range(number):
                        self._fetcher.range(
                            asked,
                            lambda why, number=number: self._answer(Trying(number, why)),
                            lambda data, number=number: self._answer(Data(number, len(data)), data),
                            lambda error, number=number: self._fail(number, error),
                        )
                    case Whole(number, file):
                        threading.Thread(
                            target=self._whole, args=(number, RemoteFile(*_plain(file))), daemon=True
                        ).start()
                    case WantSettled(number):
                        threading.Thread(target=self._settle, args=(number,), daemon=True).start()

    def _whole(self, number: int, file: RemoteFile) -> None:
        try:
            self._fetcher.whole(file, lambda why: self._answer(Trying(number, why)))
        except Exception as error:  # noqa: BLE001  whoever asked is to hear of it
            self._fail(number, error)
        else:
            self._answer(FetchDone(number))

    def _settle(self, number: int) -> None:
        self._fetcher.settle()
        self._answer(FetchDone(number))

    def _fail(self, number: int, error: Exception) -> None:
        known = isinstance(error, FarandoleError)
        self._answer(
            FetchFailed(
                number, str(error) if known else f"{type(error).__name__}: {error}", isinstance(error, UsageError)
            )
        )

    def _answer(self, message: Answer, content: bytes = b"") -> None:
        with self._lock, contextlib.suppress(OSError):
            put(self._connection, message, content)


def main(address: str, listener: socket.socket, starter: socket.socket, fetcher: Fetcher) -> None:
    """Until the starter is gone."""

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=Asker(connection, fetcher).serve, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    Asker(starter, fetcher).serve()
    with contextlib.suppress(OSError):
        os.unlink(address)
        os.rmdir(os.path.dirname(address))
    os._exit(0)  # threads may wait for a store


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a notice is the worker's: it is fed until it has left
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sockets = [socket.socket(fileno=int(number)) for number in sys.argv[2:4]]
    folder = Folder(sys.argv[4], int(sys.argv[5]))
    main(sys.argv[1], sockets[0], sockets[1], Fetcher(folder, ObjectStore(float(sys.argv[6]))))


# --- fetching ---------------------------------------------------------------------------------------------------------
#
# A process's end of the fetcher of its worker: asks, and takes what comes.
#
# The first process that asks starts the fetcher (`fetcher.py`); those that are forked from it, or get this with a
# dataset, connect to the same one. Where that one is gone, they start another, and ask it for the same again.
#
# Nothing that is waited for is waited for in silence: after `TOLD_S` without an answer it is told of what, since when,
# and what the store has said. After the deadline it is an error.
#
# Left out: use by several threads of a process.

TOLD_S = 10.0
MARGIN_S = 15.0  # beyond the deadline, for a fetcher that is busy
STARTS = 3
_log = logging.getLogger("farandole.data.fetcher")


class Fetching:
    """Picklable; each process has a connection of its own."""

    def __init__(self, folder: Path, limit_bytes: int, deadline_s: float) -> None:
        self._arguments = (str(folder), str(limit_bytes), str(deadline_s))
        self._deadline_s = deadline_s
        self._address = ""
        self._starts = 0
        self._forget()

    def _forget(self) -> None:
        """What is of this process alone."""
        self._pid = os.getpid()
        self._connection: socket.socket | None = None
        self._number = 0
        self._asked: dict[int, Range | Whole | WantSettled] = {}  # without an answer so far
        self._here: dict[int, bytes | FetchDone | FetchFailed] = {}
        self._since: dict[int, float] = {}
        self._said: dict[int, str] = {}
        self._expected: Expect | None = None

    def __getstate__(self) -> dict[str, Any]:
        fresh = Fetching.__new__(Fetching)
        fresh.__dict__.update(self.__dict__)
        fresh._forget()
        return {**fresh.__dict__, "_starts": 0}

    # --- asking ------------------------------------------------------------------------------------------------

    def begin(self, url: str) -> None:
        """Files of this place will be asked for: what takes a second to start does so meanwhile. Does not wait."""
        self._put(Soon(url))

    def expect(self, files: Sequence[RemoteFile]) -> None:
        """These are wanted, in this order. Does not wait."""
        self._connect()
        self._expected = Expect(tuple(_of(file) for file in files))
        self._put(self._expected)

    def ask(self, url: str, start: int, stop: int) -> int:
        """Have those bytes on their way; the number by which to `take` them. Does not wait."""
        return self._ask(partial(Range, url=url, start=start, stop=stop))

    def take(self, number: int) -> bytes:
        """What was asked for. Raises `ShardError` or `UsageError` where it can't be had."""
        found = self._wait(number, self._deadline_s + MARGIN_S)
        assert isinstance(found, bytes)
        return found

    def drop(self) -> None:
        """Nobody takes what has been asked for so far."""
        if self._pid == os.getpid():
            self._asked.clear()
            self._since.clear()
            self._here.clear()
            self._said.clear()

    def whole(self, file: RemoteFile) -> None:
        """Have a copy of the file in the cache. Raises as `take` does."""
        self._wait(self._ask(partial(Whole, file=_of(file))), None)

    def settle(self, at_most_s: float) -> bool:
        """Wait until nothing of what is wanted is to be fetched any more. False: it took too long."""
        number = self._ask(WantSettled)
        with contextlib.suppress(ShardError):
            self._wait(number, at_most_s)
            return True
        self._asked.pop(number, None)
        return False

    def _ask(self, make: Callable[[int], Range | Whole | WantSettled]) -> int:
        self._connect()
        self._number += 1
        self._asked[self._number] = asked = make(self._number)
        self._since[self._number] = time.perf_counter()
        self._put(asked)
        return self._number

    # --- what comes --------------------------------------------------------------------------------------------

    def _wait(self, number: int, at_most_s: float | None) -> bytes | FetchDone:
        if number in self._here:
            return self._found(number)
        with object_store.fetching():
            self._until(number, at_most_s)
        return self._found(number)

    def _until(self, number: int, at_most_s: float | None) -> None:
        began = told = time.monotonic()
        while number not in self._here:
            now = time.monotonic()
            if at_most_s is not None and now - began >= at_most_s:
                asked = self._asked.pop(number)
                raise unreached(_what(asked), self._said.pop(number, "no answer"), 1, now - began)
            if now - told >= TOLD_S:
                told = now
                said = self._said.get(number, "nothing has come")
                _log.warning(
                    "%s: waited for since %.0f s: %s; a request is given up after %.0f s",
                    _what(self._asked[number]), now - began, said, self._deadline_s,
                )  # fmt: skip
            left = TOLD_S - (now - told) if at_most_s is None else min(TOLD_S - (now - told), began + at_most_s - now)
            self._receive(max(left, 0.0))

    def _found(self, number: int) -> bytes | FetchDone:
        found = self._here.pop(number)
        if isinstance(found, FetchFailed):
            raise (UsageError if found.usage else ShardError)(found.why)
        return found

    def _receive(self, at_most_s: float) -> None:
        connection = self._connect()
        if not select.select([connection], [], [], at_most_s)[0]:
            return
        try:
            answer = get(connection, answers)
            content = exactly(connection, answer.size) if isinstance(answer, Data) else b""
        except (EOFError, OSError):
            self._again()
            return
        if isinstance(answer, Trying):
            self._said[answer.number] = answer.why
        elif (asked := self._asked.pop(answer.number, None)) is not None:  # else nobody takes it
            took = time.perf_counter() - self._since.pop(answer.number)
            if isinstance(asked, Range):
                object_store.requested(asked.url, len(content), took)
            self._said.pop(answer.number, None)
            self._here[answer.number] = bytes(content) if isinstance(answer, Data) else answer

    # --- the fetcher -------------------------------------------------------------------------------------------

    def _put(self, message: Asked) -> None:
        try:
            put(self._connect(), message)
        except OSError:
            self._again()

    def _again(self) -> None:
        """The fetcher is gone: another one is asked for the same."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._address = ""
        if self._starts >= STARTS:
            raise ShardError(
                f"the process that reads the store for this one has ended {self._starts} times; where memory is short, "
                f"fewer loader processes (num_workers) take less of it"
            )
        for message in (*((self._expected,) if self._expected else ()), *self._asked.values()):
            self._put(message)

    def _connect(self) -> socket.socket:
        if self._pid != os.getpid():
            self._forget()
        if self._connection is None and self._address:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(self._address)
                self._connection = connection
            except OSError:
                connection.close()
                self._address = ""
        if self._connection is None:
            self._connection = self._start()
        return self._connection

    def _start(self) -> socket.socket:
        self._starts += 1
        try:
            return self._started()
        except OSError as error:  # no sample's fault: a full disk, too many processes
            raise ShardError(f"the process that reads the store can't be started: {error}; make room for it") from error

    def _started(self) -> socket.socket:
        self._address = os.path.join(tempfile.mkdtemp(prefix="farandole-"), "fetcher")
        mine, theirs = socket.socketpair()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, theirs:
            listener.bind(self._address)
            listener.listen(64)
            numbers = listener.fileno(), theirs.fileno()
            command = [sys.executable, "-m", "farandole.data.fetcher", self._address, *map(str, numbers)]
            process = subprocess.Popen([*command, *self._arguments], stdin=subprocess.DEVNULL, pass_fds=numbers)
        weakref.finalize(self, _end, process, mine, Path(self._address), os.getpid())
        return mine


def _end(process: subprocess.Popen[bytes], connection: socket.socket, address: Path, starter: int) -> None:
    """By the process that has started it."""
    if os.getpid() == starter:
        connection.close()
        process.kill()
        process.wait()
        with contextlib.suppress(OSError):
            address.unlink()
            address.parent.rmdir()


def _of(file: RemoteFile) -> FileOf:
    return FileOf(file.url, file.size, file.md5)


def _what(asked: Range | Whole | WantSettled) -> str:
    if isinstance(asked, Range):
        return f"{asked.url}, bytes {asked.start} to {asked.stop}"
    return asked.file.url if isinstance(asked, Whole) else "the cache"
