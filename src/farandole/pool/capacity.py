"""When a pool tells how many workers it can have: as soon as that changes. At its beginning its hosts are on their way:
for `GATHER_S` it says so, lest others take their place; unless it has been told that it has none.
"""

from __future__ import annotations

import math

GATHER_S = 15.0


class Told:
    """Times are the caller's, in seconds. `can`, `gathers`: as was told last; None for no limit that is known."""

    def __init__(self) -> None:
        self.can: int | None = None
        self.gathers = False
        self._gathers_until = math.inf

    def news(self, can: int | None, now: float, *, short: bool) -> bool:
        """Whether that is to be told now; it is taken to be. `short`: nothing is to be had, for certain."""
        self._gathers_until = min(self._gathers_until, now + GATHER_S)
        before = self.can, self.gathers
        self.can, self.gathers = can, can is not None and now < self._gathers_until and not short
        return before != (self.can, self.gathers)
