"""A process's end of the fetcher of its worker: asks, and takes what comes.

The first process that asks starts the fetcher (`fetcher.py`); those that are forked from it, or get this with a
dataset, connect to the same one. Where that one is gone, they start another, and ask it for the same again.

Nothing that is waited for is waited for in silence: after `TOLD_S` without an answer it is told of what, since when,
and what the store has said. After the deadline it is an error.

Left out: use by several threads of a process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from farandole.data import frames, store_clock
from farandole.data.frames import Data, Done, Expect, Failed, FileOf, Range, Settled, Soon, Trying, Whole
from farandole.data.keeping import File
from farandole.data.store import unreached
from farandole.errors import ShardError, UsageError

TOLD_S = 10.0
MARGIN_S = 15.0  # beyond the deadline, for a fetcher that is busy
STARTS = 3
_log = logging.getLogger(__name__)


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
        self._asked: dict[int, Range | Whole | Settled] = {}  # without an answer so far
        self._here: dict[int, bytes | Done | Failed] = {}
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

    def expect(self, files: Sequence[File]) -> None:
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

    def whole(self, file: File) -> None:
        """Have a copy of the file in the cache. Raises as `take` does."""
        self._wait(self._ask(partial(Whole, file=_of(file))), None)

    def settle(self, at_most_s: float) -> bool:
        """Wait until nothing of what is wanted is to be fetched any more. False: it took too long."""
        number = self._ask(Settled)
        with contextlib.suppress(ShardError):
            self._wait(number, at_most_s)
            return True
        self._asked.pop(number, None)
        return False

    def _ask(self, make: Callable[[int], Range | Whole | Settled]) -> int:
        self._connect()
        self._number += 1
        self._asked[self._number] = asked = make(self._number)
        self._since[self._number] = time.perf_counter()
        self._put(asked)
        return self._number

    # --- what comes --------------------------------------------------------------------------------------------

    def _wait(self, number: int, at_most_s: float | None) -> bytes | Done:
        if number in self._here:
            return self._found(number)
        with store_clock.fetching():
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

    def _found(self, number: int) -> bytes | Done:
        found = self._here.pop(number)
        if isinstance(found, Failed):
            raise (UsageError if found.usage else ShardError)(found.why)
        return found

    def _receive(self, at_most_s: float) -> None:
        connection = self._connect()
        if not select.select([connection], [], [], at_most_s)[0]:
            return
        try:
            answer = frames.get(connection, frames.answers)
            content = frames.exactly(connection, answer.size) if isinstance(answer, Data) else b""
        except (EOFError, OSError):
            self._again()
            return
        if isinstance(answer, Trying):
            self._said[answer.number] = answer.why
        elif (asked := self._asked.pop(answer.number, None)) is not None:  # else nobody takes it
            took = time.perf_counter() - self._since.pop(answer.number)
            if isinstance(asked, Range):
                store_clock.requested(asked.url, len(content), took)
            self._said.pop(answer.number, None)
            self._here[answer.number] = bytes(content) if isinstance(answer, Data) else answer

    # --- the fetcher -------------------------------------------------------------------------------------------

    def _put(self, message: frames.Asked) -> None:
        try:
            frames.put(self._connect(), message)
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


def _of(file: File) -> FileOf:
    return FileOf(file.url, file.size, file.md5)


def _what(asked: Range | Whole | Settled) -> str:
    if isinstance(asked, Range):
        return f"{asked.url}, bytes {asked.start} to {asked.stop}"
    return asked.file.url if isinstance(asked, Whole) else "the cache"
