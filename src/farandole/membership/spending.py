"""When a run has lasted, or cost, as much as it may: pure; times are Unix time."""

from __future__ import annotations

import math

import msgspec

from farandole.errors import UsageError


def spending_of(max_hours: float | None, max_cost: float | None, keep_failed_s: float, now: float) -> Spending:
    """Of a run that begins now. Raises UsageError."""
    until = None if max_hours is None else now + 3600 * max_hours
    return Spending(max_hours=max_hours, until=until, max_cost=max_cost, keep_failed_s=keep_failed_s)


class Spending(msgspec.Struct, frozen=True, kw_only=True):
    """`until`: the run ends then, None: whenever it does. `max_hours`: what was asked for. `max_cost` in dollars, of
    instances. `keep_failed_s`: a host that has failed is kept for so long.

    Raises:
        UsageError: a limit that is none.
    """

    max_hours: float | None = None
    until: float | None = None
    max_cost: float | None = None
    keep_failed_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("--max-hours", self.max_hours), ("--max-cost", self.max_cost)):
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"{name} {value:g}: a number above 0")
        if not 0 <= self.keep_failed_s < math.inf:
            raise UsageError(f"--keep-failed {self.keep_failed_s / 60:g}: minutes, from 0")

    def over(self, now: float, dollars: float) -> str:
        """Why the run is to end, "" where it goes on. `dollars`: it has cost so far."""
        if self.until is not None and now >= self.until:
            return f"it has lasted {self.max_hours:g} hours (--max-hours)"
        if self.max_cost is not None and dollars >= self.max_cost:
            return f"its instances have cost {dollars:.2f} dollars (--max-cost {self.max_cost:g})"
        return ""
