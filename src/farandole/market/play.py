"""Plays a strategy on a market: which machines it has in each interval, what they cost, and when the job is done.

At the beginning of each interval the market takes back the spot machines that it has no room for. Then the strategy
chooses its machines for this interval. It knows the past and the present, not the future. A machine is paid for from
its request on, and computes after `PlannedJob.start_s`. If a job restarts (`Strategy.restarts`), all its machines start
again at each change of them, and the loss of a machine costs the work since the last checkpoint. While a checkpoint is
saved nobody computes. A change that the strategy makes itself loses nothing and saves in no time; on-demand machines
are never taken back, so no checkpoint is saved there. Payment ends when the job is done.

Every second of every machine is in one class of the account (docs/account.md): `start`, `compute`, `save`, or `again`,
which are seconds of computing that were lost.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from farandole.market.traces import SpotMarket
from farandole.plan.deadline import speed_of


@dataclass(frozen=True, kw_only=True)
class Price:
    """Dollars for an hour of one machine. `spot`: where a trace has no price; None: each trace has one."""

    on_demand: float
    spot: float | None = None


@dataclass(frozen=True, kw_only=True)
class PlannedJob:
    """A training.

    Attributes:
        work_s: for how many seconds one machine alone computes until the job is done.
        start_s: from the request for a machine until it computes.
        deadline_s: when the job has to be done, from its beginning; None: there is no deadline.
        budget: the dollars that the job may cost, for strategies that have one; None: there is no budget.
        seed: of what a strategy draws at random.
        speeds: item i is how many times faster i + 1 machines are than one. The job has at most so many machines.
        checkpoint_s: seconds of computing between two checkpoints, for jobs that restart; 0: they lose no work.
        save_s: how long a checkpoint takes.
    """

    work_s: int
    start_s: int
    deadline_s: int | None = None
    budget: float | None = None
    seed: int = 0
    speeds: tuple[float, ...] = (1.0,)
    checkpoint_s: int = 0
    save_s: float = 0.0

    @property
    def most(self) -> int:
        """The largest number of machines."""
        return len(self.speeds)

    def speed(self, machines: float) -> float:
        """Return how many times faster that many machines are than one.

        A machine of another type is the part of an on-demand machine that its speed is. Between two numbers the speed
        is interpolated linearly, and beyond the last one it grows as it did before.
        """
        whole = int(machines)
        if whole == machines <= self.most:
            return speed_of(self.speeds, whole)
        known = (0.0, *self.speeds)
        last = min(whole, self.most - 1)
        return known[last] + (known[last + 1] - known[last]) * (machines - last)


@dataclass(frozen=True, kw_only=True)
class Machines:
    """How many machines of each kind: spot machines by zone, and on-demand machines."""

    spot: tuple[int, ...]
    on_demand: int = 0


@dataclass(frozen=True, kw_only=True)
class SpotType:
    """The spot machines of a zone in an interval: see `MarketTrace`. `dollars`: for an hour of one."""

    speed: float
    dollars: float

    @property
    def work_dollars(self) -> float:
        """What the work costs that an on-demand machine does in an hour."""
        return self.dollars / self.speed


def types_of(market: SpotMarket, price: Price) -> list[tuple[SpotType, ...]]:
    """Return for each interval the types of the spot machines, by zone."""
    by_zone = list[list[SpotType]]()
    for zone in market.zones:
        assert zone.spot or price.spot is not None, f"{zone.name} has no price"
        dollars = zone.spot or (price.spot or 0.0,) * len(zone.counts)
        types = {each: SpotType(speed=zone.speed, dollars=each) for each in {*dollars}}
        by_zone.append([types[each] for each in dollars])
    return [*zip(*by_zone, strict=False)]


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What a strategy knows at the beginning of an interval.

    Attributes:
        time_s: since the beginning of the job.
        gap_s: the length of the interval.
        available: how many spot machines the market has, by zone.
        fleet: the machines that the job has, after the market has taken some back.
        starts_s: for each on-demand machine, for how many seconds it still starts.
        left_s: the work that is left, in seconds of one machine.
        unsaved_s: the work that the loss of a machine would cost, in seconds of one machine.
        dollars: what the job has cost so far.
        price: of the machines.
        types: the spot machines of each zone: their speed, and dollars for an hour of one.
    """

    time_s: int
    gap_s: int
    available: tuple[int, ...]
    fleet: Machines
    starts_s: tuple[int, ...]
    left_s: float
    unsaved_s: float
    dollars: float
    price: Price
    types: tuple[SpotType, ...]

    def count(self, fleet: Machines) -> float:
        """Return to how many on-demand machines these machines come, by their speed."""
        return fleet.on_demand + sum(n * each.speed for n, each in zip(fleet.spot, self.types, strict=True))

    def spot_dollars(self, spot: Sequence[int]) -> float:
        """Return what an hour of these spot machines costs."""
        return sum(n * each.dollars for n, each in zip(spot, self.types, strict=True))


class Strategy(ABC):
    """Decides which machines a job has. An object plays one job, once."""

    restarts = False  # a change of the machines restarts the job
    any_number = False  # the job may have any number of machines; else it has all or none

    def __init__(self, job: PlannedJob) -> None:
        self.job = job

    @abstractmethod
    def decide(self, now: Moment) -> Machines:
        """Return the machines of the interval that begins, with at most `now.available` spot machines."""


@dataclass(kw_only=True)
class Played:
    """What a job came to. `done_s` is None if it was not done when the traces ended.

    Attributes:
        dollars: what all machines cost.
        lost: how many machines the market took back.
        seconds: seconds of machines, by class of the account.
        paid_s: seconds of machines that were paid, by kind.
        done: the work that was done by the end of each interval, in seconds of one machine.
    """

    done_s: float | None = None
    dollars: float = 0.0
    lost: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("start", "compute", "save", "again"), 0.0))
    paid_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("spot", "on demand"), 0.0))
    done: list[float] = field(default_factory=list[float])

    @property
    def goodput(self) -> float:
        """The part of the machines' time in which they computed what was not lost."""
        paid = sum(self.seconds.values())
        return self.seconds["compute"] / paid if paid else 0.0

    def count(self, fleet: Machines, now: Moment, run: _Run) -> None:
        """Add what these machines did and cost in an interval."""
        for kind, machines, dollars in (
            ("spot", sum(fleet.spot), now.spot_dollars(fleet.spot)),
            ("on demand", fleet.on_demand, fleet.on_demand * now.price.on_demand),
        ):
            self.paid_s[kind] += machines * run.time_s
            self.dollars += run.time_s * dollars / 3600
        self.seconds["start"] += (sum(fleet.spot) + fleet.on_demand) * run.time_s - run.computing_s - run.saving_s
        self.seconds["compute"] += run.computing_s
        self.seconds["save"] += run.saving_s


def play(job: PlannedJob, market: SpotMarket, price: Price, make: Callable[[PlannedJob], Strategy]) -> Played:
    """Return what the job comes to with the strategy that `make` makes. It ends with the traces at the latest."""
    strategy, result = make(job), Played()
    machines = _RunningMachines(job, [zone.speed for zone in market.zones], restarts=strategy.restarts)
    left_s, saved = float(job.work_s), _Checkpoints(job, restarts=strategy.restarts)
    for interval, (available, types) in enumerate(zip(market.counts, types_of(market, price), strict=True)):
        time_s, before, speed = interval * market.gap_s, machines.count, machines.speed
        lost = machines.take_back(available)
        result.lost += lost
        if lost:
            left_s += saved.unsaved_s * speed
            result.seconds["compute"] -= saved.unsaved_s * before
            result.seconds["again"] += saved.unsaved_s * before
            saved.begin()
        now = Moment(
            time_s=time_s, gap_s=market.gap_s, available=available, fleet=machines.fleet, starts_s=machines.starts_s,
            left_s=left_s, unsaved_s=saved.unsaved_s * machines.speed, dollars=result.dollars, price=price, types=types,
        )  # fmt: skip
        if machines.change(strategy.decide(now), available):
            saved.begin()
        run = machines.run(market.gap_s, left_s, saved)
        left_s -= run.work_s
        result.count(machines.fleet, now, run)
        result.done.append(job.work_s - left_s)
        if left_s <= 1e-6:
            result.done_s = time_s + run.time_s
            break
    return result


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What the machines did in an interval.

    `time_s`: until the interval or the job ended. `computing_s`, `saving_s`: of all machines together.
    """

    time_s: float
    work_s: float
    computing_s: float
    saving_s: float


class _Checkpoints:
    """The checkpoints of a job that restarts: one after each `checkpoint_s` of computing."""

    def __init__(self, job: PlannedJob, *, restarts: bool) -> None:
        self._every_s = float(job.checkpoint_s) if restarts and job.checkpoint_s else math.inf
        self._save_s = job.save_s
        self._keeps = self._every_s < math.inf
        self._phase_s = 0.0  # since the last checkpoint was done: computing, then saving

    @property
    def unsaved_s(self) -> float:
        """The seconds of computing that are not in a checkpoint."""
        return min(self._phase_s, self._every_s) if self._keeps else 0.0

    def begin(self) -> None:
        """The job has restarted: all its work is saved or lost."""
        self._phase_s = 0.0

    def computing_s(self, time_s: float) -> float:
        """Return for how long of the next `time_s` the job computes."""
        return self._computed_s(self._phase_s + time_s) - self._computed_s(self._phase_s) if self._keeps else time_s

    def time_for(self, computing_s: float) -> float:
        """Return how long the job takes to compute for so long. It ends before a checkpoint that is due at its end."""
        if not self._keeps or not computing_s:
            return computing_s
        whole_s = self._computed_s(self._phase_s) + computing_s
        return whole_s + (math.ceil(whole_s / self._every_s - 1e-9) - 1) * self._save_s - self._phase_s

    def advance(self, time_s: float) -> None:
        """So much time has passed, in which the job has computed and saved."""
        if self._keeps:
            self._phase_s = (self._phase_s + time_s) % (self._every_s + self._save_s)

    def _computed_s(self, phase_s: float) -> float:
        whole, rest_s = divmod(phase_s, self._every_s + self._save_s)
        return whole * self._every_s + min(rest_s, self._every_s)


class _RunningMachines:
    """The machines of a job: for each, how many seconds it still starts."""

    def __init__(self, job: PlannedJob, speeds: Sequence[float], *, restarts: bool) -> None:
        """`speeds`: of a spot machine, by zone."""
        self._job, self._restarts, self._speeds = job, restarts, (*speeds, 1.0)
        self._spot = [list[int]() for _ in speeds]
        self._on_demand = list[int]()
        self._lost = 0

    @property
    def count(self) -> int:
        return sum(map(len, self._spot)) + len(self._on_demand)

    @property
    def speed(self) -> float:
        """How many times faster all machines are than one on-demand machine, when they compute."""
        return self._job.speed(
            sum(len(each) * speed for each, speed in zip((*self._spot, self._on_demand), self._speeds, strict=True))
        )

    @property
    def fleet(self) -> Machines:
        return Machines(spot=tuple(map(len, self._spot)), on_demand=len(self._on_demand))

    @property
    def starts_s(self) -> tuple[int, ...]:
        """For each on-demand machine, for how many seconds it still starts, the least first."""
        return tuple(sorted(self._on_demand))

    def take_back(self, available: Sequence[int]) -> int:
        """Let the market take spot machines back. It takes those first that compute. Returns how many."""
        before = self.count
        self._spot = [
            sorted(machines)[max(len(machines) - n, 0) :] for machines, n in zip(self._spot, available, strict=True)
        ]
        self._lost = before - self.count
        return self._lost

    def change(self, fleet: Machines, available: Sequence[int]) -> bool:
        """Start and stop machines; those are stopped first that have to start for the longest time.

        Returns True if the machines are others than in the interval before.
        """
        assert all(0 <= n <= room for n, room in zip(fleet.spot, available, strict=True)), f"{fleet} of {available}"
        assert sum(fleet.spot) + fleet.on_demand <= self._job.most, f"{fleet}: more than {self._job.most}"
        changed = self._lost > 0 or fleet != self.fleet
        keeps = not (self._restarts and changed)
        self._spot = [self._resized(old if keeps else [], n) for old, n in zip(self._spot, fleet.spot, strict=True)]
        self._on_demand = self._resized(self._on_demand if keeps else [], fleet.on_demand)
        return changed

    def _resized(self, machines: list[int], count: int) -> list[int]:
        kept = sorted(machines)[:count]
        return kept + [self._job.start_s] * (count - len(kept))

    def run(self, gap_s: int, left_s: float, checkpoints: _Checkpoints) -> _Run:
        """Compute until the interval ends or the job is done."""
        every = zip((*self._spot, self._on_demand), self._speeds, strict=True)
        starts = sorted((start_s, speed) for each, speed in every for start_s in each)
        computing = [0.0, *accumulate(speed for _, speed in starts)]
        saves = any(self._spot)
        time_s = work_s = computing_s = saving_s = 0.0
        for count in range(len(starts) + 1):  # so many compute, until the next one does
            until_s = float(min(starts[count][0], gap_s) if count < len(starts) else gap_s)
            if until_s == time_s:
                continue  # the next one begins at the same time
            speed, one_s = self._job.speed(computing[count]), until_s - time_s  # one_s: what each of them computes
            one_s = checkpoints.computing_s(one_s) if saves else one_s
            is_done = speed > 0 and work_s + speed * one_s >= left_s
            if is_done:
                one_s = (left_s - work_s) / speed
                until_s = time_s + (checkpoints.time_for(one_s) if saves else one_s)
            work_s = left_s if is_done else work_s + speed * one_s
            computing_s += count * one_s
            saving_s += count * (until_s - time_s - one_s)
            if saves and count:
                checkpoints.advance(until_s - time_s)
            time_s = until_s
            if is_done:
                break
        self._spot = [[max(each - gap_s, 0) for each in machines] for machines in self._spot]
        self._on_demand = [max(each - gap_s, 0) for each in self._on_demand]
        return _Run(time_s=time_s, work_s=work_s, computing_s=computing_s, saving_s=saving_s)
