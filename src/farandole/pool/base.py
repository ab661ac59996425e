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
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from farandole.errors import UsageError
from farandole.platform.bounds import MAX_WORKERS
from farandole.platform.output import LONGEST_NAME, is_name
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


class Events:
    """A queue of a pool's events."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Event] = asyncio.Queue()

    def put(self, event: Event) -> None:
        self._queue.put_nowait(event)

    async def take(self) -> list[Event]:
        """All queued events. Waits until there is at least one."""
        return [await self._queue.get(), *self.waiting()]

    def waiting(self) -> list[Event]:
        """All queued events, possibly none."""
        return [self._queue.get_nowait() for _ in range(self._queue.qsize())]


# --- spec -------------------------------------------------------------------------------------------------------------
#
# The argument of `--pool`: one pool as KIND[,KEY=VALUE]..., or a TOML file with a table for each pool.
#
#     --pool local,size=2                                  this machine
#     --pool ssh,hosts=hosts.txt                           hosts of a file, see `ssh.py`
#     --pool ec2,template=NAME,types=g4dn.xlarge+g5.xlarge  instances, see docs/ec2.md
#     --pool pools.toml                                    [[pool]] kind = "ssh", hosts = "hosts.txt", ...
#
# Every pool has a `kind`. It may have a `name` (default: its kind) and a `size`, the maximum number of workers. The
# other keys belong to the kind. The order of the pools is the order of preference.

COMMON = ("kind", "name", "size")
KINDS: Mapping[str, tuple[str, ...]] = {
    "local": (),
    "ssh": ("hosts", "python", "ssh"),
    "ec2": ("template", "types", "zones", "market", "slots", "region", "prices"),
}
NEEDED: Mapping[str, tuple[str, ...]] = {"ssh": ("hosts",), "ec2": ("template",)}


def pools(arguments: Sequence[str]) -> tuple[PoolTerms, ...]:
    """All pools of the `--pool` arguments, in their order.

    Raises:
        UsageError: an argument is invalid; the message names it.
    """
    result: list[PoolTerms] = []
    for text in arguments:
        if text.endswith(".toml"):
            result += [_pool(table, f"{text}, pool {n}") for n, table in enumerate(_tables(Path(text)), 1)]
        else:
            result.append(_pool(_keys(text), f"--pool {text}"))
    for number, pool in enumerate(result):
        if pool.name in [other.name for other in result[:number]]:
            raise UsageError(
                f"two pools are called {pool.name!r}: give one of them another name, as --pool {pool.kind},name=..."
            )
    return tuple(result)


def _keys(text: str) -> dict[str, Any]:
    kind, *words = text.split(",")
    table: dict[str, Any] = {"kind": kind}
    for item in words:
        key, equals, value = item.partition("=")
        if not equals or not key or not value:
            raise UsageError(f"--pool {text}: {item!r} is not KEY=VALUE")
        if key in table:
            raise UsageError(f"--pool {text}: {key} is given twice")
        table[key] = value
    return table


def _tables(path: Path) -> list[dict[str, Any]]:
    if sys.version_info < (3, 11):
        raise UsageError(f"--pool {path}: TOML needs Python 3.11; give each pool as --pool KIND,KEY=VALUE")
    import tomllib

    try:
        content = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"--pool {path}: {error.strerror if isinstance(error, OSError) else error}") from None
    tables: Any = content.pop("pool", None)
    if content or not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise UsageError(f"--pool {path}: the file must hold one table [[pool]] for each pool, and nothing else")
    return tables


def _pool(table: Mapping[str, Any], where: str) -> PoolTerms:
    kind = str(table.get("kind", ""))
    if kind not in KINDS:
        raise UsageError(f"{where}: unknown kind of pool {kind!r}; the kinds are {', '.join(KINDS)}")
    allowed = (*COMMON, *KINDS[kind])
    for key in table:
        if key not in allowed:
            raise UsageError(f"{where}: {kind} has no key {key!r}; its keys are {', '.join(allowed[1:])}")
    for key in NEEDED.get(kind, ()):
        if key not in table:
            raise UsageError(f"{where}: {kind} needs {key}=...")
    name = str(table.get("name", kind))
    if not is_name(name) or "/" in name:
        raise UsageError(
            f"{where}: a pool's name has at most {LONGEST_NAME} characters, all of them printable, and no /"
        )
    size = table.get("size")
    if size is not None and (not str(size).isdecimal() or len(str(size)) > 9 or not 1 <= int(size) <= MAX_WORKERS):
        raise UsageError(f"{where}: size={size}: must be a whole number from 1 to {MAX_WORKERS}")
    options = {key: _option_text(value) for key, value in table.items() if key not in COMMON}
    return PoolTerms(kind=kind, name=name, size=None if size is None else int(size), options=options)


def _option_text(value: object) -> str:
    """The option as on the command line, where a TOML list is written as a+b."""
    return "+".join(str(each) for each in cast(list[object], value)) if isinstance(value, list) else str(value)


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
