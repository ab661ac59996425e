"""A pool without processes, for tests: it records requests, and the test decides what fails.

Everything else succeeds: a start succeeds, and a stopped worker exits.
"""

from __future__ import annotations

from collections.abc import Sequence

from farandole.pool.base import (
    Event,
    Events,
    Host,
    HostPreempted,
    HostRebalance,
    NothingToGive,
    Started,
    WorkerExited,
    WorkerStartFailed,
)

KILLED = "killed by signal 9"


class FakePool:
    """`started` and `stopped` are ids in order, whatever the result; `at` holds the host of each running worker.

    Attributes:
        failing: the reason why starts fail, by host.
        mute: starts cause no event until `wake`.
        capacity: the number of workers that can still be started; None: no limit.
        elsewhere: the host on which workers start that were requested on another host.
    """

    def __init__(self, name: str = "fake", hosts: Sequence[Host] = (Host(name="here"),)) -> None:
        self.name = name
        self.hosts = list(hosts)
        self.started: list[str] = []
        self.stopped: list[str] = []
        self.at: dict[str, str] = {}
        self.failing: dict[str, str] = {}
        self.mute = False
        self.capacity: int | None = None
        self.elsewhere: dict[str, str] = {}
        self._pending: dict[str, str] = {}
        self._events = Events()

    def list(self) -> Sequence[Host]:
        return tuple(self.hosts)

    def start(self, worker: str, host: str) -> None:
        self.started.append(worker)
        if self.mute:
            self._pending[worker] = host
        else:
            self._start(worker, host)

    def stop(self, worker: str) -> None:
        if worker in self.at:
            self.stopped.append(worker)
            self.exit(worker, KILLED)

    async def events(self) -> Sequence[Event]:
        return await self._events.take()

    def waiting(self) -> Sequence[Event]:
        """The events that `events` would return, without waiting."""
        return self._events.waiting()

    def _start(self, worker: str, host: str) -> None:
        if reason := self.failing.get(host, ""):
            self._events.put(WorkerStartFailed(worker, reason))
        elif self.capacity == 0:
            self._events.put(NothingToGive(worker, "no host is available"))
        else:
            self.capacity = self.capacity and self.capacity - 1
            self.at[worker] = self.elsewhere.get(host, host)
            self._events.put(Started(worker, self.at[worker]))

    # --- events that a test causes ---------------------------------------------------------------------------

    def exit(self, worker: str, reason: str = "exited with code 0") -> None:
        """Make a running worker's process exit."""
        del self.at[worker]
        self._events.put(WorkerExited(worker, reason))

    def wake(self) -> None:
        """Report the results of the starts that were held back by `mute`."""
        self.mute, pending, self._pending = False, self._pending, {}
        for worker, host in pending.items():
            self._start(worker, host)

    def lose(self, host: str) -> None:
        """Remove the host and all its workers."""
        self.hosts = [each for each in self.hosts if each.name != host]
        for worker in [worker for worker, at in self.at.items() if at == host]:
            self.exit(worker, "its host has gone")

    def notice(self, host: str, deadline_s: float = 120.0) -> None:
        self._events.put(HostPreempted(host, deadline_s, "it is reclaimed"))

    def advise(self, host: str) -> None:
        self._events.put(HostRebalance(host, "its price rises"))

    def repeat(self, event: Event) -> None:
        """Report an event again, or one that did not happen."""
        self._events.put(event)
