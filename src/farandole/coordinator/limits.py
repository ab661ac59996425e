"""How much anyone may send, and how much of it is written down: arithmetic on times, no clock of its own.

`Bucket` slows a connection down; it never closes one, so no limit can cost an honest worker its place. `Sparing` keeps
strangers from filling the disk: of each kind of event the first few of a minute are written, the rest are counted.
Invariant: the lines that it lets through, plus the counts that it hands out, are all that happened.
"""

from __future__ import annotations

from collections import Counter

LINES = 5  # of one kind in one window
WINDOW_S = 60.0


class Bucket:
    """A token bucket: `burst` at once, `rate` a second for ever.

    A worker sends two heartbeats a second; a group of n is connected by n keys from each member, all at once.
    """

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._level = burst
        self._at: float | None = None

    def take(self, cost: float, now: float) -> float:
        """Seconds to wait before going on, 0.0 for none."""
        elapsed = now - self._at if self._at is not None else 0.0
        self._at = now
        self._level = min(self._burst, self._level + elapsed * self._rate) - cost
        return max(0.0, -self._level / self._rate)


class Sparing:
    """At most `LINES` events of a kind in each window of `WINDOW_S`. Kinds are ours, never a stranger's words."""

    def __init__(self) -> None:
        self._began = 0.0
        self._seen: Counter[str] = Counter()

    def admit(self, kind: str) -> bool:
        """Whether this event is to be written down."""
        self._seen[kind] += 1
        return self._seen[kind] <= LINES

    def due(self, now: float) -> dict[str, int]:
        """At a window's end, how many of each kind were not written down; else nothing."""
        if now - self._began < WINDOW_S:
            return {}
        more = {kind: count - LINES for kind, count in self._seen.items() if count > LINES}
        self._began = now
        self._seen.clear()
        return more
