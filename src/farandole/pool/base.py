"""The narrow seam between a run and whatever has machines for its workers.

A pool has hosts, starts workers on them, ends those that it started, and says what becomes of both. Who is started
where and when is decided in `keeper`, purely; `service` carries that out. What every pool does, `fake` among them:

1. Each `start` is answered by one of `Started`, `StartFailed` and `NoCapacity`; a worker that has `Started` has one
   `Gone`, sooner or later. `stop` brings that about; before `Started`, it may turn the answer into a `StartFailed`.
2. A worker has gone when nothing that it started is left. Who comes again, comes under another id.
3. A host that is gone is not in `list` any more, and each of its workers has a `Gone`.
4. What is known of a host in advance is said, and need not come true: `Notice` where it will go, `Advice` where it may.
   A pool that knows nothing in advance never says either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from farandole.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Host:
    """One machine of a pool; it comes and goes as a whole.

    `slots`: room for so many workers, None for as many as are asked for. `devices`: those of the slots, one for each;
    none: the workers find theirs by the number of their slot.

    Raises:
        UsageError: no name, no room, or devices for other slots than there are.
    """

    name: str
    slots: int | None = None
    devices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.name:
            raise UsageError("a host without a name: give it the one that its workers see")
        if self.slots is not None and self.slots < 1:
            raise UsageError(f"host {self.name} has {self.slots} slots: give it 1 or more, or leave it out")
        if self.devices and len(self.devices) != self.slots:
            raise UsageError(
                f"host {self.name} has {len(self.devices)} devices for {self.slots or 'any number of'} slots: name one "
                f"for each slot, or none"
            )

    def room(self, workers: int) -> bool:
        """Whether there is any beside so many workers."""
        return self.slots is None or workers < self.slots


@dataclass(frozen=True)
class Started:
    """A process of the worker is running. `host` may be another one than was asked for."""

    worker: str
    host: str


@dataclass(frozen=True)
class Found:
    """A process of the worker runs on `host`, which an earlier process of this pool has started."""

    worker: str
    host: str


@dataclass(frozen=True)
class StartFailed:
    """No process came of it, and none will: that is not a worker that was lost."""

    worker: str
    reason: str


@dataclass(frozen=True)
class NoCapacity:
    """No process came of it, for the pool has nothing to give at the moment: that is no host's fault."""

    worker: str
    reason: str


@dataclass(frozen=True)
class Notice:
    """The host will go in `deadline_s` seconds, with all that is on it."""

    host: str
    deadline_s: float
    reason: str


@dataclass(frozen=True)
class Advice:
    """The host may go: a reason to ask for another, none to leave."""

    host: str
    reason: str


@dataclass(frozen=True)
class Gone:
    """A process has ended: `reason` in words, as "exited with code 1" or "killed by signal 9"."""

    worker: str
    reason: str


@dataclass(frozen=True)
class Seen:
    """What people want to know of a host, in words: `state` is one of a few, as joined, failed, out of reach, gone."""

    host: str
    state: str
    reason: str


@dataclass(frozen=True)
class Priced:
    """The host is paid for by the hour since Unix time `since`; `dollars` are as of `day`, None: unknown."""

    host: str
    dollars: float | None
    since: float
    day: str


Event = Started | Found | StartFailed | NoCapacity | Notice | Advice | Gone | Seen | Priced


class Pool(Protocol):
    """A source of hosts. Ids of workers come from `Keeper`. All but `events` return at once."""

    @property
    def name(self) -> str:
        """What the workers say in their Hello's `pool`."""
        ...

    def list(self) -> Sequence[Host]:
        """The hosts on which workers may be started, the best first."""
        ...

    def start(self, worker: str, host: str) -> None:
        """Start a process on that host, which joins the run as `worker`."""
        ...

    def stop(self, worker: str) -> None:
        """SIGKILL, with everything that it started. No error where it has gone already, or is not known."""
        ...

    async def events(self) -> Sequence[Event]:
        """What has happened since, in order, each told once; returns when there is something."""
        ...


class Events:
    """What a pool has to say, until somebody asks."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Event] = asyncio.Queue()

    def put(self, event: Event) -> None:
        self._queue.put_nowait(event)

    async def take(self) -> list[Event]:
        """All that there are, at least one."""
        return [await self._queue.get(), *self.waiting()]

    def waiting(self) -> list[Event]:
        """All that there are."""
        return [self._queue.get_nowait() for _ in range(self._queue.qsize())]
