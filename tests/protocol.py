"""A simulator of the protocol: the real `Member` machines and the real `Coordinator` on a fake clock and network.

    World(seed).run()      # a random schedule of joins, leaves, crashes, freezes, broken pairs ...; raises Violation

Everything random comes from `random.Random(seed)`: the cluster, the delays, the faults and when they strike. Time
passes only between events. What is modelled is what the machines meet in real processes:

    control plane   a FIFO channel with random delays for each worker and direction; heartbeats; the pool
    data plane      partial sums, reduced slices, words and state, each tagged with view and round, each with a delay
                    of its own; broken pairs; processes that exit under their peers
    training side   a generator that follows `rounds.py` line by line (begin, todo, sync, finish, enter), so a thread
                    that looks late at what has happened is an event like any other
    exchange        threads that go on after the training side has left their view, and that `settle` hands garbage

Checked as it goes (`Ledger`): rules R1 and R2, view numbers, that what is reported as held is held, that all who
commit a round commit the same one with every shard counted once, that the state is not lost while someone holds it.
Checked at the end: nobody waits for ever, everyone goes, the run ends as it should, with the state of a world of one.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import count
from typing import Any

from protocol_ledger import Ledger, Violation, alone
from protocol_training import Worker

from farandole.errors import UsageError
from farandole.membership import messages as m
from farandole.membership.coordinator import Coordinator
from farandole.membership.member import Member
from farandole.membership.records import Close, Record, RunSettings, Send

SIGNATURE = m.Signature(facts=(("torch", "2"),))
FAULTS_UNTIL = 8.0  # seconds; then the world is left alone
EVENTS_LIMIT = 30_000  # a run has about 800
STOP_CODE = 7
CALM_LIMIT = 45.0  # by then the run is over, or it hangs
KINDS = (
    ("kill", 8), ("freeze", 3), ("break", 4), ("notice", 5), ("guest", 3), ("late", 1), ("release", 1), ("scale", 1),
    ("unreachable", 1), ("fail", 1), ("stop", 1),
)  # fmt: skip


class World:
    """One schedule. `member`, `coordinator` and `worker` are the classes to run: mutants have their own."""

    def __init__(
        self,
        seed: int,
        *,
        member: type[Member] = Member,
        coordinator: type[Coordinator] = Coordinator,
        worker: type[Worker] = Worker,
        trace: bool = False,
    ) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.now = 0.0
        self.lines: list[str] = []
        self._trace = trace
        self.ledger = Ledger(self)
        self.workers: dict[str, Worker] = {}
        self.rendezvous: dict[int, set[str]] = defaultdict(set)
        self.events = 0
        self.records: Counter[str] = Counter()
        self._member, self._worker = member, worker
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._ids = count()
        self._names = count(1)
        self._upward: dict[str, float] = {}
        self._downward: dict[str, float] = {}
        size = rng.choice((1, 2, 2, 3, 3, 3, 4, 4, 5))
        self.settings = RunSettings(
            run="sim",
            wanted=size,
            minimum=rng.choice((1, 1, 2, size, rng.randint(1, size))) if size > 1 else 1,
            maximum=rng.choice((None, None, size, size + 1)),
            heartbeat_s=0.5,
            heartbeat_timeout_s=2.0,
            prepare_timeout_s=3.0,
            startup_failures=1000,
        )
        self.endless = rng.random() < 0.4  # until it is stopped
        self.steps = 1_000_000 if self.endless else rng.randint(4, 12)
        self._budget = rng.choice((0, 1, 2, 3, 3, 4, 4, 5, 6, 8))
        self._temper = rng.choice((0.02, 0.05, 0.15))
        self._slow = rng.choice((0.3, 1.0, 1.0, 4.0))
        self._once: set[str] = set()
        self._welcomed: set[str] = set()
        self.coordinator = coordinator(self.settings)
        self._stop_code: int | None = None
        self.script_failed = False

    # --- running it ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Raises Violation."""
        for _ in range(self.settings.wanted):
            self.spawn(pool="pool")
        for _ in range(self._budget // 2):
            self.at(self.rng.uniform(0.0, 5.0), self.strike, None)
        self.at(0.0, self._tick)
        self.at(0.3, self._pool)
        self._until(FAULTS_UNTIL, lambda: self.coordinator.over is not None)
        self._budget = 0
        if not self.coordinator.over:
            self._go_on()
        self._until(self.now + CALM_LIMIT, lambda: self.coordinator.over is not None)
        if not self.coordinator.over:
            raise Violation("the run hangs")
        self._until(self.now + 20.0, lambda: not any(w.alive and not w.frozen for w in self.workers.values()))
        self._judge()

    def _until(self, time: float, over: Callable[[], bool]) -> None:
        heap = self._heap
        while heap and heap[0][0] <= time and not over():
            self.now, _, function, args = heapq.heappop(heap)
            self.events += 1
            if self.events > EVENTS_LIMIT:
                raise Violation("the run goes round in circles")
            function(*args)
        if not over():
            self.now = max(self.now, time)

    def _go_on(self) -> None:
        """No more faults: give the run what it needs to end."""
        self.say("people", "no more faults")
        for worker in list(self.workers.values()):
            worker.fails = False
        if self.coordinator.wanted < self.settings.minimum:
            self.coordinator.scale(self.settings.minimum, self.now)
            self.flush()
        if self.endless:
            if self.settings.maximum is None:
                self.spawn(pool="")
            self._until(self.now + CALM_LIMIT, self._settled)
            if not self.coordinator.over and not self._settled():
                raise Violation("planned changes do not come about")
            if not self.coordinator.over and not self.coordinator.ending:
                self._stop_code = STOP_CODE
                self.coordinator.stop("enough", STOP_CODE, self.now)
                self.flush()

    def _settled(self) -> bool:
        """Everyone who asks is in, everyone who wants to leave has left."""
        c = self.coordinator
        if c.over or c.ending or any(self.workers[w].unreachable for w in (c.view.members if c.view else ())):
            return True  # with an unreachable member, nobody can ever join
        if (
            c.view is None
            or c.proposed
            or c.stopping
            or any(not w.connected for w in self.workers.values() if w.alive and not w.evicted)
        ):
            return False
        inside = [c.workers[w] for w in c.view.members if w in c.workers]
        full = c.settings.maximum is not None and len(inside) >= c.settings.maximum
        outside = [w for w in c.workers.values() if w.id not in c.view.members]
        leaving = any(w.leaving for w in inside)
        return len(inside) >= c.settings.minimum and not leaving and (full or not outside)

    def _judge(self) -> None:
        over = self.coordinator.over
        assert over is not None
        for worker in self.workers.values():
            if worker.finished and worker.state != alone(self.steps):
                raise Violation(f"{worker.name} finished with another state than a world of one")
        stuck = [w.name for w in self.workers.values() if w.alive and not w.frozen]
        if stuck:
            raise Violation(f"the run is over, but {stuck} are still there")
        if self.script_failed:
            return
        if self._stop_code is not None:
            if over.code != self._stop_code and not any(w.finished for w in self.workers.values()):
                raise Violation(f"the run was stopped with code {self._stop_code}, and ended with {over.code}")
            if self._stop_code == STOP_CODE and not self.records["saved"] + self.records["not saved"]:
                raise Violation("the run was stopped without a checkpoint")
        elif over.code != 0 or not any(w.finished for w in self.workers.values()):
            raise Violation(f"the run ended with code {over.code}: {over.reason}")

    # --- time and network ------------------------------------------------------------------------------------------

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
        self.at(self.rng.uniform(0.0, 0.3), self._hello, worker)

    def _hello(self, worker: Worker) -> None:
        if worker.alive:
            worker.connected = True
            self._welcomed.add(worker.name)
            hello = m.Hello(kind="worker", worker=worker.name, host=f"host-{worker.name}", pool=worker.pool)
            self.coordinator.hello(hello, self.now)
            self.flush()
            worker.beat()
            worker.after(self.rng.uniform(0.0, 0.3), worker.tell, m.Ready(signature=SIGNATURE))
            worker.changed()

    def up(self, worker: Worker, message: m.Message) -> None:
        if type(message) is not m.Heartbeat:
            self.say(worker.name, f"-> {message}")
        self._ordered(self._upward, worker.name, self._receive, worker, message)

    def _receive(self, worker: Worker, message: m.Message) -> None:
        if worker.connected:
            self.coordinator.receive(worker.name, message, self.now)
            self.flush()

    def disconnect(self, worker: Worker) -> None:
        if worker.connected:
            self._ordered(self._upward, worker.name, self._disconnected, worker)

    def _disconnected(self, worker: Worker) -> None:
        if worker.connected:
            worker.connected = False
            if not self.coordinator.over:
                self.say("coordinator", f"{worker.name} is disconnected")
                self.coordinator.disconnected(worker.name, self.now)
            self.flush()

    def _ordered(self, channel: dict[str, float], name: str, function: Callable[..., None], *args: Any) -> None:
        when = max(channel.get(name, 0.0), self.now + self.delay())
        channel[name] = when
        self.at(when - self.now, function, *args)

    def flush(self) -> None:
        for action in self.coordinator.drain():
            match action:
                case Send(name, message):
                    worker = self.workers[name]
                    if worker.connected:
                        if not isinstance(message, m.Welcome):
                            self.say("coordinator", f"-> {name}: {message}")
                        worker.inbox.append((worker.hear, (message,)))
                        self._ordered(self._downward, name, worker.event, worker.take_control)
                        self.tempt(type(message).__name__, worker)
                case Close(name):
                    worker = self.workers[name]
                    worker.evicted, worker.connected = True, False
                    worker.inbox.append((worker.closed, ()))
                    self._ordered(self._downward, name, worker.event, worker.take_control)
                case Record(event, fields):
                    self.records[event] += 1
                    if event in ("lost", "state lost", "failed", "over"):
                        self.say("coordinator", f"records {event} {fields}")
                    if event == "state lost":
                        self.ledger.state_lost()
                    if event == "lost" and "does not hold" in fields["reason"]:
                        raise Violation(f"R1: {fields['worker']} is behind: {fields['reason']}")
                    if event == "finished" and not fields["equal"]:
                        raise Violation("the finished workers' states differ")
                case _:
                    pass

    def _tick(self) -> None:
        self.coordinator.tick(self.now)
        self.flush()
        if not self.coordinator.over:
            self.at(0.25, self._tick)

    def _pool(self) -> None:
        """Replaces what is missing, kills what was evicted, sooner or later."""
        roster = self.coordinator.roster()
        for name in roster.evicted:
            worker = self.workers[name]
            if worker.alive and self.rng.random() < 0.1:
                worker.die("killed by its pool", -9)
        known = self.coordinator.workers
        ours = [w for w in self.workers.values() if w.pool and w.alive]
        ours = [w for w in ours if w.name in known or w.name not in self._welcomed]
        for _ in range(roster.wanted - len([w for w in ours if w.name not in roster.leaving])):
            self.spawn(pool="pool")
        if not self.coordinator.over:
            self.at(0.3, self._pool)

    # --- faults ----------------------------------------------------------------------------------------------------

    def tempt(self, what: str, worker: Worker) -> None:
        """Something worth disturbing happens."""
        likely = self._temper * (0.3 if what in ("begin", "word", "end") else 2.0)
        if self._budget > 0 and self.rng.random() < likely:
            self._budget -= 1
            target = worker if self.rng.random() < 0.5 else None
            self.at(self.delay(0.01), self.strike, target)

    def strike(self, target: Worker | None) -> None:
        alive = [w for w in self.workers.values() if w.alive and not w.frozen]
        if not alive or self.coordinator.over or self.now > FAULTS_UNTIL:
            return
        kinds, weights = zip(*KINDS, strict=True)
        kind: str = self.rng.choices(kinds, weights)[0]
        if target is None or not target.alive or target.frozen:
            target = self.rng.choice(alive)
        self.say("fate", f"{kind} {target.name}")
        getattr(self, f"_strike_{kind}")(target)

    def _strike_kill(self, target: Worker) -> None:
        target.die("killed", -9)

    def _strike_freeze(self, target: Worker) -> None:
        target.freeze(self.rng.choice((0.3, 1.0, 2.5, 4.0, 1e9)))

    def _strike_break(self, target: Worker) -> None:
        """A pair of connections breaks, both ends alive; one of them may notice far later."""
        if target.groups:
            group = self.rng.choice(list(target.groups)[-2:])
            peer = self.workers[self.rng.choice([p for p in target.groups[group] if p != target.name])]
            target.after(self.rng.choice((0.0, self.delay(0.05))), target.pair_broken, group, peer.name)
            peer.after(self.delay(0.5), peer.pair_broken, group, target.name)

    def _strike_notice(self, target: Worker) -> None:
        if target.connected:
            target.tell(m.Leaving(reason="SIGTERM"))

    def _strike_guest(self, target: Worker) -> None:
        del target
        for _ in range(self.rng.choice((1, 1, 2))):
            self.spawn(pool="")

    def _strike_late(self, target: Worker) -> None:
        """The control connection is held up while the data plane goes on."""
        for channel in (self._upward, self._downward):
            channel[target.name] = max(channel.get(target.name, 0.0), self.now + self.rng.uniform(0.5, 3.5))

    def _strike_release(self, target: Worker) -> None:
        try:
            self.coordinator.release(target.name, self.now)
        except UsageError:
            return
        self.flush()

    def _strike_scale(self, target: Worker) -> None:
        del target
        s = self.settings
        self.coordinator.scale(self.rng.randint(s.minimum, s.maximum or s.wanted + 1), self.now)
        self.flush()

    def _strike_unreachable(self, target: Worker) -> None:
        del target
        self.spawn(pool="")
        list(self.workers.values())[-1].unreachable = True

    def _strike_fail(self, target: Worker) -> None:
        if "fail" not in self._once:
            self._once.add("fail")
            alike = self.rng.random() < 0.5  # the script fails on everyone at the same place, or on one
            for worker in self.workers.values() if alike else (target,):
                worker.fails = True

    def _strike_stop(self, target: Worker) -> None:
        del target
        if "stop" not in self._once:
            self._once.add("stop")
            self._stop_code = 3
            self.coordinator.stop("SIGINT", 3, self.now)
            self.flush()


def simulate(seed: int, **classes: Any) -> World:
    """Run one schedule. A Violation carries the seed and the trace of a second, equal run."""
    world = World(seed, **classes)
    try:
        world.run()
    except Exception:
        again = World(seed, trace=True, **classes)
        try:
            again.run()
        except Exception as error:
            s = again.settings
            head = f"seed {seed}: --workers {s.wanted} --min {s.minimum} --max {s.maximum}, {again.steps} steps"
            raise Violation("\n".join([f"{type(error).__name__}: {error}", head, *_shortened(again.lines)])) from error
        raise
    return world


def _shortened(lines: list[str]) -> list[str]:
    """The trace's last lines; of undisturbed rounds only the last few."""
    kept = [line for line in lines[:-20] if " ends round " not in line] + lines[-20:]
    return kept[-150:]
