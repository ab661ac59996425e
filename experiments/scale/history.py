"""One short history at both levels of detail: to which class of the account each second of the machines goes.

A history says how many spot machines there are in each interval. With every message, a machine runs a worker
`START_S` after its request and is killed when the market takes it back; the workers are the shipped state machines. By
events, `farandole.market.play` plays the same history with the strategy `farandole, spot`, as `farandole simulate`
does. It is told how fast each number of workers is where nothing happens, as `farandole bench scaling` measures it.

The classes are those of docs/account.md. `wait` is their exchange and pause: a worker that has computed its part waits
for the others.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec

from experiments.scale.machines import SLOW, EqualWorker, StepTimes, micro_batches
from farandole.market.play import PlannedJob, Price, play
from farandole.market.strategies import FarandoleSpot
from farandole.market.traces import MarketTrace, SpotMarket
from farandole.protocol.coordinator.coordinator import Coordinator
from farandole.protocol.coordinator.state import RunSettings
from farandole.protocol.view import View
from farandole.simulate.process import Process
from farandole.simulate.world import Scenario, World

GAP_S, START_S = 60, 20  # an interval of the history; from the request for a machine until it computes
JOIN_S = 1.0  # a worker that starts is in a view so much later, about: it waits for the end of a step
MICRO_BATCHES, SHARD_S = 32, 0.05  # of a step, and the seconds of one
MOST, LEAST = 8, 2  # machines: the state is never lost


class ClassTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of machines by class, and `done_s`: when the last step ended."""

    start: float
    compute: float
    again: float
    wait: float
    done_s: float

    @property
    def paid_s(self) -> float:
        return self.start + self.compute + self.again + self.wait


class HistoryRow(msgspec.Struct, frozen=True, kw_only=True):
    """A history at both levels of detail."""

    seed: int
    steps: int
    lost: int
    messages: ClassTimes
    events: ClassTimes


def drawn_counts(seed: int, intervals: int) -> tuple[int, ...]:
    """Return a history: numbers of machines that change in every second interval, in the mean."""
    rng = random.Random(seed)
    counts = [rng.randint(LEAST, MOST)]
    while len(counts) < intervals:
        counts.append(rng.choice((counts[-1], rng.randint(LEAST, MOST))))
    return tuple(counts)


# --- every message ----------------------------------------------------------------------------------------------------


class CountingWorker(EqualWorker):
    """A worker that counts the micro-batches that it has computed."""

    computed = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.shard_s = SHARD_S

    def _finds(self, shard: int) -> int:
        self.computed += 1
        return super()._finds(shard)


class FirstSwitches(StepTimes):
    """When steps ended, and when each worker came into a view."""

    def __init__(self) -> None:
        super().__init__()
        self.begins = dict[str, float]()

    def switched(self, worker: Process, view: View, round_: int) -> None:
        super().switched(worker, view, round_)
        self.begins.setdefault(worker.name, worker.world.now)


@dataclass(kw_only=True)
class SpotMachine:
    """A machine that is paid for from `requested` to `ended`."""

    requested: float
    ended: float | None = None
    worker: CountingWorker | None = None


class History:
    """A run of `steps` steps under a history, with every message."""

    def __init__(self, counts: Sequence[int], steps: int, seed: int) -> None:
        self.machines = list[SpotMachine]()
        self.times, self.lost = FirstSwitches(), 0
        scenario = Scenario(
            seed=seed, settings=RunSettings(run="history", wanted=max(counts), minimum=1, by_speed=False), hosts=2,
            steps=steps, buckets=1, checkpoints=0, budget=0, fault_rate=0.0, slow=SLOW, evaluates_every=0,
            share_rate=0.0, events_limit=10**9,
        )  # fmt: skip
        self.world = World(
            scenario, random.Random(seed), witness=lambda _: self.times, coordinator=Coordinator, worker=CountingWorker
        )
        self.world.strange = 0.0
        self.world.at(0.0, self.world.tick)
        for number, count in enumerate(counts):
            self.world.at(number * GAP_S, self.set_count, count)

    def play(self) -> ClassTimes:
        with micro_batches(MICRO_BATCHES):
            self.world.until(1e9, lambda: self.world.coordinator.over is not None)
        done_s = max(self.times.ends.values())
        ends = [min(each.ended or done_s, done_s) for each in self.machines]
        paid_s = sum(max(end - each.requested, 0.0) for each, end in zip(self.machines, ends, strict=True))
        starts = [
            min(self.times.begins.get(each.worker.name, end) if each.worker else end, end) - each.requested
            for each, end in zip(self.machines, ends, strict=True)
        ]
        start = sum(max(each, 0.0) for each in starts)
        compute = len(self.times.ends) * MICRO_BATCHES * SHARD_S
        again = sum(each.worker.computed for each in self.machines if each.worker) * SHARD_S - compute
        wait = paid_s - start - compute - again
        return ClassTimes(start=start, compute=compute, again=again, wait=wait, done_s=done_s)

    def set_count(self, count: int) -> None:
        """Let the market have that many machines from now on. It takes those back that were requested first."""
        there = [machine for machine in self.machines if machine.ended is None]
        for machine in there[: max(len(there) - count, 0)]:
            machine.ended = self.world.now
            self.lost += 1
            if machine.worker:
                machine.worker.die("killed", -9)
        for _ in range(count - len(there)):
            self.machines.append(machine := SpotMachine(requested=self.world.now))
            self.world.at(START_S - JOIN_S, self._begin, machine)

    def _begin(self, machine: SpotMachine) -> None:
        if machine.ended is None and not self.world.coordinator.over:
            self.world.spawn(pool="pool")
            worker = [*self.world.workers.values()][-1]
            assert isinstance(worker, CountingWorker)
            machine.worker = worker


def step_s(workers: int) -> float:
    """Return the time of a step of so many workers where nothing happens."""
    quiet = History((workers,), 60, seed=1)
    quiet.play()
    ends = [quiet.times.ends[step] for step in sorted(quiet.times.ends)]
    return statistics.median(after - before for before, after in pairwise(ends))


# --- by events --------------------------------------------------------------------------------------------------------


def by_events(counts: Sequence[int], steps: int, steps_s: Sequence[float]) -> ClassTimes:
    """Return the same by events. `steps_s`: item i is the time of a step of i + 1 workers."""
    job = PlannedJob(
        work_s=round(steps * steps_s[0]), start_s=START_S, speeds=tuple(steps_s[0] / each for each in steps_s)
    )
    market = SpotMarket(zones=(MarketTrace(name="history", gap_s=GAP_S, counts=tuple(counts)),))
    played = play(job, market, Price(on_demand=1.0, spot=1.0), FarandoleSpot)
    assert played.done_s is not None
    compute = steps * MICRO_BATCHES * SHARD_S
    again = played.seconds["again"]
    return ClassTimes(
        start=played.seconds["start"], compute=compute, again=again, wait=played.seconds["compute"] - compute,
        done_s=played.done_s,
    )  # fmt: skip


def rows(seeds: Iterable[int], intervals: int, steps: int) -> Iterator[HistoryRow]:
    """Yield each history at both levels of detail. It goes on with its last number of machines."""
    steps_s = [step_s(workers) for workers in range(1, MOST + 1)]
    for seed in seeds:
        counts = drawn_counts(seed, intervals)
        history = History(counts, steps, seed)
        messages = history.play()
        longer = (*counts, *[counts[-1]] * intervals)
        events = by_events(longer, steps, steps_s)
        yield HistoryRow(seed=seed, steps=steps, lost=history.lost, messages=messages, events=events)
