"""When anything of the training last moved, by what the heartbeats say; `standstill` draws the conclusions."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from farandole.membership import messages as m

SLOW, SHORT = 10, 3  # median steps
STEPS = 50  # of which the median is taken
LONGEST_STEP_S = 86400.0  # what a worker says of itself is believed up to here


class Movement:
    """What the heartbeats tell. `since`: when anything last moved; None without a view."""

    def __init__(self) -> None:
        self.since: float | None = None
        self._newest: dict[str, tuple[int, ...]] = {}
        self._rounds: dict[str, tuple[int, float, float]] = {}  # the newest, and when that one and the one before came
        self._steps: deque[float] = deque(maxlen=STEPS)
        self._said = 0.0  # for how long it had stood, the last time that was said
        self.saver = ""  # of the last checkpoint

    def heard(self, worker: str, beat: m.Heartbeat, now: float) -> None:
        round_, came, _ = self._rounds.get(worker, (-1, -math.inf, -math.inf))
        if beat.round > round_:
            self._rounds[worker] = (beat.round, now, came)
        place = (beat.view, beat.round, beat.step, beat.done)
        if self._newest.get(worker) != place:
            self._newest[worker] = place
            self.moved(now)

    def step_took(self, seconds: float) -> None:
        if seconds <= LONGEST_STEP_S:
            self._steps.append(seconds)

    def went_on(self, worker: str, now: float, within_s: float) -> bool:
        """Whether it has entered two rounds in that time."""
        return worker in self._rounds and self._rounds[worker][2] > now - within_s

    def moved(self, now: float | None) -> None:
        self.since, self._said = now, 0.0

    def stands(self, now: float) -> float:
        """For how long, in s."""
        return now - self.since if self.since is not None else 0.0

    def limit(self, seconds: float, steps: int) -> float:
        """`seconds`, or so many median steps if that is longer."""
        return max(seconds, steps * median(self._steps)) if self._steps else seconds

    def due(self, now: float, seconds: float) -> bool:
        """Whether it has to be said, and said again."""
        stands = self.stands(now)
        if stands <= max(seconds, 2 * self._said) or stands <= self.limit(seconds, SLOW):
            return False
        self._said = stands
        return True

    def forget(self, members: tuple[str, ...]) -> None:
        """All but these."""
        self._newest = {worker: place for worker, place in self._newest.items() if worker in members}
        self._rounds = {worker: rounds for worker, rounds in self._rounds.items() if worker in members}
