"""The fetcher, a process that reads the store for a worker: `python -m farandole.data.fetcher ADDRESS LISTENER STARTER
FOLDER LIMIT DEADLINE`.

It does two things in parallel. (1) It copies wanted shards to the cache, in the order in which the samples need them
(`cache_folder.py`): `WHOLE` at once, and fewer while a process waits for a sample. (2) It reads requested ranges,
samples whose shard has no copy, at once, `RANGES` at a time. So a new host has its first samples after the time of a
few requests, and does not need the store once the copies are there.

Why a process: clients of stores keep threads and locks, which forked loader processes would inherit. They also draw
from Python's generator, which would change the random numbers of a sample's augmentation. LISTENER and STARTER are
descriptors: LISTENER of a socket at ADDRESS, in a folder that only the user can access, to which loader processes
connect; STARTER of the connection to the process that has started this one. The fetcher ends when that process ends.

The newest list of wanted files counts, whichever process has sent it. A copy counts once it has its final name. A copy
that failed is not tried again for `AGAIN_S`, and its samples are read by range meanwhile; so a full disk costs speed,
and is reported. Memory: at most `RANGES` ranges and `WHOLE` pieces of 8 MB.
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
# The messages between a process and its fetcher, over a stream: typed messages, each preceded by its length; nothing
# is unpickled. The bytes of a range follow their message unencoded.

_HEAD = struct.Struct("<I")


class FileOf(msgspec.Struct, frozen=True, array_like=True):
    """A remote file: its URL, its length in bytes, its MD5."""

    url: str
    size: int
    md5: str


class Soon(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To the fetcher: files at this URL will be requested; prepare the client of its store."""

    url: str


class Expect(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To the fetcher: these files are wanted, in this order; replaces the earlier list."""

    files: tuple[FileOf, ...]


class Range(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To the fetcher: read bytes `[start, stop)` now. `number` identifies the request on its connection."""

    number: int
    url: str
    start: int
    stop: int


class Whole(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To the fetcher: copy the file now."""

    number: int
    file: FileOf


class WantSettled(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To the fetcher: answer when there is nothing more to fetch of the wanted files."""

    number: int


class Data(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to `Range`: `size` bytes follow."""

    number: int
    size: int


class FetchDone(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to `Whole`, the copy is there; or to `WantSettled`, there is nothing more to fetch."""

    number: int


class Trying(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An attempt has failed because of `why`; another one follows."""

    number: int
    why: str


class FetchFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The request has failed because of `why`. `usage=True`: the request is wrong (`UsageError`), not the store."""

    number: int
    why: str
    usage: bool = False


FetchRequest = Soon | Expect | Range | Whole | WantSettled
Answer = Data | FetchDone | Trying | FetchFailed
_encoder = msgspec.msgpack.Encoder()
read_request = msgspec.msgpack.Decoder(FetchRequest)
answers = msgspec.msgpack.Decoder(Answer)
T = TypeVar("T")


def put(connection: socket.socket, message: FetchRequest | Answer, content: bytes = b"") -> None:
    """Sends a message and the bytes that follow it."""
    body = _encoder.encode(message)
    connection.sendall(
        _HEAD.pack(len(body)) + body + content if len(content) < 1 << 12 else _HEAD.pack(len(body)) + body
    )
    if len(content) >= 1 << 12:
        connection.sendall(content)


def get(connection: socket.socket, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """Receives a message. Raises `EOFError` if the peer has closed the connection."""
    (size,) = _HEAD.unpack(exactly(connection, _HEAD.size))
    return decoder.decode(exactly(connection, size))


def exactly(connection: socket.socket, size: int) -> bytearray:
    """Receives `size` bytes. Raises `EOFError` if the peer has closed the connection."""
    content = bytearray(size)
    view, at = memoryview(content), 0
    while at < size:
        count = connection.recv_into(view[at:])
        if not count:
            raise EOFError
        at += count
    return content


# --- fetcher ----------------------------------------------------------------------------------------------------------

RANGES, WHOLE = 16, 8  # requests at a time for ranges and for copies; their sum is the maximum of connections
BESIDE = 2  # shards that are copied while a process waits for a range
AFTER_S = 0.3  # how long copies wait after an answer, because the next request comes soon
AGAIN_S = 30.0  # pause after a failed copy
ELSEWHERE_S = 0.5  # pause before it checks again a file that another process is fetching


class Fetcher:
    """Serves ranges, and copies wanted files to `folder`. Thread-safe."""

    def __init__(self, folder: Folder, store: ObjectStore) -> None:
        self._folder, self._store = folder, store
        self._changed = threading.Condition()
        self._expected_files: tuple[RemoteFile, ...] = ()
        self._in_progress: dict[str, Next] = {}  # name of a file that this process is fetching -> the decision
        self._later: dict[str, float] = {}  # name -> time of the next try (monotonic seconds)
        self._waiting = 0  # number of ranges without an answer
        self._answered_at = 0.0  # time of the last answer (monotonic seconds)
        self._used_at = 0.0
        self._printed: set[str] = set()
        self._ranges = ThreadPoolExecutor(RANGES, thread_name_prefix="range")
        for _ in range(WHOLE):
            threading.Thread(target=self._fetch_ahead, daemon=True).start()

    # --- requests ----------------------------------------------------------------------------------------------

    def expect(self, files: tuple[FileOf, ...]) -> None:
        """Replaces the list of wanted files."""
        with self._changed:
            self._expected_files = tuple(RemoteFile(*_plain(file)) for file in files)
            self._changed.notify_all()

    def range(self, request: Range, report: Callable[[str], None], answer: Callable[[bytes], None],
              fail: Callable[[Exception], None]) -> None:  # fmt: skip
        """Reads a range in a thread. Calls `report` with each failed attempt, and `answer` or `fail` at the end."""

        def read() -> None:
            try:
                answer(self._store.read(request.url, request.start, request.stop, report))
            except Exception as error:  # noqa: BLE001  it is sent to the client
                fail(error)
            with self._changed:
                self._waiting -= 1
                self._answered_at = time.monotonic()
                if not self._waiting:
                    self._changed.notify_all()

        with self._changed:
            self._waiting += 1
        self._ranges.submit(read)

    def whole(self, file: RemoteFile, report: Callable[[str], None]) -> None:
        """Copies `file` now, and evicts any copies for it. Raises the errors of `Folder.fetch` and of the store."""
        self._fetch(file, None, report, waits=True)

    def settle(self) -> None:
        """Returns when there is nothing more to fetch of the wanted files, for now."""
        with self._changed:
            self._changed.wait_for(lambda: not self._in_progress and self._next() is None)

    # --- prefetching of copies ---------------------------------------------------------------------------------

    def _fetch_ahead(self) -> None:
        while True:
            with self._changed:
                while ((hold_s := self._held_back()) and len(self._in_progress) >= BESIDE) or (
                    job := self._next()
                ) is None:
                    self._changed.wait(hold_s or (STAYS_S / 3 if not self._later else ELSEWHERE_S))
                    self._use()
                self._in_progress[job.file.name] = job
            again_s = 0.0
            try:
                if not self._fetch(job.file, job.makes_way, None, waits=False):
                    again_s = ELSEWHERE_S
            except (FarandoleError, OSError) as error:
                again_s = AGAIN_S
                self._print_once(f"{error}; samples are read from the store meanwhile")
            with self._changed:
                del self._in_progress[job.file.name]
                if again_s:
                    self._later[job.file.name] = time.monotonic() + again_s
                self._changed.notify_all()

    def _held_back(self) -> float:
        """Returns the seconds for which copies must wait, because ranges have priority and the next one comes soon."""
        return AFTER_S if self._waiting else max(0.0, self._answered_at + AFTER_S - time.monotonic())

    def _next(self) -> Next | None:
        now = time.monotonic()
        self._later = {name: at for name, at in self._later.items() if at > now}
        if not self._expected_files:
            return None
        copies = {copy.name: copy for copy in self._folder.copies()}
        for job in self._in_progress.values():  # the state after these are fetched
            for name in job.makes_way:
                copies.pop(name, None)
            copies[job.file.name] = Copy(job.file.name, job.file.size, 0.0, coming=True)
        return choose(self._expected_files, copies.values(), self._folder.limit_bytes, self._later.keys())

    def _use(self) -> None:
        """Marks wanted copies as used, so that other processes do not evict them."""
        if time.monotonic() - self._used_at > STAYS_S / 3:
            self._used_at = time.monotonic()
            for file in self._expected_files:
                self._folder.use(file)

    def _fetch(
        self, file: RemoteFile, makes_way: tuple[str, ...] | None, report: Callable[[str], None] | None, *, waits: bool
    ) -> bool:
        """Copies a file; tries once more if the bytes are not those of the file."""
        for last in (False, True):
            whole = file.url.rpartition("/")[0] in self._store.ignores_ranges
            try:
                return self._folder.fetch(
                    file,
                    lambda start, stop: self._store.read(file.url, start, stop, report),
                    makes_way,
                    waits=waits,
                    piece=file.size if whole else PIECE_BYTES,
                )
            except Torn as error:
                if last:
                    raise
                self._print_once(f"{error}; it is fetched once more")
        raise AssertionError("the second time returns, or raises")

    def _print_once(self, line: str) -> None:
        """Prints each line once."""
        if line not in self._printed:
            self._printed.add(line)
            say(f"farandole: {line}")


def _prepare(url: str) -> None:
    """Imports the package of the store at `url`, and makes its client."""
    with contextlib.suppress(Exception):  # a request for a file reports the error
        filesystem(url)


def _plain(file: FileOf) -> tuple[str, int, str]:
    return file.url, file.size, file.md5


class ClientConnection:
    """The server of one connection. Requests run in parallel, and are answered as they end, in any order."""

    def __init__(self, connection: socket.socket, fetcher: Fetcher) -> None:
        self._connection, self._fetcher = connection, fetcher
        self._lock = threading.Lock()

    def serve(self) -> None:
        with contextlib.suppress(EOFError, OSError), self._connection:
            while True:
                request: FetchRequest = get(self._connection, read_request)
                match request:
                    case Soon(url):
                        threading.Thread(target=_prepare, args=(url,), daemon=True).start()
                    case Expect(files):
                        self._fetcher.expect(files)
                    case Range(number):
                        self._fetcher.range(
                            request,
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
        except Exception as error:  # noqa: BLE001  it is sent to the client
            self._fail(number, error)
        else:
            self._answer(FetchDone(number))

    def _settle(self, number: int) -> None:
        self._fetcher.settle()
        self._answer(FetchDone(number))

    def _fail(self, number: int, error: Exception) -> None:
        is_ours = isinstance(error, FarandoleError)
        self._answer(
            FetchFailed(
                number, str(error) if is_ours else f"{type(error).__name__}: {error}", isinstance(error, UsageError)
            )
        )

    def _answer(self, message: Answer, content: bytes = b"") -> None:
        with self._lock, contextlib.suppress(OSError):
            put(self._connection, message, content)


def main(address: str, listener: socket.socket, starter: socket.socket, fetcher: Fetcher) -> None:
    """Serves all connections until the process that has started this one ends. Does not return."""

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=ClientConnection(connection, fetcher).serve, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    ClientConnection(starter, fetcher).serve()
    with contextlib.suppress(OSError):
        os.unlink(address)
        os.rmdir(os.path.dirname(address))
    os._exit(0)  # threads may wait for a store


if __name__ == "__main__":
    # the worker handles a preemption notice, and needs data until it has left
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sockets = [socket.socket(fileno=int(number)) for number in sys.argv[2:4]]
    folder = Folder(sys.argv[4], int(sys.argv[5]))
    main(sys.argv[1], sockets[0], sockets[1], Fetcher(folder, ObjectStore(float(sys.argv[6]))))


# --- fetching ---------------------------------------------------------------------------------------------------------
#
# `Fetching` is the client of the fetcher: it sends requests, and receives the answers.
#
# The first process that sends a request starts the fetcher. Processes that are forked from it, or unpickle this object
# with a dataset, connect to the same fetcher. If it has ended, they start another one, and send their requests again.
#
# No wait is silent: after `WARN_AFTER_S` without an answer a warning states the request, the time waited, and the last
# report of the store. After the deadline it is an error.
#
# Left out: use by several threads of a process.

WARN_AFTER_S = 10.0  # seconds between two warnings
MARGIN_S = 15.0  # seconds added to the deadline, for a busy fetcher
STARTS = 3  # how often one process starts a fetcher
_log = logging.getLogger("farandole.data.fetcher")


class Fetching:
    """A client of the fetcher. Picklable; each process has its own connection."""

    def __init__(self, folder: Path, limit_bytes: int, deadline_s: float) -> None:
        self._arguments = (str(folder), str(limit_bytes), str(deadline_s))
        self._deadline_s = deadline_s
        self._address = ""
        self._starts = 0
        self._forget()

    def _forget(self) -> None:
        """Resets the state that belongs to one process."""
        self._pid = os.getpid()
        self._connection: socket.socket | None = None
        self._number = 0
        self._pending: dict[int, Range | Whole | WantSettled] = {}  # requests without an answer, by number
        self._answers: dict[int, bytes | FetchDone | FetchFailed] = {}  # answers that nobody has taken yet
        self._since: dict[int, float] = {}
        self._reports: dict[int, str] = {}  # the last report of a failed attempt
        self._expected: Expect | None = None

    def __getstate__(self) -> dict[str, Any]:
        fresh = Fetching.__new__(Fetching)
        fresh.__dict__.update(self.__dict__)
        fresh._forget()
        return {**fresh.__dict__, "_starts": 0}

    # --- requests ----------------------------------------------------------------------------------------------

    def begin(self, url: str) -> None:
        """Announces requests for files at `url`, so that a slow client starts meanwhile. Does not wait."""
        self._put(Soon(url))

    def expect(self, files: Sequence[RemoteFile]) -> None:
        """Replaces the list of wanted files, in the order of need. Does not wait."""
        self._connect()
        self._expected = Expect(tuple(_file_of(file) for file in files))
        self._put(self._expected)

    def request(self, url: str, start: int, stop: int) -> int:
        """Requests bytes `[start, stop)`; returns the number by which to `take` them. Does not wait."""
        return self._ask(partial(Range, url=url, start=start, stop=stop))

    def take(self, number: int) -> bytes:
        """Waits for the bytes of request `number`, and returns them. Raises `ShardError` or `UsageError`."""
        data = self._wait(number, self._deadline_s + MARGIN_S)
        assert isinstance(data, bytes)
        return data

    def drop(self) -> None:
        """Drops all requests so far and their answers."""
        if self._pid == os.getpid():
            self._pending.clear()
            self._since.clear()
            self._answers.clear()
            self._reports.clear()

    def whole(self, file: RemoteFile) -> None:
        """Waits for a copy of the file in the cache. Raises as `take` does."""
        self._wait(self._ask(partial(Whole, file=_file_of(file))), None)

    def settle(self, at_most_s: float) -> bool:
        """Waits until there is nothing more to fetch of the wanted files. Returns False after `at_most_s` seconds."""
        number = self._ask(WantSettled)
        with contextlib.suppress(ShardError):
            self._wait(number, at_most_s)
            return True
        self._pending.pop(number, None)
        return False

    def _ask(self, make: Callable[[int], Range | Whole | WantSettled]) -> int:
        self._connect()
        self._number += 1
        self._pending[self._number] = request = make(self._number)
        self._since[self._number] = time.perf_counter()
        self._put(request)
        return self._number

    # --- answers -----------------------------------------------------------------------------------------------

    def _wait(self, number: int, at_most_s: float | None) -> bytes | FetchDone:
        if number in self._answers:
            return self._take_answer(number)
        with object_store.fetching():
            self._until(number, at_most_s)
        return self._take_answer(number)

    def _until(self, number: int, at_most_s: float | None) -> None:
        began = warned = time.monotonic()
        while number not in self._answers:
            now = time.monotonic()
            if at_most_s is not None and now - began >= at_most_s:
                request = self._pending.pop(number)
                raise unreached(_describe(request), self._reports.pop(number, "no answer"), 1, now - began)
            if now - warned >= WARN_AFTER_S:
                warned = now
                report = self._reports.get(number, "no answer")
                _log.warning(
                    "%s: waiting for %.0f s: %s; a request fails after %.0f s",
                    _describe(self._pending[number]), now - began, report, self._deadline_s,
                )  # fmt: skip
            wait_s = WARN_AFTER_S - (now - warned)
            if at_most_s is not None:
                wait_s = min(wait_s, began + at_most_s - now)
            self._receive(max(wait_s, 0.0))

    def _take_answer(self, number: int) -> bytes | FetchDone:
        answer = self._answers.pop(number)
        if isinstance(answer, FetchFailed):
            raise (UsageError if answer.usage else ShardError)(answer.why)
        return answer

    def _receive(self, at_most_s: float) -> None:
        connection = self._connect()
        if not select.select([connection], [], [], at_most_s)[0]:
            return
        try:
            answer = get(connection, answers)
            content = exactly(connection, answer.size) if isinstance(answer, Data) else b""
        except (EOFError, OSError):
            self._restart()
            return
        if isinstance(answer, Trying):
            self._reports[answer.number] = answer.why
        elif (request := self._pending.pop(answer.number, None)) is not None:  # None: the request was dropped
            seconds = time.perf_counter() - self._since.pop(answer.number)
            if isinstance(request, Range):
                object_store.requested(request.url, len(content), seconds)
            self._reports.pop(answer.number, None)
            self._answers[answer.number] = bytes(content) if isinstance(answer, Data) else answer

    # --- the fetcher -------------------------------------------------------------------------------------------

    def _put(self, message: FetchRequest) -> None:
        try:
            put(self._connect(), message)
        except OSError:
            self._restart()

    def _restart(self) -> None:
        """Starts another fetcher after the last one has ended, and sends it the same requests."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._address = ""
        if self._starts >= STARTS:
            raise ShardError(
                f"the process that reads the store for this one has ended {self._starts} times; if memory is short, "
                f"use fewer loader processes (num_workers)"
            )
        for message in (*((self._expected,) if self._expected else ()), *self._pending.values()):
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
        except OSError as error:  # a full disk, too many processes: no sample is the cause
            raise ShardError(
                f"the process that reads the store can't be started: {error}; free disk space, memory or processes"
            ) from error

    def _started(self) -> socket.socket:
        self._address = os.path.join(tempfile.mkdtemp(prefix="farandole-"), "fetcher")
        own_end, fetcher_end = socket.socketpair()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, fetcher_end:
            listener.bind(self._address)
            listener.listen(64)
            numbers = listener.fileno(), fetcher_end.fileno()
            command = [sys.executable, "-m", "farandole.data.fetcher", self._address, *map(str, numbers)]
            process = subprocess.Popen([*command, *self._arguments], stdin=subprocess.DEVNULL, pass_fds=numbers)
        weakref.finalize(self, _end, process, own_end, Path(self._address), os.getpid())
        return own_end


def _end(process: subprocess.Popen[bytes], connection: socket.socket, address: Path, starter: int) -> None:
    """Ends the fetcher; does nothing in a process that has not started it."""
    if os.getpid() == starter:
        connection.close()
        process.kill()
        process.wait()
        with contextlib.suppress(OSError):
            address.unlink()
            address.parent.rmdir()


def _file_of(file: RemoteFile) -> FileOf:
    return FileOf(file.url, file.size, file.md5)


def _describe(request: Range | Whole | WantSettled) -> str:
    if isinstance(request, Range):
        return f"{request.url}, bytes {request.start} to {request.stop}"
    return request.file.url if isinstance(request, Whole) else "the cache"
