"""What a live run has written down so far, as it grows: the lines of its metrics.jsonl, read on from where one was.

Figures that sum up a run come from there and not from what the coordinator tells its watchers, of which who comes late,
or connects again after a coordinator's death, has only the newest lines.
"""

from __future__ import annotations

from pathlib import Path

from farandole.control.run_folder import CHECKPOINTS, METRICS, Tail
from farandole.errors import FarandoleError
from farandole.membership.account import Account
from farandole.membership.prices import Prices
from farandole.observe.course import Course


class Written:
    """Attributes: course: what the lines so far say. checkpoints: the place of the run's."""

    def __init__(self, folder: Path, prices: Prices, checkpoints: str = "") -> None:
        """`checkpoints`: where the run's are, "" for its folder."""
        self.course = Course()
        self._run = folder.resolve().name
        self._prices = prices
        self.checkpoints = checkpoints or str(folder / CHECKPOINTS)
        self._tail = Tail(folder / METRICS)

    def read_on(self) -> bool:
        """A part of what is new; whether there may be more. What can't be read is not there."""
        try:
            lines = self._tail.lines()
        except (OSError, FarandoleError):
            return False
        for line in lines:
            self.course.take(line)
        return bool(lines)

    def account(self) -> Account | None:
        """None where nothing has been read."""
        return None if self.course.began is None else self.course.account.account(self._run, self._prices)
