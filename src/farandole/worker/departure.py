"""How a worker's process ends: at once, or by beginning anew in its own place.

A worker that was evicted though it had done nothing wrong (its host was away, or stood still) is as good as any other.
Those of a pool the pool replaces; a guest, whom nobody started again, comes back by itself: the process executes its
own command line once more, under the same number, so that whoever started it goes on holding it. Each further time it
waits twice as long, up to a minute, unless it had been with the run for long.

By `os._exit` or `exec`, because a thread of an abandoned view may still wait on a frozen peer and can't be woken.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from farandole.control.ticket import given
from farandole.protocol.coordinator.state import EXIT_EVICTED

# --- departure --------------------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)
LONG_S = 600.0  # after so long, the next return is like the first
LONGEST_S = 60.0
EXIT_GRACE_S = 5.0  # after Goodbye, for a training thread that is busy
START_GRACE_S = 1.0  # for one that has never trained, and is building its model or opening its data
SAVE_GRACE_S = 600.0  # after the lease, for one that saves
_again: Callable[[], None] | None = None


def leave(code: int) -> NoReturn:
    """End this process; or begin it anew, if that was asked for and it was evicted."""
    if code == EXIT_EVICTED and _again is not None:
        with contextlib.suppress(OSError):
            _again()
    os._exit(code)


def leave_in_the_end(code: int, *, saves: bool, trains: bool, within_s: float | None = None) -> None:
    """The training thread has been told to go; if it is busy for longer than its grace, the process ends under it.

    `within_s`: there is no more time than that.
    """
    grace_s = SAVE_GRACE_S if saves else EXIT_GRACE_S if trains else START_GRACE_S
    grace_s = grace_s if within_s is None else within_s
    watchdog = threading.Timer(grace_s, leave, (code,))
    watchdog.daemon = True
    watchdog.start()


def come_back(ticket: str, returns: int) -> None:
    """Ask for it. `ticket` is where the ticket was found; there have been so many `returns`."""
    global _again
    folder, environ, began = os.getcwd(), dict(os.environ), time.monotonic()

    def again() -> None:
        times = 1 if time.monotonic() - began > LONG_S else returns + 1
        _log.warning("joining again in %g s", _pause_s(times))
        if ticket == "-":
            feed(given())
        os.chdir(folder)
        _keep_nothing_open()
        os.execve(sys.executable, sys.orig_argv, {**environ, "FARANDOLE_RETURNS": str(times)})

    _again = again


def pause(returns: int) -> None:
    """Before joining again, as long as is due. A notice meanwhile ends the process: nobody needs to agree."""
    if returns:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _end)
        time.sleep(_pause_s(returns))


def _pause_s(returns: int) -> float:
    return min(2.0 ** min(returns - 1, 10), LONGEST_S)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    del number, frame
    raise SystemExit(0)


def feed(content: bytes) -> None:
    """Have `content`, less than a pipe holds, on standard input."""
    reading, writing = os.pipe()
    os.write(writing, content)
    os.close(writing)
    os.dup2(reading, 0)


def _keep_nothing_open() -> None:
    """The sockets of C++ libraries, which a peer would still find open, too."""
    for name in os.listdir("/dev/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):
                os.set_inheritable(int(name), False)


def stand_back() -> None:
    """A leaver has nothing left to do but to end, which must not take the cores that the others train on.

    Where the kernel shares cores out by sessions, as most do, a nice value counts within the session alone, and the
    session's own counts among them: the worker leads one. To take its memory down takes some 50 ms of a core; of cores
    that are busy it has a thirtieth.
    """
    with contextlib.suppress(AttributeError, OSError):
        os.nice(19)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("15")


# --- script signals ---------------------------------------------------------------------------------------------------
#
# The signals that are a worker's notices, and the handlers that its script, or a library in it, sets for them.
#
# SIGTERM to a worker means: leave between two steps. A handler of the script's own in its place would end the script
# in the middle of a step (`sys.exit(0)`), and with it the run, or have the notice ignored. So `signal.signal` for
# such a signal notes the handler and says so in the log; the signal stays the worker's notice. The noted handler is
# called once the worker has left, just before its process ends: what it saves, it can still save. Whatever it raises
# changes nothing. `signal.getsignal`, and what `signal.signal` returns, are as the script expects them. Forked
# children are no workers: there both do what they always do.
#
# Not covered: a handler that a library in C installs by itself.


class ScriptSignals:
    """Of this process. `handlers`: by signal, what its notices call.

    Attributes:
        noted: by signal, what the script has set.
        arrived: signals that have, in order.
    """

    def __init__(self, handlers: dict[signal.Signals, Callable[[int, Any], None]]) -> None:
        self.noted: dict[signal.Signals, Any] = {}
        self.arrived: list[signal.Signals] = []
        self._handlers = handlers
        self._process = os.getpid()
        self._signal, self._getsignal = signal.signal, signal.getsignal
        for number in handlers:
            signal.signal(number, self._arrive)
        signal.signal, signal.getsignal = self._note, self._look  # type: ignore[assignment]

    def _arrive(self, number: int, frame: Any) -> None:
        self.arrived.append(signal.Signals(number))
        self._handlers[signal.Signals(number)](number, frame)

    def _mine(self, number: int) -> bool:
        return number in self._handlers and os.getpid() == self._process

    def _look(self, signalnum: int) -> Any:
        """`signal.getsignal`."""
        if self._mine(signalnum) and signalnum in self.noted:
            return self.noted[signal.Signals(signalnum)]
        return self._getsignal(signalnum)

    def _note(self, signalnum: int, handler: Any) -> Any:
        """`signal.signal`."""
        if not self._mine(signalnum):
            return self._signal(signalnum, handler)
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("signal only works in main thread of the main interpreter")
        if not callable(handler) and handler not in (signal.SIG_IGN, signal.SIG_DFL):
            raise TypeError("signal handler must be signal.SIG_IGN, signal.SIG_DFL, or a callable object")
        number, before = signal.Signals(signalnum), self._look(signalnum)
        if number not in self.noted:
            _log.warning(
                "the script sets a handler of its own for %s: the signal stays this worker's notice to leave between "
                "two steps, and the handler is called when it has left", number.name,
            )  # fmt: skip
        self.noted[number] = handler
        return before

    def call_noted(self) -> None:
        """The worker has left: call the script's handlers of the signals that have arrived."""
        for number in dict.fromkeys(self.arrived):
            handler = self.noted.get(number)
            if callable(handler) and handler != self._arrive and not isinstance(handler, signal.Handlers):
                with contextlib.suppress(BaseException):
                    handler(int(number), None)
