"""Clear errors if the system refuses what loader processes need: shared memory, open files, processes.

The locks of their queues are files in /dev/shm, and so is each tensor that torch sends. A container often has 64 MB
there, or mounts it read-only, and the errors of multiprocessing and torch name neither the place nor the remedy.
`check` requests the locks of a queue before any process is started. `explained` translates errors that `check` can't
foresee: a full /dev/shm, a limit that more processes reach.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import resource
import sys
from typing import TYPE_CHECKING

from farandole.errors import UsageError

if TYPE_CHECKING:
    pass


PLACE = "/dev/shm"
WITHOUT = "load with num_workers=0"
_TORCHS = re.compile(r"unable to [^\n]*</?torch_[^\n]*\((\d+)\)")  # torch's error about a tensor's file, with its errno
_LIMITS = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)


def check(without: str = WITHOUT) -> None:
    """Allocates and releases what a queue between processes needs; takes 0.1 ms. `without`: the alternative to name.

    Raises:
        UsageError: the system refuses it.
    """
    try:
        multiprocessing.get_context("fork").Queue().close()  # the fork context starts no tracking process
    except OSError as error:
        raise UsageError(_message(error.errno or 0, str(error), without)) from error
    except ImportError as error:  # a platform without such locks
        raise UsageError(_message(errno.ENOSYS, str(error), without)) from error


def explained(error: BaseException) -> BaseException:
    """Returns `error`; if the system has refused shared memory, files or processes, a `UsageError` with the remedy."""
    number = refused(error)
    if number is None and isinstance(error, OSError) and error.errno in (errno.ENOSPC, *_LIMITS):
        number = error.errno
    return error if number is None else UsageError(_message(number, str(error)))


def refused(error: BaseException) -> int | None:
    """Returns the errno if the system has refused torch the memory of a tensor; None for all other errors."""
    match = _TORCHS.search(str(error)) if isinstance(error, RuntimeError) else None
    return int(match[1]) if match else None


def _message(number: int, error: str, without: str = WITHOUT) -> str:
    if number in (errno.EMFILE, errno.ENFILE):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return (
            f"loader processes need more open files than the {limit} that a process may have; raise the limit "
            f"(ulimit -n), take fewer processes and a smaller prefetch_factor, or {without}"
        )
    if number in (errno.EAGAIN, errno.ENOMEM):
        return (
            f"loader processes can't be started: {os.strerror(number)}; take fewer of them, raise the limit of "
            f"processes and memory (ulimit -u, a container's pids and memory), or {without}"
        )
    if sys.platform != "linux":
        return f"loader processes get no shared memory ({error}); {without}"
    try:
        space = os.statvfs(PLACE)
    except OSError as unavailable:
        return (
            f"loader processes need shared memory, and {PLACE} can't be used: {unavailable.strerror}; mount it "
            f"(mount -t tmpfs -o size=1g tmpfs {PLACE}, or docker run --shm-size 1g), or {without}"
        )
    if number == errno.ENOSPC:
        size, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
        files = ", and no more files may be made there (nr_inodes)" if space.f_files and not space.f_favail else ""
        return (
            f"loader processes need more shared memory than is free: {PLACE} has {free / 1e6:.1f} MB of "
            f"{size / 1e6:.1f}{files}; make it larger (docker run --shm-size 1g, or mount -o remount,size=1g {PLACE}), "
            f"or {without}"
        )
    if number == errno.EROFS:
        remedy = f"mount it for writing (mount -o remount,rw {PLACE}, or docker run --tmpfs {PLACE}:rw,size=1g)"
    elif number in (errno.EACCES, errno.EPERM):
        remedy = f"let this user write there (chmod 1777 {PLACE})"
    else:
        remedy = "check its mount, and the limits of this process (ulimit -a)"
    return (
        f"loader processes need shared memory, and {PLACE} can't be written: {os.strerror(number)}; {remedy}, "
        f"or {without}"
    )
