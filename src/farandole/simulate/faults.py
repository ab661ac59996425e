"""Fault injection in a simulated run: faults of every kind at random moments, likelier during protocol activity."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from farandole.errors import UsageError
from farandole.protocol import messages as m
from farandole.simulate.client import SimulatedClient
from farandole.simulate.mistaken import IN_A_REPORT
from farandole.simulate.network import Network
from farandole.simulate.process import Process

FAULTS_UNTIL = 8.0  # seconds; after this time no faults are injected
KINDS = (
    ("kill", 8), ("freeze", 3), ("break", 4), ("notice", 5), ("guest", 3), ("late", 1), ("release", 1), ("scale", 1),
    ("unreachable", 1), ("fail", 1), ("stop", 1), ("stray", 1), ("coordinator", 6), ("pause", 1), ("reset", 2),
    ("dumb", 3), ("resets", 1), ("stale", 1), ("slow", 1), ("mistake", 3),
)  # fmt: skip


class Faults(Network):
    """The part of `World` that injects faults."""

    budget: int
    fault_rate: float
    rng: random.Random
    strangers: random.Random
    deadlines: random.Random
    strange: float
    stop_code: int | None
    workers: dict[str, Process]
    at: Callable[..., None]

    def start_faults(self, focus: Sequence[str]) -> None:
        self._once: set[str] = set()
        self._kinds = [kind for kind, _ in KINDS]
        self._weights = [30 * weight if kind in focus else weight for kind, weight in KINDS]

    def maybe_inject_fault(self, occasion: str, worker: SimulatedClient) -> None:
        """Injects a fault with a probability that depends on `occasion`, which is what happens at `worker` now."""
        self.maybe_inject_shortage(worker)
        likely = self.fault_rate * (0.3 if occasion in ("begin", "commit", "end", "Heard") else 2.0)
        if self.budget > 0 and self.rng.random() < likely:
            self.budget -= 1
            target = self.workers[worker.name] if self.rng.random() < 0.5 else None
            self.at(self.delay(0.01), self.inject_fault, target)

    def finds_a_stranger(self) -> bool:
        """Returns True if the authentication of a pair of new connections must fail at one of its ends."""
        return self.now < FAULTS_UNTIL and self.strangers.random() < self.strange

    def inject_fault(self, target: Process | None) -> None:
        """Injects a fault of a random kind, into `target` or a random worker."""
        alive = [w for w in self.workers.values() if w.alive and not w.frozen]
        if not alive or self.coordinator.over or self.now > FAULTS_UNTIL:
            return
        kind = self.rng.choices(self._kinds, self._weights)[0]
        if target is None or not target.alive or target.frozen:
            target = self.rng.choice(alive)
        self.say("fate", f"{kind} {target.name}")
        getattr(self, f"_fault_{kind}")(target)

    def _fault_kill(self, target: Process) -> None:
        target.die("killed", -9)

    def _fault_freeze(self, target: Process) -> None:
        target.freeze(self.rng.choice((0.3, 1.0, 2.5, 4.0, 9.0, 1e9)))

    def _fault_break(self, target: Process) -> None:
        """A pair of connections breaks, both ends alive; one of them may notice far later."""
        if target.groups:
            group = self.rng.choice(list(target.groups)[-2:])
            peer = self.workers[self.rng.choice([p for p in target.groups[group] if p != target.name])]
            target.after(self.rng.choice((0.0, self.delay(0.05))), target.pair_broken, group, peer.name)
            peer.after(self.delay(0.5), peer.pair_broken, group, target.name)

    def _fault_notice(self, target: Process) -> None:
        """Some preempted machines have a deadline: their workers exit before it."""
        target.tell(m.LeaveRequest(reason="SIGTERM", within_s=self.deadlines.choice((None, None, 4.0, 6.0, 12.0))))

    def _fault_guest(self, target: Process) -> None:
        del target
        for _ in range(self.rng.choice((1, 1, 2))):
            self.spawn(pool="")

    def _fault_late(self, target: Process) -> None:
        """The control connection is delayed while the data plane continues."""
        if link := target.link:
            link.up_at = max(link.up_at, self.now + self.rng.uniform(0.5, 3.5))
            link.down_at = max(link.down_at, self.now + self.rng.uniform(0.5, 3.5))

    def _fault_reset(self, target: Process) -> None:
        """The control connection breaks; its pending messages are lost."""
        if link := target.link:
            self.hang_up(target)
            link.dumb_up = link.dumb_down = True
            if self.links.get(target.name) is link:
                self.at(self.delay(0.05), self._do, self._closed, target, link)
            target.after(self.delay(0.05), self.connect, target)

    def _fault_resets(self, target: Process) -> None:
        """All control connections break at once, and no worker can connect for a while."""
        del target
        until = self.now + self.rng.choice((0.0, 1.0, 3.0, 7.0))
        for worker in self.workers.values():
            worker.shut_until = max(worker.shut_until, until)
            self._fault_reset(worker)

    def _fault_dumb(self, target: Process) -> None:
        """One direction or both, of one connection or all, silently drop all messages (a network blackhole)."""
        until = self.now + self.rng.choice((0.0, 0.5, 3.0, 7.0))
        up, down = self.rng.choice(((True, False), (False, True), (True, True)))
        everyone = self.rng.random() < 0.2
        for worker in self.workers.values() if everyone else (target,):
            worker.shut_until = max(worker.shut_until, until)
            if worker.link:
                worker.link.dumb_up |= up
                worker.link.dumb_down |= down

    def _fault_stale(self, target: Process) -> None:
        """It receives old messages, and its own are dropped: an answer does not show that the other end is alive."""
        if link := target.link:
            link.down_at = max(link.down_at, self.now + self.rng.uniform(1.0, 1.9))
            self.at(self.rng.uniform(0.0, 0.5), setattr, link, "dumb_up", True)
            target.shut_until = max(target.shut_until, self.now + 12.0)

    def _fault_coordinator(self, target: Process) -> None:
        """The coordinator is killed now, or while it sends its next messages."""
        del target
        if self.up:
            if self.rng.random() < 0.4:
                self.kill_coordinator()
            else:
                self.last_sends = self.rng.choice((0, 1, 1, 2, 3, 4))

    def _fault_pause(self, target: Process) -> None:
        del target
        self.freeze_coordinator(self.rng.choice((0.4, 1.5, 4.0, 8.0)))

    def _fault_slow(self, target: Process) -> None:
        target.shard_s = self.rng.choice((0.06, 0.15, 0.3))

    def _fault_mistake(self, target: Process) -> None:
        """The worker reports something wrong; if that is in its answer to a stop, a stop is caused too."""
        if self.wrong(target) in IN_A_REPORT:
            self._fault_reset(self.rng.choice([w for w in self.workers.values() if w.alive and not w.frozen]))

    def _fault_release(self, target: Process) -> None:
        if self.listens:
            try:
                self.coordinator.release(target.name, self.now)
            except UsageError:
                return
            self.flush()

    def _fault_scale(self, target: Process) -> None:
        del target
        s = self.settings
        if self.listens:
            wanted = self.rng.randint(s.minimum, s.maximum or (s.wanted or 0) + 1)
            try:
                self.coordinator.scale(wanted, self.now)
            except UsageError:  # the run is ending
                return
            self.flush()

    def _fault_unreachable(self, target: Process) -> None:
        del target
        self.spawn(pool="")
        list(self.workers.values())[-1].unreachable = True

    def _fault_fail(self, target: Process) -> None:
        if "fail" not in self._once:
            self._once.add("fail")
            alike = self.rng.random() < 0.5  # the script fails on all workers at the same place, or on one
            for worker in self.workers.values() if alike else (target,):
                worker.fails = True

    def _fault_stray(self, target: Process) -> None:
        if "stray" not in self._once:
            self._once.add("stray")
            target.strays = self.rng.choice(("skip", "more", "other", "quit"))

    def _fault_stop(self, target: Process) -> None:
        del target
        if "stop" not in self._once and self.listens:
            self._once.add("stop")
            self.stop_code = 3
            self.coordinator.request_end("SIGINT", 3, self.now)
            self.flush()
