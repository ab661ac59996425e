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
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from farandole.control.ticket import Ticket
from farandole.errors import UsageError
from farandole.protocol.messages import Job
from farandole.protocol.settings import PoolTerms

# --- base -------------------------------------------------------------------------------------------------------------


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
class RunningWorker:
    """A process of the worker runs on `host`, which an earlier process of this pool has started."""

    worker: str
    host: str


@dataclass(frozen=True)
class WorkerStartFailed:
    """No process came of it, and none will: that is not a worker that was lost."""

    worker: str
    reason: str


@dataclass(frozen=True)
class NothingToGive:
    """No process came of it, for the pool has nothing to give at the moment: that is no host's fault."""

    worker: str
    reason: str


@dataclass(frozen=True)
class HostPreempted:
    """The host will go in `deadline_s` seconds, with all that is on it."""

    host: str
    deadline_s: float
    reason: str


@dataclass(frozen=True)
class HostRebalance:
    """The host may go: a reason to ask for another, none to leave."""

    host: str
    reason: str


@dataclass(frozen=True)
class WorkerExited:
    """A process has ended: `reason` in words, as "exited with code 1" or "killed by signal 9"."""

    worker: str
    reason: str


@dataclass(frozen=True)
class HostState:
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


Event = (
    Started
    | RunningWorker
    | WorkerStartFailed
    | NothingToGive
    | HostPreempted
    | HostRebalance
    | WorkerExited
    | HostState
    | Priced
)


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


@dataclass(frozen=True, kw_only=True)
class PoolContext:
    """What a run gives to a pool of other hosts.

    Attributes:
        name: the pool's name; its workers report it.
        run: the name under which resources of this run are marked.
        ticket: with it hosts join the run.
        job: what the workers of a host do.
        logs: the folder for the output of workers.
        until: Unix time in seconds at which everything that the pool has must be gone; infinite: none.
        keep_failed_s: how long a failed machine is kept for a look, in seconds.
    """

    name: str
    run: str
    ticket: Ticket
    job: Job
    logs: Path
    until: float = math.inf
    keep_failed_s: float = 0.0


class RemotePool(Pool, Protocol):
    """A pool of other hosts."""

    def remember(self, worker: str, host: str) -> None:
        """A worker that an earlier process of this pool has started on `host`."""
        ...

    def over(self) -> None:
        """The run has ended: the hosts are needed no more."""
        ...

    def dollars(self) -> float:
        """What the hosts have cost so far, in dollars, as far as prices are known."""
        ...

    async def close(self) -> None:
        """Give back all hosts. Nothing that the pool has started is left afterwards."""
        ...


class PoolKind(Protocol):
    """A kind of pool. `options`: its keys beside `COMMON`; `required`: those that must be given."""

    @property
    def options(self) -> tuple[str, ...]: ...

    @property
    def required(self) -> tuple[str, ...]: ...

    @property
    def sized(self) -> bool:
        """True if the pool knows how many workers it can have without a `size`."""
        ...

    def check(self, terms: PoolTerms, listen: str, show: Callable[[str], None], *, priced: bool) -> None:
        """Check `terms` before anything is started. `listen`: where the run listens, as HOST:PORT. `show` prints a
        line for the user. `priced`: the price of each host must be known.

        Raises:
            UsageError: the pool can't be had in this way.
        """
        ...

    async def open(self, terms: PoolTerms, context: PoolContext) -> RemotePool:
        """The pool of a run that has started."""
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


# --- capacity ---------------------------------------------------------------------------------------------------------
#
# When a pool tells how many workers it can have: as soon as that changes. At its beginning its hosts are on their way:
# for `GATHER_S` it says so, lest others take their place; unless it has been told that it has none.

GATHER_S = 15.0


class ReportedCapacity:
    """Times are the caller's, in seconds. `can`, `gathers`: as was told last; None for no limit that is known."""

    def __init__(self) -> None:
        self.can: int | None = None
        self.gathers = False
        self._gathers_until = math.inf

    def news(self, can: int | None, now: float, *, short: bool) -> bool:
        """Whether that is to be told now; it is taken to be. `short`: nothing is to be had, for certain."""
        self._gathers_until = min(self._gathers_until, now + GATHER_S)
        before = self.can, self.gathers
        self.can, self.gathers = can, can is not None and now < self._gathers_until and not short
        return before != (self.can, self.gathers)
