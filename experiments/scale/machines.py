"""Many workers through the shipped state machines: every message of a run, on the simulator's clock.

The workers have equal machines: a step is `SHARDS_OF_WORKER` micro-batches of `SHARD_S` seconds for each of them, with
a bucket in which each worker reduces one part. The network has a mean delay of about a millisecond, and no limit of
bandwidth. Eight workers share a host. Workers that are lost or leave are replaced by new ones, which start within a
second.

In a run of `changes` one worker is killed (its peers see closed connections), one goes silent (nothing tells that it is
gone), and one has a preemption notice, each some steps after the one before. In a run of `failures` workers are
killed at random times.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import msgspec

from experiments.scale.events import failure_times
from farandole.protocol import messages as m
from farandole.protocol.coordinator.coordinator import Coordinator
from farandole.protocol.coordinator.state import Action, RunSettings, Send
from farandole.protocol.view import View
from farandole.simulate.exchange import SimulatedExchange
from farandole.simulate.links import Parcel
from farandole.simulate.pieces import UNIT, SimulatedBucket
from farandole.simulate.process import Process
from farandole.simulate.replica import SHARDS
from farandole.simulate.witness import Witness
from farandole.simulate.worker import SimulatedWorker
from farandole.simulate.world import Scenario, World

SHARD_S, SHARDS_OF_WORKER = 0.25, 4
STEP_S = SHARD_S * SHARDS_OF_WORKER
WORKERS_OF_HOST = 8
SLOW = 0.1  # of the simulator's delays: 1 is a mean of 5 to 10 ms
PERIODIC = (m.Heartbeat, m.HeartbeatAnswer)


class MachinesRow(msgspec.Struct, frozen=True, kw_only=True):
    """What a run of many workers came to.

    Attributes:
        step_s: the median time of a step, in simulated seconds. `steps`: how many were counted, from `QUIET_STEP` on.
        heartbeats_per_s: messages from and to the coordinator that are heartbeats, in a simulated second. `others`: all
            other messages from and to it, in the whole run.
        coordinator_ms: milliseconds of this machine's CPU that the coordinator's state machine takes for a simulated
            second.
        sent: messages that a worker sends in a step without a change, in the mean. `peers`: workers to which it sends.
        pauses_s: by kind of change, how much longer the step took in which it was than the step before. `join`: of the
            worker that replaces the one with a notice.
        failures: workers that were lost. `goodput`: steps times the median, over their time.
        seconds: how long the simulation took.
    """

    workers: int
    steps: int
    step_s: float
    heartbeats_per_s: float
    others: int
    coordinator_ms: float
    sent: float
    peers: float
    pauses_s: dict[str, float]
    failures: int
    goodput: float
    seconds: float


class TimedCoordinator(Coordinator):
    """The shipped coordinator, with the time that its calls take and the messages that it gets and sends."""

    def __init__(self, *arguments: Any) -> None:
        self.spent_s, self.messages = 0.0, Counter[str]()
        super().__init__(*arguments)

    def _timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*arguments)
        finally:
            self.spent_s += time.perf_counter() - began

    def hello(self, message: m.Hello, now: float) -> str:
        self._count(message)
        return self._timed(super().hello, message, now)

    def on_message(self, worker: str, message: m.Message, now: float) -> None:
        self._count(message)
        self._timed(super().on_message, worker, message, now)

    def on_disconnect(self, worker: str, now: float) -> None:
        self._timed(super().on_disconnect, worker, now)

    def tick(self, now: float) -> None:
        self._timed(super().tick, now)

    def drain(self) -> list[Action]:
        actions: list[Action] = self._timed(super().drain)
        for action in actions:
            if isinstance(action, Send):
                self._count(action.message)
        return actions

    def _count(self, message: m.Message) -> None:
        self.messages["periodic" if isinstance(message, PERIODIC) else "others"] += 1


class StepTimes(Witness):
    """When the first worker went on after each training step, in simulated seconds, and what was sent in it."""

    def __init__(self) -> None:
        self.ends: dict[int, float] = {}  # by step
        self.joins: list[float] = []  # when the first worker began a view with a new member
        self._newest, self._members = -1, set[str]()

    def committed(self, worker: Process, exchange: SimulatedExchange) -> None:
        if exchange.kind == "train" and worker.step not in self.ends:
            self.ends[worker.step] = worker.world.now

    def switched(self, worker: Process, view: View, round_: int) -> None:
        del round_
        if view.number > self._newest:
            if not self._members >= {*view.members}:
                self.joins.append(worker.world.now)
            self._newest, self._members = view.number, {*view.members}


class EqualWorker(SimulatedWorker):
    """A worker whose micro-batches take equally long."""

    spread = (0.98, 1.02)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.shard_s = SHARD_S
        self.reaches = ""
        self.sent = Counter[tuple[int, str]]()  # messages, by step and receiver

    def send(self, group: int, peer: str, tag: int, parcel: Parcel) -> None:
        self.sent[self.step, peer] += 1
        super().send(group, peer, tag, parcel)


@contextmanager
def micro_batches(count: int) -> Generator[None]:
    """Let a training step have so many micro-batches."""
    before = SHARDS["train"]
    SHARDS["train"] = count
    try:
        yield
    finally:
        SHARDS["train"] = before


def settings_of(workers: int) -> RunSettings:
    """The settings of a run of so many workers: those of `farandole run`, but equal shares and a minimum of half.

    So the steps do not depend on the measured speed of workers, and a failure does not stop the run.
    """
    return RunSettings(run="scale", wanted=workers, minimum=max(1, workers // 2), by_speed=False)


def world_of(workers: int, steps: int, seed: int, witness: Witness) -> World:
    scenario = Scenario(
        seed=seed, settings=settings_of(workers), hosts=-(-workers // WORKERS_OF_HOST), steps=steps, buckets=1,
        checkpoints=0, budget=0, fault_rate=0.0, slow=SLOW, evaluates_every=0, share_rate=0.0, events_limit=10**9,
    )  # fmt: skip
    world = World(
        scenario, random.Random(seed), witness=lambda _: witness, coordinator=TimedCoordinator, worker=EqualWorker
    )
    world.strange = 0.0
    world.buckets["train"] = (SimulatedBucket(UNIT * workers),)
    for _ in range(workers):
        world.spawn(pool="pool")
    world.at(0.0, world.tick)
    world.at(0.3, world.pool)
    return world


# --- changes ----------------------------------------------------------------------------------------------------------

FIRST_CHANGE, BETWEEN, LAST_STEPS = 4, 5, 3  # steps
QUIET_STEP = 3  # all workers have joined, and no change is as early; figures are from its beginning on
CHANGES = ("killed", "silent", "notice")


def changes(workers: int, seed: int = 1, kinds: tuple[str, ...] = CHANGES) -> MachinesRow:
    """Return what a run comes to in which a worker is killed, one goes silent and one has a notice."""
    steps = FIRST_CHANGE + BETWEEN * len(kinds) + LAST_STEPS
    times, began = StepTimes(), time.monotonic()
    with micro_batches(workers * SHARDS_OF_WORKER):
        world = world_of(workers, steps, seed, times)
        at = dict[str, float]()
        for number, kind in enumerate(kinds):
            due = FIRST_CHANGE + BETWEEN * number
            world.until(1e9, lambda due=due: due in times.ends)
            world.until(world.now + STEP_S / 2, lambda: False)
            at[kind] = world.now
            _change(world, kind)
        world.until(1e9, lambda: world.coordinator.over is not None)
    return _row(world, times, at, time.monotonic() - began)


def _change(world: World, kind: str) -> None:
    assert world.coordinator.view is not None
    target = world.workers[world.coordinator.view.members[-1]]
    if kind == "killed":
        target.die("killed", -9)
    elif kind == "silent":
        target.freeze(1e9)
    else:
        target.tell(m.LeaveRequest(reason="SIGTERM", within_s=120.0))


# --- failures ---------------------------------------------------------------------------------------------------------


def failures(workers: int, mean_s: float, steps: int, seed: int = 1) -> MachinesRow:
    """Return what a run comes to in which workers are killed at random times, `mean_s` seconds apart in the mean."""
    times, began = StepTimes(), time.monotonic()
    target = random.Random(seed)
    with micro_batches(workers * SHARDS_OF_WORKER):
        world = world_of(workers, steps, seed, times)
        world.until(1e9, lambda: QUIET_STEP - 1 in times.ends)

        def strike() -> None:
            members = world.coordinator.view.members if world.coordinator.view else ()
            alive = [world.workers[name] for name in members if world.workers[name].alive]
            if alive and world.coordinator.ending is None:
                target.choice(alive).die("killed", -9)

        for due in failure_times(mean_s, steps * STEP_S * 3, seed):
            world.at(due, strike)
        world.until(1e9, lambda: world.coordinator.over is not None)
    return _row(world, times, {}, time.monotonic() - began)


# --- figures ----------------------------------------------------------------------------------------------------------


def _row(world: World, times: StepTimes, at: dict[str, float], seconds: float) -> MachinesRow:
    coordinator = world.coordinator
    assert isinstance(coordinator, TimedCoordinator)
    ends = [times.ends[step] for step in sorted(times.ends) if step >= QUIET_STEP - 1]
    durations = [after - before for before, after in pairwise(ends)]
    median = statistics.median(durations)
    pauses = {kind: _longer(ends, when) for kind, when in at.items()}
    if "notice" in at:
        pauses["join"] = _longer(ends, times.joins[-1])
    workers = [worker for worker in world.workers.values() if isinstance(worker, EqualWorker)]
    quiet = [count for worker in workers for (step, _), count in worker.sent.items() if step == QUIET_STEP]
    elapsed = ends[-1] - ends[0]
    return MachinesRow(
        workers=world.settings.wanted, steps=len(durations), step_s=median,
        heartbeats_per_s=coordinator.messages["periodic"] / world.now, others=coordinator.messages["others"],
        coordinator_ms=1e3 * coordinator.spent_s / world.now,
        sent=sum(quiet) / world.settings.wanted, peers=len(quiet) / world.settings.wanted,
        pauses_s=pauses, failures=world.records["lost"], goodput=min(1.0, len(durations) * median / elapsed),
        seconds=round(seconds, 1),
    )  # fmt: skip


def _longer(ends: list[float], when: float) -> float:
    """Return how much longer the step took that was in progress at the time `when` than the step before."""
    place = next(place for place, end in enumerate(ends) if end > when)
    return (ends[place] - ends[place - 1]) - (ends[place - 1] - ends[place - 2])
