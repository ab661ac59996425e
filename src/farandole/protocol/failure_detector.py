"""Failure detector: how long a worker may be silent, judged by what is usual.

Pure; times are the owner's, in seconds. The heartbeat timeout is the ceiling of a limit that follows the lateness of
earlier heartbeats, so a frozen worker costs about a second where pauses are short. Suspicions before the ceiling are at
most `STOCK`, and one more for each day of each worker, for all workers of a coordinator together. Safety rests on none
of this: a suspected worker is left out only where that is safe, dead or not (docs/protocol.md, Reconnection and the
lease 3).
Argument: docs/protocol.md, Failure detection 1-6.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from farandole.protocol import messages as m

# --- silence ----------------------------------------------------------------------------------------------------------

FLOOR_S = 1.0  # a heartbeat may always be this late: a worker that pauses for less is never suspected
FACTOR = 3.0  # how much later than usual it may be, as a multiple
HALF_LIFE_S = 120.0  # of the usual lateness
# Between two inputs: more than this was a standstill of the coordinator itself, since ticks come more often. Its clock
# stands still for the excess, so no silence grows by it, and nothing is learned from it. Messages that arrived
# meanwhile may be unread at the next tick, which judges by the ceiling alone.
OWN_PAUSE_S = 0.5
# Suspicions before the ceiling for the whole run; the stock grows by one for each day of each connected worker. Workers
# that fall silent within a ceiling's time of one another use one together. With the stock empty, the ceiling holds.
STOCK, DAY_S = 3, 86400.0


@dataclass(kw_only=True)
class Silence:
    """The silence of one worker, on the detector's clock (`FailureDetector.time`).

    `since`: when it began. `late_s`: the usual lateness of its heartbeats, as of `at`. `received`: something has
    arrived since its connection was opened.
    """

    since: float = 0.0
    late_s: float = 0.0
    at: float = 0.0
    received: bool = False


class FailureDetector:
    """Decides which workers were silent for too long, as the module's head describes.

    `time` is the coordinator's own clock in seconds, which stands still when the coordinator does. `ceiling_s` is the
    heartbeat timeout.
    """

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
        """Advance the clock to `now`; called at every input."""
        elapsed = max(0.0, now - self._now) if self._now is not None else 0.0
        self._now = now
        self.time += min(elapsed, OWN_PAUSE_S)
        self._stood |= elapsed > OWN_PAUSE_S

    def tick(self, now: float, connected: Iterable[Silence]) -> None:
        """Prepare for judging the `connected` workers; called before any of them is judged."""
        self.passes(now)
        self._judges_by_ceiling, self._stood = self._stood, False
        self._connected = list(connected)

    def begin(self, silence: Silence, now: float, grace_s: float = 0.0) -> None:
        """Restart a silence: the connection opened or closed, or the worker gets `grace_s` more seconds.

        The usual lateness is not known then.
        """
        self.passes(now)
        silence.since, silence.received = self.time + grace_s, False

    def hear(self, silence: Silence, now: float, *, learns: bool) -> None:
        """End a silence: a message of the worker arrived. `learns`: the silence was ordinary, so learn from it.

        It is not ordinary before the worker has computed: it imports and compiles, and a long call in C that holds the
        interpreter's lock silences all threads of a process. Such a call later (unpickling, garbage collection, a fork)
        is learned from if it ends in time.
        """
        self.passes(now)
        if learns:
            late = self.lasts_s(silence) - self._heartbeat_s
            silence.late_s, silence.at = max(late, self._usual_s(silence)), self.time
        silence.since, silence.received = self.time, True

    # --- what follows ----------------------------------------------------------------------------------------

    def lasts_s(self, silence: Silence) -> float:
        """Return the length of the silence so far, in seconds."""
        return self.time - silence.since

    def limit_s(self, silence: Silence) -> float:
        """Return how many seconds the silence of a steady worker may last."""
        usual = max(self._usual_s(silence), median(map(self._usual_s, self._connected or [silence])))
        return min(self.ceiling_s, self._heartbeat_s + max(FLOOR_S, FACTOR * usual))

    def passed_s(self, silence: Silence, *, steady: bool) -> float:
        """Return the limit in seconds that the silence has exceeded, 0 for none.

        `steady`: the usual lateness applies to this worker, and others wait for it.
        """
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
        """Return True if more than half are late: they share the cause, as a network or a line of the script.

        Workers that fall silent together do so up to a heartbeat apart.
        """
        late = [each for each in self._connected if self.lasts_s(each) > self._heartbeat_s + FLOOR_S / 4]
        return 2 * len(late) > len(self._connected)

    def _draw(self) -> bool:
        """Draw an early suspicion from the stock. Returns False if the stock is empty."""
        grown = (self.time - self._stocked_at) * len(self._connected) / DAY_S
        self._stock, self._stocked_at = min(STOCK, self._stock + grown), self.time
        if self.time - self._drawn_at <= self.ceiling_s:
            return True
        if self._stock < 1.0:
            return False
        self._stock, self._drawn_at = self._stock - 1.0, self.time
        return True


# --- progress ---------------------------------------------------------------------------------------------------------
#
# When the training last made progress, by what heartbeats report. `protocol/coordinator/failures.py` draws the
# conclusions.

STALL_STEPS, STOP_STEPS = 10, 3  # limits in median steps
STEPS = 50  # of which the median is taken
LONGEST_STEP_S = 86400.0  # reports of a longer step are ignored


class LastProgress:
    """The progress of the training, from heartbeats. `since`: the time of the last progress, None without a view."""

    def __init__(self) -> None:
        self.since: float | None = None
        self._newest: dict[str, tuple[int, ...]] = {}
        self._rounds: dict[str, tuple[int, float, float]] = {}  # the newest, when it came, and the one before
        self._steps: deque[float] = deque(maxlen=STEPS)
        self._said = 0.0  # the length of the stall when it was last reported, in seconds
        self.saver = ""  # the worker that writes the last checkpoint

    def on_heartbeat(self, worker: str, beat: m.Heartbeat, now: float) -> None:
        """Record a heartbeat, and progress if the worker is in another place than before."""
        round_, came, _ = self._rounds.get(worker, (-1, -math.inf, -math.inf))
        if beat.round > round_:
            self._rounds[worker] = (beat.round, now, came)
        place = (beat.view, beat.round, beat.step, beat.shards_computed)
        if self._newest.get(worker) != place:
            self._newest[worker] = place
            self.moved(now)

    def step_took(self, seconds: float) -> None:
        """Record the time of a step."""
        if seconds <= LONGEST_STEP_S:
            self._steps.append(seconds)

    def went_on(self, worker: str, now: float, within_s: float) -> bool:
        """Return True if the worker has entered two rounds within the last `within_s` seconds."""
        return worker in self._rounds and self._rounds[worker][2] > now - within_s

    def moved(self, now: float | None) -> None:
        """Record progress at `now`; None: there is no view."""
        self.since, self._said = now, 0.0

    def unchanged_s(self, now: float) -> float:
        """Return the time without progress in seconds, 0 without a view."""
        return now - self.since if self.since is not None else 0.0

    def limit(self, seconds: float, steps: int) -> float:
        """Return `seconds`, or the time of `steps` median steps if that is longer."""
        return max(seconds, steps * median(self._steps)) if self._steps else seconds

    def due(self, now: float, seconds: float) -> bool:
        """Return True if a stall must be reported now. Reports again each time that its length has doubled."""
        stands = self.unchanged_s(now)
        if stands <= max(seconds, 2 * self._said) or stands <= self.limit(seconds, STALL_STEPS):
            return False
        self._said = stands
        return True

    def forget(self, members: tuple[str, ...]) -> None:
        """Forget all workers except `members`."""
        self._newest = {worker: place for worker, place in self._newest.items() if worker in members}
        self._rounds = {worker: rounds for worker, rounds in self._rounds.items() if worker in members}


# --- rate limit -------------------------------------------------------------------------------------------------------
#
# Limits how often a worker may do what costs the others time: some at once, then one every `seconds`.


class RateLimit:
    """A token bucket for each worker: `burst` at first, and one more every `seconds`. Times are the caller's."""

    def __init__(self, burst: int, seconds: float) -> None:
        self._burst = burst
        self._seconds = seconds
        self._used: dict[str, tuple[float, float]] = {}  # tokens in use, and as of when

    def draw(self, worker: str, now: float) -> None:
        """Use one token of `worker`."""
        self._used[worker] = (self._left_over(worker, now) + 1, now)

    def spent(self, worker: str, now: float) -> bool:
        """Return True if `worker` has no token left."""
        return self._left_over(worker, now) > self._burst - 1

    def forget(self, worker: str) -> None:
        self._used.pop(worker, None)

    def _left_over(self, worker: str, now: float) -> float:
        used, at = self._used.get(worker, (0.0, now))
        return max(0.0, used - (now - at) / self._seconds)
