"""How much of what a worker prints, or logs by `run.log`, is shown: all, until it is more than anybody reads. Pure.

    as usual    every line, `BURST` at once and `LINES_A_S` for ever; of several workers that print, each has its part
    a flood     every `SAY_S` the newest `NEWEST` lines, and before them how many are only in the worker's log file,
                until so little has come that it is as usual again

What is left out is counted in lines, or, where it came too fast to be read, in bytes. Nothing is kept of it: memory is
that of `NEWEST` lines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

BURST = 1000.0
LINES_A_S = 400.0
SAY_S = 2.0
NEWEST = 10


class Flow:
    """Of the lines of one `source`, all of which are in the `place`."""

    def __init__(self, source: str, place: str = "its log") -> None:
        self._source, self._place = source, place
        self._level = BURST  # lines that may still be shown
        self._at: float | None = None
        self._since: float | None = None  # the flood's, or when it was last told of
        self._lines = self._bytes = 0  # since then
        self._newest: deque[bytes] = deque(maxlen=NEWEST)

    def take(
        self, lines: Sequence[bytes], now: float, *, part: float = 1.0, passed: int = 0, unread: int = 0
    ) -> tuple[Sequence[bytes], str, Sequence[bytes]]:
        """What is to be shown now: lines, a word of ours ("": none), and lines after it.

        `part`: of what all workers may. Before `lines` came others, which nobody has kept: `passed` lines, and `unread`
        bytes.
        """
        self._level = min(
            BURST * part, self._level + LINES_A_S * part * (now - (now if self._at is None else self._at))
        )
        self._at = now
        shown: Sequence[bytes] = ()
        if self._since is None:
            room = 0 if passed or unread else int(self._level)
            shown, lines = lines[:room], lines[room:]
            self._level -= len(shown)
            if not lines and not passed and not unread:
                return shown, "", ()
            self._since = now
        self._lines += passed + len(lines)
        self._bytes += unread
        if passed or unread:
            self._newest.clear()
        self._newest.extend(lines)
        if now < self._since + SAY_S:
            return shown, "", ()
        usual = self._lines <= LINES_A_S * SAY_S * part and not self._bytes
        word, newest = self._told()
        self._since, self._level = (None if usual else now), 0.0
        return shown, word, newest

    def end(self) -> tuple[str, Sequence[bytes]]:
        """Nothing more will come."""
        return self._told()

    def _told(self) -> tuple[str, Sequence[bytes]]:
        newest, lines, size = tuple(self._newest), self._lines - len(self._newest), self._bytes
        self._newest.clear()
        self._lines = self._bytes = 0
        if not lines and not size:
            return "", newest
        counted = f"{lines:,} line{'' if lines == 1 else 's'}"
        much = f"{size / 1e6:,.0f} MB" if not lines else f"{counted} and {size / 1e6:,.0f} MB" if size else counted
        return f"... {much} of {self._source} are only in {self._place}", newest
