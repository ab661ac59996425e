"""Every message between workers, pools, observers and the coordinator, as typed structs.

A control connection accepts only these messages. It refuses any other message, and any value beyond the bounds of its
field's type. `sendable` checks a message against the same bounds before it is sent. A connection is one ordered stream
in each direction. No code relies on an order across connections.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated

import msgspec

from farandole.errors import UsageError
from farandole.platform.bounds import real, whole
from farandole.platform.output import LONGEST_NAME, one_line
from farandole.protocol.values import MAX_COMPARED as MAX_COMPARED
from farandole.protocol.values import MAX_LINES as MAX_LINES
from farandole.protocol.values import MAX_MESSAGE_BYTES as MAX_MESSAGE_BYTES
from farandole.protocol.values import (
    MAX_NAMED,
    MAX_NAMED_BYTES,
    MOST_LINKS,
    SAID,
    Call,
    Checkpoints,
    Count,
    Digest,
    Dollars,
    ExitCode,
    LinkUse,
    Message,
    Name,
    Said,
    Seconds,
    Text,
    abridged,
    refusal,
    shortened,
)
from farandole.protocol.values import Line as Line
from farandole.protocol.values import Metrics as Metrics
from farandole.protocol.values import Newest as Newest
from farandole.protocol.values import Signature as Signature
from farandole.protocol.values import StepTime as StepTime
from farandole.protocol.view import Lineage, View
from farandole.run_options import RUN_OPTIONS, default

# --- checkpoints ------------------------------------------------------------------------------------------------------
#
# Messages about checkpoints: which worker writes them, what became of one, and from which one the run goes on.


class Saved(Message):
    """Answer to End(save=True): the checkpoint's `path`, or the `error` why there is none.

    `between`: the script failed between two steps here, so this worker's state belongs to neither. `finite`: see
    `Manifest`. `seconds`: the time that writing took.
    """

    path: Text = ""
    error: Text = ""
    between: bool = False
    finite: bool = True
    seconds: Seconds = 0.0


class Checkpointed(Message):
    """A checkpoint of the beginning of `step` was written to `path`, or failed because of `error`.

    `bytes`: its size. `seconds`: the time that writing took. `copy_ms`: how long the training thread was blocked, in
    milliseconds. `finite`: see `Manifest`. `late`: it was skipped, since the one before is still being written.
    """

    step: Count
    path: Text = ""
    error: Text = ""
    bytes: Count = 0
    seconds: Seconds = 0.0
    copy_ms: Seconds = 0.0
    finite: bool = True
    late: bool = False


class CannotStart(Message):
    """This worker can't begin the first view: it does not find the checkpoint that `Propose` named."""

    view: Count
    reason: Text


class Restored(Message):
    """The first view begins at `step` with the state of checkpoint `path`; "": with the script's initial state.

    `damaged`: newer checkpoints that were skipped, each with its reason. `differences`: what may change the bits, as
    text. `last_finite`: the newest checkpoint with a finite state, if this one is not `finite`. `done`: the script
    has no steps left, so no view begins.
    """

    step: Count
    path: Text = ""
    damaged: tuple[Text, ...] = ()
    differences: tuple[Text, ...] = ()
    finite: bool = True
    last_finite: Text = ""
    done: bool = False


class End(Message):
    """The run ends: save the state of the last complete step if `save`, answer `Saved`, wait for `Goodbye`.

    `allow_between`: no worker has that state; save the state that the script left between two steps.
    """

    save: bool
    reason: str
    allow_between: bool = False


class Saver(Message):
    """`worker` writes the checkpoints from now on. `at_once`: one immediately, since another worker could not."""

    worker: str
    at_once: bool = False


# --- comparison -------------------------------------------------------------------------------------------------------
#
# Messages about replicas that differ, and about shards for which two workers have different results. What follows from
# them: docs/protocol.md, Replicas that differ and Recomputation.

MAX_PARTS = 8  # views for which a worker reports the digests by who made the sums
# the two kinds of difference, as the reason of a refusal names them
MICRO_BATCH, UPDATES = "the micro-batch", "its updates differ"


class Differs(Message):
    """By the commit messages of a round of `step`, the replicas of `workers` differ from the others': it can't end."""

    step: Count
    workers: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_NAMED)]


class Drifts(Message):
    """Under `--bits any`: the replicas of `workers` differ from the others' at `step`, for the `times`-th time."""

    step: Count
    workers: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_NAMED)]
    times: Count


class ShardsDiffer(Message):
    """The commit messages of a round of `step` show different results of two workers for one shard: it can't end."""

    step: Count


class Computed(msgspec.Struct, frozen=True, kw_only=True):
    """The results of a worker for some shards of a round: as their `owner`, or as the worker that checks them.

    `digests`: one for each of `names`, over what the shards read, computed and left behind, in order. If there are too
    many for a message, the last one covers all the rest.
    """

    owner: Name = ""
    shards: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_NAMED)] = ()
    names: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_NAMED)] = ()
    digests: Annotated[tuple[Digest, ...], msgspec.Meta(max_length=MAX_NAMED)] = ()

    @property
    def number(self) -> int:
        """The digest of all of it for the commit message: 63 bits, 0 if there are no shards."""
        if not self.shards:
            return 0
        digest = hashlib.sha256(repr((self.owner, self.shards, self.digests)).encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1 or 1


NO_DIGESTS = Computed()


def fitting(names: Sequence[str]) -> int:
    """Return how many of `names`, from the first on, fit into a message; at least 1 unless `names` is empty."""
    size = 0
    for number, name in enumerate(names[:MAX_NAMED]):
        size += len(name.encode()) + 16  # and a digest
        if size > MAX_NAMED_BYTES:
            return max(number, 1)
    return min(len(names), MAX_NAMED)


class PartDigests(msgspec.Struct, frozen=True, kw_only=True):
    """The digests of a replica by the member that made the sums in `view`.

    Each of `members` has one of `digests`. It covers the elements of parameters, and of the optimizer's tensors of the
    same shapes, whose gradients that member sums up. `cut`: a digest of the partition into buckets.
    """

    view: Count
    cut: Digest
    members: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_NAMED)]
    digests: Annotated[tuple[Digest, ...], msgspec.Meta(max_length=MAX_NAMED)]


class Digests(Message):
    """Answer to Compare: a digest of each value and tensor of this worker's replica, by name, in order.

    `step`: the last step at whose beginning the replica was complete. `parts`: one for each view whose update may have
    caused a difference. `rest`: a digest of everything in no part, 0 if the parts are unknown.
    """

    step: Count
    names: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_NAMED)]
    digests: Annotated[tuple[Digest, ...], msgspec.Meta(max_length=MAX_NAMED)]
    parts: Annotated[tuple[PartDigests, ...], msgspec.Meta(max_length=MAX_PARTS)] = ()
    rest: Digest = 0


class Compare(Message):
    """The replicas differ and training has stopped: answer `Digests`, wait for `End` or `Goodbye`."""


# --- reports ----------------------------------------------------------------------------------------------------------
#
# Messages of a recovery: Stop, the report of every participant, and how the round goes on.


class Stop(Message):
    """Abandon the view and any proposed one; answer `Stopped`. `stop` numbers the stops."""

    stop: int


class Stopped(Message):
    """Answer to Stop: this worker has abandoned its view, and neither ends a round nor switches until `Resume`.

    Attributes:
        round: the round that it is in, or begins next.
        has_result: it holds every reduced bucket of `round`.
        view: the view of that round, complete: the coordinator may be another process than the one that proposed it.
        lineage: how the round's shards were assigned.
        synced: it holds the run's state.
        step: the training step; results of different steps are not compared.
        call: the script's call in the round, if that has begun.
        prepared: the newest view that it is ready to switch to, as in its commit message.
        own_results, check_results: its results for its own checked shards, and for those that it checks.
        unchecked: it has not passed its admission check yet.
        compared: the workers whose results are compared in `round`, because they compute the same shard as another.
        cannot_end: it has seen that `round` cannot end: replicas, or two results of one shard, differ.
    """

    stop: Count
    view: View | None
    round: Count
    step: Count
    has_result: bool
    synced: bool
    lineage: Lineage
    call: Call = Call()
    prepared: Count = 0
    own_results: Computed = NO_DIGESTS
    check_results: Computed = NO_DIGESTS
    unchecked: bool = False
    compared: tuple[Name, ...] = ()
    cannot_end: bool = False


class Resume(Message):
    """Continue from `round` in `view`. A receiver that is one round behind commits that round, which it holds.

    `commit`: all members hold `round`, so a receiver at `round` ends it without another all-reduce. Otherwise
    the round is redone under this view, with its shards assigned by `lineage`.
    """

    view: View
    round: int
    commit: bool
    lineage: Lineage


class ViewWithdrawn(Message):
    """Answer to Stopped for a joiner without state: its view is withdrawn, and it stays a candidate."""


# --- terms ------------------------------------------------------------------------------------------------------------
#
# What a run is started with, the same for all its workers: sizes, seed, threads, checkpoints, limits.
#
# One value: the command line makes it, settings.json holds it, the coordinator follows it, and each worker gets it with
# its Welcome. Invariant: an existing value has been checked, also one that was read from a file or came over the
# network.


class RunTerms(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a run that all its processes share. All times are in seconds.

    Attributes:
        wanted: target number of workers; None for as many as the run's pools can have.
        minimum, maximum: fewest workers that train, and most that the run takes.
        seed: for initialisation, data order and dropout.
        threads: intra-op threads of a worker.
        pin: each worker gets CPU cores of its own.
        ledger: every delivered sample is counted.
        by_speed: micro-batches are assigned by measured speed, else equally.
        bits: which machines may compute for the run, "same", "portable" or "any"; see `numeric_facts.py`.
        codec: the number format in which gradients are summed, "none" for their own; see `collective/codec.py`.
        stop_on_nan: a loss that is not finite ends the run.
        audit: the fraction of all micro-batches that a second worker computes too, 0 to 1.
        stop_undecided: end the run if two workers disagree about one of them and no third can decide.
        heartbeat_timeout_s: longest silence of a worker; the failure detector often gives it up earlier.
        stall_s: how long a worker waits for a peer before it reports it as stalled.
        orphan_s: how long a worker continues without a coordinator.
        standstill_s: how long the training may make no progress before an event reports it.
        stop_s: how long a requested end of the run waits for its step.

    Raises:
        UsageError: a value is beyond its limit, or contradicts another; names both and the remedy.
    """

    wanted: int | None = 1
    minimum: int = default("minimum")
    maximum: int | None = default("maximum")
    seed: int = default("seed")
    threads: int = default("threads")
    pin: bool = default("pin")
    ledger: bool = default("ledger")
    by_speed: bool = default("by_speed")
    bits: str = default("bits")
    codec: str = default("codec")
    stop_on_nan: bool = default("stop_on_nan")
    audit: float = default("audit")
    stop_undecided: bool = default("stop_undecided")
    checkpoints: Checkpoints = Checkpoints()
    heartbeat_s: float = 0.5
    heartbeat_timeout_s: float = 5.0
    stall_s: float = default("stall_s")
    orphan_s: float = default("orphan_s")
    prepare_timeout_s: float = 30.0
    startup_failures: int = 5
    end_s: float = 10.0  # how long the end of the run waits for workers whose script has not ended while others' have
    standstill_s: float = default("standstill_s")
    stop_s: float = default("stop_s")
    views_per_group: int = 256  # messages of views 512 apart could not be distinguished in one group

    def __post_init__(self) -> None:
        for name in (name for name in self.__struct_fields__ if name in RUN_OPTIONS):
            RUN_OPTIONS[name].check(getattr(self, name))
        for name in ("startup_failures", "views_per_group"):
            whole(f"{name} {{}}", getattr(self, name))
        for name in ("heartbeat_s", "heartbeat_timeout_s", "prepare_timeout_s", "end_s"):
            real(f"{name} {{}}", getattr(self, name), why="seconds")
        if self.minimum < 1:
            raise UsageError(f"--min {self.minimum}: a run needs at least one worker; use --min 1 or more")
        if self.wanted is not None and self.wanted < self.minimum:
            raise UsageError(
                f"--workers {self.wanted} is below --min {self.minimum}: the run could never start; "
                f"raise --workers or lower --min"
            )
        if self.maximum is not None and self.maximum < (self.wanted or self.minimum):
            below = f"--workers {self.wanted}" if self.wanted else f"--min {self.minimum}"
            raise UsageError(f"--max {self.maximum} is below {below}: raise --max or lower {below.split()[0]}")
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
        if self.audit and self.bits == "any":
            raise UsageError(f"--audit {self.audit:g} with --bits any: unlike machines find different bits in any case")
        if self.checkpoints.keep < 1:
            raise UsageError(f"--keep {self.checkpoints.keep}: a run keeps at least one checkpoint")


# --- spans ------------------------------------------------------------------------------------------------------------
#
# Messages of a trace: what each worker did in the next steps, reported on request.
#
# A *span* is a stretch of time in which the training thread was in one class (see the classes in `values.py`); a *wait*
# is one in which the worker's exchange waited for a peer's message. Times are whole microseconds on a clock of the
# worker's own; `wall_us` relates that clock to Unix time. `protocol/coordinator/accounting.py` asks and
# keeps the answers.
#
# All that a worker reports is bounded: `most` of each kind, which the coordinator makes smaller the more workers there
# are.

MOST_STEPS = 1000  # of one trace
MOST_SPANS = 20_000  # of a worker, and as many waits
MOST_PEERS = 1000
MOST_TAKEN = 2000  # steps in an answer: the requested ones and some more (`worker/timing.py`)
Kind = Annotated[int, msgspec.Meta(ge=0, le=len(SAID) - 1)]  # a time class, as its index in `SAID`


class Trace(Message):
    """To a worker: report its spans in the next `steps` steps; 0: answer at once with what is recorded so far.

    `number` identifies the trace; a worker records one at a time, the newest. `most`: the limit of spans, and of waits.
    """

    number: Count
    steps: Annotated[int, msgspec.Meta(ge=0, le=MOST_STEPS)]
    most: Annotated[int, msgspec.Meta(ge=1, le=MOST_SPANS)] = MOST_SPANS


class Spans(Message):
    """A worker's answer to the trace of that `number`.

    All times are microseconds on the worker's own clock; `wall_us` is the Unix time at its zero. `steps`: (number,
    begin, end of its round or 0 if it has not ended). `spans`: (class, begin, duration). `waits`: (index of the peer in
    `peers`, begin, duration). `full`: more than that did not fit.
    """

    number: Count
    wall_us: Count = 0
    steps: Annotated[tuple[tuple[Count, Count, Count], ...], msgspec.Meta(max_length=MOST_TAKEN)] = ()
    spans: Annotated[tuple[tuple[Kind, Count, Count], ...], msgspec.Meta(max_length=MOST_SPANS)] = ()
    peers: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MOST_PEERS)] = ()
    waits: Annotated[tuple[tuple[Count, Count, Count], ...], msgspec.Meta(max_length=MOST_SPANS)] = ()
    full: bool = False


class Traced(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a trace. `number` 0: no trace was requested.

    `asked`: the workers that record it, in rank order. Of these, some have `answered`, some are `gone` without an
    answer, and some still owe theirs (`owed`).
    """

    number: int = 0
    steps: int = 0
    asked: tuple[str, ...] = ()
    answered: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    owed: tuple[str, ...] = ()


# --- supply -----------------------------------------------------------------------------------------------------------
#
# Messages between pools and the coordinator: how many workers are wanted, and what became of them.

MAX_HOST_WORKERS = 1000  # on one host


class Roster(Message):
    """To a pool: the desired state of its workers.

    Attributes:
        wanted: how many of its workers the run wants.
        mark: the prefix of the ids of its workers.
        losses: deaths in a row without progress of the run (crash loop).
        leaving: workers with a preemption notice.
        released: workers that the run has dismissed; they exit by themselves.
        evicted: workers to kill; the run continues without them.
        unfed: released workers whose host could not get the data: start none on that host for a while.
        wrong_hosts: hosts never to use again, because a worker there computed wrong results.
        over: the exit code of the run, -1 while it continues; `reason` says why it ended.
        present: workers that belong to the run; all others have no part in it and never will.
    """

    wanted: int
    mark: str = ""
    losses: int = 0
    leaving: tuple[str, ...] = ()
    released: tuple[str, ...] = ()
    evicted: tuple[str, ...] = ()
    unfed: tuple[str, ...] = ()
    wrong_hosts: tuple[str, ...] = ()
    over: int = -1
    reason: str = ""
    present: tuple[str, ...] = ()


class WorkerProcessExited(Message):
    """From a pool: the process of this worker has ended, for certain. Sent again on a new connection."""

    worker: Name
    reason: Text


class StartFailed(Message):
    """From a pool: the process of `worker` could not be started. It does not count as a lost worker."""

    worker: Name
    host: Name
    reason: Text


class NoCapacity(Message):
    """From a pool: it can't start all the workers that it should. Sent once, until it could start one."""

    reason: Text


class PreemptionNotice(Message):
    """From a pool: `host`, with these workers, goes within `within_s` seconds. Sent again on a new connection."""

    workers: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_HOST_WORKERS)]
    host: Name
    within_s: Count
    reason: Text


class RebalanceAdvice(Message):
    """From a pool: `host` may be preempted. Its workers stay, and the pool starts others elsewhere if it can."""

    host: Name
    reason: Text


class Capacity(Message):
    """From a pool: it can have `workers` workers now, including those that run; None: no limit is known.

    `gathers`: its hosts are still starting, so there may be more in a moment. Sent again on a new connection.
    """

    workers: Count | None = None
    gathers: bool = False


class HostSeen(Message):
    """From a pool, for display: the `state` of `host`; host "" stands for none, or all."""

    host: Text
    state: Name
    reason: Text = ""


class HostPriced(Message):
    """From a pool: `host` costs `dollars` an hour since Unix time `since`; None: the price is unknown.

    `day`: the date of the price. Sent again on a new connection.
    """

    host: Name
    dollars: Dollars | None
    since: Seconds
    day: Name = ""


FromPool = (
    WorkerProcessExited
    | StartFailed
    | NoCapacity
    | PreemptionNotice
    | RebalanceAdvice
    | Capacity
    | HostSeen
    | HostPriced
)


# --- preemption deadline ----------------------------------------------------------------------------------------------
#
# A worker's preemption notice may have a deadline, when its machine goes. Some time before it the worker's lease ends
# (`PreemptionClock` in `protocol/worker/session.py`): it sends no commit message and ends no round from then on, saves,
# sends `Lapsed` and exits. So it saves the state of the beginning of the current step, and nobody has ended that step
# with its help without holding the result.
# Argument: docs/protocol.md, Preemption deadline 1-5.

EXIT_PREEMPTED = 0  # exit code of a worker that left because of a preemption notice


class LeaveRequest(Message):
    """The worker has a preemption notice (SIGTERM, SIGINT, spot interruption) and wants to leave gracefully.

    `within_s`: seconds until its machine goes; None: no deadline.
    """

    reason: Text
    within_s: Seconds | None = None


class PreemptionDeadline(Message):
    """To a worker: its machine is preempted within `within_s` seconds."""

    within_s: float


class Lapsed(Message):
    """The lease of this worker ended before it could leave: it commits nothing more, and has saved what it could."""


# --- hosts ------------------------------------------------------------------------------------------------------------
#
# Messages between a pool and the agents of its hosts. The coordinator passes them on unread.
#
# An agent is the process of a host that starts that host's workers (`pool/agent.py`). Both sides send the state and not
# the changes: an `AgentOrder` names all workers that are to run, a `Report` all that run and all that have ended. So a
# message that is lost with a connection, or comes twice, does no harm; a side that reconnects sends everything again.

MOST = 10_000  # workers that one host may have had over its life
CHUNK_BYTES = 64 * 1024  # of a log, in one message
Ids = Annotated[tuple[Name, ...], msgspec.Meta(max_length=MOST)]
Endings = Annotated[dict[Name, Text], msgspec.Meta(max_length=MOST)]
Words = Annotated[tuple[Text, ...], msgspec.Meta(max_length=MOST)]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The job of the workers of a host, the same for all hosts of a run.

    `pack`: the hash of the run's code (see `code/pack.py`), which contains `script`; "" if the host has the code in
    `folder`. `setup` and `prepare`: commands that must succeed first. `orphan_s`: an agent without a coordinator and
    without workers ends after that many seconds. `environ`: variables of the workers' environment, beside the host's.
    """

    script: Text
    arguments: Words = ()
    folder: Text = ""
    pack: Name = ""
    setup: Text = ""
    prepare: Text = ""
    threads: Count = 1
    orphan_s: Seconds = 600.0
    environ: Annotated[dict[Name, Text], msgspec.Meta(max_length=MOST)] = msgspec.field(default_factory=dict)


class HostPreemption(msgspec.Struct, frozen=True, kw_only=True):
    """A host is preempted at Unix time `at`; with `advice` it only may be."""

    at: Seconds
    reason: Text
    advice: bool = False


class AgentOrder(Message):
    """To an agent, its desired state: exactly these `workers` run. A worker that has ended is not started again, since
    ids are never used twice.

    `instance`: the agent process that the order is for; the workers of another one are others. `acknowledged`: workers
    whose end the pool knows, so it need not be reported any more. `logs`: how many bytes of each worker's log the pool
    has. `end`: stop all workers, and exit. `session` identifies the pool's process, `serial` grows with its orders.
    """

    job: Job
    session: Name
    serial: Count
    instance: Name
    workers: Ids = ()
    acknowledged: Ids = ()
    logs: Annotated[dict[Name, Count], msgspec.Meta(max_length=MOST)] = msgspec.field(default_factory=dict)
    end: bool = False


class Report(Message):
    """From an agent, its actual state. `instance` identifies its process; workers of another instance ended with that.

    `state`: preparing, ready, or failed with the `reason`. `ended`: reasons by worker, for ends that the pool has not
    acknowledged. `failed`: the same for workers that never started. `notified`: the preemption of the host, if it is
    known. `session` and `serial` are those of the newest order that it has.
    """

    instance: Name
    state: Name
    reason: Text = ""
    session: Name = ""
    serial: Count = 0
    running: Ids = ()
    ended: Endings = msgspec.field(default_factory=dict)
    failed: Endings = msgspec.field(default_factory=dict)
    notified: HostPreemption | None = None


class Output(Message):
    """From an agent: output of a worker, from byte `offset` of its log on."""

    worker: Name
    offset: Count
    content: Annotated[bytes, msgspec.Meta(max_length=CHUNK_BYTES)]


class ToHost(Message):
    """From a pool: `order` for the agent of `host`, one of its hosts."""

    host: Name
    order: AgentOrder


class FromHost(Message):
    """To a pool: a message of the agent of `host`; None: the agent is not connected any more."""

    host: Name
    message: Report | Output | None = None


# --- connecting -------------------------------------------------------------------------------------------------------
#
# Messages about the connections of a proposed view. What unauthenticated peers in them lead to: docs/protocol.md,
# Reconfiguration.


class Publish(Message):
    """A rendezvous key of `group`, for the other members of that group, or for member `to` alone."""

    group: Count
    key: Name
    value: bytes
    to: Name = ""


class Prepared(Message):
    """The connections of this worker for the proposed view are open."""

    view: Count


class PeerNotAuthenticated(Message):
    """In the proposed view, the connection to `peer` leads to an unauthenticated party at `address`, not to `peer`.

    `peer` is the worker itself if unauthenticated connections keep it from listening at `address`.
    """

    view: Count
    peer: Name
    address: Name


class Published(Message):
    """A rendezvous key from another member of group `group`."""

    group: int
    key: str
    value: bytes


# --- messages ---------------------------------------------------------------------------------------------------------

HEARD_EVERY = 2  # heartbeats for each answer


# --- from a worker -----------------------------------------------------------------------------------------


class Hello(Message):
    """First message of a connection. `worker` is the id given by the pool that started the process, "" for none.

    A worker whose connection broke returns with the id of its `Welcome`, the random `session` of its process, and an
    `attempt` that only grows, so that a replayed old Hello can't take its place. `synced`: it holds the run's state.
    `zone`: the zone of its host, "" if unknown.
    """

    kind: Name  # "worker", "pool", "observer"; "host_agent": the agent of a host; "agent_pool": the pool of such hosts
    worker: Name = ""
    host: Name = ""
    pid: Count = 0
    pool: Name = ""
    session: Name = ""
    attempt: Count = 0
    synced: bool = False
    zone: Name = ""


class Ready(Message):
    """The worker has built its model and opened its data, and asks for admission.

    `unreached`: why it can't write the run's checkpoints to their place, "" if it can.
    """

    signature: Signature
    unreached: Text = ""


class Heartbeat(Message):
    """Sent every heartbeat interval, by a thread of its own.

    Attributes:
        number: counts the heartbeats of a connection; 0 needs no answer (`HeartbeatAnswer`).
        view, round, step, epoch: where the worker is.
        shard_us: mean time in microseconds of the shards computed since the last heartbeat, 0 if there were none.
        shards, shards_total: this worker's shards of its newest training step, and the step's.
        call: the script's call in `round`, once the round has begun here.
        shards_computed: how many shards the worker has computed in all.
        waits_for_peers: it has nothing to compute and waits for others.
        at_step_start: its state is that of the start of a step, and no update has begun.
        blocked_on: the peer that it has waited for beyond the soft limit, "" for none.
        time_us: microseconds in each time class (`SAID` in `values.py`).
        lines: lines of metrics, from rank 0 only.
        logged: newest lines of `run.log` of another worker, to be compared with rank 0's.
        links: its use of the links to each other host; None: not in this heartbeat.
    """

    number: Count = 0
    view: Count = 0
    round: Count = 0
    step: Count = 0
    epoch: Count = 0
    shard_us: Count = 0
    shards: Count = 0
    shards_total: Count = 0
    call: Call = Call()
    shards_computed: Count = 0
    waits_for_peers: bool = False
    at_step_start: bool = False
    blocked_on: Name = ""
    time_us: Said = ()
    lines: Annotated[tuple[Line, ...], msgspec.Meta(max_length=MAX_LINES)] = ()
    links: Annotated[tuple[LinkUse, ...], msgspec.Meta(max_length=MOST_LINKS)] | None = None
    logged: Annotated[tuple[Line, ...], msgspec.Meta(max_length=MAX_COMPARED)] = ()


class Switched(Message):
    """This worker continues in `view` from `round`; a leaving worker stops there."""

    view: Count
    round: Count
    step: Count


class Synced(Message):
    """A joiner of `view` holds the state now."""

    view: Count


class Suspect(Message):
    """The connection to `peer` broke, or it stalled: this worker has waited `waited_s` seconds for it, 0 otherwise."""

    view: Count
    peer: Name
    reason: Text
    waited_s: Count = 0


class ScriptFailed(Message):
    """The training script raised, and the run ends, with exit code `code`.

    An error of farandole's own, or `sys.exit` in the script, has a message alone as traceback.
    """

    traceback: Text
    code: ExitCode = 1


class DataUnavailable(Message):
    """The data is unavailable on this worker's host: a full disk, an unreachable store, a damaged data file."""

    reason: Text


class Unrecorded(Message):
    """This worker can't write its ledger any more; `reason` says what is missing, and why."""

    reason: Text


class UnknownOperator(Message):
    """Under `--bits portable`: this worker has run an operator that is not known to be portable."""

    operator: Name


class LoaderEnded(Message):
    """A DataLoader process of this worker has died for `reason`, and others were started in its place."""

    reason: Text


class Finished(Message):
    """The training script ran to its end. `fingerprint` is that of the replicated state.

    It ended in `view` after `step`, before `round` began; view 0: it was never in one. `after`: the time since the end
    of the last step's inner loop.
    """

    fingerprint: Name = ""
    view: Count = 0
    round: Count = 0
    step: Count = 0
    after: StepTime = StepTime()


class NotFinite(Message):
    """The exact loss of `step` is not finite, and that of the step before was. All workers report it."""

    step: Count
    loss: Name


class SettingChanged(Message):
    """The script has changed a setting of torch on this worker, detected where the inner loop of `step` began."""

    step: Count
    setting: Name
    before: Name
    now: Name


# --- from the coordinator ----------------------------------------------------------------------------------


class Welcome(Message):
    """Answer to Hello: the worker's id, and the terms of the run.

    `lines` is the newest line of metrics that the coordinator has, as (step, index).
    """

    run: str
    worker: str
    folder: str
    terms: RunTerms
    lines: tuple[int, int]


class HeartbeatAnswer(Message):
    """Answer to every `HEARD_EVERY`th heartbeat, whose number is `beat`; also the answer to an agent's report.

    `lines` is the newest line of metrics that the coordinator has, as (step, index): workers drop it and older ones.
    """

    beat: int = 0
    lines: tuple[int, int] = (-1, 0)


class JoinRefused(Message):
    """The worker is not admitted; it exits with this reason."""

    reason: str


class Propose(Message):
    """Prepare this view. Members switch to it once their commit messages agree on it, to a first view at once.

    The workers that begin a first view must find the checkpoint `newest` or a newer one; else they answer
    `CannotStart`. `key` is the secret of the view's group, with which members authenticate each other. It exists only
    on the wire.
    """

    view: View
    newest: Newest = Newest()
    key: bytes = b""

    def __repr__(self) -> str:  # without the key
        return f"Propose(view={self.view!r}, newest={self.newest!r})"


class Goodbye(Message):
    """Exit now with `code`: the other members have switched, or the run is over. `save`: save the state first."""

    reason: str
    code: int = 0
    save: bool = False


class Stacks(Message):
    """Write the stacks of all threads to the log, with this `reason`. There is no answer."""

    reason: str


class Note(Message):
    """To observers: a line of metrics.jsonl, byte for byte."""

    line: bytes


FromWorker = (
    Hello | Ready | Heartbeat | LeaveRequest | Lapsed | Publish | Prepared | PeerNotAuthenticated | Switched | Synced
    | Suspect | Stopped | ScriptFailed | DataUnavailable | Saved | Differs | Drifts | ShardsDiffer | Digests
    | Checkpointed | CannotStart | Restored | Unrecorded | LoaderEnded | Finished | NotFinite | SettingChanged
    | UnknownOperator | Spans | FromPool | ToHost | Report | Output
)  # fmt: skip
FromCoordinator = (
    Welcome | HeartbeatAnswer | JoinRefused | Propose | Published | Stop | Resume | ViewWithdrawn | Goodbye
    | PreemptionDeadline | End | Compare | Stacks | Trace | Saver | Roster | Note | AgentOrder | FromHost
)  # fmt: skip
encode = msgspec.msgpack.Encoder().encode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
decode_from_coordinator = msgspec.msgpack.Decoder(FromCoordinator).decode
_PROSE = ("reason", "traceback", "unreached", "error")  # texts to display, with arbitrary text of exceptions
_PROSES = ("damaged", "differences")
_SHOWN_NAMES = ("operator", "setting", "before", "now")  # names and values from torch and the script
MAX_PROSES = 20


def sendable(message: Message) -> Message:
    """Return `message` as the coordinator accepts it: texts to display are shortened.

    Raises:
        UsageError: the coordinator would refuse it; names the field, the value and the limit.
    """
    changed: dict[str, object] = {}
    for name in message.__struct_fields__:
        value = getattr(message, name)
        if name in _PROSE and isinstance(value, str):
            changed[name] = shortened(value)
        elif name in _SHOWN_NAMES and isinstance(value, str):
            changed[name] = one_line(value)[:LONGEST_NAME]
        elif name in _PROSES and isinstance(value, tuple):
            changed[name] = tuple(abridged(text) for text in value[:MAX_PROSES])
    message = msgspec.structs.replace(message, **changed) if changed else message
    if why := refusal(message, decode_from_worker):
        raise UsageError(f"this message can't be sent to the coordinator: {why}; use smaller or fewer values")
    return message
