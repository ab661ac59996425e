"""The run's books beside its checkpoints, where another machine finds them when this one is lost.

One writer, the coordinator's process, puts one object there, `run-NAME.json`: the settings, the books and the time,
without any secret. It does so in a thread: a store may be slow or away, and nobody waits for it. So what is there may
be older than the last promise by as long as an upload takes. Who takes over from such books finds workers in a view
that they do not name; those end, and the run goes on from a checkpoint, to the same bits.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import msgspec

from farandole.checkpoint.store import Store, first_line, reaching
from farandole.errors import UsageError
from farandole.membership.reconnection import Durable
from farandole.membership.records import RunSettings

ALIVE_S = 20.0  # at the latest after so long it is written again, to show that there is a coordinator
CLOSE_S = 5.0


class Shipped(msgspec.Struct, frozen=True, kw_only=True):
    """What is there. `time`: Unix time."""

    time: float
    settings: RunSettings
    books: Durable


def outlived(settings: RunSettings) -> bool:
    """Whether somebody goes on when this machine is lost, and there is a place for the books."""
    return settings.checkpoints.url != "" and any(pool.kind != "local" for pool in settings.pools)


def place(url: str, run: str) -> tuple[Store, str]:
    """The store, and the object's name there."""
    store = Store(url)
    return store, f"{store.path}/run-{run}.json"


def load(url: str, run: str) -> Shipped:
    """What a coordinator of `run` has left there.

    Raises:
        UsageError: there is none that can be read.
        FarandoleError: the place can't be reached.
    """
    store, name = place(url, run)
    with reaching(url):
        try:
            return msgspec.json.decode(store.files.cat_file(name), type=Shipped)
        except FileNotFoundError:
            raise UsageError(
                f"--checkpoints {url}: no journal of run {run} is there; see that it is the run's"
            ) from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UsageError(f"{url}/run-{run}.json can't be read: {error}") from None


class Shipping:
    """`put` returns at once. `failed` is called, from a thread, with the reason of each first failure in a row."""

    def __init__(self, settings: RunSettings, failed: Callable[[str], None]) -> None:
        self._settings, self._failed = settings, failed
        self._changed = threading.Condition()
        self._books: Durable | None = None
        self._written: Durable | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="shipping", daemon=True)
        self._thread.start()

    def put(self, books: Durable) -> None:
        with self._changed:
            self._books = books
            self._changed.notify()

    def close(self) -> None:
        """What was put last is written, if that is possible soon."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        failing = False
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._books is not self._written, ALIVE_S)
                books, closing = self._books, self._closing
            if books is not None and not (closing and books is self._written):
                try:
                    self._write(books)
                    failing = False
                except Exception as error:  # noqa: BLE001  the clients of stores have errors of their own
                    if not failing:
                        self._failed(f"{type(error).__name__}: {first_line(error)}")
                    failing = True
                self._written = books
            if closing:
                return

    def _write(self, books: Durable) -> None:
        store, name = place(self._settings.checkpoints.url, self._settings.run)
        content = msgspec.json.encode(Shipped(time=time.time(), settings=self._settings, books=books))
        if store.local:  # whole or not at all
            beside = f"{name}.part"
            store.files.makedirs(store.path, exist_ok=True)
            with store.files.open(beside, "wb") as file:
                file.write(content)
            with contextlib.suppress(FileNotFoundError):
                store.files.mv(beside, name)
        else:
            store.files.pipe_file(name, content)
