"""What strangers and broken workers do, and what we can't tell, recorded sparingly: of each kind a few events a minute,
then their number.
"""

from __future__ import annotations

from collections.abc import Callable

from farandole.coordinator.limits import Sparing
from farandole.membership import events

REASON = 200  # characters of what is wrong with a message: it may quote the message


class Strangers:
    """`record` writes an event down."""

    def __init__(self, record: Callable[[events.Event], None]) -> None:
        self._record = record
        self._sparing = Sparing()

    def strange(self, source: str, reason: str) -> None:
        """Somebody at `source` is not let in, or not heard; `reason` is one of a few of ours."""
        if self._sparing.admit(reason):
            self._record(events.Stranger(source=source, reason=reason))

    def malformed(self, source: str, reason: str) -> None:
        """What `source` has sent breaks the protocol."""
        if self._sparing.admit("malformed"):
            self._record(events.Malformed(source=source, reason=reason[:REASON]))

    def untold(self, sentence: str) -> bool:
        """Somebody asked for what could not be told. Returns whether it was recorded."""
        recorded = self._sparing.admit(sentence)
        if recorded:
            self._record(events.NotTold(reason=sentence))
        return recorded

    def count(self, now: float) -> None:
        """At a window's end, and with `now` infinite at once: how many more there were."""
        for reason, more in self._sparing.due(now).items():
            self._record(events.Strangers(reason=reason, more=more))
