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


# --- spec -------------------------------------------------------------------------------------------------------------
#
# What `--pool` says: one pool as KIND[,KEY=VALUE]..., or a TOML file with a table for each.
#
#     --pool local,size=2                                  this machine
#     --pool ssh,hosts=hosts.txt                           hosts of a file, see `ssh.py`
#     --pool ec2,template=NAME,types=g4dn.xlarge+g5.xlarge  instances, see docs/ec2.md
#     --pool pools.toml                                    [[pool]] kind = "ssh", hosts = "hosts.txt", ...
#
# Every pool has a `kind`, may have a `name` (default: its kind) and a `size`, more than which it never has; the rest of
# its keys are its kind's. The order is that of preference.

COMMON = ("kind", "name", "size")
KINDS: Mapping[str, tuple[str, ...]] = {
    "local": (),
    "ssh": ("hosts", "python", "ssh"),
    "ec2": ("template", "types", "zones", "market", "slots", "region", "prices"),
}
NEEDED: Mapping[str, tuple[str, ...]] = {"ssh": ("hosts",), "ec2": ("template",)}


def pools(asked: Sequence[str]) -> tuple[PoolTerms, ...]:
    """All that `--pool` says, in its order.

    Raises:
        UsageError: something in it can't be meant; names it.
    """
    found: list[PoolTerms] = []
    for text in asked:
        if text.endswith(".toml"):
            found += [_pool(table, f"{text}, pool {n}") for n, table in enumerate(_tables(Path(text)), 1)]
        else:
            found.append(_pool(_keys(text), f"--pool {text}"))
    for number, pool in enumerate(found):
        if pool.name in [other.name for other in found[:number]]:
            raise UsageError(
                f"two pools are called {pool.name!r}: give one another name, as --pool {pool.kind},name=..."
            )
    return tuple(found)


def _keys(text: str) -> dict[str, Any]:
    kind, *words = text.split(",")
    found: dict[str, Any] = {"kind": kind}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key or not value:
            raise UsageError(f"--pool {text}: {word!r} is no KEY=VALUE")
        if key in found:
            raise UsageError(f"--pool {text}: {key} is there twice")
        found[key] = value
    return found


def _tables(path: Path) -> list[dict[str, Any]]:
    if sys.version_info < (3, 11):
        raise UsageError(f"--pool {path}: reading TOML takes Python 3.11; give each pool as --pool KIND,KEY=VALUE")
    import tomllib

    try:
        content = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"--pool {path}: {error.strerror if isinstance(error, OSError) else error}") from None
    tables: Any = content.pop("pool", None)
    if content or not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise UsageError(f"--pool {path}: it holds a table [[pool]] for each pool, and nothing else")
    return tables


def _pool(table: Mapping[str, Any], where: str) -> PoolTerms:
    kind = str(table.get("kind", ""))
    if kind not in KINDS:
        raise UsageError(f"{where}: no such kind of pool as {kind!r}; there are {', '.join(KINDS)}")
    allowed = (*COMMON, *KINDS[kind])
    for key in table:
        if key not in allowed:
            raise UsageError(f"{where}: {kind} has no {key!r}; it has {', '.join(allowed[1:])}")
    for key in NEEDED.get(kind, ()):
        if key not in table:
            raise UsageError(f"{where}: {kind} needs {key}=...")
    name = str(table.get("name", kind))
    if not is_name(name) or "/" in name:
        raise UsageError(
            f"{where}: a pool's name has at most {LONGEST_NAME} characters, all of them to be seen, and no /"
        )
    size = table.get("size")
    if size is not None and (not str(size).isdecimal() or len(str(size)) > 9 or not 1 <= int(size) <= MAX_WORKERS):
        raise UsageError(f"{where}: size={size}: a whole number from 1 to {MAX_WORKERS}")
    options = {key: _word(value) for key, value in table.items() if key not in COMMON}
    return PoolTerms(kind=kind, name=name, size=None if size is None else int(size), options=options)


def _word(value: object) -> str:
    """A list of a TOML file is a+b on the command line."""
    return "+".join(str(each) for each in cast(list[object], value)) if isinstance(value, list) else str(value)


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
