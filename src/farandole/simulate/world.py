"""A simulated run: the shipped `WorkerStateMachine`, `Driver`, `Session` and `Coordinator` on a fake clock and network.

All random choices come from one generator: the delays, the faults and their times. Time passes only between events.
The model contains the conditions that the state machines meet in real processes:

    control plane   connections that are late, reset, or drop messages in one direction or both; a coordinator that is
                    frozen or killed, also while it sends, and restarts with its journal (`network.py`)
    data plane      partial sums, reduced slices, commit messages and state, each tagged with view and round, each with
                    its own delay; broken pairs; processes that exit during an exchange
    training side   a script that calls the shipped `Driver`; a thread that reacts late to an event is an event like any
                    other
    exchange        the shipped order, executed by threads that continue after the training side has left their view,
                    and that receive garbage from `release_peers`
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from farandole.protocol import messages as m
from farandole.protocol.coordinator.coordinator import Coordinator
from farandole.protocol.coordinator.state import RunSettings
from farandole.protocol.worker.state_machine import WorkerStateMachine
from farandole.simulate.faults import Faults
from farandole.simulate.pieces import BUCKETS
from farandole.simulate.process import Process
from farandole.simulate.witness import Violation, Witness
from farandole.simulate.worker import SimulatedWorker

SIGNATURE = m.Signature(facts=(("torch", "2"),))
EVENTS_LIMIT = 60_000  # a run has about 1,000


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The parameters of a simulated run, and the amount of its faults.

    Attributes:
        seed: the seed of the generators beside the world's own one: for reaching the store, failed authentication.
        hosts: the number of hosts of the workers.
        zones: the number of zones, in which the hosts are in turn.
        steps: the number of steps of the script.
        buckets: the number of buckets of a training step, at most three.
        pieces: the largest number of pieces of a slice of such a bucket.
        checkpoints: the steps between checkpoints; 0: no checkpoints.
        budget: the number of faults.
        fault_rate: the fault rate during protocol activity.
        slow: a factor of the network's delays; 1 is a mean delay of 5 ms.
        focus: the kinds of faults that are most frequent.
        shortages: the largest number of data shortages.
        evaluates_every: the steps between evaluations; 0: no evaluations.
        share_rate: the probability with which shares are random at each decision; None: it is drawn.
        events_limit: the number of events from which on the run is taken to make no progress.
    """

    seed: int
    settings: RunSettings
    hosts: int
    steps: int
    buckets: int
    checkpoints: int
    budget: int
    fault_rate: float
    slow: float
    focus: Sequence[str] = ()
    shortages: int = 0
    zones: int = 1
    pieces: int = 1
    evaluates_every: int = 3
    share_rate: float | None = None
    events_limit: int = EVENTS_LIMIT


class World(Faults):
    """A simulated run. `member`, `coordinator` and `worker` are the classes to run; mutants pass their own."""

    def __init__(
        self,
        scenario: Scenario,
        rng: random.Random,
        *,
        witness: Callable[[World], Witness] = lambda _: Witness(),
        member: type[WorkerStateMachine] = WorkerStateMachine,
        coordinator: type[Coordinator] = Coordinator,
        worker: type[SimulatedWorker] = SimulatedWorker,
        trace: bool = False,
    ) -> None:
        self.rng = rng
        self.disks = random.Random(scenario.seed + 0.5)  # which workers reach the store, and which disks are full
        self.strangers = random.Random(scenario.seed + 0.25)  # which connections fail to authenticate
        self.updates_last = scenario.seed % 4 == 3  # updates take time in these scenarios, and none in the others
        self.deadlines = random.Random(scenario.seed + 0.125)  # deadlines of preemption notices
        self.strange = self.strangers.choice((0.0, 0.0, 0.0, 0.1, 0.4))
        self.now = 0.0
        self.lines: list[str] = []
        self._trace = trace
        self.workers: dict[str, Process] = {}
        self.rendezvous: dict[int, set[str]] = defaultdict(set)
        self.store: dict[int, int] = {}  # checkpoints: the state by step
        self.events = 0
        self.records: Counter[str] = Counter()
        self._state_machine, self._worker = member, worker
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._ids = count()
        self._names = count(1)
        self.settings, self.steps, self.checkpoints = scenario.settings, scenario.steps, scenario.checkpoints
        self.hosts, self.zones = scenario.hosts, scenario.zones
        self.evaluates_every, self._events_limit = scenario.evaluates_every, scenario.events_limit
        trained = [replace(each, most_pieces=scenario.pieces) for each in BUCKETS["train"][: scenario.buckets]]
        self.buckets = {**BUCKETS, "train": trained}
        self.budget, self.fault_rate, self._slow = scenario.budget, scenario.fault_rate, scenario.slow
        self.stop_code: int | None = None
        self.script_failed = self.strayed = False
        self.witness = witness(self)
        self.start_shortages(scenario.seed, budget=scenario.shortages)
        self.start_network(coordinator, scenario.share_rate)
        self.start_faults(scenario.focus)

    def until(self, time: float, over: Callable[[], bool]) -> None:
        heap = self._heap
        while heap and heap[0][0] <= time and not over():
            self.now, _, function, args = heapq.heappop(heap)
            self.events += 1
            if self.events > self._events_limit:
                raise Violation("the run makes no progress: too many events")
            function(*args)
        if not over():
            self.now = max(self.now, time)

    # --- time ------------------------------------------------------------------------------------------------------

    def at(self, delay: float, function: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._heap, (self.now + delay, next(self._ids), function, args))

    def delay(self, scale: float = 0.01) -> float:
        x = self.rng.random()
        return self._slow * scale * (x if x < 0.95 else 20 * x)

    def say(self, worker: str, text: str) -> None:
        if self._trace:
            self.lines.append(f"{self.now:8.4f} {worker:>12}  {text}")

    def spawn(self, *, pool: str) -> None:
        name = f"w{next(self._names)}"
        worker = self._worker(self, name, self._state_machine(name), pool=pool)
        self.workers[name] = worker
        worker.after(self.rng.uniform(0.0, 0.3), worker.start, SIGNATURE)
