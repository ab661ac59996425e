"""The wall time of a worker's steps, of which no part is in two steps and none in none.

A step's time runs from the end of the inner loop before to the end of its own, so the update, schedules, logging and
evaluations between two inner loops belong to the step that follows them. A worker's first step begins when the script
is handed it: what came before is no step's (the start, the time between two starts of a continued run). So the steps'
times add up to the time from the first step's beginning to the last one's end. What follows the last step is an
interval of the same kind.

Three parts of each are told apart: evaluations, `run.once`, and pauses (a view is stopped or takes effect, or fewer
workers are there than the minimum). They are disjoint: a pause within an evaluation is a pause.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Literal

from farandole.membership.values import StepTime
from farandole.worker.timing import Meter


class StepClock:
    """Of one worker, on the thread of its script. `meter` says how long it has been in pauses."""

    def __init__(self, meter: Meter, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._meter, self._clock = meter, clock
        self._began: int | None = None
        self._paused = 0  # as the interval in hand began
        self._apart = {"evaluation": 0, "once": 0}  # of it, ns

    def begin(self) -> None:
        """A step is handed to the script. Only the first one begins here."""
        if self._began is None:
            self._began, self._paused = self._clock(), self._meter.paused()

    @contextmanager
    def apart(self, part: Literal["evaluation", "once"]) -> Generator[None]:
        """What is done within is that part of the interval in hand, but for the pauses in it."""
        began, paused = self._clock(), self._meter.paused()
        try:
            yield
        finally:
            self._apart[part] += self._clock() - began - (self._meter.paused() - paused)

    def end(self) -> StepTime:
        """The interval in hand ends now, and the next one begins."""
        now, paused = self._clock(), self._meter.paused()
        began = now if self._began is None else self._began
        ended = StepTime(
            seconds=_s(now - began), evaluation_s=_s(self._apart["evaluation"]), once_s=_s(self._apart["once"]),
            pause_s=_s(paused - self._paused),
        )  # fmt: skip
        self._began, self._paused = now, paused
        self._apart = dict.fromkeys(self._apart, 0)
        return ended


def _s(ns: int) -> float:
    return round(max(ns, 0) / 1e9, 6)
