"""Locks on files: held by a process for as long as it has the file open, and released by the kernel when it dies.

A file system may keep no locks (Lustre mounted without `flock`, NFS mounted without its lock service, some FUSE file
systems). Then nobody can know whether another process holds one. That is an error of its own, and never taken for "held
by another" or for "held by us": both would be wrong, and the second would let two runs into one folder.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from farandole.errors import UsageError

_HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


class NoFileLocks(UsageError):
    """The file system of `place` keeps no locks; `remedy` says what to do."""

    def __init__(self, place: Path | str, error: OSError, remedy: str) -> None:
        super().__init__(f"{place} is on a file system that keeps no locks ({error.strerror}): {remedy}")


def take(handle: int, place: Path | str, remedy: str, *, wait: bool = False) -> bool:
    """Take the lock on an open file. False: another process has it. `wait`: until that one has released it.

    Raises:
        NoFileLocks: the file system of `place` keeps no locks.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno in _HELD:
            return False
        raise NoFileLocks(place, error, remedy) from None
    return True


def held(handle: int) -> bool:
    """True if another process holds the lock on an open file. False also where the file system keeps no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _HELD
    fcntl.flock(handle, fcntl.LOCK_UN)
    return False


def release_in_children(handle: int) -> None:
    """Have processes that are forked from this one without an exec close their copy of a held lock's file, so that the
    lock does not outlive this process in them.
    """
    file = _identity(handle)

    def close() -> None:
        if _identity(handle) == file:  # else the number is another file's by now
            os.close(handle)

    os.register_at_fork(after_in_child=close)


def _identity(handle: int) -> tuple[int, int] | None:
    try:
        info = os.fstat(handle)
    except OSError:
        return None
    return info.st_dev, info.st_ino
