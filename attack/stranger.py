"""A process of another user, where root is to be had: it has nothing of the run's but what it is told.

It is a fork of this process, so that it needs no file that the other user may not read; it gives up root, groups and
working directory before it does anything. What it got hold of (every byte that was sent to it, that it read from files
and from /proc) it returns, and that comes back through a pipe as bytes: the attacker is believed in nothing else.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  what sockets would import when they are used: the other user may not be able to
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType

from attack.base import NotMade

NOBODY = 65534
IS_OTHER = os.geteuid() == 0  # the same user else: of what only a file's mode forbids, nothing can be said
CHUNK = 1 << 16


class Stranger:
    """`act(*arguments)` in a process of another user; a context: on leaving it the process is gone."""

    def __init__(self, act: Callable[..., bytes], *arguments: object) -> None:
        sys.stdout.flush()
        self._pipe, ours = os.pipe()
        self.pid = os.fork()
        self._got = b""
        self._over = False
        if self.pid == 0:
            _be(act, arguments, ours)
        os.close(ours)

    def __enter__(self) -> Stranger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._pipe)

    def got(self, seconds: float) -> bytes:
        """What it returned. Raises NotMade if it does not end in time, or failed of itself."""
        deadline = time.monotonic() + seconds
        while not self._over:
            if not select.select([self._pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise NotMade(f"the stranger is not done after {seconds:g} s")
            data = os.read(self._pipe, CHUNK)
            self._got += data
            self._over = not data
        if self._got[:1] != b"+":
            raise NotMade(f"the stranger failed: {self._got[1:].decode(errors='replace')}")
        return self._got[1:]


def _be(act: Callable[..., bytes], arguments: tuple[object, ...], pipe: int) -> None:
    """Never returns."""
    try:
        if IS_OTHER:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        os.chdir("/")
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        told = b"+" + act(*arguments)
    except BaseException:  # noqa: BLE001  whatever it is, it is told
        told = b"-" + traceback.format_exc().encode()
    with contextlib.suppress(OSError):
        while told:
            told = told[os.write(pipe, told) :]
    os._exit(0)
