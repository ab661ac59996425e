"""Hosts of a simulated run that can't get their workers the data, for a while: a disk is full, a store out of reach.

Its workers say so where they next need data, or before they ask in; or one does at any moment, and trains on. Whom it
strikes, and when, is drawn from a generator of its own: schedules without shortages are what they are without all this.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from farandole.simulate.client import SimulatedClient
from farandole.simulate.process import Process

UNTIL = 8.0  # seconds, as other faults
LIKELY = 0.04  # where something is under way
KINDS = ("worker",) * 8 + ("host",) * 4 + ("says",) * 3 + ("everyone",)


class Shortages:
    """The part of `World` in which data runs short. Subclass: it has no clock and no workers."""

    now: float
    at: Callable[..., None]
    say: Callable[[str, str], None]
    host_of: Callable[[SimulatedClient], str]
    workers: dict[str, Process]

    def start_shortages(self, seed: int, *, budget: int) -> None:
        """`budget`: so many, at most."""
        self.drawn = random.Random(seed + 0.0625)
        self.short_of: set[str] = set()  # these hosts
        self._shortages = budget

    def tempt_shortage(self, worker: SimulatedClient) -> None:
        """Something is under way with `worker`."""
        if self._shortages > 0 and self.drawn.random() < LIKELY:
            self.at(self.drawn.uniform(0.0, 0.05), self.run_short, self.workers[worker.name])

    def run_short(self, target: Process | None) -> None:
        """Of `target`, or anybody."""
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
        """From now on there is data everywhere."""
        self._shortages = 0
        self.short_of.clear()
        for worker in self.workers.values():
            worker.starves = False
