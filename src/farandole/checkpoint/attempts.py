"""Calls to a store of checkpoints: within a limit, tried again where that can help, and never waited for in silence.

- *What is tried again*: whatever a remote store's client raises, but for "there is no such thing" and "you may not". Of
  a folder: what a network file system or a disk may have for a moment (EIO, ESTALE, a timeout), and not a full disk. Up
  to `attempts` times in `limit_s`, after pauses that double and vary, so that many runs do not come back at once.
- *What is told*: after `told_s` without an answer, the place and what it was asked, once a call.
- *What is given up*: a call that does not come back within `limit_s`. It runs on a thread of its own, which is left
  behind then: a system call on a dead mount can't be taken back. Where no thread is to be had, it is made without a
  limit.

The pauses come from a generator of this module's own: Python's is the script's.
"""

from __future__ import annotations

import errno
import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from farandole.errors import FarandoleError

T = TypeVar("T")

_log = logging.getLogger(__name__)
_chance = random.Random()
_FINAL = (
    FileNotFoundError,
    PermissionError,
    FileExistsError,
    NotADirectoryError,
    IsADirectoryError,
    ImportError,
    TypeError,
    MemoryError,
    NotImplementedError,
)
_PASSING = {
    errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ETIMEDOUT, errno.ENETDOWN,
    errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED,
    errno.ENOTCONN, errno.EREMOTEIO,
}  # fmt: skip


class NotKept(OSError):
    """A store has acknowledged a checkpoint, and what is there is not what was written."""


class NotDelivered(OSError):
    """The uploader could not write, and another attempt would not help."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How often and how long a store is asked. Times in seconds."""

    attempts: int = 6
    limit_s: float = 60.0
    told_s: float = 5.0
    first_pause_s: float = 0.2
    longest_pause_s: float = 5.0

    def pause(self, number: int) -> float:
        """After the failure of that attempt, counted from 1."""
        return min(self.first_pause_s * 2.0 ** (number - 1), self.longest_pause_s) * _chance.uniform(0.5, 1.0)


def passing(error: BaseException, *, local: bool) -> bool:
    """True if the same call may succeed a moment later."""
    if isinstance(error, NotKept):
        return True
    if isinstance(error, (FarandoleError, NotDelivered, *_FINAL)):
        return False
    if local:
        return isinstance(error, TimeoutError) or (isinstance(error, OSError) and error.errno in _PASSING)
    return isinstance(error, Exception)


def insist(call: Callable[[], T], what: str, patience: Patience, *, local: bool) -> T:
    """The result of `call`. `what` says what it does, and where, as in "checkpoints at URL: listing".

    Raises:
        TimeoutError: it has not come back within the limit.
        Exception: what it has raised last.
    """
    until = time.monotonic() + patience.limit_s
    return attempt(lambda: within(call, what, until - time.monotonic(), patience.told_s), what, patience, local=local)


def attempt(call: Callable[[], T], what: str, patience: Patience, *, local: bool) -> T:
    """As `insist`, for a call that has limits of its own: none begins after `limit_s`.

    Raises:
        Exception: what it has raised last.
    """
    began = time.monotonic()
    for number in range(1, patience.attempts + 1):
        try:
            return call()
        except Exception as error:
            pause, now = patience.pause(number), time.monotonic()
            over = number == patience.attempts or now + pause >= began + patience.limit_s
            if over or not passing(error, local=local):
                if number > 1:
                    notes = vars(error).setdefault("__notes__", [])  # as `add_note` does from Python 3.11 on
                    notes.append(f"tried {number} times in {now - began:.0f} s")
                raise
            _log.info("%s: %s; tried again", what, error)
            time.sleep(pause)
    raise AssertionError("the last attempt raises")


def within(call: Callable[[], T], what: str, limit_s: float, told_s: float = Patience.told_s) -> T:
    """The result of `call`, or what it raises.

    Raises:
        TimeoutError: it has not come back within `limit_s`.
    """
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001  raised below
            failures.append(error)

    thread = threading.Thread(target=run, name="store", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # none is to be had
        return call()
    thread.join(min(told_s, limit_s))
    if thread.is_alive() and told_s < limit_s:
        _log.warning("%s: no answer for %.0f s; it is given up after %.0f s", what, told_s, limit_s)
        thread.join(limit_s - told_s)
    if failures:
        raise failures[0]
    if not results:
        raise TimeoutError(f"no answer within {limit_s:.0f} s")
    return results[0]
