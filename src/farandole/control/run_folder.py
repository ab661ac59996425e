"""The files in a run's folder. Files have mode 0600, folders 0700 (see `platform/files.py`)."""

from __future__ import annotations

import contextlib
import os
import socket
from abc import ABC, abstractmethod
from pathlib import Path

from farandole.errors import RunFolderInUse
from farandole.platform import files
from farandole.platform.files import opener
from farandole.protocol.metrics import Line

# --- run folder -------------------------------------------------------------------------------------------------------

SETTINGS = "settings.json"  # RunSettings, written by `farandole run`
TICKET = "ticket"  # written by the coordinator when it listens
TICKETS = "tickets"  # tickets issued to others, written by `farandole ticket`
CERTIFICATE = "tls.pem"  # the run's key and certificate, if it serves beyond loopback
RECORD = "coordinator.json"  # the coordinator's pid and address, written last
METRICS = "metrics.jsonl"
JOURNAL = "journal.sqlite"
CHECKPOINTS = "checkpoints"  # the default place
CODE = "code"  # the script and the modules that workers imported from its folder, unchanged (see `code/snapshot.py`)
PACK = "code.tar.gz"  # the working folder as it is sent to other hosts (see `code/pack.py`)
LEDGER = "ledger"  # ID.jsonl for each worker, with --ledger
BENCH = "bench"  # where the workers of `farandole bench` find each other for DistributedDataParallel
LOGS = "logs"  # ID.log for each worker of the local pool
HIDDEN_LOG_PREFIX = "farandole, aside: "  # prefix of log lines that are not shown to users
COORDINATOR_LOG = "coordinator.log"
OUTPUT = "run.log"  # the output of a detached `farandole run`
EXPORTS_LOG = "exports.log"  # of the process that writes for TensorBoard and Weights & Biases
TENSORBOARD = "tensorboard"  # the default place
WANDB = "wandb"
LOCK = "lock"  # held by `farandole run` for as long as it lives
FILES = (
    *(SETTINGS, TICKET, CERTIFICATE, RECORD, METRICS, COORDINATOR_LOG, OUTPUT, EXPORTS_LOG, LOCK, PACK),
    *(JOURNAL, f"{JOURNAL}-wal", f"{JOURNAL}-shm", f"{JOURNAL}-journal"),
)
FOLDERS = (CHECKPOINTS, CODE, LEDGER, LOGS, TENSORBOARD, WANDB)


# --- folder lock ------------------------------------------------------------------------------------------------------
#
# The lock of a run's folder: one process at a time trains in it, or supervises the run that does.
#
# `farandole run` holds it for as long as it lives, and so does a script that trains by itself with FARANDOLE_FOLDER. A
# process id alone proves nothing, since ids are reused; a lock ends with its process. The lock's file names its holder,
# for users.

_REMEDY = (
    "a second run could use this folder at the same time; name a folder on another file system (a local disk), "
    "and a place for checkpoints with --checkpoints, if they must stay where they are"
)


def hold(folder: Path) -> int:
    """Take the lock of the run's folder, until this process ends. Returns the lock's handle.

    Raises:
        RunFolderInUse: another process holds it.
        NoFileLocks: the file system has no locks.
    """
    handle = files.opener(str(folder / LOCK), os.O_RDWR | os.O_CREAT)
    try:
        if not files.take(handle, folder, _REMEDY):
            raise in_use(folder)
    except BaseException:
        os.close(handle)
        raise
    with contextlib.suppress(OSError):  # a full disk
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return handle


def is_locked(folder: Path) -> bool:
    """True while a process holds the folder: a `farandole run`, coordinator or not, or a script that trains alone."""
    try:
        with open(folder / LOCK, "rb", opener=files.opener) as file:
            return files.is_locked(file.fileno())
    except OSError:
        return False


def in_use(folder: Path) -> RunFolderInUse:
    """The error for a folder that another process holds."""
    holder = ""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        holder = files.read(folder / LOCK)[:200].decode()
    by = f" ({holder})" if holder.startswith("process ") and holder.isprintable() else ""
    return RunFolderInUse(
        f"a run is alive in {folder}{by}; see `farandole status --run {folder}`, end it with "
        f"`farandole stop --run {folder}` (a script that trains by itself: end its process), or use another folder"
    )


# --- tail -------------------------------------------------------------------------------------------------------------
#
# Reads the complete lines that were added to a run's metrics.jsonl.

READ_BYTES = 8 * 1024 * 1024  # at a time: a million lines take many calls, so that progress can be shown


class Tail:
    """A reader of the file at `path`, which may not exist yet. A file that became shorter is read from its end on.

    Attributes:
        at: bytes that have been read, of `size`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.at = self.size = 0

    def lines(self) -> list[bytes]:
        """The next lines, with their ends; empty: there are no more for now.

        Raises:
            NotPrivate: the file belongs to another user.
            OSError: it can't be read.
        """
        try:
            with open(self._path, "rb", opener=opener) as file:
                self.size = file.seek(0, 2)
                self.at = min(self.at, self.size)
                file.seek(self.at)
                data = file.read(READ_BYTES)
        except FileNotFoundError:
            return []
        complete = data.rfind(b"\n") + 1
        self.at += complete or (len(data) if len(data) == READ_BYTES else 0)  # no line of a run is this long
        return data[:complete].splitlines(keepends=True)


# --- observer ---------------------------------------------------------------------------------------------------------
#
# The interface of everything that watches a run by its lines: TensorBoard, Prometheus, Weights & Biases, or your own.
#
# An observer gets the lines of metrics.jsonl, each with its position in the file: a *cursor*, from which it continues
# after a restart. Invariant: it only watches. Whatever it raises is reported once, costs nobody else anything, and is
# never an error of the run; the caller ensures this (`observe/export_process.py` from the file,
# `coordinator/observers.py` as lines come).


class Observer(ABC):
    """An observer, called from one thread. `name`: its name in messages to users."""

    name: str

    def begin(self) -> int:
        """Prepare, and return the byte of metrics.jsonl from which lines are wanted. Called again after an error."""
        return 0

    @abstractmethod
    def take(self, line: Line, at: int = 0) -> None:
        """The next line, which begins at byte `at`."""

    def flush(self) -> None:
        """No more lines for now: make the received ones visible."""
        return

    def close(self) -> None:
        """No more lines will come."""
        return


class RecordingObserver(Observer):
    """Stores the lines that it gets, for tests."""

    name = "kept"

    def __init__(self) -> None:
        self.lines: list[Line] = []

    def take(self, line: Line, at: int = 0) -> None:
        del at
        self.lines.append(line)
