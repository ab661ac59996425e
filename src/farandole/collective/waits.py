"""Whom a worker's exchanges have waited for, kept only while somebody asks (`farandole trace`).

One object for all of a worker's exchanges, of one view after the other. The views' threads add to it, the training
thread takes what is there: lists are handed over whole, so nobody needs a lock.
"""

from __future__ import annotations

from typing import NamedTuple

SHORTEST_NS = 20_000  # what came sooner was there already


class Wait(NamedTuple):
    """For `peer`'s message; times are of the monotonic clock."""

    peer: str
    began_ns: int
    ended_ns: int


class Waits:
    """Attributes:
    kept: those since somebody asked, at most `most`; None: nobody does.
    """

    def __init__(self) -> None:
        self.kept: list[Wait] | None = None
        self.most = 0

    def add(self, peer: str, began_ns: int, ended_ns: int) -> None:
        kept = self.kept
        if kept is not None and ended_ns - began_ns >= SHORTEST_NS and len(kept) < self.most:
            kept.append(Wait(peer, began_ns, ended_ns))
