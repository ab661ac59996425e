"""A worker's lines of metrics that the coordinator may still need.

Every worker keeps them, since any may become rank 0 and have to send what the one before could not; those that the
coordinator says it has are let go of, so it is a handful but while there is no coordinator. What is under way on a
connection that breaks is sent again on the next one, from where the coordinator's Welcome says. `metric_lines` has the
other side.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from statistics import median

from farandole.membership.values import MAX_LINES, Line, Metrics

KEPT = 100_000
RECENT_STEPS = 50  # kept in any case


class KeptLines:
    """Those of one worker."""

    def __init__(self) -> None:
        self._lines: deque[Line] = deque(maxlen=KEPT)
        self._sent = (-1, -1)

    def add(self, line: Line) -> None:
        self._lines.append(line)

    def send_after(self, newest: tuple[int, int]) -> None:
        """A new connection: the coordinator has all up to this one."""
        self._sent = newest

    def forget(self, newest: tuple[int, int]) -> None:
        """The coordinator has all up to this one, so nobody needs them."""
        while len(self._lines) > RECENT_STEPS and (self._lines[0].step, self._lines[0].index) <= newest:
            self._lines.popleft()

    def take(self) -> tuple[Line, ...]:
        """The next ones to send."""
        new = (line for line in self._lines if (line.step, line.index) > self._sent)
        lines = tuple(islice(new, MAX_LINES))
        if lines:
            self._sent = (lines[-1].step, lines[-1].index)
        return lines

    def median_step_s(self) -> float | None:
        """Of the newest steps, None without any."""
        newest = list(self._lines)[-RECENT_STEPS:]
        seconds = [line.fields.training_s for line in newest if isinstance(line.fields, Metrics)]
        return median(seconds) if seconds else None
