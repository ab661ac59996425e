"""A simulated run: the shipped `Member`, `Driver`, `Session` and `Coordinator` on a fake clock and network.

Everything random comes from one generator: the delays, the faults and when they strike. Time passes only between
events. What is modelled is what the machines meet in real processes:

    control plane   connections that are late, reset, or dumb in one direction or both; a coordinator that is frozen,
                    or killed, also in the middle of sending, and comes back with its journal (`network.py`)
    data plane      partial sums, reduced slices, words and state, each tagged with view and round, each with a delay
                    of its own; broken pairs; processes that exit under their peers
    training side   a script that calls the shipped `Driver`: a thread that looks late at what has happened is an event
                    like any other
    exchange        the shipped order, followed by threads that go on after the training side has left their view, and
                    that `settle` hands garbage
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from farandole.protocol import messages as m
from farandole.protocol.coordinator.coordinator import Coordinator
from farandole.protocol.coordinator.state import RunSettings
from farandole.protocol.worker.member import Member
from farandole.simulate.faults import Faults
from farandole.simulate.pieces import BUCKETS
from farandole.simulate.process import Process
from farandole.simulate.witness import Violation, Witness
from farandole.simulate.worker import SimulatedWorker

SIGNATURE = m.Signature(facts=(("torch", "2"),))
EVENTS_LIMIT = 60_000  # a run has about 1,000


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What a simulated run is started with, and how much befalls it.

    Attributes:
        seed: of what is drawn beside the world's own generator: who reaches the store, who finds strangers.
        hosts: that the workers are spread over.
        steps: that the script asks for.
        buckets: of a training step, at most three.
        checkpoints: one every so many steps; 0: none.
        budget: so many faults.
        temper: how likely one is where something is under way.
        slow: how slow the network is; 1 is a delay of 5 ms in the mean.
        focus: kinds of faults that are to strike most.
        shortages: so many, at most, of data on a host.
    """

    seed: int
    settings: RunSettings
    hosts: int
    steps: int
    buckets: int
    checkpoints: int
    budget: int
    temper: float
    slow: float
    focus: Sequence[str] = ()
    shortages: int = 0


class World(Faults):
    """`member`, `coordinator` and `worker` are the classes to run: mutants have their own."""

    def __init__(
        self,
        scenario: Scenario,
        rng: random.Random,
        *,
        witness: Callable[[World], Witness] = lambda _: Witness(),
        member: type[Member] = Member,
        coordinator: type[Coordinator] = Coordinator,
        worker: type[SimulatedWorker] = SimulatedWorker,
        trace: bool = False,
    ) -> None:
        self.rng = rng
        self.disks = random.Random(scenario.seed + 0.5)  # who reaches the store, and what is full
        self.strangers = random.Random(scenario.seed + 0.25)  # who finds one in its connections, while they are about
        self.updates_last = scenario.seed % 4 == 3  # in the others they take no time
        self.deadlines = random.Random(scenario.seed + 0.125)  # of notices
        self.strange = self.strangers.choice((0.0, 0.0, 0.0, 0.1, 0.4))
        self.now = 0.0
        self.lines: list[str] = []
        self._trace = trace
        self.workers: dict[str, Process] = {}
        self.rendezvous: dict[int, set[str]] = defaultdict(set)
        self.store: dict[int, int] = {}  # checkpoints: the state by step
        self.events = 0
        self.records: Counter[str] = Counter()
        self._member, self._worker = member, worker
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._ids = count()
        self._names = count(1)
        self.settings, self.steps, self.checkpoints = scenario.settings, scenario.steps, scenario.checkpoints
        self.hosts = scenario.hosts
        self.buckets = {**BUCKETS, "train": BUCKETS["train"][: scenario.buckets]}
        self.budget, self.temper, self._slow = scenario.budget, scenario.temper, scenario.slow
        self.stop_code: int | None = None
        self.script_failed = self.strayed = False
        self.witness = witness(self)
        self.start_shortages(scenario.seed, budget=scenario.shortages)
        self.start_network(coordinator)
        self.start_faults(scenario.focus)

    def until(self, time: float, over: Callable[[], bool]) -> None:
        heap = self._heap
        while heap and heap[0][0] <= time and not over():
            self.now, _, function, args = heapq.heappop(heap)
            self.events += 1
            if self.events > EVENTS_LIMIT:
                raise Violation("the run goes round in circles")
            function(*args)
        if not over():
            self.now = max(self.now, time)

    # --- time ------------------------------------------------------------------------------------------------------

    def at(self, delay: float, function: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._heap, (self.now + delay, next(self._ids), function, args))

    def delay(self, scale: float = 0.01) -> float:
        x = self.rng.random()
        return self._slow * scale * (x if x < 0.95 else 20 * x)

    def say(self, who: str, what: str) -> None:
        if self._trace:
            self.lines.append(f"{self.now:8.4f} {who:>12}  {what}")

    def spawn(self, *, pool: str) -> None:
        name = f"w{next(self._names)}"
        worker = self._worker(self, name, self._member(name), pool=pool)
        self.workers[name] = worker
        worker.after(self.rng.uniform(0.0, 0.3), worker.start, SIGNATURE)
