"""A reconciler of workers, played with a fake pool."""

from __future__ import annotations

from farandole.pool.base import Host
from farandole.pool.fake import FakePool
from farandole.pool.reconciler import PoolReconciler
from farandole.protocol import messages as m
from farandole.protocol.messages import Roster


class Play:
    """A reconciler and its fake pool at a time of the test's own. `said`: what the coordinator was told."""

    def __init__(self, *hosts: Host, count: int = 0) -> None:
        self.pool = FakePool(hosts=hosts or (Host(name="here"),))
        self.reconciler = PoolReconciler(count)
        self.said: list[m.FromPool] = []
        self.now = 0.0

    def roster(self, now: float | None = None, **roster: object) -> None:
        self.now = self.now if now is None else now
        self.reconciler.update(Roster(**roster), self.now)  # type: ignore[arg-type]
        self.act()

    def at(self, now: float) -> Play:
        self.now = now
        return self.act()

    def act(self) -> Play:
        """Until the pool has nothing more to say."""
        while True:
            for event in self.pool.waiting():
                self.reconciler.on_event(event, self.now)
            due = self.reconciler.take_actions(self.pool.list(), self.now)
            self.said += self.reconciler.take_messages()
            for worker in due.stop:
                self.pool.stop(worker)
            for worker, host in due.start:
                self.pool.start(worker, host)
            if not (due.stop or due.start):
                return self

    def tick(self, until: float, every: float = 0.5) -> Play:
        while self.now + every <= until:
            self.at(self.now + every)
        return self.at(until)

    def exits(self, worker: str, now: float, reason: str = "exited with code 1") -> None:
        self.pool.exit(worker, reason)
        self.at(now)

    def told(self, kind: type[m.FromPool]) -> list[m.FromPool]:
        return [message for message in self.said if isinstance(message, kind)]


def two_hosts(slots: int | None = 2) -> Play:
    return Play(Host(name="north", slots=slots), Host(name="south", slots=slots))
