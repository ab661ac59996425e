"""What the coordinator holds and hands out: settings, actions, and its records of workers, stops and endings."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from farandole.errors import UsageError
from farandole.membership import messages as m
from farandole.membership.events import Event


class OwnPool(msgspec.Struct, frozen=True, kw_only=True):
    """The pool of `farandole run`, as it says in its Hello."""

    pool: str
    host: str
    pid: int


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a run fixes when it starts. Times in seconds. `listen` is HOST[:PORT] (see `coordinator/endpoint.py`).

    `pool`: that of `farandole run` itself. `command`: the script and its arguments, as given in `directory`.
    `by_speed`: shards are dealt by measured speed, else equally. `stop_on_nan`: a loss that is not finite ends the run.
    `newest`: what a resumed run begins with, or newer. `code`: the facts of code that are known from the start (see
    `difference`); with `other_code` who differs in some is let in. `edited`: files that are others than when the run
    was on before. `standstill_s`, `stop_s`: how long the training may stand still before that is told, and before a
    stop that was asked for no longer waits for its step.
    """

    run: str
    folder: str = ""
    pool: OwnPool | None = None
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
    stop_on_nan: bool = False
    code: tuple[tuple[str, str], ...] = ()
    other_code: bool = False
    edited: tuple[str, ...] = ()
    checkpoints: m.Checkpoints = m.Checkpoints()
    newest: m.Newest = m.Newest()
    heartbeat_s: float = 0.5
    heartbeat_timeout_s: float = 5.0
    stall_s: float = 30.0
    orphan_s: float = 600.0
    prepare_timeout_s: float = 30.0
    startup_failures: int = 5
    end_s: float = 10.0  # after a stop, for those whose script has not ended where others' have
    standstill_s: float = 60.0
    stop_s: float = 30.0
    views_per_group: int = 256  # numbers; messages of views 512 apart could not be told apart in one group

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
        if self.stall_s < self.heartbeat_s:
            raise UsageError(f"--stall {self.stall_s:g}: at least {self.heartbeat_s:g} s, the time between heartbeats")
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
    """For the journal, metrics.jsonl and the observers."""

    event: Event


@dataclass(frozen=True)
class Log:
    """A line of training metrics for metrics.jsonl and the observers."""

    line: m.Line


Action = Send | Close | Record | Log


@dataclass(kw_only=True)
class Worker:
    """What the coordinator knows of a worker. `state`: starting, ready, member, finished.

    `unreached`: why it can't write the run's checkpoints, "" if it can. `saves`: what it was last told of that; None
    where it is unknown what it has heard. `step`: that it last said to be in, -1 for none.
    """

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
    entered: int = -1  # the step in which it did, as a joiner
    prepared: int = 0
    computed: bool = False  # a step has ended in which it had shards
    fingerprint: str = ""
    unreached: str = ""
    saves: bool | None = False
    step: int = -1
    beat: m.Heartbeat = field(default_factory=m.Heartbeat)

    @property
    def reaches(self) -> bool:
        """Whether what it saves is in the run's store, as far as is known."""
        return not self.unreached


@dataclass(kw_only=True)
class Stopping:
    """A stop in progress: who still owes an answer, and what the others said.

    `overdue` are those out of reach and why: they are not waited for if it is safe to go on without them. `expelled`
    go in any case. `stalls` are the accused that were waited for, their connections standing.
    """

    number: int
    waiting: set[str]
    reports: dict[str, m.Stopped] = field(default_factory=dict)
    accusations: dict[tuple[str, str], str] = field(default_factory=dict)
    stalls: set[str] = field(default_factory=set[str])
    overdue: dict[str, str] = field(default_factory=dict)
    expelled: dict[str, str] = field(default_factory=dict)
    cause: str
    told: bool = False  # that it can't be decided yet
    patient: bool = False  # the overdue have been waited for once more


Shared = m.Differs | m.NotFinite


@dataclass
class Claim:
    """What was said of one step, last, and by whom. See `testimony`."""

    message: Shared
    workers: set[str] = field(default_factory=set[str])


class Departed(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that was let go by a decision, should its process come back. `started`: it has trained. `entered` as a
    worker's, for one whose connection had closed before; else -1.
    """

    session: str
    reason: str
    code: int
    started: bool
    pool: str = ""
    entered: int = -1


class Losses(msgspec.Struct, frozen=True, kw_only=True):
    """Those without a new furthest `step` between them, and the joiners in a row, the first of which entered in step
    `since`. See `losses`.
    """

    count: int = 0
    step: int = -1
    reason: str = ""  # of the newest process that has ended
    joiners: int = 0
    since: int = -1


@dataclass(frozen=True, kw_only=True)
class Finish:
    """A worker's script has ended with `round` not begun, after `step`."""

    worker: str
    round: int
    step: int


class Ending(msgspec.Struct, kw_only=True):
    """The run is on its way out. `failed`: in the middle of a step; else a planned stop, by an empty view, or
    `finished`: every member's script has run to its end. `stored`: the last state is saved.
    """

    code: int
    reason: str
    failed: bool
    saver: str = ""
    between: bool = False  # nobody has the state of a whole step
    finished: bool = False
    stored: bool = False
    apart: bool = False  # the replicas differ: those of `odd` from the others', as far as is known; see `replicas`
    odd: tuple[str, ...] = ()
    where: str = ""  # they were found to: "at step 5"
    told: str = ""  # ... by whom, where it was one alone
    compared: bool = False
