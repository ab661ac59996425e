"""The coordinator's state: settings, actions, and the records of workers, stops and endings."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from statistics import median
from typing import Any

import msgspec

from farandole.protocol import events
from farandole.protocol import messages as m
from farandole.protocol import settings as protocol_settings
from farandole.protocol.coordinator.logged_values import LoggedValues
from farandole.protocol.cost import Prices
from farandole.protocol.difference import Difference, Finish
from farandole.protocol.events import Event
from farandole.protocol.failure_detector import FailureDetector, LastProgress, RateLimit, Silence
from farandole.protocol.link_speed import LinkHistory
from farandole.protocol.messages import Heartbeat, Job, RunTerms, Stopped
from farandole.protocol.settings import Exports, PoolTerms, Spending
from farandole.protocol.values import Call, LinkUse
from farandole.protocol.view import Lineage, View

# --- records ----------------------------------------------------------------------------------------------------------


class OwnPool(msgspec.Struct, frozen=True, kw_only=True):
    """The pool of `farandole run`: the name, host and process ID that its Hello carries."""

    pool: str
    host: str
    pid: int


class RunSettings(RunTerms, frozen=True, kw_only=True):
    """The terms of a run and the settings of its coordinator alone.

    Attributes:
        pool: the pool of `farandole run` itself.
        pools: all pools of the run, the preferred one first.
        taken_over: the run is taken over from a coordinator that was killed or is cut off.
        command: the script and its arguments, as given in `directory`.
        commit: the git commit of the script, "" if there is none.
        listen: HOST[:PORT], see `coordinator/listener.py`.
        code: the code facts that are known from the start (see `protocol/difference.py`).
        job: what workers of external hosts run, with the packed code of the run; None if the code is not packed.
        other_code: admit workers that differ in some of `code`.
        edited: files that have changed since the run was last active.
        newest: a resumed run begins with this checkpoint or a newer one.
        spending: the limits of time and cost.
        prices: the prices of the run's hosts.
        tag: the tag of the resources that the run pays for.
        exports: the other places where the run's metrics are shown.
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
        """The part of the settings that every worker receives."""
        return RunTerms(**{name: getattr(self, name) for name in RunTerms.__struct_fields__})


# --- actions ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Send:
    """Send `message` to `worker`."""

    worker: str
    message: m.Message


@dataclass(frozen=True)
class Close:
    """Close the connection of a worker that has been removed."""

    worker: str


@dataclass(frozen=True)
class Record:
    """Write an event to the journal and metrics.jsonl, and pass it to the observers."""

    event: Event


@dataclass(frozen=True)
class Log:
    """Write a line of training metrics to metrics.jsonl, and pass it to the observers."""

    line: m.Line


Action = Send | Close | Record | Log


class Removal(Enum):
    """Why a worker is taken out of the state."""

    LEFT = "left"  # its part is done: it exits by itself
    EVICTED = "evicted"  # it may still be alive: its connection is closed, and its pool kills it
    DIED = "died"  # its process has ended or makes no more progress, for certain


@dataclass(kw_only=True)
class Worker:
    """The coordinator's record of one worker. `state` is starting, ready, member or finished:

        starting -> ready       `Ready` is accepted         ready -> starting     Hello again, in no view
        ready -> member         the first `Switched`        member -> ready       `ViewWithdrawn`
        member -> finished      `Finished`                  finished -> member    a new coordinator; it reports it again

    `JoinRefused`, `Goodbye` or certain death removes the record from any state.

    Attributes:
        unreached: why it cannot write the run's checkpoints, "" if it can.
        saves: the newest value sent to it of whether it writes checkpoints; None if it is unknown what it received.
        may_write: it was told to write checkpoints once, or a killed coordinator may have told it.
        step: the newest step that it reported, -1 for none.
        last_answer: the view and the round in its newest answer to a stop; view 0 for none.
    """

    id: str
    host: str
    pid: int
    pool: str
    silence: Silence
    state: str = "starting"
    session: str = ""  # identifies its process
    attempt: int = 0  # the number of its newest connection
    connected: bool = True
    leaving: str = ""  # the reason of its preemption notice or leave request, "" for none
    goes_at: float = math.inf  # when its machine is preempted, on the coordinator's clock
    entered: int = -1  # the step in which it entered as a joiner, -1 for a founder
    prepared: int = 0  # the newest view that it is prepared for
    computed: bool = False  # it has computed shards
    fingerprint: str = ""  # the digest of its final state, once it has finished
    after: m.StepTime = field(default_factory=m.StepTime)  # the time between its last step and the end of its script
    finish: Finish | None = None  # the end of its script, if it was a member
    unreached: str = ""
    saves: bool | None = False
    may_write: bool = False
    step: int = -1
    last_answer: tuple[int, int] = (0, 0)
    data_unavailable: str = ""  # why its host cannot get the data, "" if it can
    heartbeat: m.Heartbeat = field(default_factory=m.Heartbeat)
    zone: str = ""  # of its host, "" if it reports none

    @property
    def reaches(self) -> bool:
        """True if its checkpoints go to the run's store, as far as is known."""
        return not self.unreached


@dataclass(kw_only=True)
class Tracing:
    """The newest trace (see `accounting.start_trace`).

    `workers` were asked, by rank, and `answers` are in the order of arrival. `looked_at` is when somebody last asked
    for the answers. `most` is the limit of spans, and of waits, for each worker.
    """

    number: int
    steps: int
    most: int
    looked_at: float
    workers: tuple[str, ...]
    answers: dict[str, bytes] = field(default_factory=dict[str, bytes])


@dataclass(kw_only=True)
class ReportedTime:
    """The times that one process has reported (see `accounting.py`), in microseconds.

    Its first report, of `first_us` in total, arrived at `first_at` and its newest, `reported`, at `heard_at`, both on
    the coordinator's clock in seconds. `written` is the total that has been written to a line. `links`: its use of
    the links to each other host, None before it reports any. `zone`: that of its host, "" if it reports none.
    """

    session: str
    host: str
    zone: str
    pool: str
    first_us: int
    first_at: float
    reported: tuple[int, ...]
    heard_at: float
    step: int
    written: int = 0
    links: tuple[LinkUse, ...] | None = None


@dataclass(kw_only=True)
class Stopping:
    """A stop of the view in progress: the workers that still owe an answer, and the reports of the others.

    Attributes:
        overdue: unreachable workers and why; the decision does not wait for them if it is safe to go on without them.
        expelled: workers that are removed in any case, and why.
        failed: joiners whose replica differs from the others', with the step in which it was seen.
        difference_reporters: workers that report that the commit messages of the round differ.
        stalls: accused workers that were waited for although their connections were open.
    """

    number: int
    unanswered: set[str]
    reports: dict[str, m.Stopped] = field(default_factory=dict)
    accusations: dict[tuple[str, str], str] = field(default_factory=dict)
    stalls: set[str] = field(default_factory=set[str])
    overdue: dict[str, str] = field(default_factory=dict)
    expelled: dict[str, str] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    difference_reporters: set[str] = field(default_factory=set[str])
    cause: str
    unfenced_reported: bool = False  # an event says that the stop cannot be decided yet
    patient: bool = False  # the overdue workers have been given one more timeout


Shared = m.Differs | m.ShardsDiffer | m.NotFinite


@dataclass
class Corroboration:
    """The newest report about one step and the workers that sent it. See `disputes.corroborate`."""

    message: Shared
    workers: set[str] = field(default_factory=set[str])


class Departed(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that was removed by a decision, in case its process comes back.

    Attributes:
        started: it has trained.
        refused: its refusal was counted in the crash loop (see `failures.on_refused`).
        entered: as in `Worker`, for one whose connection had closed before its removal; else -1.
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
    """A counted loss: when it happened, and the workers that were present then or earlier.

    A worker that came later was not struck by it: a replacement may start and die in less time.
    See docs/protocol.md, Crash loops 3.
    """

    at: float = -math.inf
    present: frozenset[str] = frozenset()


class CrashLoop(msgspec.Struct, frozen=True, kw_only=True):
    """The losses in a row without progress, and the joiners in a row that died or were refused. See `failures.py`.

    Attributes:
        count: losses without a new furthest `step` between them.
        reason: the end of the newest process that has ended.
        joiners: joiners in a row that were lost; the first of them entered in step `since`.
        refusals: how many of `joiners` were refused; the others died.
    """

    count: int = 0
    step: int = -1
    reason: str = ""
    joiners: int = 0
    refusals: int = 0
    since: int = -1


class Ending(msgspec.Struct, kw_only=True):
    """The end of the run, from the decision to end until the process exits.

    `failed` means that the run ends in the middle of a step. Otherwise it ends as planned, by an empty view, or as
    `finished`: the script of every member has run to its end. `stored` means that the last state is saved.
    """

    code: int
    reason: str
    failed: bool
    saver: str = ""
    between: bool = False  # no worker has the state of a whole step
    finished: bool = False
    stored: bool = False
    # The replicas differ: those of `differing` from the others', as far as is known; see `disputes.py`. The names in
    # quotes are those in journals.
    replicas_differ: bool = msgspec.field(default=False, name="apart")
    differing: tuple[str, ...] = msgspec.field(default=(), name="odd")
    where: str = ""  # where the difference was seen: "at step 5"
    reporter: str = msgspec.field(default="", name="told")  # the worker that reported it, if it was only one
    compared: bool = False  # the replicas have been compared


# --- shares by speed --------------------------------------------------------------------------------------------------
#
# How fast the workers are, and whether other shares of a step's shards would make its steps shorter. Invariants: shares
# change time and no bit; while the distributions of measured times stay the same, no shares come twice; where the times
# depend on the shares, an oscillation costs one window in ever longer periods.
# To change the shares the coordinator proposes a view with the same members and other shares, over the standing
# connections. The members switch to it like at a join, at the same step for all. The shares of the view in force only
# say how the next round is assigned.
# Argument: docs/protocol.md, Shares by speed 1-4.

WINDOW = 16  # figures: 8 s of ordinary heartbeats, more if a shard takes longer than a heartbeat interval
KEPT_FIGURES = 4 * WINDOW
WORTH = 0.9
RELEGATION_WINDOWS, LONGEST = 8, 512  # windows that a relegation counts: one minute at first, one hour at most
WHOLE = 1000  # the share of the fastest worker
STRAGGLER_SPEED = 0.8  # a worker below this part of the fastest speed is a straggler


@dataclass(frozen=True, kw_only=True)
class Times:
    """The time that a worker takes for a shard, in µs: the median and three standard errors to either side of it.

    For any distribution, n/2 of n figures are below the median, plus or minus sqrt(n)/2. So the figures that are 1.5
    sqrt(n) places before and after the middle one enclose the median.
    """

    low: float
    middle: float
    high: float

    @staticmethod
    def of(figures: Sequence[int]) -> Times:
        """Return the times for these measured figures, in µs."""
        ordered = sorted(figures)
        first = max(0, math.floor(len(ordered) / 2 - 1.5 * math.sqrt(len(ordered))))
        return Times(low=ordered[first], middle=median(ordered), high=ordered[-1 - first])

    def at_least(self, other: Times) -> Times:
        """Return the larger value of both for each of low, middle and high."""
        return Times(
            low=max(self.low, other.low), middle=max(self.middle, other.middle), high=max(self.high, other.high)
        )


@dataclass(frozen=True)
class Relegation:
    """A worker got fewer shards because of `times`, which count at least until window `until`."""

    times: Times
    patience: int
    until: int


class Speeds:
    """The measured speeds of the workers, and the next shares to propose.

    A figure is the mean wall time of a worker's passes over all its shards between two heartbeats, without waits for
    data or peers: a worker with half a core shows twice the time. One shard says little: a host held to half its time
    computes for 50 ms and stands still for 50 ms. For a worker without shards its last figures count, or the others'
    median.

    It lives as long as the coordinator and reads no clock.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self._window = window
        self._view = 0
        self._windows = 0
        self._judged = 0  # windows of this view that have ended
        self._shards = 0  # the most shards in a step of this view
        self._figures: dict[str, deque[int]] = {}
        self._fresh: dict[str, int] = {}  # the number of figures received in this view
        self._newest: dict[str, Heartbeat] = {}
        self._relegations: dict[str, Relegation] = {}

    def heard(self, worker: str, beat: Heartbeat, view: View | None) -> None:
        """Record a heartbeat if its sender is a member of `view`, the view in force."""
        if view is None or beat.view != view.number or worker not in view.members:
            return
        if view.number != self._view:
            self._begin(view)
        self._newest[worker] = beat
        self._shards = max(self._shards, beat.shards_total)
        if beat.shard_us:
            self._figures.setdefault(worker, deque(maxlen=KEPT_FIGURES)).append(beat.shard_us)
            self._fresh[worker] = self._fresh.get(worker, 0) + 1

    def due(self, view: View) -> tuple[int, ...] | None:
        """Return the shares to propose for `view` at the end of a window, None if a change is not worthwhile.

        A window is `WINDOW` figures of each member under one view; the medians of the newest `KEPT_FIGURES` give the
        shares. They are worthwhile if a step would take less than `WORTH` of its time, even if each worker were three
        standard errors slower than its median under the new shares, and three faster under those in force. So plain
        cases act at once, noisy ones later. While the distributions stay, each change lowers the time that the true
        medians predict by more than a tenth, so no shares come twice.

        A second call in the same window returns None.
        """
        if view.number != self._view or view.size < 2 or not self._window_complete(view):
            return None
        times = [self._believed(worker) for worker in view.members]
        proposed = shares_for([each.middle for each in times])
        before, after = self._dealt(view), self._dealt(msgspec.structs.replace(view, shares=proposed))
        self._windows += 1
        self._judged += 1
        if step_us(after, [each.high for each in times]) >= WORTH * step_us(before, [each.low for each in times]):
            return None
        for worker, each, had, gets in zip(view.members, times, before, after, strict=True):
            if gets < had:
                self._relegate(worker, each)
        return proposed

    def _dealt(self, view: View) -> list[int]:
        """Return the number of shards of a step that each member of the view has, in rank order."""
        held = view.lineage(view.members).assign(self._shards)
        return [len(held[worker]) for worker in view.members]

    def relative(self) -> dict[str, float]:
        """Return the newest measured speeds relative to the fastest worker, which has 1."""
        times = {worker: median(figures) for worker, figures in self._figures.items()}
        fastest = min(times.values(), default=0.0)
        return {worker: fastest / each for worker, each in times.items()}

    def newest(self, worker: str) -> Heartbeat:
        """Return the newest heartbeat of a worker in the view in force."""
        return self._newest.get(worker, Heartbeat())

    def _begin(self, view: View) -> None:
        """Start a new view, and drop the figures of workers that are not in it: they do not come back."""
        self._view, self._shards, self._judged = view.number, 0, 0
        self._fresh.clear()
        self._newest.clear()
        for records in (self._figures, self._relegations):
            for worker in [worker for worker in records if worker not in view.members]:
                del records[worker]

    def _window_complete(self, view: View) -> bool:
        """Return True if every member has the figures of another window, or is known to have no shards to measure."""
        wanted = (self._judged + 1) * self._window
        return bool(self._fresh) and all(
            self._fresh.get(w, 0) >= wanted or self._has_no_shards(w) for w in view.members
        )

    def _has_no_shards(self, worker: str) -> bool:
        """Return True if the worker is known to have no shards in this view."""
        beat = self.newest(worker)
        return beat.shards_total > 0 and beat.shards == 0 and worker not in self._fresh

    def _believed(self, worker: str) -> Times:
        """Return the times of a worker: not faster than at its relegation while that counts.

        A worker without shards can't be measured: its last figures count. A worker without figures, such as a joiner,
        has the median of the others.
        """
        figures = list(self._figures.get(worker, ()))[-self._fresh.get(worker, KEPT_FIGURES) :]
        times = Times.of(figures or [round(median(map(median, self._figures.values())))])
        relegation = self._relegations.get(worker)
        return times.at_least(relegation.times) if relegation and self._windows < relegation.until else times

    def _relegate(self, worker: str, times: Times) -> None:
        """Record that the worker gets fewer shards. Its patience doubles each time, up to `LONGEST`.

        Distributions may depend on the shares: a quota of half a core leaves full speed to a worker with work for half
        the time. Such a worker would get its shards back, be slow, lose them, and so on. Each oscillation takes shards
        from some worker, so it costs one window in ever longer periods.
        """
        before = self._relegations.get(worker)
        patience = min(2 * before.patience, LONGEST) if before else RELEGATION_WINDOWS
        self._relegations[worker] = Relegation(times, patience, self._windows + patience)


def shares_for(shard_us: Sequence[float]) -> tuple[int, ...]:
    """Return shares in proportion to speed, () if all speeds are equal. `shard_us` is the time for a shard, in µs."""
    fastest = min(shard_us)
    shares = tuple(max(1, round(WHOLE * fastest / each)) for each in shard_us)
    return shares if len(set(shares)) > 1 else ()


def step_us(counts: Sequence[int], shard_us: Sequence[float]) -> float:
    """Return the duration of a step in µs: that of the member with the most work."""
    return max(count * each for count, each in zip(counts, shard_us, strict=True))


def stragglers(speeds: Mapping[str, float]) -> dict[str, float]:
    """Return the slow workers of `Speeds.relative` with their speeds, the slowest first."""
    return dict(sorted((item for item in speeds.items() if item[1] < STRAGGLER_SPEED), key=lambda item: item[1]))


# --- issued views -----------------------------------------------------------------------------------------------------
#
# The views and shard assignments that this run's coordinators have issued. A report can name only these, and each rule
# can be checked from one worker's report alone. A worker that breaks one is removed at once, and its report is ignored.
# A worker alters nothing in a view that it was sent. The state that lists the view is written before it is sent, with a
# full disk into its copy in memory. Heartbeats and reports of a worker come in order, and nothing moves while it is
# stopped. What other workers report plays no part here: those who could contradict a report may have been removed by
# the decision before it, so the round of a worker's newest answer is in the journal.
# Argument: docs/protocol.md, Issued views 1-5.


class IssuedView(msgspec.Struct, frozen=True, kw_only=True):
    """A view that was sent to workers.

    For a view that was sent by Resume, `round` is the round in which it is entered and `lineage` the assignment of the
    shards of that round.
    """

    view: View
    round: int = 0
    lineage: Lineage | None = None

    def deals(self, round_: int) -> tuple[Lineage, ...]:
        """Return the assignments of the shards of `round_` that are possible in this view.

        In its first round only the workers that hold the state get shards.
        """
        if self.lineage is not None and round_ == self.round:
            return (self.lineage,)
        return tuple(self.view.lineage(workers) for workers in (self.view.members, self.view.synced))


def drop_other_views(state: CoordinatorState, named: Iterable[View | None]) -> None:
    """Drop the issued views that are not in `named`: no worker can be in them any more.

    A worker whose connection broke before it heard `Resume` stays where it was, perhaps for several decisions. So a
    view is kept as long as a report that a decision used has named it; everything older is dropped only once all have
    switched to one view. A worker without state may have been sent out of a view without hearing so; nothing follows
    from the view that it names.
    """
    views = list(named)
    state.issued = [issued for issued in state.issued if issued.view in views]


def issued_views(state: CoordinatorState) -> list[View]:
    """Return the views that a worker may be in, or may be about to enter."""
    return [issued.view for issued in state.issued]


def issued_denial(state: CoordinatorState, worker: str, report: Stopped) -> str:
    """Return the reason why no honest worker can have sent this report, "" if one can have."""
    view = report.view
    if not report.synced:
        return ""
    if view is None:
        return "it reports that it holds the state and is in no view"
    issued_view = next((issued for issued in state.issued if issued.view == view), None)
    if issued_view is None:
        return f"it reports view {view.number} with {len(view.members)} members, which was never issued"
    beat = state.workers[worker].heartbeat
    earliest = max(issued_view.round, beat.round if beat.view == view.number else 0)
    if report.round < earliest:
        return f"it reports round {report.round} of view {view.number}, but it was already in round {earliest}"
    stopped_in, stopped_at = state.workers[worker].last_answer
    if view.number == stopped_in and report.round != stopped_at:
        return f"it reports round {report.round} of view {view.number}, and has answered a stop in round {stopped_at}"
    if report.lineage not in issued_view.deals(report.round):
        return f"it reports a shard assignment of round {report.round} in view {view.number} that was never issued"
    return ""


# --- state ------------------------------------------------------------------------------------------------------------
#
# The coordinator's state: which workers there are, what is outstanding, and the few methods that change it. The other
# modules of this package are functions over the state; coordinator.py holds it and passes it to them. Every change
# leaves through `actions`, in order.

EXIT_EVICTED = 3  # the exit code of an evicted worker
EXIT_DATA_UNAVAILABLE = 6  # the exit code of a worker whose host could not get the data
EXIT_BANNED = 5  # the exit code of an evicted worker that must not rejoin; external workers rejoin after code 3
KEPT_WORKERS = 1000  # removed workers that are remembered
BENEFITS, BENEFIT_S = 3, 600.0  # how many may be used at once, and seconds until one more may be
RETURNS, RETURN_S = 60, 1.0  # how many may be used at once, and seconds until one more may be


class CoordinatorState:
    """All state of the coordinator, and the methods that change it.

    Invariant: nothing is proposed while a view is stopped or the last checkpoint is saved. A stop keeps what was
    proposed before until its decision, since workers may have switched to it.
    """

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings

        # --- pools and targets ---
        # The target number of workers of each pool with a fixed target, by pool mark (see `scaling.pool_mark`).
        self.fixed_targets = {} if settings.pools else {"": settings.wanted or 0}
        # The target of all other pools together. None: as many as they can have.
        self.shared_target = settings.wanted
        # The number of workers that a pool reports that it can have, by pool mark.
        self.pool_capacity: dict[str, int] = {}
        # The marks of the pools whose hosts are starting.
        self.gathering_pools: frozenset[str] = frozenset()
        # The targets that were last computed for each pool, by pool mark. See `scaling.shrink`.
        self.targets: dict[str, int] = {}
        # The names of the pools, in the order in which they came; the run's own or preferred pool is the first.
        self.pools = [pool.name for pool in settings.pools] or ([settings.pool.pool] if settings.pool else [])
        # Workers in a row that died before they were members, by pool mark.
        self.startup_failures: dict[str, int] = {}
        # The newest number in an ID that the coordinator has given, such as guest-3. Only grows.
        self.external_workers = 0

        # --- workers ---
        # The present workers by ID, in the order in which they came.
        self.workers: dict[str, Worker] = {}
        # Workers that a decision removed, the newest `KEPT_WORKERS`. Disjoint from `workers`.
        self.departed: dict[str, Departed] = {}
        # Workers that broke the protocol or must stay out for another reason, the newest `KEPT_WORKERS`.
        self.banned: dict[str, None] = {}
        # Workers that certainly make no more progress, with the end that their pool reported, the newest
        # `KEPT_WORKERS` in order: their process has ended, or their lease is over.
        self.dead: dict[str, str] = {}
        # Workers that have not connected yet and must leave at once, since their host is preempted, with the reason;
        # the newest `KEPT_WORKERS`.
        self.preempted: dict[str, str] = {}
        # Hosts whose workers were found to compute wrong results.
        self.wrong_hosts: set[str] = set()
        # How often each worker may still win a dispute by its standing alone, and reconnect. See `disputes.py`.
        self.benefits, self.returns = RateLimit(BENEFITS, BENEFIT_S), RateLimit(RETURNS, RETURN_S)
        # Decides from heartbeats when a silence is too long.
        self.failure_detector = FailureDetector(settings.heartbeat_s, settings.heartbeat_timeout_s)

        # --- admission ---
        # What the first admitted worker brought, and joiners are compared with; None until there is one.
        self.signature: m.Signature | None = None
        # External workers that were ready before the first worker of the run's own pool, which they are compared with.
        self.early_external: dict[str, m.Ready] = {}
        # The step and value of the newest recorded change of each torch setting.
        self.altered: dict[str, tuple[int, str]] = {}
        # The number of recorded changes of settings. At most `admission.MOST_TOLD`.
        self.alterations = 0
        # Operators that are not known to be portable, and that an event has named.
        self.unknown_operators: set[str] = set()
        # The step after which results are not reproducible, -1 for the beginning; None: all results are.
        self.unpromised: int | None = None

        # --- views ---
        # The number of the newest view that was created. Only grows, also across coordinators.
        self.number = 0
        # The newest view that is in force for any worker. None: no worker holds the state.
        self.view: View | None = None
        # The view before `view`, while some of its members may not have switched yet.
        self.previous: View | None = None
        # A view that was proposed, until it is in force for all participants.
        self.proposed: View | None = None
        # When `proposed` was sent.
        self.proposed_at = 0.0
        # The reason for the newest proposed view.
        self.cause = ""
        # The views that a worker may be in or may enter, as they were sent. See `IssuedView`.
        self.issued: list[IssuedView] = []
        # The step with which `view` began.
        self.view_began = 0
        # The number of the newest view in which a step is known to have ended.
        self.view_with_step = 0
        # The first round of `view`, in which its members switch to it; -1 until enough workers report the same one.
        self.switch_round = -1
        # The round that each worker reports for `switch_round`.
        self.switches: dict[str, int] = {}
        # For a worker that reported its switch: the workers that reported a later round of the view before it.
        self.ahead: dict[str, set[str]] = {}
        # Once `proposed` is in force for a worker: the participants that have not reported yet that they switched.
        self.unswitched: set[str] = set()
        # The joiners of `view` that do not hold the state yet.
        self.unsynced: set[str] = set()
        # The next proposal of new connections among the same members is not sent before this time.
        self.regroup_at = 0.0
        # The newest proposals in a row that were given up because of an unauthenticated connection.
        self.unauthenticated_tries = 0
        # No view that needs new connections is proposed before this time.
        self.meet_at = 0.0
        # The measured speeds of the workers.
        self.speeds = Speeds()

        # --- stops ---
        # The stop of the view in progress. `ending` is the end of the run.
        self.stopping: Stopping | None = None
        # The number of the newest stop. Only grows.
        self.stops = 0

        # --- progress ---
        # The furthest step that is known to have begun since the state was last lost, -1 for none.
        self.reached = -1
        # The furthest step that each worker has reported.
        self.steps: dict[str, int] = {}
        # When a round, a step or a shard last moved.
        self.progress = LastProgress()
        # For each of the newest rounds: the first worker that reported that it began the round, and its call.
        self.first_calls: dict[int, tuple[str, Call]] = {}
        # A script of this coordinator's workers has ended (`Worker.finish`).
        self.any_finish = False
        # The newest step with a recorded loss that is not finite, -1 for none.
        self.not_finite = -1
        # With `--bits any`: the newest step that was recorded to begin with replicas that differ, -1 for none.
        self.drifted_step = -1

        # --- failures ---
        # The losses in a row. See `CrashLoop`.
        self.crash_loop = CrashLoop()
        # The last counted loss, and the last counted loss of a joiner.
        self.strike = self.joiner_strike = Strike()
        # How many workers in a row could not get the data before there was a view.
        self.data_failures = 0
        # Reports of single workers about facts that the others must see too. See `disputes.corroborate`.
        self.corroborations: dict[str, Corroboration] = {}

        # --- checkpoints ---
        # The newest checkpoint that is known to be in the run's store.
        self.newest = settings.newest
        # `saver` is the worker that writes checkpoints while the run trains, "" if no worker can. `first_founder` is
        # the worker whose state the first view began with.
        self.saver = self.first_founder = ""
        # The workers that failed to write a checkpoint, with the number of the newest failed try of each.
        self.failed: dict[str, int] = {}
        # The number of the newest try, and that of the newest success. Invariant: succeeded <= tries.
        self.tries = self.succeeded = 0

        # --- the end of the run ---
        # Set once the run is to end.
        self.ending: Ending | None = None
        # When the end of the run was requested.
        self.ending_at = 0.0
        # The workers that may write the last checkpoint, the best first. If not empty, no worker trains any more.
        self.savers: list[str] = []
        # Former savers that only have a state between two steps.
        self.between: list[str] = []
        # When workers that have not finished are no longer waited for, while others hold the final state; else None.
        self.deadline: float | None = None
        # The workers whose replica digests were requested, and the digests that have arrived.
        self.digests_wanted: set[str] = set()
        self.digests: dict[str, m.Digests] = {}
        # Set once, at the very end. Nothing is decided afterwards.
        self.over: Ending | None = None

        # --- metrics and accounting ---
        # The newest line of metrics that was written, as (step, index).
        self.last_line: tuple[int, int] = (-1, 0)
        # The newest step whose line was written, -1 for none.
        self.last_step_line = -1
        # The lines that are not written yet, by sender. See `metric_lines.py`.
        self.unwritten_lines: dict[str, deque[m.Line]] = {}
        # What workers have passed to `run.log`.
        self.logged_values = LoggedValues()
        # `clock`: when the coordinator last ticked. `times_due`: when the reported times are next written.
        self.clock = self.times_due = 0.0
        # The times that workers have reported, by ID. See `accounting.py`.
        self.reported_times: dict[str, ReportedTime] = {}
        # The recent use of the links between hosts, from which their rates follow. It is not kept in the journal.
        self.links = LinkHistory()
        # The newest trace that was requested, with its answers.
        self.tracing: Tracing | None = None

        # --- output ---
        # The actions since the last `drain()`, in order.
        self.actions: list[Action] = []
        # The types of events that are recorded once and are already recorded.
        self.reported_once: set[type[events.Event]] = set()
        # The number of events that the journal could not take.
        self.unrecorded = 0

    # --- reading ---------------------------------------------------------------------------------------------

    @property
    def wanted(self) -> int:
        """The target number of workers of all pools together."""
        if not self.settings.pools:
            return sum(self.fixed_targets.values())
        return protocol_settings.wanted(self.shared_target, self.targets, self.fixed_targets)

    def views(self) -> list[View]:
        """Return the views that workers may be in, the oldest first."""
        return [view for view in (self.previous, self.view, self.proposed) if view]

    def participants(self) -> list[str]:
        """Return the live workers in the view in force, the proposed view or the previous view."""
        return [w for w in dict.fromkeys(w for view in self.views() for w in view.members) if w in self.workers]

    def is_waited_for(self, worker: str) -> bool:
        """Return True if others may have to wait for the worker: it is in a view, must answer a stop, or must save."""
        stopping = self.stopping
        in_stop = stopping is not None and (worker in stopping.unanswered or worker in stopping.reports)
        return in_stop or worker in self.savers or any(worker in view.members for view in self.views())

    def has_met(self, worker: str) -> bool:
        """Return True if a worker of that ID is known now, or was before."""
        return worker in self.workers or worker in self.departed

    def has_trained(self, worker: str) -> bool:
        """Return True if the worker trains, or has trained: it is a member with the state, or has finished."""
        return self.workers[worker].state in ("member", "finished") and worker not in self.unsynced

    def affects_only_itself(self, worker: Worker) -> bool:
        """Return True if its script's end affects only itself: it is no member, and the run does not wait for it."""
        return not self.has_trained(worker.id) and (self.view is not None or not worker.pool)

    def everyone_finished(self) -> bool:
        """Return True if the scripts of all members have ended, and there is at least one member."""
        members = self.members()
        return bool(members) and all(self.workers[w].state == "finished" for w in members)

    def members(self) -> list[str]:
        """Return the present members of the view in force, in rank order."""
        return [w for w in (self.view.members if self.view else ()) if w in self.workers]

    def hosts_of(self, workers: Iterable[str]) -> tuple[str, ...]:
        """Return the hosts of these workers, as their first Hello reported them."""
        return tuple(self.workers[w].host for w in workers)

    def zones_of(self, workers: Iterable[str]) -> tuple[str, ...]:
        """Return the zones of these workers, as their first Hello reported them; empty if there is only one zone."""
        zones = tuple(self.workers[w].zone for w in workers)
        return zones if len(set(zones)) > 1 else ()

    # --- writing ---------------------------------------------------------------------------------------------

    def next_number(self) -> int:
        """Return a new view number. No number is used twice in a run."""
        self.number += 1
        return self.number

    def send(self, worker: str, message: m.Message) -> None:
        """Queue a message to `worker`."""
        self.actions.append(Send(worker, message))

    def record(self, event: events.Event) -> None:
        """Queue an event for the journal, metrics.jsonl and the observers."""
        self.actions.append(Record(event))

    def remove(self, worker: str, cause: Removal, reason: str, code: int = 0) -> None:
        """Take `worker` out of the state, and record the event.

        A worker that left gets `Goodbye` and exits with `code`. An evicted worker gets `Goodbye` with its eviction
        code, and its connection is closed. A dead worker gets no message. The caller handles what follows for the view.
        """
        started = self.has_trained(worker)
        removed = self.workers.pop(worker)
        if cause is Removal.LEFT:
            self.record(events.LeftEvent(worker=worker, host=removed.host, reason=reason))
            self.dismiss(removed, reason, code, started=started)
            return
        self.record(events.LostEvent(worker=worker, host=removed.host, reason=reason))
        if cause is Removal.EVICTED:
            self.dismiss(removed, f"evicted: {reason}", self.eviction_code(worker), started=started)
            self.actions.append(Close(worker))

    def close_evicted(self, worker: str, reason: str) -> None:
        """Send an evicted worker its Goodbye, and close its connection."""
        self.send(worker, m.Goodbye(reason=f"evicted: {reason}", code=self.eviction_code(worker)))
        self.actions.append(Close(worker))

    def differ(self, difference: Difference) -> None:
        """Fail the run because two scripts call different things; a run that is ending keeps its reason and code."""
        if self.ending is None or not self.ending.failed:
            self.record(events.CallsDifferEvent(workers=difference.workers, reason=difference.reason))
        self.ending = self.ending or Ending(code=1, reason=difference.reason, failed=True)
        self.ending.failed = True

    def dismiss(self, removed: Worker, reason: str, code: int, *, started: bool, refused: bool = False) -> None:
        """Send a removed worker its Goodbye with `code`, and remember it: if it returns, the Goodbye is sent again."""
        pushed_out = removed.connected or (self.stopping is not None and removed.id in self.stopping.expelled)
        for rate_limit in (self.benefits, self.returns):
            rate_limit.forget(removed.id)
        self.departed[removed.id] = Departed(
            session=removed.session,
            reason=reason,
            code=code,
            started=started,
            refused=refused,
            pool=removed.pool,
            entered=-1 if pushed_out else removed.entered,
        )
        _trim(self.departed)
        self.send(removed.id, m.Goodbye(reason=reason, code=code))

    def ban(self, worker: str) -> None:
        """Mark `worker` so that it must not rejoin once it is evicted."""
        self.banned[worker] = None
        _trim(self.banned)

    def eviction_code(self, worker: str) -> int:
        """Return the exit code of `worker` for an eviction."""
        return EXIT_BANNED if worker in self.banned else EXIT_EVICTED

    def leave_on_arrival(self, worker: str, reason: str) -> None:
        """Make `worker` leave as soon as it connects, since its host is about to be preempted."""
        self.preempted[worker] = reason
        _trim(self.preempted)

    def mark_dead(self, worker: str, reason: str = "") -> None:
        """Record that `worker` certainly makes no more progress."""
        self.dead[worker] = reason
        _trim(self.dead)


def _trim(records: dict[str, Any]) -> None:
    """Keep the newest `KEPT_WORKERS` entries."""
    for oldest in list(records)[:-KEPT_WORKERS]:
        del records[oldest]
