"""A process group that ends when this process ends, kill -9 included, or when it is told to.

The group's leader holds the read end of a pipe whose only write end is here, and has asked the kernel to send SIGKILL
to the group for what happens to it (fcntl(2), F_SETSIG). Whatever closes the write end, the kernel ends the group.
Other systems than Linux have no such signal: there the processes see to their own end (`parent.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import sys


class Lifeline:
    """`read_end` is for the group's leader; close ours with `handed_over`. Raises OSError: there are no descriptors.

    It owns both ends, and closes each once, however often it is asked: a number that is closed twice is another's.
    """

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()

    @property
    def read_end(self) -> int:
        assert self._read_end >= 0, "it was handed over"
        return self._read_end

    def handed_over(self) -> None:
        ours, self._read_end = self._read_end, -1
        if ours >= 0:
            os.close(ours)

    def cut(self) -> None:
        """End the group, if it is still there."""
        ours, self._write_end = self._write_end, -1
        if ours >= 0:
            os.close(ours)

    def abandon(self) -> None:
        """Nobody has said whether it was handed over: end the group, if there is one."""
        self.handed_over()
        self.cut()


def hang_on(read_end: int, group: int) -> None:
    """Have the kernel end process group `group` when the lifeline is cut, as long as somebody in it keeps it open."""
    if sys.platform == "linux":
        fcntl.fcntl(read_end, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(read_end, fcntl.F_SETOWN, -group)
        fcntl.fcntl(read_end, fcntl.F_SETFL, fcntl.fcntl(read_end, fcntl.F_GETFL) | os.O_ASYNC)


def is_cut(read_end: int) -> bool:
    poll = select.poll()
    poll.register(read_end, 0)  # hang-ups alone
    return bool(poll.poll(0))


def kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter: macOS, of a group of zombies
        os.killpg(group, signal.SIGKILL)
