"""What the coordinator holds and hands out: settings, actions, and its records of workers, stops and endings."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec

from farandole.membership import messages as m
from farandole.membership.events import Event
from farandole.membership.exports import Exports
from farandole.membership.hosts import Job
from farandole.membership.preference import PoolTerms
from farandole.membership.prices import Prices
from farandole.membership.silence import Silence
from farandole.membership.spending import Spending
from farandole.membership.terms import RunTerms


class OwnPool(msgspec.Struct, frozen=True, kw_only=True):
    """The pool of `farandole run`, as it says in its Hello."""

    pool: str
    host: str
    pid: int


class RunSettings(RunTerms, frozen=True, kw_only=True):
    """The terms of a run, and what is its coordinator's own. `listen` is HOST[:PORT] (see `coordinator/listener.py`).

    `pool`: that of `farandole run` itself, `pools`: all that it has, the preferred first. `taken_over`: from
    one that was killed, or is cut off. `command`: the script and its
    arguments, as given in `directory`.
    `commit`: of the script, as git says it, "" for none.
    `spending`: how long it may last, and what it may cost; `prices`: of its hosts, `tag`: of what it pays for.
    `exports`: where else it is seen.
    `newest`: what a resumed run begins with, or newer. `code`: the facts of code that are known from the start (see
    `difference`); with `other_code` who differs in some is let in. `job`: what workers of other hosts do, with the
    run's packed code; None where it is not packed. `edited`: files that are others than when the run was on before.
    """

    run: str
    folder: str = ""
    pool: OwnPool | None = None
    pools: tuple[PoolTerms, ...] = ()
    taken_over: bool = False
    command: tuple[str, ...] = ()
    directory: str = ""
    commit: str = ""
    listen: str = "127.0.0.1"
    code: tuple[tuple[str, str], ...] = ()
    job: Job | None = None
    other_code: bool = False
    edited: tuple[str, ...] = ()
    newest: m.Newest = m.Newest()
    spending: Spending = Spending()
    prices: Prices = Prices()
    tag: str = ""
    exports: Exports = Exports()

    @property
    def terms(self) -> RunTerms:
        """What every worker gets."""
        return RunTerms(**{name: getattr(self, name) for name in RunTerms.__struct_fields__})


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
    silence: Silence
    state: str = "starting"
    session: str = ""  # of its process
    attempt: int = 0  # of its newest connection
    connected: bool = True
    leaving: str = ""  # the reason of its notice
    goes_at: float = math.inf  # its machine, as is known
    entered: int = -1  # the step in which it did, as a joiner
    prepared: int = 0
    computed: bool = False  # a step has ended in which it had shards
    fingerprint: str = ""
    after: m.StepTime = field(default_factory=m.StepTime)  # between its last step and its script's end
    unreached: str = ""
    saves: bool | None = False
    step: int = -1
    unfed: str = ""  # why its host can't get it the data
    beat: m.Heartbeat = field(default_factory=m.Heartbeat)

    @property
    def reaches(self) -> bool:
        """Whether what it saves is in the run's store, as far as is known."""
        return not self.unreached


@dataclass(kw_only=True)
class Tracing:
    """The newest trace (`tracing`): the workers that were `asked`, by rank, and the `answers`, as they came.

    `looked_at`: when somebody last asked for them. `most`: spans that each may tell of, and waits.
    """

    number: int
    steps: int
    most: int
    looked_at: float
    asked: tuple[str, ...]
    answers: dict[str, bytes] = field(default_factory=dict[str, bytes])


@dataclass(kw_only=True)
class Told:
    """What one process has told of its time (`accounting`): `first_us` at `first_at`, `said` at `heard_at`, on the
    coordinator's clock. `written`: how much of it is in a line.
    """

    session: str
    host: str
    pool: str
    first_us: int
    first_at: float
    said: tuple[int, ...]
    heard_at: float
    step: int
    written: int = 0


@dataclass(kw_only=True)
class Stopping:
    """A stop in progress: who still owes an answer, and what the others said.

    `overdue` are those out of reach and why: they are not waited for if it is safe to go on without them. `expelled`
    go in any case. `failed` are joiners whose replica came apart from the others' in that step, and `apart` those who
    say that words differ. `stalls` are the accused that were waited for, their connections standing.
    """

    number: int
    waiting: set[str]
    reports: dict[str, m.Stopped] = field(default_factory=dict)
    accusations: dict[tuple[str, str], str] = field(default_factory=dict)
    stalls: set[str] = field(default_factory=set[str])
    overdue: dict[str, str] = field(default_factory=dict)
    expelled: dict[str, str] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    apart: set[str] = field(default_factory=set[str])
    cause: str
    told: bool = False  # that it can't be decided yet
    patient: bool = False  # the overdue have been waited for once more


Shared = m.Differs | m.Unlike | m.NotFinite


@dataclass
class Claim:
    """What was said of one step, last, and by whom. See `testimony`."""

    message: Shared
    workers: set[str] = field(default_factory=set[str])


class Departed(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that was let go by a decision, should its process come back. `started`: it has trained. `refused`: that
    was counted (`losses`, 6). `entered` as a worker's, for one whose connection had closed before; else -1.
    """

    session: str
    reason: str
    code: int
    started: bool
    refused: bool = False
    pool: str = ""
    entered: int = -1


@dataclass(frozen=True, kw_only=True)
class Strike:
    """A loss that counted: when, and who was `there`, or had been. See `losses`, 3."""

    at: float = -math.inf
    there: frozenset[str] = frozenset()


class Losses(msgspec.Struct, frozen=True, kw_only=True):
    """Those without a new furthest `step` between them, and the joiners in a row, the first of which entered in step
    `since`; `refusals` of them were refused, the others died. See `losses`.
    """

    count: int = 0
    step: int = -1
    reason: str = ""  # of the newest process that has ended
    joiners: int = 0
    refusals: int = 0
    since: int = -1


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
