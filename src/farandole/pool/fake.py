"""A pool without processes, for tests: it notes what it was asked for, and what goes wrong is what the test says.

Whatever a test does not ask for goes well: a start succeeds, a worker that is stopped ends.
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
    """`started` and `stopped` are ids in order, whatever came of them; `at` says where each is that is running.

    Attributes:
        failing: why starts fail, by host.
        mute: nothing is heard of starts, until `wake`.
        capacity: None, or how many more can be started.
        elsewhere: the host on which workers start that were asked for on another one.
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
        self._unheard: dict[str, str] = {}
        self._events = Events()

    def list(self) -> Sequence[Host]:
        return tuple(self.hosts)

    def start(self, worker: str, host: str) -> None:
        self.started.append(worker)
        if self.mute:
            self._unheard[worker] = host
        else:
            self._start(worker, host)

    def stop(self, worker: str) -> None:
        if worker in self.at:
            self.stopped.append(worker)
            self.exit(worker, KILLED)

    async def events(self) -> Sequence[Event]:
        return await self._events.take()

    def waiting(self) -> Sequence[Event]:
        """What `events` would return, without waiting."""
        return self._events.waiting()

    def _start(self, worker: str, host: str) -> None:
        if reason := self.failing.get(host, ""):
            self._events.put(WorkerStartFailed(worker, reason))
        elif self.capacity == 0:
            self._events.put(NothingToGive(worker, "no host is to be had"))
        else:
            self.capacity = self.capacity and self.capacity - 1
            self.at[worker] = self.elsewhere.get(host, host)
            self._events.put(Started(worker, self.at[worker]))

    # --- what a test makes happen ----------------------------------------------------------------------------

    def exit(self, worker: str, reason: str = "exited with code 0") -> None:
        """Let a running worker's process end."""
        del self.at[worker]
        self._events.put(WorkerExited(worker, reason))

    def wake(self) -> None:
        """What was not heard of starts is heard now."""
        self.mute, unheard, self._unheard = False, self._unheard, {}
        for worker, host in unheard.items():
            self._start(worker, host)

    def lose(self, host: str) -> None:
        """It goes, with all that is on it."""
        self.hosts = [each for each in self.hosts if each.name != host]
        for worker in [worker for worker, at in self.at.items() if at == host]:
            self.exit(worker, "its host has gone")

    def notice(self, host: str, deadline_s: float = 120.0) -> None:
        self._events.put(HostPreempted(host, deadline_s, "it is reclaimed"))

    def advise(self, host: str) -> None:
        self._events.put(HostRebalance(host, "its price rises"))

    def repeat(self, event: Event) -> None:
        """Tell what was told before, or what is not so."""
        self._events.put(event)
