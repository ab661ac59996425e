"""What the coordinator holds and hands out: settings, actions, and its records of workers, stops and endings."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import msgspec

from farandole.protocol import events
from farandole.protocol import messages as m
from farandole.protocol import settings as preference
from farandole.protocol.cost import Prices
from farandole.protocol.difference import Difference, Finish
from farandole.protocol.events import Event
from farandole.protocol.failure_detector import FailureDetector, Progress, RateLimit, Silence
from farandole.protocol.messages import Heartbeat, Job, RunTerms, Stopped
from farandole.protocol.settings import Exports, PoolTerms, Spending
from farandole.protocol.values import Call
from farandole.protocol.view import Lineage, View

# --- records ----------------------------------------------------------------------------------------------------------


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
    data_unavailable: str = ""  # why its host can't get it the data
    heartbeat: m.Heartbeat = field(default_factory=m.Heartbeat)

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
    workers: tuple[str, ...]
    answers: dict[str, bytes] = field(default_factory=dict[str, bytes])


@dataclass(kw_only=True)
class ReportedTime:
    """What one process has told of its time (`accounting`): `first_us` at `first_at`, `said` at `heard_at`, on the
    coordinator's clock. `written`: how much of it is in a line.
    """

    session: str
    host: str
    pool: str
    first_us: int
    first_at: float
    reported: tuple[int, ...]
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


Shared = m.Differs | m.ShardsDiffer | m.NotFinite


@dataclass
class Corroboration:
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
    present: frozenset[str] = frozenset()


class CrashLoop(msgspec.Struct, frozen=True, kw_only=True):
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


# --- speeds -----------------------------------------------------------------------------------------------------------
#
# How fast the workers are, and whether other shares of a step's shards would make its steps shorter.
#
# The argument for how work is dealt by speed:
#
# 1. Who computes a shard changes no bit, so it may be decided by what was measured, and late, and wrongly: the price
#    of a wrong decision is time, never a result.
# 2. How work is dealt is a fact of the view, `View.shares`. To change it the coordinator proposes a view with the
#    same members and other shares; it uses the connections that stand, and takes effect like a join (R2), at the same
#    step for everyone. So a step asks nobody, and a worker that dies meanwhile is recovered as ever.
# 3. Measured is the wall time of a worker's own passes over its shards, without its waiting for data or peers: a
#    worker that gets half a core shows twice the time. One shard says little: a host that is held to half its time
#    computes for 50 ms and stands still for 50 more. So a figure is the mean over all shards between two heartbeats.
# 4. A *window* is `WINDOW` figures of each member under one view. At the end of each, the medians of the view's
#    figures so far, the newest `KEPT` of them, give the shares to try. They are proposed if a step would take less
#    than `WORTH` of its time even where each worker's median is three standard errors slower than it looks for the
#    new shares, and three faster for those in force. So what is plain is done at once, what is noisy later, and noise
#    can't make the shares go to and fro: while the figures' distributions stay what they are, each change lowers the
#    time that the true medians predict by more than a tenth, so no shares come twice.
# 5. But the distributions may depend on the shares: a quota of half a core leaves a worker its full speed as long as it
#    has work for half the time only. It would get its shards back, be slow, lose them, and so on. So whoever gets fewer
#    is not believed to be faster than it was then before its *patience* is over, which doubles each time up to an hour.
#    Any going to and fro takes shards from somebody each time round: it costs one window in ever more.
# 6. Who has no shards, as there are fewer than workers, can't be measured: its last figures count, and before it has
#    had any, the others' median, which is also a joiner's share until it has been measured.

WINDOW = 16  # figures: 8 s of ordinary heartbeats, longer where a shard takes longer than they are apart
KEPT_FIGURES = 4 * WINDOW
WORTH = 0.9
PATIENCE, LONGEST = 8, 512  # windows: at first one minute, at last an hour
WHOLE = 1000  # the fastest's share
SLOW = 0.8  # of the fastest's speed; below it a worker is a straggler


@dataclass(frozen=True, kw_only=True)
class Times:
    """What a shard takes a worker, in µs: the median, and three standard errors to either side of it.

    Whatever the distribution, of n figures n/2 are below its median, give or take sqrt(n)/2: so those that stand 1.5
    sqrt(n) before and behind the middle one enclose it.
    """

    low: float
    middle: float
    high: float

    @staticmethod
    def of(figures: Sequence[int]) -> Times:
        ordered = sorted(figures)
        first = max(0, math.floor(len(ordered) / 2 - 1.5 * math.sqrt(len(ordered))))
        return Times(low=ordered[first], middle=median(ordered), high=ordered[-1 - first])

    def at_least(self, other: Times) -> Times:
        return Times(
            low=max(self.low, other.low), middle=max(self.middle, other.middle), high=max(self.high, other.high)
        )


@dataclass(frozen=True)
class Relegation:
    """A worker got fewer shards, because of `times`, which hold at least until window `until`."""

    times: Times
    patience: int
    until: int


class Speeds:
    """What the heartbeats tell, and the next shares to propose. Lives as long as the coordinator, holds no clock."""

    def __init__(self, window: int = WINDOW) -> None:
        self._window = window
        self._view = 0
        self._windows = 0
        self._judged = 0  # windows of this view
        self._shards = 0  # in a step, the most in this view
        self._figures: dict[str, deque[int]] = {}
        self._fresh: dict[str, int] = {}  # how many were heard in this view
        self._newest: dict[str, Heartbeat] = {}
        self._relegations: dict[str, Relegation] = {}

    def heard(self, worker: str, beat: Heartbeat, view: View | None) -> None:
        """A heartbeat, if it is of somebody in `view`, the one in force."""
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
        """At the end of a window: the shares to propose for `view`, if that is worth it. Asked again, None."""
        if view.number != self._view or view.size < 2 or not self._settled(view):
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
        """How many of a step's shards each member of the view has, in rank order."""
        held = view.lineage(view.members).assign(self._shards)
        return [len(held[worker]) for worker in view.members]

    def relative(self) -> dict[str, float]:
        """Speeds as measured last, of the fastest's: 1 for that one."""
        times = {worker: median(figures) for worker, figures in self._figures.items()}
        fastest = min(times.values(), default=0.0)
        return {worker: fastest / each for worker, each in times.items()}

    def newest(self, worker: str) -> Heartbeat:
        """A worker's newest heartbeat in the view in force."""
        return self._newest.get(worker, Heartbeat())

    def _begin(self, view: View) -> None:
        """Whoever is not in the view any more does not come back."""
        self._view, self._shards, self._judged = view.number, 0, 0
        self._fresh.clear()
        self._newest.clear()
        for kept in (self._figures, self._relegations):
            for worker in [worker for worker in kept if worker not in view.members]:
                del kept[worker]

    def _settled(self, view: View) -> bool:
        """Everyone has another window's figures, or is known to have no shards to measure."""
        wanted = (self._judged + 1) * self._window
        return bool(self._fresh) and all(self._fresh.get(w, 0) >= wanted or self._is_idle(w) for w in view.members)

    def _is_idle(self, worker: str) -> bool:
        beat = self.newest(worker)
        return beat.shards_total > 0 and beat.shards == 0 and worker not in self._fresh

    def _believed(self, worker: str) -> Times:
        figures = list(self._figures.get(worker, ()))[-self._fresh.get(worker, KEPT_FIGURES) :]
        times = Times.of(figures or [round(median(map(median, self._figures.values())))])
        relegation = self._relegations.get(worker)
        return times.at_least(relegation.times) if relegation and self._windows < relegation.until else times

    def _relegate(self, worker: str, times: Times) -> None:
        before = self._relegations.get(worker)
        patience = min(2 * before.patience, LONGEST) if before else PATIENCE
        self._relegations[worker] = Relegation(times, patience, self._windows + patience)


def shares_for(shard_us: Sequence[float]) -> tuple[int, ...]:
    """Shares in proportion to speed, none where they are equal."""
    fastest = min(shard_us)
    shares = tuple(max(1, round(WHOLE * fastest / each)) for each in shard_us)
    return shares if len(set(shares)) > 1 else ()


def step_us(counts: Sequence[int], shard_us: Sequence[float]) -> float:
    """How long a step takes: as long as whoever has most to do."""
    return max(count * each for count, each in zip(counts, shard_us, strict=True))


def stragglers(speeds: Mapping[str, float]) -> dict[str, float]:
    """Those of `Speeds.relative` that are slow, the slowest first."""
    return dict(sorted((item for item in speeds.items() if item[1] < SLOW), key=lambda item: item[1]))


# --- issued -----------------------------------------------------------------------------------------------------------
#
# What this run's coordinators have issued, and that a report can only be of it.
#
# A report steers the recovery: it names the view to go on from, the round, and how its shards are dealt. So what it
# names must be known here. Who knows what when:
#
# 1. A worker is in a view that a coordinator has told it, whole, by `Propose` or `Resume`, and alters nothing of it.
#    Both go out after the state that have the view in `issued` are kept (`reconnection`, 6 and 7), on a full disk in
#    their copy in memory. So whatever an honest worker names is in `issued` of this coordinator and of each that
#    follows.
# 2. Which ones may be named? All that are outstanding, and older ones too: a worker whose connection broke before it
#    heard Resume stands where it stood, be it for several decisions. So a view is kept for as long as a report that a
#    decision was made of has named it, and everything older is dropped only once all have switched to one view. Who
#    holds no state may be in any: it was sent out of a view once that others have left since, and has not heard it.
#    Nothing follows from it.
# 3. How a round's shards are dealt is a function of the view and the round: by the view; or as Resume has said, in the
#    round that it has said it for. A view that came by Resume is entered in that round and no earlier one.
# 4. In one view its round never goes back, so its own newest heartbeat is a bound; heartbeats and reports of a worker
#    come in order, and while it is stopped nothing moves.
#
# An honest worker never breaks one of these, however late its messages are, and each can be told from one worker's own
# words. So whoever breaks one is put out, without anybody else being asked; its report is not looked at any further.
# Nobody is believed or blamed here for what others say: that is for `plausible`.


class IssuedView(msgspec.Struct, frozen=True, kw_only=True):
    """A view; and of one that came by Resume the round in which it is entered, with how that one's shards are dealt."""

    view: View
    round: int = 0
    lineage: Lineage | None = None

    def deals(self, round_: int) -> tuple[Lineage, ...]:
        """How the shards of `round_` may be dealt under this view; its first round's go to those who hold the state."""
        if self.lineage is not None and round_ == self.round:
            return (self.lineage,)
        return tuple(self.view.lineage(workers) for workers in (self.view.members, self.view.synced))


def keep_issued(state: CoordinatorState, named: Iterable[View | None]) -> None:
    """Of what was issued, `named` is where workers still are, or may be."""
    views = list(named)
    state.issued = [issued for issued in state.issued if issued.view in views]


def issued_views(state: CoordinatorState) -> list[View]:
    """All that somebody may be in, or be about to enter."""
    return [issued.view for issued in state.issued]


def issued_denial(state: CoordinatorState, worker: str, report: Stopped) -> str:
    """Why no honest worker can have said this, in words; "" if one can."""
    view = report.view
    if not report.synced:
        return ""
    if view is None:
        return "it says that it holds the state, and is in no view"
    known = next((issued for issued in state.issued if issued.view == view), None)
    if known is None:
        return f"it says that it is in view {view.number} of {len(view.members)}, which was never issued"
    beat = state.workers[worker].heartbeat
    earliest = max(known.round, beat.round if beat.view == view.number else 0)
    if report.round < earliest:
        return f"it says that it is in round {report.round} of view {view.number}, and it was in round {earliest}"
    if report.lineage not in known.deals(report.round):
        return f"it says that the shards of round {report.round} in view {view.number} are dealt as nobody dealt them"
    return ""


# --- state ------------------------------------------------------------------------------------------------------------
#
# The coordinator's state: who there is, what is outstanding, and the few ways to write in them.
#
# `planned`, `unplanned` and `ending` are functions over the state; `coordinator` holds them and feeds them. Every
# change leaves through `actions`, in order.

EXIT_EVICTED = 3  # the exit code of workers that were
EXIT_DATA_UNAVAILABLE = 6  # ... of those whose host could not get them the data
EXIT_BANNED = 5  # ... because of what they did: a guest comes back after an eviction, but not after this
KEPT_WORKERS = 1000
BENEFITS, BENEFIT_S = 3, 600.0
RETURNS, RETURN_S = 60, 1.0


class CoordinatorState:
    """At most one of {a proposed view, a stop, a checkpoint being saved} is outstanding at any time.

    Attributes:
        early: guests that asked in before the run's first own worker, which they are to be compared with.
        view: the newest view in force for anyone.
        began: the step with which it began; `proved`: the newest view in which a step is known to have ended.
        wrong_hosts: whose workers were found to compute wrong.
        drifted: the newest step that was told to have begun with replicas that differ, where that is allowed.
        applied: the round in which it took effect, as far as that is known; `switches`: what each has said of that;
            `beyond`: who was heard to be further before it.
        claims: what one says that others should have seen too. See `testimony`.
        previous: the view before it, while some of its members may not have switched yet.
        proposed: a view on its way, until it is in force for everyone concerned.
        issued: the views that a worker may be in, or enter, with what was said of them. See `issued`.
        unswitched: who has not reported yet that it goes on in `proposed`, once anybody has.
        unsynced: joiners of `view` that do not hold the state yet.
        savers: who may still write the last checkpoint, the best first; nobody trains any more.
        between: those of them whose state is only that between two steps.
        deadline: when those who have not finished are no longer waited for, while others hold the final state.
        not_finite: the newest step that was told to have a loss that is not finite.
        unpromised: the step after which no bits are promised, -1 for the beginning; None: they are.
        altered: the step and value of the newest change of each setting that was told; `alterations`: how many were.
        asked, digests: of whom the replica's digests are wanted, and those that have come.
        departed: who was let go by a decision, the newest `KEPT`.
        begun: of the newest rounds, the first who was heard to have begun it, and what it has called.
        finish: the first who was heard to have ended its script.
        barred: who broke the protocol, or is to stay out for another reason, the newest `KEPT`.
        noticed: of workers that have not come yet, why they are to leave at once: their host goes; the newest `KEPT`.
        gone: who makes no progress any more, for certain: its process has ended, or its lease.
        newest: the newest checkpoint that is known to be in the run's store.
        founder: with whose state the first view has begun.
        saver: who writes checkpoints while the run trains; "" where nobody can. See `saving`.
        failed: who could not, and in which try, by number; `tries` and `succeeded` number them too.
        ending_at: when its stop was asked for.
        over: set once, at the very end.
        unfed: how many in a row could not be fed before there was a view.
        unrecorded: how many events the journal could not take.
        wants: how many workers the run wants of a pool, by its mark (see `names`), where that is fixed.
        shared: how many of the other pools together, None: all that they can have. `can`: what they have said of that;
            `gather`: whose hosts are on their way; `targets`: what they were last asked for. See `preference`.
        benefits, returns: what each worker may still have of them. See `suspicion`, 4 and 6.
        reached: the furthest step that is known to have begun since the state was last lost; `steps` that each was in.
        clock: when the coordinator last ticked.
        told_times: what workers have told of theirs, by id; at `times_due` it is written down. See `accounting`.
        tracing: the newest trace that was asked for, and what has come of it.
        last_line: the newest line of metrics that went to the file, as (step, index).
        recorded: the newest step whose line went there, -1: none.
        waiting: those that are still to go there, by who sent them. See `metric_lines`.
    """

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        self.fixed_targets = {} if settings.pools else {"": settings.wanted or 0}
        self.shared_target = settings.wanted
        self.pool_capacity: dict[str, int] = {}
        self.gathering_pools: frozenset[str] = frozenset()
        self.targets: dict[str, int] = {}
        self.workers: dict[str, Worker] = {}
        self.departed: dict[str, Departed] = {}
        self.banned: dict[str, None] = {}
        self.dead: dict[str, str] = {}  # in order; what its pool has said of its end
        self.preempted: dict[str, str] = {}
        self.external_workers = 0
        self.pools = [pool.name for pool in settings.pools] or (
            [settings.pool.pool] if settings.pool else []
        )  # in the order in which they came
        self.signature: m.Signature | None = None
        self.early_external: dict[str, m.Ready] = {}
        self.altered: dict[str, tuple[int, str]] = {}
        self.alterations = 0
        self.view: View | None = None
        self.view_began = 0
        self.proven_view = 0
        self.wrong_hosts: set[str] = set()
        self.drifted_step = -1
        self.applied_round = -1
        self.switches: dict[str, int] = {}
        self.ahead: dict[str, set[str]] = {}
        self.previous: View | None = None
        self.proposed: View | None = None
        self.issued: list[IssuedView] = []
        self.proposed_at = 0.0
        self.cause = ""
        self.regroup_at = 0.0  # not earlier
        self.unauthenticated_tries = 0  # of the newest proposals in a row, those that were given up for one
        self.meet_at = 0.0  # no new connections earlier
        self.unswitched: set[str] = set()
        self.unsynced: set[str] = set()
        self.stopping: Stopping | None = None
        self.stops = 0
        self.ending: Ending | None = None
        self.ending_at = 0.0
        self.savers: list[str] = []
        self.between: list[str] = []
        self.deadline: float | None = None
        self.not_finite = -1
        self.unpromised: int | None = None
        self.corroborations: dict[str, Corroboration] = {}
        self.digests_wanted: set[str] = set()
        self.digests: dict[str, m.Digests] = {}
        self.over: Ending | None = None
        self.newest = settings.newest
        self.saver = self.founder = ""
        self.failed: dict[str, int] = {}
        self.tries = self.succeeded = 0
        self.reported_once: set[type[events.Event]] = set()  # events that are said once
        self.unknown_operators: set[str] = set()  # that were told of
        self.startup_failures: dict[str, int] = {}  # in a row, by the mark of their pool
        self.data_failures = 0
        self.first_calls: dict[int, tuple[str, Call]] = {}
        self.first_finish: Finish | None = None
        self.crash_loop = CrashLoop()
        self.strike = self.joiner_strike = Strike()  # the last that counted
        self.unrecorded = 0
        self.benefits, self.returns = RateLimit(BENEFITS, BENEFIT_S), RateLimit(RETURNS, RETURN_S)
        self.reached = -1
        self.steps: dict[str, int] = {}
        self.clock = self.times_due = 0.0
        self.reported_times: dict[str, ReportedTime] = {}
        self.tracing: Tracing | None = None
        self.last_line: tuple[int, int] = (-1, 0)
        self.last_step_line = -1
        self.waiting: dict[str, deque[m.Line]] = {}
        self.actions: list[Action] = []
        self.number = 0
        self.speeds = Speeds()
        self.progress = Progress()
        self.failure_detector = FailureDetector(settings.heartbeat_s, settings.heartbeat_timeout_s)

    # --- reading ---------------------------------------------------------------------------------------------

    @property
    def wanted(self) -> int:
        """How many workers the run wants of all pools."""
        if not self.settings.pools:
            return sum(self.fixed_targets.values())
        return preference.wanted(self.shared_target, self.targets, self.fixed_targets)

    def views(self) -> list[View]:
        """The views that workers may be in, the oldest first."""
        return [view for view in (self.previous, self.view, self.proposed) if view]

    def participants(self) -> list[str]:
        """Everyone alive who is in the view, in the proposed one, or still in the one before."""
        return [w for w in dict.fromkeys(w for view in self.views() for w in view.members) if w in self.workers]

    def has_part(self, worker: str) -> bool:
        """Whether the others may have to wait for it: it is in a view, is to answer a stop, or to save."""
        stopping = self.stopping
        asked = stopping is not None and (worker in stopping.waiting or worker in stopping.reports)
        return asked or worker in self.savers or any(worker in view.members for view in self.views())

    def has_met(self, worker: str) -> bool:
        """Whether a process of that id is there, or was."""
        return worker in self.workers or worker in self.departed

    def let_in(self, worker: str) -> bool:
        """Whether the worker has, or has had, a part in the training."""
        return self.workers[worker].state in ("member", "finished") and worker not in self.unsynced

    def stands_alone(self, worker: Worker) -> bool:
        """Whether what its script does is its own affair: it was not let in, and the run does not wait for it."""
        return not self.let_in(worker.id) and (self.view is not None or not worker.pool)

    def everyone_finished(self) -> bool:
        members = self.members()
        return bool(members) and all(self.workers[w].state == "finished" for w in members)

    def members(self) -> list[str]:
        """Of the view in force, those who are there, in rank order."""
        return [w for w in (self.view.members if self.view else ()) if w in self.workers]

    def hosts_of(self, workers: Iterable[str]) -> tuple[str, ...]:
        """Where those who are there run, as they said when they first came."""
        return tuple(self.workers[w].host for w in workers)

    # --- writing ---------------------------------------------------------------------------------------------

    def next_number(self) -> int:
        self.number += 1
        return self.number

    def send(self, worker: str, message: m.Message) -> None:
        self.actions.append(Send(worker, message))

    def record(self, event: events.Event) -> None:
        self.actions.append(Record(event))

    def dismiss(self, worker: str, reason: str, code: int = 0) -> None:
        """The worker's part is done: it exits by itself."""
        started = self.let_in(worker)
        gone = self.workers.pop(worker)
        self.record(events.LeftEvent(worker=worker, host=gone.host, reason=reason))
        self.record_departure(gone, reason, code, started=started)

    def evict(self, worker: str, reason: str) -> None:
        """Take out a worker that may still be alive: its connection is closed, its pool is told to kill it."""
        started = self.let_in(worker)
        gone = self.workers.pop(worker)
        self.record(events.LostEvent(worker=worker, host=gone.host, reason=reason))
        self.record_departure(gone, f"evicted: {reason}", self.eviction_code(worker), started=started)
        self.actions.append(Close(worker))

    def close_evicted(self, worker: str, reason: str) -> None:
        """Tell it to go, and close its connection."""
        self.send(worker, m.Goodbye(reason=f"evicted: {reason}", code=self.eviction_code(worker)))
        self.actions.append(Close(worker))

    def differ(self, difference: Difference) -> None:
        """Two scripts go different ways, which ends the run; one on its way out keeps its own reason and code."""
        if self.ending is None or not self.ending.failed:
            self.record(events.CallsDifferEvent(workers=difference.workers, reason=difference.reason))
        self.ending = self.ending or Ending(code=1, reason=difference.reason, failed=True)
        self.ending.failed = True

    def record_departure(self, gone: Worker, reason: str, code: int, *, started: bool, refused: bool = False) -> None:
        """It exits with `code`; it is told again should it come back without having heard it."""
        put_out = gone.connected or (self.stopping is not None and gone.id in self.stopping.expelled)
        for rate_limit in (self.benefits, self.returns):
            rate_limit.forget(gone.id)
        self.departed[gone.id] = Departed(
            session=gone.session,
            reason=reason,
            code=code,
            started=started,
            refused=refused,
            pool=gone.pool,
            entered=-1 if put_out else gone.entered,
        )
        _trim(self.departed)
        self.send(gone.id, m.Goodbye(reason=reason, code=code))

    def ban(self, worker: str) -> None:
        """When it is evicted now, it must not come back."""
        self.banned[worker] = None
        _trim(self.banned)

    def eviction_code(self, worker: str) -> int:
        """The exit code of `worker`, should it be evicted."""
        return EXIT_BANNED if worker in self.banned else EXIT_EVICTED

    def leave_on_arrival(self, worker: str, reason: str) -> None:
        """When it comes now, it is to leave."""
        self.preempted[worker] = reason
        _trim(self.preempted)

    def mark_dead(self, worker: str, reason: str = "") -> None:
        """It makes no progress any more, for certain."""
        self.dead[worker] = reason
        _trim(self.dead)


def _trim(kept: dict[str, Any]) -> None:
    for oldest in list(kept)[:-KEPT_WORKERS]:
        del kept[oldest]
