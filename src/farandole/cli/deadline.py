"""`farandole run --deadline`: how many workers the last pool must have, so that the run is done in time.

The last pool has on-demand machines, which nobody takes back. `OnDemandTarget` learns from the lines of metrics.jsonl
how many samples are left, how fast the run is with how many workers, and how long a worker of this pool takes to start.
With that it applies the rule of `plan/deadline.py` each second, where a machine is a worker, its work is in samples,
and its speed in samples a second. `meet_deadline` sets the target of the pool as `farandole scale --pool` does.

Only workers of the last pool count for the deadline. The others may all be gone in the next moment, but each step that
they do is a step less.
"""

from __future__ import annotations

import asyncio
import re
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from farandole.control.api import Api
from farandole.errors import CoordinatorUnreachable, UsageError
from farandole.market.speeds import speeds_of
from farandole.plan.deadline import burst_of, fewest_on_demand, speed_of, speeds_from, work_until
from farandole.protocol.coordinator.state import RunSettings
from farandole.protocol.events import CoordinatorBackEvent, ViewEvent
from farandole.protocol.metrics import Line, StepLine
from farandole.protocol.settings import PoolTerms

DECISION_S = 1.0  # between two decisions
LONGEST_FIRST_START_S = 600.0  # if the run's first step comes later than that, it has waited for machines
WAITING_PART = 0.1  # without a step after this part of the time, or that longest start, one worker is requested
MARGIN = 1.05  # the work that is left counts so many times, since speeds vary
LOCAL_START_S, REMOTE_START_S = 5.0, 180.0  # a start of a worker, of a process on this machine or of a new machine
UNSIZED = 256  # workers that a pool without a size is taken to have
SPARE_PART = 0.05  # workers are given back only if so much of the time is left over without them


def checked_speeds(
    path: Path | None, start: str | None, deadline: str | None, pools: Sequence[PoolTerms], minimum: int
) -> tuple[float, ...]:
    """Return the speeds in the file of `--speeds`; () without one. Checks the pools of a run with a deadline.

    Raises:
        UsageError: an option is for a deadline, and there is none; the run has no pool of on-demand machines, its size
            is not known, or the other pools can't have the smallest number of workers; or the file has no speeds.
    """
    if deadline is None:
        for option, value in (("--speeds", path), ("--start", start)):
            if value is not None:
                raise UsageError(f"{option} {value}: it is used with --deadline only")
        return ()
    if len(pools) < 2:
        raise UsageError(
            f"--deadline: the last of several pools must have on-demand machines, and the others may have spot "
            f"machines; this run has {len(pools) or 'no'} --pool"
        )
    *others, last = pools
    if minimum > sum(pool.size or UNSIZED for pool in others):
        raise UsageError(
            f"--deadline: pool {last.name} begins without workers, and the other pools have less than --min {minimum}; "
            f"lower --min, or raise their sizes"
        )
    if last.size is None:
        raise UsageError(
            f"--deadline: pool {last.name} is the last one and has no size; say how many workers it may have, as "
            f"--pool {last.kind},name={last.name},size=4"
        )
    return () if path is None else speeds_of(path, sum(pool.size or UNSIZED for pool in pools)).relative


@dataclass(frozen=True, kw_only=True)
class OnDemandDecision:
    """How many workers the pool must have.

    Attributes:
        count: the target number of workers.
        late_s: by how many seconds the deadline is missed if only this pool computes from now on; 0.0: it is met.
        left: the steps that are left; None: not known yet.
    """

    count: int
    late_s: float = 0.0
    left: int | None = None


class OnDemandTarget:
    """The target of the pool of on-demand machines. Call `take` with every line, and `decide` at any time.

    Args:
        pool: the name of the pool, which is not the run's first.
        most: the largest number of its workers.
        speeds: how many times faster 1, 2, ... workers are than one; (): not known, the run learns it.
        start_s: how long a worker takes to start, at least, as long as none has been seen to start.
        begins: the Unix time at which the run began.
        deadline: the Unix time at which the run has to be done.
    """

    def __init__(
        self, *, pool: str, most: int, start_s: float, begins: float, deadline: float, speeds: Sequence[float] = ()
    ) -> None:  # fmt: skip
        self._id = re.compile(rf"{re.escape(pool)}-w\d")  # how the ID of a worker of this pool begins
        self._most, self._begins, self._deadline = most, begins, deadline
        self._assumed_start_s, self._relative = start_s, tuple(speeds)
        self._first: StepLine | None = None
        self._last: StepLine | None = None
        self._steps = Counter[int]()  # by the number of workers
        self._samples = Counter[int]()  # of these steps
        self._seconds: dict[int, float] = {}  # of these steps
        self._members = 0  # workers of this pool in the view
        self._requested: list[float] = []  # when a worker was requested that is not in the view yet, the oldest first
        self._start_s: float | None = None  # the longest start of a worker of this pool

    def take(self, line: Line) -> None:
        """Learn from a line of metrics.jsonl."""
        if isinstance(line, StepLine) and line.total is not None and line.samples:
            self._first, self._last = self._first or line, line
            step_s = max(line.seconds - line.once_s - line.pause_s, 1e-6)
            self._steps[line.workers] += 1
            self._samples[line.workers] += line.samples
            self._seconds[line.workers] = self._seconds.get(line.workers, 0.0) + step_s
        elif isinstance(line, ViewEvent):
            self._has_members(line.members, line.time)
        elif isinstance(line, CoordinatorBackEvent):
            self._has_members(line.workers, line.time)

    def decide(self, now: float) -> OnDemandDecision:
        """Return the target at the Unix time `now`. It is taken for granted that it is requested at once."""
        found = self._decision(now)
        missing = found.count - self._members
        while len(self._requested) < missing:
            self._requested.append(now)
        del self._requested[max(missing, 0) :]
        return found

    def _has_members(self, workers: tuple[str, ...], when: float) -> None:
        members = sum(self._id.match(worker) is not None for worker in workers)
        for _ in range(members - self._members):
            if self._requested:
                self._start_s = max(self._start_s or 0.0, when - self._requested.pop(0))
        self._members = members

    def _decision(self, now: float) -> OnDemandDecision:
        if self._first is None or self._last is None:
            longest_s = min(WAITING_PART * (self._deadline - self._begins), LONGEST_FIRST_START_S)
            return OnDemandDecision(count=int(now - self._begins >= longest_s))
        left, whole = MARGIN * self._left(self._last), MARGIN * self._left(self._first)
        first_start_s = min(self._first.time - self._begins, LONGEST_FIRST_START_S)
        start_s = self._start_s or max(first_start_s, self._assumed_start_s)
        speeds = self._speeds()
        burst = burst_of(whole, self._deadline - self._first.time, start_s, speeds)
        starts_s = [0.0] * self._members
        for requested in self._requested:
            remaining_s = requested + start_s - now
            insort(starts_s, max(remaining_s, 0.0) if remaining_s > -start_s else start_s)  # it will not come soon

        def fewest(time_s: float, most: int) -> int:
            return fewest_on_demand(left, time_s, DECISION_S, start_s, starts_s, most, speeds)

        time_s = self._deadline - now
        all_starts_s = [*starts_s[: self._most], *[start_s] * (self._most - len(starts_s))]
        missing = left / MARGIN - work_until(max(time_s, 0.0), all_starts_s, speeds)
        if missing > 0:
            return OnDemandDecision(count=self._most, late_s=missing / speeds[-1], left=_steps_left(self._last))
        count = fewest(time_s, burst)
        if count >= burst:
            count = max(burst, fewest(time_s, self._most))
        elif count < len(starts_s):
            with_spare = fewest((1 - SPARE_PART) * time_s - start_s, burst)
            count = min(max(with_spare, count), len(starts_s))
        return OnDemandDecision(count=count, left=_steps_left(self._last))

    def _left(self, line: StepLine) -> float:
        """Return the samples that are left after a step, if the number of workers stays."""
        return _steps_left(line) * self._samples[line.workers] / self._steps[line.workers]

    def _speeds(self) -> list[float]:
        """Return the samples a second of 1, 2, ... workers of the pool."""
        if not self._relative:
            return speeds_from({n: self._samples[n] / self._seconds[n] for n in self._seconds}, self._most)
        as_of_one = sum(seconds * speed_of(self._relative, n) for n, seconds in self._seconds.items())
        of_one = sum(self._samples.values()) / as_of_one
        return [of_one * speed_of(self._relative, n) for n in range(1, self._most + 1)]


def _steps_left(line: StepLine) -> int:
    assert line.total is not None
    return max(line.total - line.step - 1, 0)


def target_of(settings: RunSettings) -> OnDemandTarget | None:
    """Return the target of the run's last pool; None: the run has no deadline."""
    spending = settings.spending
    if spending.deadline is None:
        return None
    last = settings.pools[-1]
    assumed_s = LOCAL_START_S if last.kind == "local" else REMOTE_START_S
    return OnDemandTarget(
        pool=last.name, most=last.size or 0, start_s=assumed_s if spending.start_s is None else spending.start_s,
        begins=spending.begins, deadline=spending.deadline, speeds=spending.speeds,
    )  # fmt: skip


async def begin_without(pool: str, api: Api) -> None:
    """Set the target of the pool to 0, before anything is requested of it."""
    while True:
        try:
            await asyncio.to_thread(api.scale, 0, pool)
            return
        except CoordinatorUnreachable:
            await asyncio.sleep(DECISION_S)


async def meet_deadline(
    pool: str, api: Api, target: OnDemandTarget, show: Callable[[str], None], current: int | None
) -> None:
    """Set the target of the pool whenever it changes, and say so. Never returns.

    `current`: the target that the pool has; None: not known.
    """
    is_late, refusal = False, ""
    while True:
        decision = target.decide(time.time())
        if decision.count != current and decision.left != 0:  # at the end all workers go anyway
            try:
                await asyncio.to_thread(api.scale, decision.count, pool)
            except CoordinatorUnreachable:
                pass
            except UsageError as error:
                if str(error) != refusal:
                    show(f"deadline: pool {pool} can't have {decision.count} workers: {error}")
                refusal = str(error)
            else:
                show(_described(decision, pool, current))
                current, refusal = decision.count, ""
        if is_late != (is_late := decision.late_s > 0):
            show(_lateness(decision, pool))
        await asyncio.sleep(DECISION_S)


def _described(decision: OnDemandDecision, pool: str, before: int | None) -> str:
    was = "" if before is None else f", {before} before"
    why = "no step is done yet" if decision.left is None else f"{decision.left:,} steps are left"
    return f"deadline: pool {pool}: target {decision.count}{was}; {why}"


def _lateness(decision: OnDemandDecision, pool: str) -> str:
    if not decision.late_s:
        return "deadline: it can be met again"
    return (
        f"deadline: behind the plan: if only the {decision.count} workers of pool {pool} compute from now on, the run "
        f"ends {decision.late_s:,.0f} s late"
    )
