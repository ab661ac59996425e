"""How fast the workers are, and whether other shares of a step's shards would make its steps shorter.

The argument for how work is dealt by speed:

1. Who computes a shard changes no bit, so it may be decided by what was measured, and late, and wrongly: the price of a
   wrong decision is time, never a result.
2. How work is dealt is a fact of the view, `View.shares`. To change it the coordinator proposes a view with the same
   members and other shares; it uses the connections that stand, and takes effect like a join (R2), at the same step for
   everyone. So a step asks nobody, and a worker that dies meanwhile is recovered as ever.
3. Measured is the wall time of a worker's own passes over its shards, without its waiting for data or peers: a worker
   that gets half a core shows twice the time. One shard says little: a host that is held to half its time computes for
   50 ms and stands still for 50 more. So a figure is the mean over all shards between two heartbeats.
4. A *window* is `WINDOW` figures of each member under one view. At the end of each, the medians of the view's figures
   so far, the newest `KEPT` of them, give the shares to try. They are proposed if a step would take less than `WORTH`
   of its time even where each worker's median is three standard errors slower than it looks for the new shares, and
   three faster for those in force. So what is plain is done at once, what is noisy later, and noise can't make the
   shares go to and fro: while the figures' distributions stay what they are, each change lowers the time that the true
   medians predict by more than a tenth, so no shares come twice.
5. But the distributions may depend on the shares: a quota of half a core leaves a worker its full speed as long as it
   has work for half the time only. It would get its shards back, be slow, lose them, and so on. So whoever gets fewer
   is not believed to be faster than it was then before its *patience* is over, which doubles each time up to an hour.
   Any going to and fro takes shards from somebody each time round: it costs one window in ever more.
6. Who has no shards, as there are fewer than workers, can't be measured: its last figures count, and before it has had
   any, the others' median, which is also a joiner's share until it has been measured.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import msgspec

from farandole.membership.messages import Heartbeat
from farandole.membership.view import View

WINDOW = 16  # figures: 8 s of ordinary heartbeats, longer where a shard takes longer than they are apart
KEPT = 4 * WINDOW
WORTH = 0.9
PATIENCE, LONGEST = 8, 512  # windows: at first one minute, at last an hour
WHOLE = 1000  # the fastest's share
SLOW = 0.8  # of the fastest's speed; below it a worker is a straggler


@dataclass(frozen=True, kw_only=True)
class Times:
    """What a shard takes a worker, in µs: the median, and three standard errors to either side of it.

    Whatever the distribution, of n figures n/2 are below its median, give or take sqrt(n)/2: so those that stand 1.5
    sqrt(n) before and behind the middle one enclose it.
    """

    low: float
    middle: float
    high: float

    @staticmethod
    def of(figures: Sequence[int]) -> Times:
        ordered = sorted(figures)
        first = max(0, math.floor(len(ordered) / 2 - 1.5 * math.sqrt(len(ordered))))
        return Times(low=ordered[first], middle=median(ordered), high=ordered[-1 - first])

    def at_least(self, other: Times) -> Times:
        return Times(
            low=max(self.low, other.low), middle=max(self.middle, other.middle), high=max(self.high, other.high)
        )


@dataclass(frozen=True)
class Relegation:
    """A worker got fewer shards, because of `times`, which hold at least until window `until`."""

    times: Times
    patience: int
    until: int


class Speeds:
    """What the heartbeats tell, and the next shares to propose. Lives as long as the coordinator, holds no clock."""

    def __init__(self, window: int = WINDOW) -> None:
        self._window = window
        self._view = 0
        self._windows = 0
        self._judged = 0  # windows of this view
        self._shards = 0  # in a step, the most in this view
        self._figures: dict[str, deque[int]] = {}
        self._fresh: dict[str, int] = {}  # how many were heard in this view
        self._newest: dict[str, Heartbeat] = {}
        self._relegations: dict[str, Relegation] = {}

    def heard(self, worker: str, beat: Heartbeat, view: View | None) -> None:
        """A heartbeat, if it is of somebody in `view`, the one in force."""
        if view is None or beat.view != view.number or worker not in view.members:
            return
        if view.number != self._view:
            self._begin(view)
        self._newest[worker] = beat
        self._shards = max(self._shards, beat.of)
        if beat.shard_us:
            self._figures.setdefault(worker, deque(maxlen=KEPT)).append(beat.shard_us)
            self._fresh[worker] = self._fresh.get(worker, 0) + 1

    def due(self, view: View) -> tuple[int, ...] | None:
        """At the end of a window: the shares to propose for `view`, if that is worth it. Asked again, None."""
        if view.number != self._view or view.size < 2 or not self._settled(view):
            return None
        times = [self._believed(worker) for worker in view.members]
        proposed = shares_for([each.middle for each in times])
        before, after = self._dealt(view), self._dealt(msgspec.structs.replace(view, shares=proposed))
        self._windows += 1
        self._judged += 1
        if step_us(after, [each.high for each in times]) >= WORTH * step_us(before, [each.low for each in times]):
            return None
        for worker, each, had, gets in zip(view.members, times, before, after, strict=True):
            if gets < had:
                self._relegate(worker, each)
        return proposed

    def _dealt(self, view: View) -> list[int]:
        """How many of a step's shards each member of the view has, in rank order."""
        held = view.lineage(view.members).assign(self._shards)
        return [len(held[worker]) for worker in view.members]

    def relative(self) -> dict[str, float]:
        """Speeds as measured last, of the fastest's: 1 for that one."""
        times = {worker: median(figures) for worker, figures in self._figures.items()}
        fastest = min(times.values(), default=0.0)
        return {worker: fastest / each for worker, each in times.items()}

    def newest(self, worker: str) -> Heartbeat:
        """A worker's newest heartbeat in the view in force."""
        return self._newest.get(worker, Heartbeat())

    def _begin(self, view: View) -> None:
        """Whoever is not in the view any more does not come back."""
        self._view, self._shards, self._judged = view.number, 0, 0
        self._fresh.clear()
        self._newest.clear()
        for kept in (self._figures, self._relegations):
            for worker in [worker for worker in kept if worker not in view.members]:
                del kept[worker]

    def _settled(self, view: View) -> bool:
        """Everyone has another window's figures, or is known to have no shards to measure."""
        wanted = (self._judged + 1) * self._window
        return bool(self._fresh) and all(self._fresh.get(w, 0) >= wanted or self._is_idle(w) for w in view.members)

    def _is_idle(self, worker: str) -> bool:
        beat = self.newest(worker)
        return beat.of > 0 and beat.shards == 0 and worker not in self._fresh

    def _believed(self, worker: str) -> Times:
        figures = list(self._figures.get(worker, ()))[-self._fresh.get(worker, KEPT) :]
        times = Times.of(figures or [round(median(map(median, self._figures.values())))])
        relegation = self._relegations.get(worker)
        return times.at_least(relegation.times) if relegation and self._windows < relegation.until else times

    def _relegate(self, worker: str, times: Times) -> None:
        before = self._relegations.get(worker)
        patience = min(2 * before.patience, LONGEST) if before else PATIENCE
        self._relegations[worker] = Relegation(times, patience, self._windows + patience)


def shares_for(shard_us: Sequence[float]) -> tuple[int, ...]:
    """Shares in proportion to speed, none where they are equal."""
    fastest = min(shard_us)
    shares = tuple(max(1, round(WHOLE * fastest / each)) for each in shard_us)
    return shares if len(set(shares)) > 1 else ()


def step_us(counts: Sequence[int], shard_us: Sequence[float]) -> float:
    """How long a step takes: as long as whoever has most to do."""
    return max(count * each for count, each in zip(counts, shard_us, strict=True))


def stragglers(speeds: Mapping[str, float]) -> dict[str, float]:
    """Those of `Speeds.relative` that are slow, the slowest first."""
    return dict(sorted((item for item in speeds.items() if item[1] < SLOW), key=lambda item: item[1]))
