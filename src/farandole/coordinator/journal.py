"""The run's record: `journal.sqlite` holds every event and the coordinator's state, `metrics.jsonl` every event and
every step's metrics.

An event is committed, together with the state that it led to, before anyone is told of it: a coordinator that is
killed has promised nothing that its successor does not know. The state are kept a second time in memory, and believed
there: the disk may be full (see `journal.py`). SQLite runs in WAL mode. Where all workers end with this machine,
`synchronous=NORMAL` does: a killed process loses nothing, a host that loses power may lose the last events, and a
commit takes no fsync (some tens of microseconds instead of milliseconds, in the process that hands out views). Where
workers of other hosts go on without it, each commit is on the disk before anyone is told (`outlived`).
Who reads the journal with a tool of his own may lock it: nobody waits for that longer than `BUSY_S`. A write that fails
costs its events, as on a full disk, and after one none is tried for `RETRY_S`, with the state in memory alone.

All of it is done in a thread (`platform/files.py`): for a disk that does not answer nobody waits longer than its
limit. Then it is as with a full disk, until the disk answers.

metrics.jsonl gets one line a write, so a
reader sees whole lines; what they hold, and which count when the file is read again, is in `protocol/metrics.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import struct
import sys
import tempfile
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from pathlib import Path

import msgspec

from farandole.checkpoint.store import Store, first_line, reaching
from farandole.control.run_folder import JOURNAL, METRICS
from farandole.errors import UsageError
from farandole.platform.files import FileThread, add, append, check_file, cut_torn, decoded, opener
from farandole.protocol import events
from farandole.protocol.coordinator.reconnection import Durable
from farandole.protocol.coordinator.state import RunSettings
from farandole.protocol.metrics import Line, LogLine, StepLine, as_written, parse_line, parse_lines
from farandole.protocol.reported_events import ALL

# --- safekeeping ------------------------------------------------------------------------------------------------------
#
# The coordinator's state a second time, in memory that `farandole run` holds.
#
# The journal is on a disk that may be full, and in a folder that somebody may clear: a coordinator that is killed
# then leaves state behind that are too old, or none, and one that went on from those would give numbers of views out
# twice and send workers away that hold the newest state. Of everything that the coordinator's process has, only what
# its parent holds outlives it for as long as the run: so the state are written there too, before the journal, and so
# before anyone is told. Who comes back believes this copy; it is never older than the journal.
#
# The memory is a file without a name and takes turns with two slots, so that whoever is killed while writing one leaves
# the other whole:
#
#     sequence number, CRC-32 and length of the state, then the state as JSON

HEAD = struct.Struct(">QIQ")
SLOT = 1 << 30  # bytes from one slot to the next; what is never written takes no memory


def allot() -> int:
    """A descriptor of such memory, for a coordinator to inherit. Elsewhere than on Linux it is a file."""
    if sys.platform == "linux":
        return os.memfd_create("farandole-state")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Safekeeping:
    """`descriptor` is one of `allot`'s."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._sequence, self._books = max(self._read(0), self._read(1))

    @property
    def state(self) -> bytes:
        """The newest that the process before this one has put in; b"" for none."""
        return self._books

    def put(self, state: bytes) -> None:
        """Where there is no memory for it, nothing is left of those before either: they would be believed."""
        self._sequence += 1
        record = HEAD.pack(self._sequence, zlib.crc32(state), len(state)) + state
        written = 0
        with contextlib.suppress(OSError):
            written = os.pwrite(self._descriptor, record, SLOT * (self._sequence % 2))
        if written < len(record):
            os.ftruncate(self._descriptor, 0)

    def _read(self, slot: int) -> tuple[int, bytes]:
        head = os.pread(self._descriptor, HEAD.size, SLOT * slot)
        if len(head) < HEAD.size:
            return 0, b""
        sequence, checksum, length = HEAD.unpack(head)
        state = os.pread(self._descriptor, length, SLOT * slot + HEAD.size) if length < SLOT else b""
        return (sequence, state) if zlib.crc32(state) == checksum and len(state) == length else (0, b"")


# --- journal ----------------------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)
SCHEMA = """
CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY,
    time REAL NOT NULL,
    event TEXT NOT NULL,
    view INTEGER,
    step INTEGER,
    worker TEXT,
    detail TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS state (id INTEGER PRIMARY KEY, state TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS written (id INTEGER PRIMARY KEY, event INTEGER NOT NULL);
"""
COLUMNS = ("view", "step", "worker")  # of a row, so that SQL finds them
RECENT_LINES = 1000
BUSY_S = 0.05  # for whoever holds the journal's lock
RETRY_S = 1.0  # after a write that has failed
TAIL_BYTES = 8 * 1024 * 1024  # of metrics.jsonl, in which those are found


class Journal:
    """Writes both files of a run's folder, and keeps the coordinator's state. The coordinator's process only.

    Attributes:
        recent: the newest lines of metrics.jsonl since the run was last started, oldest first.
        damaged: how many among these are none, if that is not told there.
        outlived: workers of the run go on when this machine dies.

    Raises:
        NotPrivate: one of the files is another's.
        sqlite3.Error, OSError: on writing, when the disk is full or doesn't answer.
    """

    def __init__(self, folder: Path, safekeeping: Safekeeping | None = None, *, outlived: bool = False) -> None:
        self.folder = folder
        self._safekeeping = safekeeping
        self._files = FileThread("journal")
        try:
            self._open(outlived)
        except BaseException:
            self._files.end()
            raise

    def _open(self, outlived: bool) -> None:
        folder = self.folder
        _claim(folder / JOURNAL)
        self._database = sqlite3.connect(folder / JOURNAL, isolation_level=None, check_same_thread=False)
        try:
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute(f"PRAGMA synchronous={'FULL' if outlived else 'NORMAL'}")
            self._database.executescript(SCHEMA)
            self._database.execute(f"PRAGMA busy_timeout={round(1000 * BUSY_S)}")  # before, nobody waits for us
        except sqlite3.Error:
            self._database.close()
            raise
        self._retry_at = 0.0  # not written to earlier, by the monotonic clock
        self._metrics = append(folder / METRICS)
        tail = self._tail()
        torn = len(tail) - (tail.rfind(b"\n") + 1)  # by a crash; it would swallow the next line
        cut_torn(self._metrics, tail)
        cut = len(tail) == TAIL_BYTES  # the first one, in two
        lines = tail[: len(tail) - torn].split(b"\n")[cut:-1]
        older = (line for line in map(parse_line, reversed(lines[:-RECENT_LINES])) if line is not None)
        self._before_recent = _newest(older, (-1, 0))
        self.recent, damaged = parse_lines(lines[-RECENT_LINES:])
        told = {line.lines for line in self.recent if isinstance(line, events.MetricsDamagedEvent)}
        self.damaged = 0 if damaged in told else damaged
        self._unwritten: deque[int] = deque()  # events that are kept and not written yet
        self._mend()
        starts = [at for at, line in enumerate(self.recent) if isinstance(line, events.RunStartedEvent)]
        del self.recent[: starts[-1] if starts else 0]

    def keep(self, happened: Sequence[events.Event], state: Durable, late: Callable[[], object] | None = None) -> None:
        """Events, and the state that they led to: all or nothing, before anyone is told.

        `late` is called, in another thread, if this has raised a TimeoutError and they are written later all the same.
        """
        encoded = self.remember(state)
        if not self.ready:
            raise sqlite3.OperationalError("it could not be written a moment ago")
        self._files.run(partial(self._commit, happened, encoded), late)

    def _commit(self, happened: Sequence[events.Event], encoded: bytes) -> None:
        ids: list[int] = []
        try:
            self._database.execute("BEGIN IMMEDIATE")
            for event in happened:
                fields = events.fields_of(event)
                columns = (event.time, events.name_of(event), *(fields.pop(name, None) for name in COLUMNS))
                row = self._database.execute(
                    "INSERT INTO events (time, event, view, step, worker, detail) VALUES (?, ?, ?, ?, ?, ?)",
                    (*columns, msgspec.json.encode(fields).decode()),
                )
                ids.append(row.lastrowid or 0)
            self._database.execute("INSERT OR REPLACE INTO state VALUES (0, ?)", (encoded.decode(),))
            self._database.execute("COMMIT")
        except sqlite3.Error as error:
            if isinstance(error, sqlite3.OperationalError):  # a lock, a full disk; else it is the event's own
                self._retry_at = time.monotonic() + RETRY_S
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise
        self._unwritten += ids

    @property
    def ready(self) -> bool:
        """Returns False for a while after a write that has failed, and while one that was given up has not returned."""
        return time.monotonic() >= self._retry_at and not self._files.stuck

    def remember(self, state: Durable) -> bytes:
        """The state in memory alone, and as they are written."""
        encoded = msgspec.json.encode(state)
        if self._safekeeping:
            self._safekeeping.put(encoded)
        return encoded

    def state(self) -> Durable | None:
        """What the coordinator before this one has left."""
        if self._safekeeping and self._safekeeping.state:
            return decoded(self._safekeeping.state, Durable)
        return _books(self._database)

    def last_line(self) -> tuple[int, int]:
        """The newest line of metrics as (step, index), (-1, 0) without any."""
        return _newest(reversed(self.recent), self._before_recent)

    def write(self, line: Line, written: Callable[[Exception | None], object]) -> bool:
        """One line of metrics.jsonl, all of it or nothing. Doesn't wait: `written` is called, in another thread, with
        the error or None. Returns False, and writes nothing, if too many lines wait for the disk.
        """
        return self._files.post(partial(self._write, as_written(line), isinstance(line, events.Event), written))

    def _write(self, text: bytes, is_event: bool, written: Callable[[Exception | None], object]) -> None:
        try:
            self._add(text, is_event)
        except (OSError, sqlite3.Error) as error:
            written(error)
        else:
            written(None)

    def _add(self, text: bytes, is_event: bool) -> None:
        add(self._metrics, text)
        if is_event and self._unwritten:
            self._mark_written(self._unwritten.popleft())

    def _mark_written(self, event: int) -> None:
        """So that no later process writes its line again. The next mark stands for this one too."""
        if not self.ready:
            return
        try:
            self._database.execute("INSERT OR REPLACE INTO written VALUES (0, ?)", (event,))
        except sqlite3.Error as error:
            self._retry_at = time.monotonic() + RETRY_S
            _log.error("the journal could not be written: %s", error)

    def close(self) -> None:
        """What is written is on its way to the disk; for one that doesn't answer nobody waits."""
        if not self._files.stuck:
            with contextlib.suppress(TimeoutError):
                self._files.run(self._close)
        self._files.close()

    def _close(self) -> None:
        self._database.close()
        self._metrics.close()

    def _tail(self) -> bytes:
        self._metrics.seek(max(self._metrics.seek(0, os.SEEK_END) - TAIL_BYTES, 0))
        return self._metrics.read(TAIL_BYTES) or b""

    def _mend(self) -> None:
        """Events that were kept by a coordinator which was killed before it wrote their lines."""
        row = self._database.execute("SELECT event FROM written").fetchone()
        rows = self._database.execute(
            "SELECT id, time, event, view, step, worker, detail FROM events WHERE id > ? ORDER BY id", row or (0,)
        )
        for id_, at, event, view, step, worker, detail in rows.fetchall():
            named = {"event": event, "time": at, "view": view, "step": step, "worker": worker}
            fields = {k: v for k, v in named.items() if v is not None}
            try:
                line = events.restored({**fields, **msgspec.json.decode(detail)})
            except (ValueError, TypeError):  # msgspec's own errors among them: another program's row
                self.damaged += 1
                continue
            self._unwritten.append(id_)
            if line in self.recent:  # killed before it could say so
                self._unwritten.pop()
            else:
                self.recent.append(line)
                try:
                    self._add(as_written(line), is_event=True)
                except (OSError, sqlite3.Error) as error:  # the disk is full: it must not keep the run from going on
                    _log.error("metrics.jsonl could not be written: %s; lost: %s", error, line)


def _newest(lines: Iterable[Line], before: tuple[int, int]) -> tuple[int, int]:
    """The newest line of metrics in `lines`, newest first; `before`: that in those before them. A step's own line is
    looked for, from which on those of `run.log` are counted: a script may log thousands of lines after a step.
    """
    step, logs, floor = -1, 0, (-1, 0)
    for line in lines:
        match line:
            case LogLine() if step in (-1, line.step):
                step, logs = line.step, logs + 1
            case StepLine() if step in (-1, line.step):
                return max(floor, (line.step, logs))
            case events.LinesLostEvent() if line.step >= 0:  # it may be told a little later than the lines after them
                floor = max(floor, (line.step, line.index + (logs if line.step == step else 0)))
            case events.ResumedEvent() if step < 0:
                return line.step - 1, ALL
            case events.StateLostEvent() | events.RunStartedEvent() if step < 0:
                return -1, 0
            case StepLine() | LogLine() | events.StateLostEvent() | events.RunStartedEvent() | events.ResumedEvent():
                return max(floor, (step, logs))
            case _:
                pass
    if step in (-1, before[0]):
        return max(floor, (before[0], before[1] + logs))
    return max(floor, (step, logs))


def _claim(journal: Path) -> None:
    """SQLite opens files in a way of its own: they are made, or looked at, before. What it adds has the same mode."""
    for part in ("-wal", "-shm", "-journal"):
        with contextlib.suppress(FileNotFoundError):
            check_file(journal.with_name(journal.name + part))
    try:
        check_file(journal)
    except FileNotFoundError:
        os.close(opener(str(journal), os.O_RDWR | os.O_CREAT | os.O_EXCL))


def set_aside(folder: Path) -> Path:
    """Take the journal that `folder` holds out of the way, under another name, which is returned."""
    aside = next(path for n in count(1) if not (path := folder / f"{JOURNAL}.damaged-{n}").exists())
    (folder / JOURNAL).rename(aside)
    for part in ("-wal", "-shm"):  # of that journal; beside another one they would be taken for its own
        (folder / f"{JOURNAL}{part}").unlink(missing_ok=True)
    return aside


def read_state(folder: Path) -> Durable | None:
    """What the coordinator of the run in `folder` has left, read without touching it.

    Raises:
        sqlite3.Error, msgspec.MsgspecError: there is no journal, or none of this version.
    """
    with contextlib.closing(sqlite3.connect(f"{(folder / JOURNAL).resolve().as_uri()}?mode=ro", uri=True)) as database:
        return _books(database)


def _books(database: sqlite3.Connection) -> Durable | None:
    row = database.execute("SELECT state FROM state").fetchone()
    return None if row is None else decoded(row[0], Durable)


# --- shipping ---------------------------------------------------------------------------------------------------------
#
# The run's state beside its checkpoints, where another machine finds them when this one is lost.
#
# One writer, the coordinator's process, puts one object there, `run-NAME.json`: the settings, the state and the time,
# without any secret. It does so in a thread: a store may be slow or away, and nobody waits for it. So what is there may
# be older than the last promise by as long as an upload takes. Who takes over from such state finds workers in a view
# that they do not name; those end, and the run goes on from a checkpoint, to the same bits.

ALIVE_S = 20.0  # at the latest after so long it is written again, to show that there is a coordinator
CLOSE_S = 5.0


class Shipped(msgspec.Struct, frozen=True, kw_only=True):
    """What is there. `time`: Unix time."""

    time: float
    settings: RunSettings
    state: Durable


def outlived(settings: RunSettings) -> bool:
    """Whether somebody goes on when this machine is lost, and there is a place for the state."""
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

    def put(self, state: Durable) -> None:
        with self._changed:
            self._books = state
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
                state, closing = self._books, self._closing
            if state is not None and not (closing and state is self._written):
                try:
                    self._write(state)
                    failing = False
                except Exception as error:  # noqa: BLE001  the clients of stores have errors of their own
                    if not failing:
                        self._failed(f"{type(error).__name__}: {first_line(error)}")
                    failing = True
                self._written = state
            if closing:
                return

    def _write(self, state: Durable) -> None:
        store, name = place(self._settings.checkpoints.url, self._settings.run)
        content = msgspec.json.encode(Shipped(time=time.time(), settings=self._settings, state=state))
        if store.local:  # whole or not at all
            beside = f"{name}.part"
            store.files.makedirs(store.path, exist_ok=True)
            with store.files.open(beside, "wb") as file:
                file.write(content)
            with contextlib.suppress(FileNotFoundError):
                store.files.mv(beside, name)
        else:
            store.files.pipe_file(name, content)
