"""The exit of a worker's process: it ends at once, or it restarts in place.

A worker that was evicted without a fault of its own (its host was unreachable, or frozen) may join again. A pool
replaces its own evicted workers. An external worker has no pool that restarts it, so it restarts itself: the process
executes its own command line again, with the same pid, so that its parent process still controls it. Each further
restart waits twice as long, up to a minute, unless the worker had been in the run for a long time.

The process ends by `os._exit` or `exec`, because a thread of an abandoned view may still wait on a frozen peer, and
can't be woken.
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

from farandole.control.ticket import read_stdin
from farandole.protocol.coordinator.state import EXIT_EVICTED

# --- process exit -----------------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)
LONG_S = 600.0  # after so long in the run, the next restart waits like the first
LONGEST_S = 60.0
EXIT_GRACE_S = 5.0  # after Goodbye, for a busy training thread
START_GRACE_S = 1.0  # for a training thread that has never trained, and builds its model or opens its data
SAVE_GRACE_S = 600.0  # after the lease, for a training thread that saves
_again: Callable[[], None] | None = None


def leave(code: int) -> NoReturn:
    """Ends this process with exit code `code`; restarts it instead if it was evicted and `come_back` was called."""
    if code == EXIT_EVICTED and _again is not None:
        with contextlib.suppress(OSError):
            _again()
    os._exit(code)


def exit_after_grace(code: int, *, saves: bool, trains: bool, within_s: float | None = None) -> None:
    """Ends the process after a grace period, in case the training thread is busy and does not exit by itself.

    The period depends on whether the thread saves a checkpoint or trains. `within_s` overrides it, in seconds.
    """
    grace_s = SAVE_GRACE_S if saves else EXIT_GRACE_S if trains else START_GRACE_S
    grace_s = grace_s if within_s is None else within_s
    watchdog = threading.Timer(grace_s, leave, (code,))
    watchdog.daemon = True
    watchdog.start()


def come_back(ticket: str, returns: int) -> None:
    """Makes `leave` restart this process if it is evicted.

    `ticket` is the source of the ticket, "-" for standard input. `returns` is the number of restarts so far.
    """
    global _again
    folder, environ, began = os.getcwd(), dict(os.environ), time.monotonic()

    def again() -> None:
        times = 1 if time.monotonic() - began > LONG_S else returns + 1
        _log.warning("this worker was evicted; it joins again in %g s", _pause_s(times))
        if ticket == "-":
            set_stdin(read_stdin())
        os.chdir(folder)
        _keep_nothing_open()
        os.execve(sys.executable, sys.orig_argv, {**environ, "FARANDOLE_RETURNS": str(times)})

    _again = again


def pause(returns: int) -> None:
    """Waits before joining again. SIGTERM or SIGINT ends the process meanwhile, because it is in no view."""
    if returns:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _end)
        time.sleep(_pause_s(returns))


def _pause_s(returns: int) -> float:
    return min(2.0 ** min(returns - 1, 10), LONGEST_S)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    del number, frame
    raise SystemExit(0)


def set_stdin(content: bytes) -> None:
    """Makes `content` the standard input of this process. It must fit into a pipe's buffer."""
    reading, writing = os.pipe()
    os.write(writing, content)
    os.close(writing)
    os.dup2(reading, 0)


def _keep_nothing_open() -> None:
    """Marks all descriptors to be closed by `exec`, including sockets of C++ libraries, which peers would see open."""
    for name in os.listdir("/dev/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):
                os.set_inheritable(int(name), False)


def lower_priority() -> None:
    """Lowers the CPU priority of a leaving worker, so that its exit does not take time from the workers that train.

    Most kernels schedule by sessions (autogroup): a process's nice value counts only within its session, and the
    session has a value of its own. A pool's worker leads a session, so both are set. One that `farandole join` began
    may be in the session of a terminal, whose other processes must not become slow: its session is left as it is.
    Freeing its memory takes about 50 ms of a core; on busy cores it gets a thirtieth of the time.
    """
    with contextlib.suppress(AttributeError, OSError):
        os.nice(19)
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text("15")


# --- script signals ---------------------------------------------------------------------------------------------------
#
# The signals that are preemption notices of a worker, and the handlers that its script or a library sets for them.
#
# SIGTERM to a worker means: leave between two steps. A handler of the script would end the script in the middle of a
# step (`sys.exit(0)`), and with it the run, or would ignore the notice. So `signal.signal` for such a signal stores the
# handler and logs that; the signal stays the worker's notice. The stored handler is called after the worker has left,
# just before its process ends, so it can still save its data. Exceptions of the handler are ignored.
# `signal.getsignal`, and the result of `signal.signal`, are what the script expects. In forked children, which are not
# workers, both functions behave as usual.
#
# Not covered: a handler that a C library installs by itself.


class ScriptSignals:
    """The notice signals of this process. `handlers` maps each signal to the function that handles its notice.

    Attributes:
        noted: the handlers that the script has set, by signal.
        arrived: the signals that have arrived, in order.
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
        """The replacement of `signal.getsignal`."""
        if self._mine(signalnum) and signalnum in self.noted:
            return self.noted[signal.Signals(signalnum)]
        return self._getsignal(signalnum)

    def _note(self, signalnum: int, handler: Any) -> Any:
        """The replacement of `signal.signal`."""
        if not self._mine(signalnum):
            return self._signal(signalnum, handler)
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("signal only works in main thread of the main interpreter")
        if not callable(handler) and handler not in (signal.SIG_IGN, signal.SIG_DFL):
            raise TypeError("signal handler must be signal.SIG_IGN, signal.SIG_DFL, or a callable object")
        number, before = signal.Signals(signalnum), self._look(signalnum)
        if number not in self.noted:
            _log.warning(
                "the script sets a handler for %s: the signal still makes this worker leave between two steps, and the "
                "script's handler is called after it has left", number.name,
            )  # fmt: skip
        self.noted[number] = handler
        return before

    def call_noted(self) -> None:
        """Calls the script's handlers of the signals that have arrived, after the worker has left."""
        for number in dict.fromkeys(self.arrived):
            handler = self.noted.get(number)
            if callable(handler) and handler != self._arrive and not isinstance(handler, signal.Handlers):
                with contextlib.suppress(BaseException):
                    handler(int(number), None)
