"""Errors in words where the system refuses what loader processes need: shared memory, open files, processes.

The locks of their queues are files in /dev/shm, and so is each tensor that torch sends. A container often has 64 MB
there, or mounts it read-only, and the errors of multiprocessing and torch name neither the place nor the remedy.
`check` asks for the locks of a queue before anything is started. What it can't know is explained when it comes
(`explained`): a place that becomes full, a limit that more processes reach.
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
_TORCHS = re.compile(r"unable to [^\n]*</?torch_[^\n]*\((\d+)\)")  # what torch says of a tensor's file, and its errno
_LIMITS = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)


def check(without: str = WITHOUT) -> None:
    """Ask for what a queue between processes needs, and let go of it; 0.1 ms. `without`: how to do without.

    Raises:
        UsageError: the system refuses it.
    """
    try:
        multiprocessing.get_context("fork").Queue().close()  # where it is forked, no tracking process is started
    except OSError as error:
        raise UsageError(_said(error.errno or 0, str(error), without)) from error
    except ImportError as error:  # a platform without such locks
        raise UsageError(_said(errno.ENOSYS, str(error), without)) from error


def explained(error: BaseException) -> BaseException:
    """`error`; or, if the system has refused shared memory, files or processes, one that says so, and what to do."""
    number = refused(error)
    if number is None and isinstance(error, OSError) and error.errno in (errno.ENOSPC, *_LIMITS):
        number = error.errno
    return error if number is None else UsageError(_said(number, str(error)))


def refused(error: BaseException) -> int | None:
    """The errno with which the system has refused torch the memory of a tensor; None for all other errors."""
    found = _TORCHS.search(str(error)) if isinstance(error, RuntimeError) else None
    return int(found[1]) if found else None


def _said(number: int, error: str, without: str = WITHOUT) -> str:
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
        found = os.statvfs(PLACE)
    except OSError as away:
        return (
            f"loader processes need shared memory, and {PLACE} can't be used: {away.strerror}; mount it "
            f"(mount -t tmpfs -o size=1g tmpfs {PLACE}, or docker run --shm-size 1g), or {without}"
        )
    if number == errno.ENOSPC:
        size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
        files = ", and no more files may be made there (nr_inodes)" if found.f_files and not found.f_favail else ""
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
        remedy = "see to it, and to the limits of this process (ulimit -a)"
    return (
        f"loader processes need shared memory, and {PLACE} can't be written: {os.strerror(number)}; {remedy}, "
        f"or {without}"
    )
