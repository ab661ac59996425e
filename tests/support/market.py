"""A strategy for tests of jobs on a spot market."""

from __future__ import annotations

from collections.abc import Callable

from farandole.market.play import Machines, Moment, PlannedJob, Strategy


def scripted(*fleets: Machines, restarts: bool = False) -> Callable[[PlannedJob], Strategy]:
    """A strategy that wants these machines, one after the other."""

    class Scripted(Strategy):
        def decide(self, now: Moment) -> Machines:
            return fleets[now.time_s // now.gap_s]

    Scripted.restarts = restarts
    return Scripted
