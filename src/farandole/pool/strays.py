"""What a worker's script has started in a session of its own, and left: it is found, and ended with its worker.

A worker's process group is killed when the worker has exited, but whoever made a session of its own (a daemon) is in
none of ours. On Linux this process therefore asks to be the *subreaper* of all that it starts, directly or not:
when the parent of such a process ends, it becomes a child of ours instead of the system's. Whose it was says the
environment that it began with, in which its worker's name stands. It is ended once that worker has exited. One that has
cleared its environment might be somebody else's (children that a shell left us when it became this process): it is left
alone.

Left out: a word about those; other systems than Linux, guests (`farandole join`), and a `farandole run` that is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
END_S = 2.0  # for the last ones to be gone
POLL_S = 0.01
SHOWN = 80  # characters of a command line


class Strays:
    """Build it before the first worker is started. `tell` gets a line about each process that is ended."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._ours: dict[int, str] = {}  # strays, and whose
        self._sessions: set[int] = set()  # of workers
        self._before: set[int] = set()
        self._linux = sys.platform == "linux"
        if self._linux:
            self._before = set(_children())
            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def began(self, session: int) -> None:
        """A worker was started, in a session of its own."""
        self._sessions.add(session)

    def sweep(self, workers: Collection[str], running: Collection[str]) -> bool:
        """End those of `workers` that are not `running` any more. Whether there are any that have not gone yet."""
        if not self._linux:
            return False
        left = False
        for pid in _children():
            stat = _stat(pid)
            if stat is None or pid in self._before or pid in self._sessions:
                continue
            dead, session = stat
            if dead:
                if pid in self._ours or session in self._sessions:
                    _reap(pid)
                    self._ours.pop(pid, None)
                continue
            worker = self._ours.get(pid) or _worker(pid)
            if worker not in workers:
                continue
            told = pid in self._ours or session in self._sessions  # of the worker's own: killed with it already
            self._ours[pid] = worker
            if worker not in running:
                left = True
                if not told:
                    self._tell(f"process {pid}, which {worker} left behind, is ended: {_command(pid)}")
                _kill(pid)
        return left

    def end(self, workers: Collection[str]) -> None:
        """No worker is running: wait until nothing of theirs is."""
        deadline = time.monotonic() + END_S
        while self.sweep(workers, ()) and time.monotonic() < deadline:
            time.sleep(POLL_S)


def _children() -> list[int]:
    """Of this process, those of all its threads."""
    found: list[int] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(pid) for pid in path.read_text().split()]
    return found


def _stat(pid: int) -> tuple[bool, int] | None:
    """Whether it has ended and waits to be reaped, and its session."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0] in "ZX", int(fields[3])


def _worker(pid: int) -> str:
    """The worker in whose environment it began, "" for none."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    mark = b"FARANDOLE_WORKER="
    return next((item.removeprefix(mark).decode(errors="replace") for item in environ if item.startswith(mark)), "")


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()[:SHOWN]
    except OSError:
        return ""


def _kill(pid: int) -> None:
    """It is a child that nobody has reaped, so its number is not another's."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
