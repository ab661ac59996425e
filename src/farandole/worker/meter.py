"""What a worker's time goes to, measured where the training thread passes anyway.

The thread is in one class of `membership/classes.py` at a time, and `enter`s the next one as it goes: where it asks for
a micro-batch, where it has one, where it waits, where it goes on. The clock is read once at each such change, some ten
times a step, and belongs to the class before it up to then. So no moment is in two classes and none in none: the
classes add up to the time since the process began, exactly, in whole nanoseconds.

It is the wall's time of the thread that trains: on an accelerator, of the thread that launches the work. What other
threads do beside it (sending, saving, fetching) is in no class, for it takes none of the worker's time. Durations are
of the monotonic clock. The spans themselves are kept for a trace alone (`tracer.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from farandole.membership.classes import SAID, TimeClass


class Meter:
    """Written by the training thread, read by that of the connection. It begins in `start`, where the worker has been
    for `already_s` seconds.

    Attributes:
        current: the class in which it is.
    """

    def __init__(self, already_s: float = 0.0, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self.current: TimeClass = "start"
        self._spent = dict.fromkeys(SAID, 0)  # ns
        self._since = clock() - round(1e9 * already_s)
        self._keep: Callable[[TimeClass, int, int], None] | None = None

    def enter(self, name: TimeClass) -> None:
        """From now on it is in `name`."""
        if name == self.current:
            return
        with self._lock:
            self._pass()
            self.current = name

    def now(self) -> int:
        return self._clock()

    def cut(self, keep: Callable[[TimeClass, int, int], None] | None) -> int:
        """What it is in ends here, and begins again. From here on each such span (class, beginning, end; nanoseconds)
        goes to `keep`, as it ends. Returns when that is.
        """
        with self._lock:
            self._pass()
            self._keep = keep
            return self._since

    def _pass(self) -> None:
        now = self._clock()
        self._spent[self.current] += now - self._since
        if self._keep is not None and now > self._since:
            self._keep(self.current, self._since, now)
        self._since = now

    def paused(self) -> int:
        """Nanoseconds so far in which a view was stopped or took effect, or too few workers were there."""
        with self._lock:
            spent = self._spent["pause"] + self._spent["few"]
            return spent + (self._clock() - self._since if self.current in ("pause", "few") else 0)

    def said(self) -> tuple[int, ...]:
        """So far, in microseconds, in the order of `SAID`."""
        with self._lock:
            spent = dict(self._spent)
            spent[self.current] += self._clock() - self._since
        return tuple(ns // 1000 for ns in spent.values())
