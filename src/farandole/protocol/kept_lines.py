"""Metrics lines of a worker that the coordinator may still need.

Every worker keeps them, since any may become rank 0 and have to send what the one before could not. Acknowledged lines
are dropped, so there are few of them as long as there is a coordinator. What is under way on a connection that breaks
is sent again on the next one, from where the coordinator's Welcome says. Invariant: no line is lost silently; beyond
`KEPT_LINES` lines, further ones are counted in one line in their place, which becomes the event `lines lost`.
The coordinator notices a gap in the lines' numbers when it writes the next one: rank 0 may die beside a worker that has
just joined.
Argument: docs/protocol.md, Metrics lines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median

from farandole.platform.bounds import MAX_COUNT
from farandole.protocol.values import MAX_COMPARED, MAX_LINES, Line, Metrics

KEPT_LINES = 100_000
RECENT_STEPS = 50  # steps of which the median is taken


class KeptLines:
    """The lines of one worker that the coordinator may still need, oldest first."""

    def __init__(self) -> None:
        self._sent: deque[Line] = deque()  # sent on this connection; the coordinator may not have them
        self._unsent: deque[Line] = deque()
        self._heard = (-1, 0)
        self._steps_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._newest_logged: dict[tuple[str, ...], Line] = {}  # of each call of `run.log`, by the names

    def add(self, line: Line) -> None:
        if isinstance(line.fields, Metrics):
            self._steps_s.append(line.fields.training_s)
        elif isinstance(line.fields, Mapping):
            names = tuple(line.fields)
            self._newest_logged.pop(names, None)
            self._newest_logged[names] = line
            if len(self._newest_logged) > MAX_COMPARED:
                del self._newest_logged[next(iter(self._newest_logged))]
        append(self._unsent, line, KEPT_LINES - len(self._sent))

    def send_after(self, newest: tuple[int, int]) -> None:
        """Restart on a new connection: the coordinator has all lines up to `newest`, (step, index)."""
        self._unsent.extendleft(reversed(self._sent))
        self._sent.clear()
        _drop(self._unsent, newest)

    def forget(self, newest: tuple[int, int]) -> None:
        """Record that the coordinator has all lines up to `newest`; drop those of its previous report, now written."""
        for lines in (self._sent, self._unsent):
            _drop(lines, self._heard)
        self._heard = newest

    def take(self) -> tuple[Line, ...]:
        """Return the next lines to send, `MAX_LINES` at most."""
        lines = tuple(self._unsent.popleft() for _ in range(min(MAX_LINES, len(self._unsent))))
        self._sent.extend(lines)
        return lines

    @property
    def to_compare(self) -> bool:
        """True if `take_to_compare` would return lines."""
        return bool(self._newest_logged)

    def take_to_compare(self) -> tuple[Line, ...]:
        """Return the newest line of each call of `run.log` since the last time, oldest first."""
        lines = tuple(self._newest_logged.values())
        self._newest_logged.clear()
        return lines

    def median_step_s(self) -> float | None:
        """Return the median time of the newest steps in seconds, without evaluations and pauses; None without steps."""
        return median(self._steps_s) if self._steps_s else None


def append(lines: deque[Line], line: Line, room: int) -> None:
    """Append `line`. If `lines` has `room` lines already, add it to the count of missing lines instead."""
    last = lines[-1] if lines else None
    if len(lines) < room:
        lines.append(line)
        return
    more = line.missing or 1
    if last is not None and last.missing:
        lines.pop()
        more += last.missing
    lines.append(Line(step=line.step, index=line.index, fields=min(more, MAX_COUNT)))


def _drop(lines: deque[Line], newest: tuple[int, int]) -> None:
    while lines and (lines[0].step, lines[0].index) <= newest:
        lines.popleft()
