"""On-demand machines for a deadline: how many, so that the deadline is certain, and as late as possible.

Spot machines are cheaper, and may all be gone in the next moment. So only on-demand machines count: those that run now,
and those that the next decision can request. As long as they can do all the work that is left, the deadline is certain,
and more of them can wait: what spot machines do meanwhile is not paid for at the higher price. If the work can be
divided, several on-demand machines can do at the end what one would have to begin much earlier. But each costs its
start, so there are at most `burst_of` of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

DEARER = 1.03  # the work of several on-demand machines at the end may cost so many times that of fewer


def speed_of(speeds: Sequence[float], machines: int) -> float:
    """Return how many times faster `machines` machines are than one. `speeds`: item i is that of i + 1 machines."""
    return speeds[min(machines, len(speeds)) - 1] if machines > 0 else 0.0


def speeds_from(measured: Mapping[int, float], machines: int) -> list[float]:
    """Return the speeds of 1, 2, ... `machines` machines from measured ones: `measured` has at least one, by number.

    No machine has the speed 0. Between two measured numbers the speed is interpolated linearly. Beyond the last one the
    last line goes on, if it does not fall.
    """
    points = {0: 0.0, **measured}
    places, found = sorted(points), list[float]()
    for count in range(1, machines + 1):
        after = next((place for place in places if place >= count), places[-1])
        before = max(place for place in places if place < after)
        slope = (points[after] - points[before]) / (after - before)
        speed = points[after] + slope * (count - after)
        found.append(max(speed, found[-1] if found else speed))
    return found


def fewest_in_time(work_s: float, time_s: float, start_s: float, speeds: Sequence[float]) -> int | None:
    """Return the fewest machines that do work of `work_s` seconds of one machine within `time_s`; None: too few exist.

    They compute after `start_s`.
    """
    for machines in range(1, len(speeds) + 1):
        if speed_of(speeds, machines) * (time_s - start_s) >= work_s:
            return machines
    return None


def burst_of(work_s: float, time_s: float, start_s: float, speeds: Sequence[float]) -> int:
    """Return the largest number of on-demand machines to have: at most twice as many as are needed from the beginning.

    With more, the work could begin later still, and their starts would cost more than that gains. If more machines do
    less work each, there are only as many as do it for at most `DEARER` times the price.
    """
    needed = fewest_in_time(work_s, time_s, start_s, speeds) or len(speeds)
    dearest = DEARER * needed / speeds[needed - 1]  # machine-seconds for a second's work of one machine
    return max(
        n for n in range(needed, min(2 * needed, len(speeds)) + 1) if n == needed or n / speeds[n - 1] <= dearest
    )


def fewest_on_demand(
    left_s: float, time_s: float, decision_s: float, start_s: float, running_s: Sequence[float], burst: int,
    speeds: Sequence[float],
) -> int:  # fmt: skip
    """Return the fewest on-demand machines until the next decision with which the deadline is certain; else `burst`.

    Args:
        left_s: the work that is left, in seconds of one machine.
        time_s: until the deadline.
        decision_s: until the next decision.
        start_s: from the request for a machine until it computes.
        running_s: for each on-demand machine that runs, how long it still starts, the least first.
        burst: the largest number of on-demand machines.
        speeds: see `speed_of`.
    """

    def is_certain(count: int) -> bool:
        kept = running_s[:count]
        new, later = [start_s] * (count - len(kept)), [decision_s + start_s] * (burst - count)
        return work_until(time_s, sorted((*kept, *new, *later)), speeds) >= left_s

    return bisect_left(range(burst), True, key=is_certain)  # more machines do more


def time_for(work_s: float, starts_s: Sequence[float], speeds: Sequence[float]) -> float:
    """Return after how many seconds machines have done the work that begin at these times, in order; at least one."""
    last_s = starts_s[-1]
    for count, (start_s, next_s) in enumerate(zip(starts_s, (*starts_s[1:], last_s), strict=True), 1):
        speed = speed_of(speeds, count)
        if count == len(starts_s) or work_s <= speed * (next_s - start_s):
            return start_s + work_s / speed
        work_s -= speed * (next_s - start_s)
    raise AssertionError("the last machine does the rest")


def work_until(time_s: float, starts_s: Sequence[float], speeds: Sequence[float]) -> float:
    """Return the work that machines do until `time_s`, which begin at these times, in order; at least one."""
    ends = [min(each, time_s) for each in (*starts_s[1:], time_s)]
    spans = enumerate(zip(starts_s, ends, strict=True), 1)
    return sum(speed_of(speeds, count) * max(end - start, 0.0) for count, (start, end) in spans)
