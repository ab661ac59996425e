"""The signals that are a worker's notices, and the handlers that its script, or a library in it, sets for them.

SIGTERM to a worker means: leave between two steps. A handler of the script's own in its place would end the script in
the middle of a step (`sys.exit(0)`), and with it the run, or have the notice ignored. So `signal.signal` for such a
signal notes the handler and says so in the log; the signal stays the worker's notice. The noted handler is called once
the worker has left, just before its process ends: what it saves, it can still save. Whatever it raises changes nothing.
`signal.getsignal`, and what `signal.signal` returns, are as the script expects them. Forked children are no workers:
there both do what they always do.

Not covered: a handler that a library in C installs by itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

_log = logging.getLogger(__name__)


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
