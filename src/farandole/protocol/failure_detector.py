"""How long a worker may be silent, judged by what is usual: a suspicion that costs a second where nothing ever lasts.

Pure; times are the owner's, in seconds. A worker that is frozen, or whose machine is gone, closes no connection. It
only falls silent, and its peers wait for it. A constant limit must be as long as the longest pause of any sound worker
on any machine; where pauses are short, it costs seconds for nothing. So the heartbeat timeout is the *ceiling* of a
limit that follows what is usual. Who knows what, when:

1. A worker sends a heartbeat every `heartbeat_s`, from a thread of its own, whatever it trains. How late the next one
   is, that is all that can be known of a silence while it lasts; how late they were, what is usual.
2. The limit for the next heartbeat to be late is `FACTOR` times the latest that came: of this worker, or of the median
   of all that are connected, if that is more, for a machine that is loaded delays all of its workers. It halves every
   `HALF_LIFE_S`, and is at least `FLOOR_S`. So who stands still for less than the floor is never suspected.
3. The coordinator may be the one that stood still. Any input shows that it runs; ticks come more often than every
   `STANDSTILL_S`. What is beyond that between two inputs is its own standstill: its clock here, `time`, stands still as
   well, so no silence grows by it and no gap is learned from it. What arrived meanwhile may not have been read yet at
   the first tick after it: so that tick judges by the ceiling alone.
4. If more than half of the connected are late at once, they are not to blame, one by one: something that they share is
   (a network, a suspended machine, a line of the script that stops every thread). The ceiling holds.
5. What is usual is not known of who has never been heard on its connection, nor of who has not computed yet: it starts,
   imports and compiles, and a long call in C that holds the interpreter's lock silences every thread of a process. The
   owner says so (`steady`, `learns`), and says also whom nobody waits for: a control connection that carries nothing
   any more silences a worker that trains on with its peers, and it is to come back by itself (`session`, 4).
6. Later on such a call (unpickling, a collection of garbage, a fork) may still come as a surprise, once or in every
   epoch. One that ends in time is learned from (2). For the rest there is a bound that needs no statistics: to be
   suspected before the ceiling is drawn from a stock of `STOCK` for the run, which grows by one for each day of each
   connected worker. What falls silent within a ceiling's time of another is drawn once: it may be a host that is gone.
   Is the stock used up, the constant holds. So false suspicions beyond those of the constant are at most one a
   worker-day, and the stock.

Safety rests on none of this: who is suspected is left out only where that is safe, dead or not (`reconnection`, 3).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from farandole.protocol import messages as m

# --- silence ----------------------------------------------------------------------------------------------------------

FLOOR_S = 1.0  # a heartbeat may always be as late as that
FACTOR = 3.0  # how much later than usual it may be
HALF_LIFE_S = 120.0  # of what is usual
STANDSTILL_S = 0.5  # between two inputs: what is longer is the coordinator's own
STOCK, DAY_S = 3, 86400.0


@dataclass(kw_only=True)
class Silence:
    """One worker's. `since`: on the coordinator's clock. `late_s`: the latest heartbeat, as of `at`.

    `heard`: anything has come since its connection was opened.
    """

    since: float = 0.0
    late_s: float = 0.0
    at: float = 0.0
    received: bool = False


class FailureDetector:
    """See the module's head. `time` is the coordinator's own clock, which stands still when it does."""

    def __init__(self, heartbeat_s: float, ceiling_s: float) -> None:
        self.ceiling_s = ceiling_s
        self.time = 0.0
        self._heartbeat_s = heartbeat_s
        self._now: float | None = None
        self._stood = self._judges_by_ceiling = False
        self._connected: list[Silence] = []
        self._stock, self._stocked_at, self._drawn_at = float(STOCK), 0.0, -math.inf

    # --- inputs ----------------------------------------------------------------------------------------------

    def passes(self, now: float) -> None:
        """It is `now`: at every input."""
        gone = max(0.0, now - self._now) if self._now is not None else 0.0
        self._now = now
        self.time += min(gone, STANDSTILL_S)
        self._stood |= gone > STANDSTILL_S

    def tick(self, now: float, connected: Iterable[Silence]) -> None:
        """Before anybody is judged."""
        self.passes(now)
        self._judges_by_ceiling, self._stood = self._stood, False
        self._connected = list(connected)

    def begin(self, silence: Silence, now: float, grace_s: float = 0.0) -> None:
        """Its connection has opened or closed, or it is given time: what is usual then is not known."""
        self.passes(now)
        silence.since, silence.received = self.time + grace_s, False

    def hear(self, silence: Silence, now: float, *, learns: bool) -> None:
        """Something has come from it. `learns`: what went before was nothing special."""
        self.passes(now)
        if learns:
            late = self.lasts_s(silence) - self._heartbeat_s
            silence.late_s, silence.at = max(late, self._usual_s(silence)), self.time
        silence.since, silence.received = self.time, True

    # --- what follows ----------------------------------------------------------------------------------------

    def lasts_s(self, silence: Silence) -> float:
        return self.time - silence.since

    def limit_s(self, silence: Silence) -> float:
        """How long it may last where it is steady."""
        usual = max(self._usual_s(silence), median(map(self._usual_s, self._connected or [silence])))
        return min(self.ceiling_s, self._heartbeat_s + max(FLOOR_S, FACTOR * usual))

    def passed_s(self, silence: Silence, *, steady: bool) -> float:
        """The limit that it has passed, 0 for none. `steady`: what is usual counts for it, and others wait for it."""
        lasts = self.lasts_s(silence)
        if lasts > self.ceiling_s:
            return self.ceiling_s
        if not steady or not silence.received or self._judges_by_ceiling or lasts <= self._heartbeat_s + FLOOR_S:
            return 0.0
        limit = self.limit_s(silence)
        return limit if lasts > limit and not self._shared() and self._draw() else 0.0

    def _usual_s(self, silence: Silence) -> float:
        return silence.late_s * 0.5 ** ((self.time - silence.at) / HALF_LIFE_S)

    def _shared(self) -> bool:
        """Whether more than half are late; those who fell silent at once are so by up to a heartbeat's time apart."""
        late = [each for each in self._connected if self.lasts_s(each) > self._heartbeat_s + FLOOR_S / 4]
        return 2 * len(late) > len(self._connected)

    def _draw(self) -> bool:
        """Whether the stock allows it."""
        grown = (self.time - self._stocked_at) * len(self._connected) / DAY_S
        self._stock, self._stocked_at = min(STOCK, self._stock + grown), self.time
        if self.time - self._drawn_at <= self.ceiling_s:
            return True
        if self._stock < 1.0:
            return False
        self._stock, self._drawn_at = self._stock - 1.0, self.time
        return True


# --- movement ---------------------------------------------------------------------------------------------------------
#
# When anything of the training last moved, by what the heartbeats say; `standstill` draws the conclusions.

SLOW, SHORT = 10, 3  # median steps
STEPS = 50  # of which the median is taken
LONGEST_STEP_S = 86400.0  # what a worker says of itself is believed up to here


class Progress:
    """What the heartbeats tell. `since`: when anything last moved; None without a view."""

    def __init__(self) -> None:
        self.since: float | None = None
        self._newest: dict[str, tuple[int, ...]] = {}
        self._rounds: dict[str, tuple[int, float, float]] = {}  # the newest, and when that one and the one before came
        self._steps: deque[float] = deque(maxlen=STEPS)
        self._said = 0.0  # for how long it had stood, the last time that was said
        self.saver = ""  # of the last checkpoint

    def on_heartbeat(self, worker: str, beat: m.Heartbeat, now: float) -> None:
        round_, came, _ = self._rounds.get(worker, (-1, -math.inf, -math.inf))
        if beat.round > round_:
            self._rounds[worker] = (beat.round, now, came)
        place = (beat.view, beat.round, beat.step, beat.shards_computed)
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


# --- rate limit -------------------------------------------------------------------------------------------------------
#
# How often a worker may do what costs the others something: some at once, then one every so many seconds.


class RateLimit:
    """`burst` at first, and one more every `seconds`, for each worker. Times are the caller's, in seconds."""

    def __init__(self, burst: int, seconds: float) -> None:
        self._burst = burst
        self._seconds = seconds
        self._used: dict[str, tuple[float, float]] = {}  # how much, and when that was

    def draw(self, worker: str, now: float) -> None:
        self._used[worker] = (self._left_over(worker, now) + 1, now)

    def spent(self, worker: str, now: float) -> bool:
        """Whether there is none left."""
        return self._left_over(worker, now) > self._burst - 1

    def forget(self, worker: str) -> None:
        self._used.pop(worker, None)

    def _left_over(self, worker: str, now: float) -> float:
        used, at = self._used.get(worker, (0.0, now))
        return max(0.0, used - (now - at) / self._seconds)
