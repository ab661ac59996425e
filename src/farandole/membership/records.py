"""What the coordinator holds and hands out: settings, actions, and its records of workers, stops and endings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from farandole.errors import UsageError
from farandole.membership import messages as m


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a run fixes when it starts. Times in seconds. `listen` is HOST[:PORT] (see `control/endpoint.py`).

    `command`: the script and its arguments, as given in `directory`.
    `by_speed`: shards are dealt by measured speed, else equally.
    """

    run: str
    folder: str = ""
    command: tuple[str, ...] = ()
    directory: str = ""
    listen: str = "127.0.0.1"
    wanted: int = 1
    minimum: int = 1
    maximum: int | None = None
    seed: int = 0
    threads: int = 1
    ledger: bool = False
    by_speed: bool = True
    checkpoints: m.Checkpoints = m.Checkpoints()
    heartbeat_s: float = 0.5
    heartbeat_timeout_s: float = 5.0
    stall_s: float = 30.0
    orphan_s: float = 600.0
    prepare_timeout_s: float = 30.0
    startup_failures: int = 5

    def __post_init__(self) -> None:
        if self.minimum < 1:
            raise UsageError(f"--min {self.minimum}: a run needs at least one worker; use --min 1 or more")
        if self.wanted < self.minimum:
            raise UsageError(
                f"--workers {self.wanted} is below --min {self.minimum}: the run could never start; "
                f"raise --workers or lower --min"
            )
        if self.maximum is not None and self.maximum < self.wanted:
            raise UsageError(f"--max {self.maximum} is below --workers {self.wanted}: raise --max or lower --workers")
        if self.heartbeat_timeout_s < 4 * self.heartbeat_s:
            raise UsageError(
                f"a heartbeat timeout of {self.heartbeat_timeout_s:g} s for one every {self.heartbeat_s:g} s: at least "
                f"four of them must fit"
            )
        if self.orphan_s <= self.heartbeat_timeout_s:
            raise UsageError(
                f"--orphan-limit {self.orphan_s:g}: it must be longer than the heartbeat timeout, "
                f"{self.heartbeat_timeout_s:g} s"
            )
        if self.checkpoints.keep < 1:
            raise UsageError(f"--keep {self.checkpoints.keep}: a run keeps at least one checkpoint")


# --- actions ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Send:
    worker: str
    message: m.Message


@dataclass(frozen=True)
class Close:
    """Close the worker's connection: it is out."""

    worker: str


@dataclass(frozen=True)
class Record:
    """An event for the journal, metrics.jsonl and the observers."""

    event: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Log:
    """A line of training metrics for metrics.jsonl and the observers."""

    line: m.Line


Action = Send | Close | Record | Log


@dataclass(kw_only=True)
class Worker:
    """What the coordinator knows of a worker. `state`: starting, ready, member, finished."""

    id: str
    host: str
    pid: int
    pool: str
    seen: float
    state: str = "starting"
    session: str = ""  # of its process
    attempt: int = 0  # of its newest connection
    connected: bool = True
    leaving: str = ""  # the reason of its notice
    prepared: int = 0
    fingerprint: str = ""
    beat: m.Heartbeat = field(default_factory=m.Heartbeat)


@dataclass(kw_only=True)
class Stopping:
    """A stop in progress: who still owes an answer, and what the others said.

    `overdue` are those out of reach and why: they are not waited for if it is safe to go on without them. `expelled`
    go in any case.
    """

    number: int
    waiting: set[str]
    reports: dict[str, m.Stopped] = field(default_factory=dict)
    accusations: dict[tuple[str, str], str] = field(default_factory=dict)
    overdue: dict[str, str] = field(default_factory=dict)
    expelled: dict[str, str] = field(default_factory=dict)
    cause: str
    told: bool = False  # that it can't be decided yet
    patient: bool = False  # the overdue have been waited for once more


class Departed(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that was let go by a decision, should its process come back. `started`: it has trained."""

    session: str
    reason: str
    code: int
    started: bool


class Ending(msgspec.Struct, kw_only=True):
    """The run is on its way out. `failed`: through an exception; else a planned stop, by an empty view."""

    code: int
    reason: str
    failed: bool
    saver: str = ""
    between: bool = False  # nobody has the state of a whole step
    apart: bool = False  # the replicas differ: those of `odd` from the others', as far as is known; see `replicas`
    odd: tuple[str, ...] = ()
    where: str = ""  # they were found to: "at step 5"
    compared: bool = False
