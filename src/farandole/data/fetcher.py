"""The process that reads the store for a worker: `python -m farandole.data.fetcher ADDRESS LISTENER STARTER FOLDER
LIMIT DEADLINE`.

It does two things side by side. Shards that are wanted are copied to the cache, in the order in which the samples want
them (`keeping.py`), `WHOLE` at once, and fewer while somebody waits for a sample. And what is asked for by range,
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
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from farandole.data import frames
from farandole.data.folder import PIECE_BYTES, Folder
from farandole.data.frames import Data, Done, Expect, Failed, FileOf, Range, Settled, Soon, Trying, Whole
from farandole.data.keeping import STAYS_S, Copy, File, Next, choose
from farandole.data.store import Store, Torn, filesystem
from farandole.errors import FarandoleError, UsageError
from farandole.platform.output import say

RANGES, WHOLE = 16, 8  # connections to the store at most: their sum
BESIDE = 2  # shards that are copied while somebody waits for a range
AFTER_S = 0.3  # for which copies wait behind an answer, for what is asked next
AGAIN_S = 30.0
ELSEWHERE_S = 0.5  # until it is looked again at what another process is fetching


class Fetcher:
    """Threads share it."""

    def __init__(self, folder: Folder, store: Store) -> None:
        self._folder, self._store = folder, store
        self._changed = threading.Condition()
        self._wanted: tuple[File, ...] = ()
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
            self._wanted = tuple(File(*_plain(file)) for file in files)
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

    def whole(self, file: File, told: Callable[[str], None]) -> None:
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
        self, file: File, makes_way: tuple[str, ...] | None, told: Callable[[str], None] | None, *, waits: bool
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
                asked: frames.Asked = frames.get(self._connection, frames.asked)
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
                        threading.Thread(target=self._whole, args=(number, File(*_plain(file))), daemon=True).start()
                    case Settled(number):
                        threading.Thread(target=self._settle, args=(number,), daemon=True).start()

    def _whole(self, number: int, file: File) -> None:
        try:
            self._fetcher.whole(file, lambda why: self._answer(Trying(number, why)))
        except Exception as error:  # noqa: BLE001  whoever asked is to hear of it
            self._fail(number, error)
        else:
            self._answer(Done(number))

    def _settle(self, number: int) -> None:
        self._fetcher.settle()
        self._answer(Done(number))

    def _fail(self, number: int, error: Exception) -> None:
        known = isinstance(error, FarandoleError)
        self._answer(
            Failed(number, str(error) if known else f"{type(error).__name__}: {error}", isinstance(error, UsageError))
        )

    def _answer(self, message: frames.Answer, content: bytes = b"") -> None:
        with self._lock, contextlib.suppress(OSError):
            frames.put(self._connection, message, content)


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
    main(sys.argv[1], sockets[0], sockets[1], Fetcher(folder, Store(float(sys.argv[6]))))
