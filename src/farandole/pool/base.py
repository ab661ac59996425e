"""The interface between a run and the systems that provide machines for its workers.

A pool has hosts, starts workers on them, stops the workers that it started, and reports what happens to both. The pure
class `PoolReconciler` in `reconciler.py` decides which workers start where and when; `serve_pool` there carries that
out. Every pool, `FakePool` included, keeps these rules:

1. The pool answers each `start` with exactly one of `Started`, `WorkerStartFailed` and `NothingToGive`. Each worker
   with `Started` gets exactly one `WorkerExited` later. `stop` causes it; a `stop` before `Started` may turn the answer
   into a `WorkerStartFailed`.
2. A worker has exited when no process that it started is left. A worker that comes back has a new id.
3. A host that no longer exists is not in `list`, and each of its workers gets a `WorkerExited`.
4. The pool reports in advance what it knows about a host, and the report need not come true: `HostPreempted` if the
   host will go, `HostRebalance` if it may go. A pool that knows nothing in advance never reports either.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from farandole.control.ticket import Ticket
from farandole.errors import UsageError
from farandole.protocol.messages import Job
from farandole.protocol.settings import PoolTerms

# --- base -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Host:
    """One machine of a pool. All of it appears and disappears at once.

    `slots`: the number of workers that fit, None for no limit. `devices`: one device for each slot; empty: each worker
    finds its device by its slot number.

    Raises:
        UsageError: the name is empty, slots are below 1, or the number of devices differs from the number of slots.
    """

    name: str
    slots: int | None = None
    devices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.name:
            raise UsageError("a host has no name: give it the name that its workers see")
        if self.slots is not None and self.slots < 1:
            raise UsageError(f"host {self.name} has {self.slots} slots: give it 1 or more, or leave it out")
        if self.devices and len(self.devices) != self.slots:
            raise UsageError(
                f"host {self.name} has {len(self.devices)} devices for {self.slots or 'any number of'} slots: name one "
                f"for each slot, or none"
            )

    def room(self, workers: int) -> bool:
        """Returns True if the host has a free slot beside that many workers."""
        return self.slots is None or workers < self.slots


@dataclass(frozen=True)
class Started:
    """A process of the worker is running. `host` may differ from the requested host."""

    worker: str
    host: str


@dataclass(frozen=True)
class RunningWorker:
    """A process of the worker runs on `host`. An earlier process of this pool started it."""

    worker: str
    host: str


@dataclass(frozen=True)
class WorkerStartFailed:
    """The start failed, and no process will come of it. This does not count as a lost worker."""

    worker: str
    reason: str


@dataclass(frozen=True)
class NothingToGive:
    """The pool has no capacity at the moment, so no process was started. No host is at fault."""

    worker: str
    reason: str


@dataclass(frozen=True)
class HostPreempted:
    """The host goes in `deadline_s` seconds, with all its workers."""

    host: str
    deadline_s: float
    reason: str


@dataclass(frozen=True)
class HostRebalance:
    """The host may go. This is a reason to request another host, not a reason to leave this one."""

    host: str
    reason: str


@dataclass(frozen=True)
class WorkerExited:
    """A process has ended. `reason` is text, such as "exited with code 1" or "killed by signal 9"."""

    worker: str
    reason: str


@dataclass(frozen=True)
class HostState:
    """The state of a host, as text for users: `state` is one of a few, such as joined, failed, out of reach, gone."""

    host: str
    state: str
    reason: str


@dataclass(frozen=True)
class Priced:
    """The host costs `dollars` an hour since Unix time `since`. The price is as of `day`; None: unknown."""

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
    """A source of hosts. `PoolReconciler` creates the ids of workers. All methods except `events` return at once."""

    @property
    def name(self) -> str:
        """The value of `pool` in the workers' Hello."""
        ...

    def list(self) -> Sequence[Host]:
        """The hosts on which workers may be started, best first."""
        ...

    def start(self, worker: str, host: str) -> None:
        """Start a process on that host. The process joins the run as `worker`."""
        ...

    def stop(self, worker: str) -> None:
        """Send SIGKILL to the worker and all that it started. No error if the worker is gone or unknown."""
        ...

    async def events(self) -> Sequence[Event]:
        """The events since the last call, in order, each reported once. Waits until there is at least one."""
        ...


@dataclass(frozen=True, kw_only=True)
class PoolContext:
    """The data that a run gives to a pool of other hosts.

    Attributes:
        name: the pool's name; its workers report it.
        run: the name under which resources of this run are marked.
        ticket: the ticket with which hosts join the run.
        job: the job of the workers of a host.
        logs: the folder for the output of workers.
        until: Unix time in seconds at which all resources of the pool must be gone; infinite: no limit.
        keep_failed_s: how long a failed machine is kept for debugging, in seconds.
        wanted: the number of workers that the user asked for; None: all that each pool can have.
    """

    name: str
    run: str
    ticket: Ticket
    job: Job
    logs: Path
    until: float = math.inf
    keep_failed_s: float = 0.0
    wanted: int | None = None


class RemotePool(Pool, Protocol):
    """A pool of other hosts."""

    def remember(self, worker: str, host: str) -> None:
        """Add a worker that an earlier process of this pool has started on `host`."""
        ...

    def over(self) -> None:
        """The run has ended: the hosts are no longer needed."""
        ...

    def dollars(self) -> float:
        """Return the cost of the hosts so far in dollars, as far as prices are known."""
        ...

    async def close(self) -> None:
        """Give back all hosts. Nothing that the pool has started is left afterwards."""
        ...


@runtime_checkable
class Provisions(Protocol):
    """A pool that requests hosts before workers are started there, and gives back those that are not needed.

    `claims_size`: it never reports a capacity, so the run wants its `size` of it even while it has fewer hosts.
    """

    claims_size: bool

    def want(self, workers: int, without: Collection[str] = ()) -> None:
        """The run wants that many workers of this pool, none of them on the hosts `without`."""
        ...


class PoolKind(Protocol):
    """A kind of pool. `options`: its keys beside `COMMON`; `required`: those that must be given."""

    @property
    def options(self) -> tuple[str, ...]: ...

    @property
    def required(self) -> tuple[str, ...]: ...

    def is_sized(self, terms: PoolTerms) -> bool:
        """Return True if the pool knows how many workers it can have without a `size`."""
        ...

    def check(self, terms: PoolTerms, listen: str, show: Callable[[str], None], *, priced: bool) -> None:
        """Check `terms` before anything is started. `listen`: where the run listens, as HOST:PORT. `show` prints a
        line for the user. `priced`: the price of each host must be known.

        Raises:
            UsageError: the pool can't be used with these terms.
        """
        ...

    async def open(self, terms: PoolTerms, context: PoolContext) -> RemotePool:
        """The pool of a run that has started."""
        ...


class Events:
    """A queue of a pool's events."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Event] = asyncio.Queue()

    def put(self, event: Event) -> None:
        self._queue.put_nowait(event)

    async def take(self) -> list[Event]:
        """Return all queued events. Waits until there is at least one."""
        return [await self._queue.get(), *self.waiting()]

    def waiting(self) -> list[Event]:
        """Return all queued events, possibly none."""
        return [self._queue.get_nowait() for _ in range(self._queue.qsize())]


# --- capacity ---------------------------------------------------------------------------------------------------------
#
# A pool reports how many workers it can have as soon as that number changes. At the beginning its hosts are still
# arriving: for `GATHER_S` seconds it reports that too, so that other pools do not start replacements meanwhile. It does
# not report this if it has learned that it gets no hosts.

GATHER_S = 15.0


class ReportedCapacity:
    """Decides when the capacity must be reported. Times are the caller's, in seconds.

    `can` and `gathers` are the values of the last report; `can` is None if no limit is known.
    """

    def __init__(self) -> None:
        self.can: int | None = None
        self.gathers = False
        self._gathers_until = math.inf

    def update(self, can: int | None, now: float, *, short: bool) -> bool:
        """Returns True if the value changed and must be reported. Records it as reported.

        `short`: the pool knows that it gets no workers.
        """
        self._gathers_until = min(self._gathers_until, now + GATHER_S)
        before = self.can, self.gathers
        self.can, self.gathers = can, can is not None and now < self._gathers_until and not short
        return before != (self.can, self.gathers)
