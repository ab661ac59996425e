"""A worker's lease: how long it may go on without a coordinator. Times are the caller's, in seconds.

It ends `orphan_s` after the newest heartbeat, or Hello, was *sent* that the coordinator has answered: the coordinator
received that later than it was sent, so when it has heard nothing for `orphan_s`, the lease is over, whatever the
network held up. See `reconnection`, 2.
"""

from __future__ import annotations

import math


class Lease:
    """Without end until the first `welcomed`."""

    def __init__(self) -> None:
        self.end = math.inf
        self._ended = False  # and somebody has gone by it
        self._beats: dict[int, float] = {}  # when sent, by number; not answered yet
        self._number = 0

    def beat(self, now: float) -> int:
        """A heartbeat goes out: its number."""
        self._number += 1
        self._beats[self._number] = now
        return self._number

    def heard(self, number: int, orphan_s: float) -> None:
        """Heartbeat `number` was answered."""
        sent = self._beats.get(number)
        if sent is not None and sent <= self.end:  # what has ended stays ended: the run may have begun again
            self.end = max(self.end, sent + orphan_s)
            self._beats = {n: at for n, at in self._beats.items() if n > number}

    def welcomed(self, hello_at: float, orphan_s: float) -> None:
        """The Hello sent at `hello_at` was answered; of the connection before nothing will be any more."""
        if self.end == math.inf:
            self.end = hello_at + orphan_s
        elif hello_at <= self.end:
            self.end = max(self.end, hello_at + orphan_s)
        self._beats.clear()

    def over(self, now: float) -> bool:
        """Once that was found it stays so, whatever is answered: a word refused for it is not asked for again."""
        self._ended = self._ended or now > self.end
        return self._ended
