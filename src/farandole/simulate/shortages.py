"""Simulated data shortages: the data is unavailable on a host for a while; a disk is full, or a store is unreachable.

The host's workers report that when they next need data, or before they are ready. Or one worker reports it at any
moment, and continues to train. The workers and times are drawn from a separate generator, so that schedules without
shortages do not depend on this module.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from farandole.simulate.client import SimulatedClient
from farandole.simulate.process import Process

UNTIL = 8.0  # seconds, as other faults
LIKELY = 0.04  # probability during protocol activity
KINDS = ("worker",) * 8 + ("host",) * 4 + ("says",) * 3 + ("everyone",)


class Shortages:
    """The part of `World` that injects data shortages. Subclasses have the clock and the workers."""

    now: float
    at: Callable[..., None]
    say: Callable[[str, str], None]
    host_of: Callable[[SimulatedClient], str]
    workers: dict[str, Process]

    def start_shortages(self, seed: int, *, budget: int) -> None:
        """`budget`: the largest number of shortages."""
        self.drawn = random.Random(seed + 0.0625)
        self.short_of: set[str] = set()  # hosts without data
        self._shortages = budget

    def maybe_inject_shortage(self, worker: SimulatedClient) -> None:
        """Injects a shortage with some probability during an activity of `worker`."""
        if self._shortages > 0 and self.drawn.random() < LIKELY:
            self.at(self.drawn.uniform(0.0, 0.05), self.run_short, self.workers[worker.name])

    def run_short(self, target: Process | None) -> None:
        """Makes data unavailable to `target`, or to a random worker."""
        alive = [w for w in self.workers.values() if w.alive and not w.frozen]
        if not alive or self._shortages <= 0 or self.now > UNTIL:
            return
        self._shortages -= 1
        kind = self.drawn.choice(KINDS)
        if target is None or not target.alive or target.frozen:
            target = self.drawn.choice(alive)
        self.say("fate", f"no data for {kind} {target.name}")
        if kind == "host" and len({self.host_of(w) for w in alive}) == 1:
            kind = "worker"
        if kind == "worker":
            target.starves = True
        elif kind == "says":
            target.tell_unfed()
        else:
            hosts = {self.host_of(w) for w in (alive if kind == "everyone" else [target])}
            self.short_of |= hosts
            self.at(self.drawn.choice((0.1, 0.3, 1.0, 100.0)), self.short_of.difference_update, hosts)

    def feed_all(self) -> None:
        """Ends all shortages."""
        self._shortages = 0
        self.short_of.clear()
        for worker in self.workers.values():
            worker.starves = False
