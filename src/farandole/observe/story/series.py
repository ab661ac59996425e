"""One number of a run by step, as a picture needs it: of a million steps `POINTS` at most, and no spike is lost.

The values are cut into buckets of `width` neighbours. Of each bucket its least and its greatest value are shown, each
at its own step; when there are more than `BUCKETS`, two become one and `width` doubles. So what is drawn has the
envelope of all values, whatever their number (min-max decimation). What is not a number is passed over; a bucket of
nothing else is a gap.

A picture that is drawn already is brought up to date by a `Patch`: from which point on it changes, and what follows.
That is what is new and the bucket it falls into. Only when the width doubles, each time the run has become twice as
long, or when steps are taken again from long ago, it is more.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left

import msgspec

BUCKETS = 600
POINTS = 2 * BUCKETS


class Patch(msgspec.Struct, frozen=True, kw_only=True):
    """Points from number `at` on are these, and there are no others. `y` is None at a gap."""

    at: int
    x: list[int]
    y: list[float | None]


class Seen(msgspec.Struct, kw_only=True):
    """How far somebody's picture is: it has `count` values in buckets of `width`, and knows of `cuts`."""

    count: int = 0
    width: int = 1
    cuts: int = 0


class Series:
    """`put` values in the order of their steps: one of a step that has been is taken again, and so are all after it."""

    def __init__(self) -> None:
        self._steps = array("q")
        self._values = array("d")
        self._width = 1
        self._least = array("q")  # by bucket, where in the values
        self._greatest = array("q")
        self._cuts: list[int] = []  # how many values were left

    def __len__(self) -> int:
        return len(self._values)

    @property
    def last(self) -> float | None:
        """The newest value, None where there is none or it is not a number."""
        return self._shown(len(self) - 1) if self._values else None

    def put(self, step: int, value: float) -> None:
        if self._steps and step <= self._steps[-1]:
            self.cut(step)
        self._steps.append(step)
        self._values.append(value)
        self._count(len(self) - 1)
        if len(self._least) > BUCKETS:
            self._double()

    def cut(self, step: int) -> None:
        """Values of `step` and of later ones do not count any more."""
        left = bisect_left(self._steps, step)
        if left == len(self):
            return
        del self._steps[left:], self._values[left:]
        whole = left // self._width
        del self._least[whole:], self._greatest[whole:]
        for index in range(whole * self._width, left):
            self._count(index)
        self._cuts.append(left)

    def patch(self, seen: Seen) -> Patch | None:
        """What a picture lacks that is as far as `seen` says, None: nothing. Then `seen` says how far it is."""
        known = min([seen.count, *self._cuts[seen.cuts :]])
        if known == len(self) == seen.count and seen.width == self._width:
            seen.cuts = len(self._cuts)
            return None
        bucket = known // self._width if seen.width == self._width else 0
        seen.count, seen.width, seen.cuts = len(self), self._width, len(self._cuts)
        x: list[int] = []
        y: list[float | None] = []
        for least, greatest in zip(self._least[bucket:], self._greatest[bucket:], strict=True):
            for index in sorted((least, greatest)):
                x.append(self._steps[index])
                y.append(self._shown(index))
        return Patch(at=2 * bucket, x=x, y=y)

    def _shown(self, index: int) -> float | None:
        value = self._values[index]
        return value if math.isfinite(value) else None

    def _count(self, index: int) -> None:
        """The value at `index`, the newest, in its bucket."""
        if index % self._width == 0:
            self._least.append(index)
            self._greatest.append(index)
            return
        self._least[-1] = self._extreme(self._least[-1], index, least=True)
        self._greatest[-1] = self._extreme(self._greatest[-1], index, least=False)

    def _extreme(self, one: int, other: int, *, least: bool) -> int:
        """Which of two values, by where they are; of equal ones the first."""
        a, b = self._values[one], self._values[other]
        if not math.isfinite(b):
            return one
        if not math.isfinite(a):
            return other
        return other if (b < a if least else b > a) else one

    def _double(self) -> None:
        self._width *= 2
        for extremes, least in ((self._least, True), (self._greatest, False)):
            pairs = range(0, len(extremes), 2)
            merged = [
                self._extreme(extremes[i], extremes[i + 1], least=least) if i + 1 < len(extremes) else extremes[i]
                for i in pairs
            ]
            del extremes[:]
            extremes.extend(merged)
