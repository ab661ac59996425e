"""What lies where in a run's folder. Files have mode 0600, folders 0700 (see `platform/files.py`)."""

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
TICKETS = "tickets"  # those issued for others, written by `farandole ticket`
CERTIFICATE = "tls.pem"  # the run's key and certificate, where it serves others than loopback
RECORD = "coordinator.json"  # its pid and address, written last
METRICS = "metrics.jsonl"
JOURNAL = "journal.sqlite"
CHECKPOINTS = "checkpoints"  # unless they are elsewhere
CODE = "code"  # the script, and what the workers have imported from its folder, as they were (see `code/snapshot.py`)
PACK = "code.tar.gz"  # the working folder as other hosts get it (see `code/pack.py`)
LEDGER = "ledger"  # ID.jsonl for each worker, with --ledger
BENCH = "bench"  # ID.jsonl for each worker of `farandole bench`
LOGS = "logs"  # ID.log for each worker of the local pool
ASIDE = "farandole, aside: "  # begins lines of these that nobody is shown
COORDINATOR_LOG = "coordinator.log"
EXPORTS_LOG = "exports.log"  # of the process that writes for TensorBoard and Weights & Biases
TENSORBOARD = "tensorboard"  # unless it is elsewhere
WANDB = "wandb"
LOCK = "lock"  # held by `farandole run` for as long as it lives
FILES = (
    *(SETTINGS, TICKET, CERTIFICATE, RECORD, METRICS, COORDINATOR_LOG, EXPORTS_LOG, LOCK, PACK),
    *(JOURNAL, f"{JOURNAL}-wal", f"{JOURNAL}-shm", f"{JOURNAL}-journal"),
)
FOLDERS = (CHECKPOINTS, CODE, LEDGER, LOGS, TENSORBOARD, WANDB)


# --- folder lock ------------------------------------------------------------------------------------------------------
#
# The lock of a run's folder: one process at a time trains in it, or accompanies the run that does.
#
# `farandole run` holds it for as long as it lives, and so does a script that trains by itself with FARANDOLE_FOLDER. A
# process id alone proves nothing, since ids are used again; a lock ends with its process. The lock's file names its
# holder, for people.

_REMEDY = (
    "nothing there could keep a second run out of this folder; name a folder on another file system (a local disk), "
    "and the place for checkpoints there if they are to stay (--checkpoints)"
)


def hold(folder: Path) -> int:
    """Take the run's folder for this process, until it ends. Returns the lock's handle.

    Raises:
        RunFolderInUse: another process has it.
        NoFileLocks: its file system keeps no locks.
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


def held(folder: Path) -> bool:
    """True while a process holds the folder: a `farandole run`, coordinator or not, or a script that trains alone."""
    try:
        with open(folder / LOCK, "rb", opener=files.opener) as file:
            return files.held(file.fileno())
    except OSError:
        return False


def in_use(folder: Path) -> RunFolderInUse:
    """The error for who wants a folder that is held."""
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
# The whole lines that a run's metrics.jsonl has got since they were last asked for.

READ_BYTES = 8 * 1024 * 1024  # at a time: a million lines take many turns, and somebody can be told how far it is


class Tail:
    """Of the file at `path`, which may not be there yet. A file that has become shorter is read from its end on.

    Attributes:
        at: bytes that have been read, of `size`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.at = self.size = 0

    def lines(self) -> list[bytes]:
        """The next ones, with their ends; none: there are no more for now.

        Raises:
            NotPrivate: the file is another's.
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
        whole = data.rfind(b"\n") + 1
        self.at += whole or (len(data) if len(data) == READ_BYTES else 0)  # no line of a run is as long
        return data[:whole].splitlines(keepends=True)


# --- observer ---------------------------------------------------------------------------------------------------------
#
# The seam of everything that watches a run by its lines: TensorBoard, Prometheus, Weights & Biases, one of yours.
#
# An observer is handed the lines of metrics.jsonl, each with the place from which on the file has it: a *cursor*, by
# which it says where it goes on when it begins again. Invariant: it only watches. Whatever it raises is told once,
# costs nobody else anything, and is never an error of the run's; whoever hands it lines sees to that
# (`observe/export_process.py` from the file, `coordinator/observers.py` as they come).


class Observer(ABC):
    """Called from one thread. `name` is what people are told of it by."""

    name: str

    def begin(self) -> int:
        """Get ready, and say from which byte of metrics.jsonl on lines are wanted. Called again after an error."""
        return 0

    @abstractmethod
    def take(self, line: Line, at: int = 0) -> None:
        """The next line, which begins at byte `at`."""

    def flush(self) -> None:
        """No more lines for now: what was taken is to be seen."""
        return

    def close(self) -> None:
        """No more at all."""
        return


class RecordingObserver(Observer):
    """Keeps what it is handed, for tests."""

    name = "kept"

    def __init__(self) -> None:
        self.lines: list[Line] = []

    def take(self, line: Line, at: int = 0) -> None:
        del at
        self.lines.append(line)
