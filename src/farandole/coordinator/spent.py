"""What a live run's account comes to (`membership/account.py`), for its status and `/metrics`.

The coordinator reads its own metrics.jsonl on, a part at a time: so one that comes again knows of workers that went
before it began, and what it tells is what `farandole account` says of the same lines. Before it has read all of them,
and where they can't be read, nothing is known. Nothing is decided by it. It reads in a thread: nobody waits for it.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from farandole.control.run_folder import METRICS, Tail
from farandole.control.status import AccountStatus
from farandole.errors import FarandoleError
from farandole.membership.account import Reading
from farandole.membership.records import RunSettings
from farandole.platform.files import FileThread

EVERY_S = 5.0  # between two sums
READ_S = 0.5  # between two looks at the file


class Spent:
    """`look_soon` now and then; `account` is what is known."""

    def __init__(self, settings: RunSettings, folder: Path) -> None:
        self.account: AccountStatus | None = None
        self._run, self._prices = settings.run, settings.prices
        self._tail = Tail(folder / METRICS)
        self._reading = Reading()
        self._look_at = self._sum_at = 0.0
        self._files = FileThread("spent")
        self._looking = False

    def look_soon(self, now: float) -> None:
        """`look`, in the thread, unless it is at it or it is too early."""
        if now >= self._look_at and not self._looking:
            self._looking = True
            self._files.post(partial(self._look, now))

    def close(self) -> None:
        """The thread ends when it has done what it is at."""
        self._files.end()

    def _look(self, now: float) -> None:
        try:
            self.look(now)
        finally:
            self._looking = False

    def look(self, now: float) -> None:
        """At most one part of the file."""
        if now < self._look_at:
            return
        try:
            lines = self._tail.lines()
        except (OSError, FarandoleError):
            lines = []
        for line in lines:
            self._reading.take(line)
        behind = self._tail.at < self._tail.size
        self._look_at = now + (0.0 if lines and behind else READ_S)
        if not behind and (now >= self._sum_at or self.account is None):
            self._sum_at = now + EVERY_S
            self.account = self._summed()

    def _summed(self) -> AccountStatus | None:
        found = self._reading.account(self._run, self._prices)
        if found.seconds is None or found.worker_hours is None:
            return None
        return AccountStatus(
            seconds=found.seconds, goodput=found.goodput, worker_hours=found.worker_hours, dollars=found.dollars
        )
