"""The lock of a run's folder: one process at a time trains in it, or accompanies the run that does.

`farandole run` holds it for as long as it lives, and so does a script that trains by itself with FARANDOLE_FOLDER. A
process id alone proves nothing, since ids are used again; a lock ends with its process. The lock's file names its
holder, for people.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from farandole.control.run_folder import LOCK
from farandole.errors import RunFolderInUse
from farandole.platform import file_lock, private

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
    handle = private.opener(str(folder / LOCK), os.O_RDWR | os.O_CREAT)
    try:
        if not file_lock.take(handle, folder, _REMEDY):
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
        with open(folder / LOCK, "rb", opener=private.opener) as file:
            return file_lock.held(file.fileno())
    except OSError:
        return False


def in_use(folder: Path) -> RunFolderInUse:
    """The error for who wants a folder that is held."""
    holder = ""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        holder = private.read(folder / LOCK)[:200].decode()
    by = f" ({holder})" if holder.startswith("process ") and holder.isprintable() else ""
    return RunFolderInUse(
        f"a run is alive in {folder}{by}; see `farandole status --run {folder}`, end it with "
        f"`farandole stop --run {folder}` (a script that trains by itself: end its process), or use another folder"
    )
