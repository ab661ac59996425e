"""The run's record: `journal.sqlite` holds every event and the coordinator's state, `metrics.jsonl` every event and
every step's metrics.

An event is committed, together with the state that it led to, before any message about it is sent: a killed
coordinator has promised nothing that its successor does not know. The state is kept a second time in memory, and that
copy is believed, because the disk may be full (see `Safekeeping`). SQLite runs in WAL mode. If all workers end with
this machine, it uses `synchronous=NORMAL`: a killed process loses nothing, a host that loses power may lose the last
events, and a commit takes no fsync (some tens of microseconds instead of milliseconds, in the process that hands out
views). If workers on other hosts go on without it, each commit is on the disk before any message is sent (`outlived`).
A user who reads the journal with another tool may lock it: nothing waits for that longer than `BUSY_S`. A failed write
costs its events, as on a full disk. After it no write is tried for `RETRY_S`, and the state is in memory only.

All of it is done in a thread (`platform/files.py`): nothing waits for a stuck disk longer than its limit. Then the disk
counts as full, until it answers.

metrics.jsonl gets one line a write, so a reader sees whole lines. `protocol/metrics.py` describes their contents, and
which of them count when the file is read again.
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
# The journal is on a disk that may be full, and in a folder that a user may clear. A coordinator that is killed then
# leaves a state that is too old, or none. A successor that went on from it would give the same view numbers out twice
# and send workers away that hold the newest state. Of all that the coordinator's process has, only what its parent
# holds lives as long as the run. So the state is written there too, before the journal, and so before any message is
# sent. A successor believes this copy; it is never older than the journal.
#
# The memory is a file without a name. It has two slots, used in turns, so that a process that is killed while it writes
# one leaves the other intact:
#
#     sequence number, CRC-32 and length of the state, then the state as JSON

HEAD = struct.Struct(">QIQ")
SLOT = 1 << 30  # bytes from one slot to the next; unwritten parts take no memory


def allocate_state_memory() -> int:
    """A descriptor of such memory, for a coordinator to inherit. On systems other than Linux it is a file."""
    if sys.platform == "linux":
        return os.memfd_create("farandole-state")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Safekeeping:
    """The copy of the state in memory. `descriptor`: from `allocate_state_memory`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._sequence, self._state = max(self._read(0), self._read(1))

    @property
    def state(self) -> bytes:
        """The newest state that the previous process has written; b"" for none."""
        return self._state

    def put(self, state: bytes) -> None:
        """Write the state. If there is no memory for it, older states are removed too, since they would be believed."""
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
CREATE TABLE IF NOT EXISTS books (id INTEGER PRIMARY KEY, books TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS written (id INTEGER PRIMARY KEY, event INTEGER NOT NULL);
"""  # `books` holds the coordinator's state
COLUMNS = ("view", "step", "worker")  # fields with a column of their own, for SQL queries
RECENT_LINES = 1000
BUSY_S = 0.05  # wait for another process's lock on the journal
RETRY_S = 1.0  # delay after a failed write
TAIL_BYTES = 8 * 1024 * 1024  # the end of metrics.jsonl that is searched for recent lines


class Journal:
    """Writes both files of a run's folder, and keeps the coordinator's state. The coordinator's process only.

    Attributes:
        recent: the newest lines of metrics.jsonl since the run was last started, oldest first.
        damaged: the number of invalid lines among these, if no line reports it yet.
        outlived: workers of the run go on when this machine dies.

    Raises:
        NotPrivate: one of the files belongs to another user.
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
            self._database.execute(f"PRAGMA busy_timeout={round(1000 * BUSY_S)}")  # only now do others wait for us
        except sqlite3.Error:
            self._database.close()
            raise
        self._retry_at = 0.0  # no write before this time of the monotonic clock
        self._metrics = append(folder / METRICS)
        tail = self._tail()
        torn = len(tail) - (tail.rfind(b"\n") + 1)  # a line cut by a crash; it would merge with the next line
        cut_torn(self._metrics, tail)
        cut = len(tail) == TAIL_BYTES  # the first line may be incomplete
        lines = tail[: len(tail) - torn].split(b"\n")[cut:-1]
        older = (line for line in map(parse_line, reversed(lines[:-RECENT_LINES])) if line is not None)
        self._before_recent = _newest(older, (-1, 0))
        self.recent, damaged = parse_lines(lines[-RECENT_LINES:])
        reported = {line.lines for line in self.recent if isinstance(line, events.MetricsDamagedEvent)}
        self.damaged = 0 if damaged in reported else damaged
        self._unwritten: deque[int] = deque()  # events that are committed and whose lines are not written yet
        self._write_missing_lines()
        starts = [at for at, line in enumerate(self.recent) if isinstance(line, events.RunStartedEvent)]
        del self.recent[: starts[-1] if starts else 0]

    def commit(
        self, happened: Sequence[events.Event], state: Durable, late: Callable[[], object] | None = None
    ) -> None:
        """Commit events and the state that they led to: all or nothing, before any message about them is sent.

        `late` is called in another thread if this has raised a TimeoutError and the commit succeeds later.
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
            self._database.execute("INSERT OR REPLACE INTO books VALUES (0, ?)", (encoded.decode(),))
            self._database.execute("COMMIT")
        except sqlite3.Error as error:
            if isinstance(error, sqlite3.OperationalError):  # a lock or a full disk; else the event is the cause
                self._retry_at = time.monotonic() + RETRY_S
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise
        self._unwritten += ids

    @property
    def ready(self) -> bool:
        """Returns False for a while after a failed write, and while a write that timed out has not returned."""
        return time.monotonic() >= self._retry_at and not self._files.stuck

    def remember(self, state: Durable) -> bytes:
        """Store the state in memory only. Returns it encoded."""
        encoded = msgspec.json.encode(state)
        if self._safekeeping:
            self._safekeeping.put(encoded)
        return encoded

    def state(self) -> Durable | None:
        """The state that the previous coordinator has left, None without any."""
        if self._safekeeping and self._safekeeping.state:
            return decoded(self._safekeeping.state, Durable)
        return _read_state(self._database)

    def last_line(self) -> tuple[int, int]:
        """The position (step, index) of the newest line of metrics, (-1, 0) without any."""
        return _newest(reversed(self.recent), self._before_recent)

    def write(self, line: Line, written: Callable[[Exception | None], object]) -> bool:
        """Write one line to metrics.jsonl, all of it or nothing. Does not wait: `written` is called in another thread,
        with the error or None. Returns False, and writes nothing, if too many lines wait for the disk.
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
        """Record that the event's line is written, so that no later process repeats it. The next mark covers it too."""
        if not self.ready:
            return
        try:
            self._database.execute("INSERT OR REPLACE INTO written VALUES (0, ?)", (event,))
        except sqlite3.Error as error:
            self._retry_at = time.monotonic() + RETRY_S
            _log.error("the journal could not be written: %s", error)

    def close(self) -> None:
        """Close the files, with all writes on their way to the disk. Does not wait for a stuck disk."""
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

    def _write_missing_lines(self) -> None:
        """Write the lines of events that were committed by a coordinator that was killed before it wrote them."""
        row = self._database.execute("SELECT event FROM written").fetchone()
        rows = self._database.execute(
            "SELECT id, time, event, view, step, worker, detail FROM events WHERE id > ? ORDER BY id", row or (0,)
        )
        for id_, at, event, view, step, worker, detail in rows.fetchall():
            named = {"event": event, "time": at, "view": view, "step": step, "worker": worker}
            fields = {k: v for k, v in named.items() if v is not None}
            try:
                line = events.restored({**fields, **msgspec.json.decode(detail)})
            except (ValueError, TypeError):  # msgspec's errors among them: a row of another program
                self.damaged += 1
                continue
            self._unwritten.append(id_)
            if line in self.recent:  # the line was written, and the process was killed before it recorded this
                self._unwritten.pop()
            else:
                self.recent.append(line)
                try:
                    self._add(as_written(line), is_event=True)
                except (OSError, sqlite3.Error) as error:  # the disk is full: this must not stop the run
                    _log.error("metrics.jsonl could not be written: %s; lost: %s", error, line)


def _newest(lines: Iterable[Line], before: tuple[int, int]) -> tuple[int, int]:
    """The position of the newest line of metrics in `lines`, newest first; `before`: the newest in older lines.

    It searches for the newest line of a step, and counts the lines of `run.log` after it, because a script may log
    thousands of lines after a step.
    """
    step, logs, floor = -1, 0, (-1, 0)
    for line in lines:
        match line:
            case LogLine() if step in (-1, line.step):
                step, logs = line.step, logs + 1
            case StepLine() if step in (-1, line.step):
                return max(floor, (line.step, logs))
            case events.LinesLostEvent() if line.step >= 0:  # it may be reported a little later than the lines after it
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
    """Create or check the files before SQLite opens them its own way. Files that SQLite adds get the same mode."""
    for part in ("-wal", "-shm", "-journal"):
        with contextlib.suppress(FileNotFoundError):
            check_file(journal.with_name(journal.name + part))
    try:
        check_file(journal)
    except FileNotFoundError:
        os.close(opener(str(journal), os.O_RDWR | os.O_CREAT | os.O_EXCL))


def set_aside(folder: Path) -> Path:
    """Rename the journal in `folder`. Returns its new path."""
    new_path = next(path for n in count(1) if not (path := folder / f"{JOURNAL}.damaged-{n}").exists())
    (folder / JOURNAL).rename(new_path)
    for part in ("-wal", "-shm"):  # SQLite would apply them to a new journal
        (folder / f"{JOURNAL}{part}").unlink(missing_ok=True)
    return new_path


def read_state(folder: Path) -> Durable | None:
    """The state that the coordinator of the run in `folder` has left, read without changing the journal.

    Raises:
        sqlite3.Error, msgspec.MsgspecError: there is no journal, or it has another version.
    """
    with contextlib.closing(sqlite3.connect(f"{(folder / JOURNAL).resolve().as_uri()}?mode=ro", uri=True)) as database:
        return _read_state(database)


def _read_state(database: sqlite3.Connection) -> Durable | None:
    row = database.execute("SELECT books FROM books").fetchone()
    return None if row is None else decoded(row[0], Durable)


# --- shipping ---------------------------------------------------------------------------------------------------------
#
# The run's state is stored beside its checkpoints, where another machine finds it when this one is lost.
#
# One writer, the coordinator's process, stores one object there, `run-NAME.json`: the settings, the state and the time,
# without any secret. It does so in a thread: a store may be slow or unreachable, and nothing waits for it. So the
# object may be older than the last promise by the time of an upload. A coordinator that takes over from such a state
# meets workers in a view that the state does not contain. Those workers end, and the run goes on from a checkpoint,
# with the same bits.

ALIVE_S = 20.0  # the object is written at least this often, to show that there is a coordinator
CLOSE_S = 5.0


class Shipped(msgspec.Struct, frozen=True, kw_only=True):
    """The stored object. `time`: Unix time."""

    time: float
    settings: RunSettings
    state: Durable = msgspec.field(name="books")  # its name in files


def outlived(settings: RunSettings) -> bool:
    """Returns True if workers go on when this machine is lost, and there is a store for the state."""
    return settings.checkpoints.url != "" and any(pool.kind != "local" for pool in settings.pools)


def place(url: str, run: str) -> tuple[Store, str]:
    """The store, and the object's name in it."""
    store = Store(url)
    return store, f"{store.path}/run-{run}.json"


def load(url: str, run: str) -> Shipped:
    """The object that a coordinator of `run` has stored.

    Raises:
        UsageError: there is none, or it can't be read.
        FarandoleError: the store can't be reached.
    """
    store, name = place(url, run)
    with reaching(url):
        try:
            return msgspec.json.decode(store.files.cat_file(name), type=Shipped)
        except FileNotFoundError:
            raise UsageError(
                f"--checkpoints {url}: there is no journal of run {run}; check that this is the run's URL"
            ) from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UsageError(f"{url}/run-{run}.json can't be read: {error}") from None


class Shipping:
    """Ships the state in a thread; `put` returns at once.

    `failed` is called from the thread with the reason of each first failure in a row.
    """

    def __init__(self, settings: RunSettings, failed: Callable[[str], None]) -> None:
        self._settings, self._failed = settings, failed
        self._changed = threading.Condition()
        self._state: Durable | None = None
        self._written: Durable | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="shipping", daemon=True)
        self._thread.start()

    def put(self, state: Durable) -> None:
        with self._changed:
            self._state = state
            self._changed.notify()

    def close(self) -> None:
        """Write the last state, if that is possible soon."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        failing = False
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._state is not self._written, ALIVE_S)
                state, closing = self._state, self._closing
            if state is not None and not (closing and state is self._written):
                try:
                    self._write(state)
                    failing = False
                except Exception as error:  # noqa: BLE001  the clients of stores have their own error types
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
