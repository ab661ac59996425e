"""Every message between workers, pools, observers and the coordinator, as typed structs.

Only these are ever decoded from a control connection; anything else is refused, and so is what goes beyond the bounds
that a worker's fields carry. `sendable` holds a message to the same bounds before it is sent. One connection is one
ordered stream in each direction; nothing is assumed about the order across connections.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Annotated

import msgspec

from farandole.errors import UsageError
from farandole.platform.bounds import MAX_COUNT, MAX_SEED, MAX_THREADS, MAX_WORKERS, real, whole
from farandole.platform.output import LONGEST_NAME, one_line
from farandole.protocol.values import MAX_LINES as MAX_LINES
from farandole.protocol.values import MAX_MESSAGE_BYTES as MAX_MESSAGE_BYTES
from farandole.protocol.values import (
    MAX_NAMED,
    MAX_NAMED_BYTES,
    SAID,
    Call,
    Checkpoints,
    Count,
    Digest,
    Dollars,
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

# --- checkpoints ------------------------------------------------------------------------------------------------------
#
# Messages about checkpoints: which worker writes them, what became of one, and from which one the run goes on.


class Saved(Message):
    """Answer to End(save=True): the checkpoint's path, or why there is none.

    `between`: the script failed between two steps here, so this worker's state is of neither. `finite`: see `Manifest`;
    `seconds` is how long the writing took.
    """

    path: Text = ""
    error: Text = ""
    between: bool = False
    finite: bool = True
    seconds: Seconds = 0.0


class Checkpointed(Message):
    """A checkpoint of the beginning of `step` was written to `path`, or was not, because of `error`.

    `seconds` is how long the writing took, `copy_ms` how long the training thread was blocked; `finite`: see Manifest.
    `late`: it was left out, since the one before is still being written.
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
    """The first view can't begin with what this worker finds: it is not the checkpoint that `Propose` spoke of."""

    view: Count
    reason: Text


class Restored(Message):
    """The first view begins at `step` with the state of `path`; "" for the script's own beginning.

    `damaged` are newer ones that were passed over, `differences` what may change the bits, in words; `last_finite`,
    where the state is not `finite`, the newest that is. `done`: the script asks for nothing more, so no view begins.
    """

    step: Count
    path: Text = ""
    damaged: tuple[Text, ...] = ()
    differences: tuple[Text, ...] = ()
    finite: bool = True
    last_finite: Text = ""
    done: bool = False


class End(Message):
    """The run ends: save the state of the last whole step if `save`, answer Saved, await Goodbye.

    `between`: nobody has that; save what the script has left between two steps.
    """

    save: bool
    reason: str
    between: bool = False


class Saver(Message):
    """`worker` writes the checkpoints from now on; `at_once`, since another could not. See `saving`."""

    worker: str
    at_once: bool = False


# --- comparison -------------------------------------------------------------------------------------------------------
#
# Messages about replicas that differ, and about shards for which two workers have different results. What follows from
# them: docs/protocol.md, Replicas that differ and Recomputation.

MAX_PARTS = 8  # views of which a worker says who made which sums
# what is found to differ, in words that the reason of a refusal has
MICRO_BATCH, UPDATES = "the micro-batch", "its updates differ"


class Differs(Message):
    """The control words of a round of `step` say that `workers` hold another replica than the others: it can't end."""

    step: Count
    workers: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_NAMED)]


class Drifts(Message):
    """Under `--bits any`: at `step` the replicas of `workers` are unlike the others', for the `times`-th time."""

    step: Count
    workers: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_NAMED)]
    times: Count


class ShardsDiffer(Message):
    """The control words of a round of `step` say that two workers found different things of one shard: it can't end."""

    step: Count


class Computed(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker has computed of some of a round's shards: their holder's, or another one's who checks them.

    `digests` are those of what the shards read, found and left, by name, in order. Where there are too many for a
    message, the last one is of all that are left.
    """

    holder: Name = ""
    shards: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_NAMED)] = ()
    names: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_NAMED)] = ()
    digests: Annotated[tuple[Digest, ...], msgspec.Meta(max_length=MAX_NAMED)] = ()

    @property
    def number(self) -> int:
        """For the control word: 63 bits, 0 where there is nothing."""
        if not self.shards:
            return 0
        digest = hashlib.sha256(repr((self.holder, self.shards, self.digests)).encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1 or 1


NO_DIGESTS = Computed()


def fitting(names: Sequence[str]) -> int:
    """How many of these names, from the first on, fit into a message; at least 1 of some."""
    size = 0
    for number, name in enumerate(names[:MAX_NAMED]):
        size += len(name.encode()) + 16  # and a digest
        if size > MAX_NAMED_BYTES:
            return max(number, 1)
    return min(len(names), MAX_NAMED)


class PartDigests(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's digests by who made the sums: for each of `members` one digest of the elements of parameters, and of
    the optimizer's tensors of their shapes, whose gradients that member sums up in `view`. `cut`: how they are cut into
    buckets.
    """

    view: Count
    cut: Digest
    members: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_NAMED)]
    digests: Annotated[tuple[Digest, ...], msgspec.Meta(max_length=MAX_NAMED)]


class Digests(Message):
    """Answer to Compare: a digest of each value and tensor of this worker's replica, by name, in order.

    `step` is the one whose beginning it was last seen whole at. `parts`: for each view that has made an update which a
    difference may come from; `rest`: a digest of what is in no part, 0 where the parts are unknown.
    """

    step: Count
    names: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_NAMED)]
    digests: Annotated[tuple[Digest, ...], msgspec.Meta(max_length=MAX_NAMED)]
    parts: Annotated[tuple[PartDigests, ...], msgspec.Meta(max_length=MAX_PARTS)] = ()
    rest: Digest = 0


class Compare(Message):
    """The replicas differ and nobody trains any more: answer Digests, await End or Goodbye."""


# --- reports ----------------------------------------------------------------------------------------------------------
#
# Messages of a recovery: Stop, the report of every participant, and how the round goes on.


class Stop(Message):
    """Abandon the view and any proposed one; answer Stopped."""

    stop: int


class Stopped(Message):
    """Answer to Stop: this worker has abandoned its view and will neither end a round nor switch until told.

    `round` is the round it is in (or will begin next), `holds` whether it holds every reduced bucket of it, `view`
    the view applied in it (whole: the coordinator may be another one than proposed it), `lineage` how the round's
    shards were dealt, `synced` whether it holds the state, `step` the training step
    (for the record only), `call` what it has called in the round, if it has begun. `prepared` is the newest view that
    it is ready to switch to, as in its control word. `held` and `checked` are what it has computed of shards that two
    compute; `unproven`: it has not proved itself yet.
    """

    stop: Count
    view: View | None
    round: Count
    step: Count
    holds: bool
    synced: bool
    lineage: Lineage
    call: Call = Call()
    prepared: Count = 0
    held: Computed = NO_DIGESTS
    checked: Computed = NO_DIGESTS
    unproven: bool = False


class Resume(Message):
    """Go on from `round` in `view`. A receiver behind it commits the round before, which it holds.

    `commit`: the receiver at `round` holds it, as everyone does: it ends the round without a further exchange.
    Otherwise the round's exchange is done (again) under this view, its shards dealt by `lineage`.
    """

    view: View
    round: int
    commit: bool
    lineage: Lineage


class Demoted(Message):
    """Answer to Stopped for a joiner without state: its view is no more, it stays a candidate."""


# --- terms ------------------------------------------------------------------------------------------------------------
#
# What a run is started with, the same for all its workers: sizes, seed, threads, checkpoints, limits.
#
# One value: the command line makes it, settings.json holds it, the coordinator follows it, and each worker gets it with
# its Welcome. Invariant: an existing value has been checked, also one that was read from a file or came over the
# network.

WHOLE = {  # and the most of each
    "wanted": MAX_WORKERS, "minimum": MAX_WORKERS, "maximum": MAX_WORKERS, "seed": MAX_SEED, "threads": MAX_THREADS,
    "startup_failures": MAX_COUNT, "views_per_group": MAX_COUNT,
}  # fmt: skip
_OPTIONS = {
    "wanted": "--workers", "minimum": "--min", "maximum": "--max", "orphan_s": "--orphan-limit", "stall_s": "--stall",
    "standstill_s": "--standstill", "stop_s": "--stop-limit",
}  # fmt: skip
BITS = ("same", "portable", "any")  # what is promised of them; see `numeric_facts.py`


class RunTerms(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds. `wanted`, `minimum`, `maximum`: of workers; None wants all that the run's pools can have.
    `ledger`: every delivered sample is counted.

    `heartbeat_timeout_s`: the most that a worker may be silent; often it is given up earlier (see `silence`). `pin`:
    each worker has cores of its own. `by_speed`: shards are dealt by measured speed, else equally. `bits`: who may
    compute for the run. `stop_on_nan`: a loss that is not finite ends the run. `audit`: the part of all shards that
    another worker computes too; `stop_undecided`: the run ends where two find different things of one and nobody can
    tell who is right. `standstill_s`, `stop_s`: how long the training may stand still before that is told, and before a
    stop that was asked for no longer waits for its step.

    Raises:
        UsageError: a value is beyond its limit, or contradicts another; names both and the remedy.
    """

    wanted: int | None = 1
    minimum: int = 1
    maximum: int | None = None
    seed: int = 0
    threads: int = 1
    pin: bool = False
    ledger: bool = False
    by_speed: bool = True
    bits: str = "same"
    stop_on_nan: bool = False
    audit: float = 0.0
    stop_undecided: bool = False
    checkpoints: Checkpoints = Checkpoints()
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
        for name, most in WHOLE.items():
            if (value := getattr(self, name)) is not None:
                whole(f"{_option(name)} {{}}", value, -MAX_SEED if name == "seed" else 0, most)
        for name in (name for name in self.__struct_fields__ if name.endswith("_s")):
            real(f"{_option(name)} {{}}", getattr(self, name), why="seconds")
        if self.bits not in BITS:
            raise UsageError(f"--bits {self.bits}: say {' or '.join(BITS)}")
        if self.minimum < 1:
            raise UsageError(f"--min {self.minimum}: a run needs at least one worker; use --min 1 or more")
        if self.threads < 1:
            raise UsageError(f"--threads {self.threads}: a worker needs at least one")
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
        if not 0.0 <= self.audit <= 1.0:
            raise UsageError(f"--audit {self.audit:g}: a part of all shards, from 0 to 1 (or 0% to 100%)")
        if self.audit and self.bits == "any":
            raise UsageError(f"--audit {self.audit:g} with --bits any: unlike machines find different bits in any case")
        if self.checkpoints.keep < 1:
            raise UsageError(f"--keep {self.checkpoints.keep}: a run keeps at least one checkpoint")


def _option(field: str) -> str:
    return _OPTIONS.get(field, f"--{field.replace('_', '-')}")


# --- spans ------------------------------------------------------------------------------------------------------------
#
# Messages of a trace: what each worker did in the next steps, reported on request.
#
# A *span* is a stretch of time in which the training thread was in one class (see the classes in `values.py`); a *wait*
# is one in which the worker's exchange waited for a peer's message. Times are whole microseconds on a clock of the
# worker's own; `wall_us` relates that clock to Unix time. `coordinator/accounting.py` asks and keeps the answers.
#
# All that a worker reports is bounded: `most` of each kind, which the coordinator makes smaller the more workers there
# are.

MOST_STEPS = 1000  # that may be asked for
MOST_SPANS = 20_000  # of a worker, and so many waits
MOST_PEERS = 1000
MOST_TAKEN = 2000  # steps in an answer: those that were asked for, and some more (`worker/timing.py`)
Kind = Annotated[int, msgspec.Meta(ge=0, le=len(SAID) - 1)]  # a class, as its place in `SAID`


class Trace(Message):
    """To a worker: tell what you do in the next `steps` steps; with 0, at once, as far as it goes.

    `number` is this trace's own; a worker has one at a time, the newest. At most `most` spans, and waits.
    """

    number: Count
    steps: Annotated[int, msgspec.Meta(ge=0, le=MOST_STEPS)]
    most: Annotated[int, msgspec.Meta(ge=1, le=MOST_SPANS)] = MOST_SPANS


class Spans(Message):
    """A worker's answer to the trace of that `number`.

    `steps`: each one's number, when it began, and when its round ended, 0 if it has not. `spans`: class, beginning,
    duration; `waits`: the place of the peer in `peers`, beginning, duration. `full`: more than that would not fit.
    """

    number: Count
    wall_us: Count = 0
    steps: Annotated[tuple[tuple[Count, Count, Count], ...], msgspec.Meta(max_length=MOST_TAKEN)] = ()
    spans: Annotated[tuple[tuple[Kind, Count, Count], ...], msgspec.Meta(max_length=MOST_SPANS)] = ()
    peers: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MOST_PEERS)] = ()
    waits: Annotated[tuple[tuple[Count, Count, Count], ...], msgspec.Meta(max_length=MOST_SPANS)] = ()
    full: bool = False


class Traced(msgspec.Struct, frozen=True, kw_only=True):
    """How far a trace is: of the workers that were `asked`, in rank order, those that have `answered`, those that are
    `gone` without, and those that still owe theirs. `number` 0: none has been asked for.
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

MAX_HOST_WORKERS = 1000  # of a host


class Roster(Message):
    """To a pool: how many of its workers the run wants, those it counts as lost for good, whether it is over.

    Their ids begin with `mark` (see `names`).
    `leaving` have notice; `released` have been let go and exit by themselves; `evicted` are to be killed: the run goes
    on without them. `losses` in a row have brought the run nowhere. `over` carries the exit code, -1 while it goes on.
    `unfed` are those of the released whose host could not get them the data: it is to be left alone for a while.
    `present` are those that have been told so: all others have no part in the run and never will. `wrong_hosts` are
    not to be used any more: a worker there computed wrong.
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
    """From a pool: this process of its own has ended, for certain. Said again after a break."""

    worker: Name
    reason: Text


class StartFailed(Message):
    """From a pool: no process came of what was to be `worker`. Nobody was lost."""

    worker: Name
    host: Name
    reason: Text


class NoCapacity(Message):
    """From a pool: it would start more workers than it can now. Said once, until it could start one."""

    reason: Text


class PreemptionNotice(Message):
    """From a pool: the host of these workers will go within `within_s` seconds. Said again after a break."""

    workers: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_HOST_WORKERS)]
    host: Name
    within_s: Count
    reason: Text


class RebalanceAdvice(Message):
    """From a pool: this host may go. Its workers stay, and the pool starts others elsewhere if it can."""

    host: Name
    reason: Text


class Capacity(Message):
    """From a pool: it can have so many workers now, those that it has among them; None: no limit is known. `gathers`:
    its hosts are still on their way, so there may be more in a moment. Said again after a break.
    """

    workers: Count | None = None
    gathers: bool = False


class HostSeen(Message):
    """From a pool, for people: what has become of a host. "" stands for none, or all."""

    host: Text
    state: Name
    reason: Text = ""


class HostPriced(Message):
    """From a pool: this host is paid for by the hour since Unix time `since`, at the price of a `day`; None: it is not
    known. Said again after a break.
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
# A worker's preemption notice may have a deadline, when its machine goes. A `PART` of the notice before it the worker's
# lease ends: it sends no commit message and ends no round from then on, saves, sends `Lapsed` and exits. So it saves
# the state of the beginning of the current step, and nobody has ended that step with its help without holding the
# result.
# Argument: docs/protocol.md, Preemption deadline 1-5.

PART, LONGEST_S = 0.25, 30.0  # how much of a notice is kept for saving, at most
SHORTEST_S = 4.0
EXIT_PREEMPTED = 0  # the exit code of who has gone by its notice


class LeaveRequest(Message):
    """The worker has had notice (SIGTERM, SIGINT, spot interruption) and wants to leave gracefully.

    `within_s`: its machine goes then; None: it has time.
    """

    reason: Text
    within_s: Seconds | None = None


class PreemptionDeadline(Message):
    """To a worker: its machine goes within so many seconds."""

    within_s: float


class Lapsed(Message):
    """This worker's time is over before it could leave: it gives no word any more, and has saved what it could."""


class Ends:
    """When a worker's notice ends its lease. Times are the caller's, in seconds."""

    def __init__(self) -> None:
        self.at = math.inf
        self.left_s = 0.0  # from then to the deadline

    def within(self, seconds: float, now: float) -> None:
        """Its machine goes then."""
        left_s = min(PART * seconds, LONGEST_S)
        if seconds >= SHORTEST_S and now + seconds - left_s < self.at:
            self.at, self.left_s = now + seconds - left_s, left_s

    def over(self, now: float) -> bool:
        return now > self.at


# --- hosts ------------------------------------------------------------------------------------------------------------
#
# Messages between a pool and the agents of its hosts. The coordinator passes them on unread.
#
# An agent is the process of a host that starts that host's workers (`pool/agent.py`). Both sides send the state and not
# the changes: an `AgentOrder` names all workers that are to run, a `Report` all that run and all that have ended. So a
# message that is lost with a connection, or comes twice, does no harm; a side that reconnects sends everything again.

MOST = 10_000  # workers that one host may have had
CHUNK_BYTES = 64 * 1024  # of a log, in one message
Ids = Annotated[tuple[Name, ...], msgspec.Meta(max_length=MOST)]
Endings = Annotated[dict[Name, Text], msgspec.Meta(max_length=MOST)]
Words = Annotated[tuple[Text, ...], msgspec.Meta(max_length=MOST)]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What the workers of a host do, the same for all hosts of a run.

    `pack`: the hash of the run's code (see `code/pack.py`), of which `script` is a file; "" where the host has it, in
    `folder`. `setup` and `prepare`: commands that must succeed first. `orphan_s`: without a coordinator
    and without workers an agent ends after so long.
    """

    script: Text
    arguments: Words = ()
    folder: Text = ""
    pack: Name = ""
    setup: Text = ""
    prepare: Text = ""
    threads: Count = 1
    orphan_s: Seconds = 600.0


class HostPreemption(msgspec.Struct, frozen=True, kw_only=True):
    """A host will go `at` that Unix time; or may, where `advice`."""

    at: Seconds
    reason: Text
    advice: bool = False


class AgentOrder(Message):
    """To an agent: these `workers` are to run, and nobody else. What has ended stays ended: ids are never used twice.

    `instance`: the agent's process that it is for; another one's workers are others. `heard`: whose end is known, and
    need not be reported any more. `logs`: how many bytes of each worker's log are
    there. `end`: stop all, and end. `session` is the pool's process's own, `serial` grows with its orders.
    """

    job: Job
    session: Name
    serial: Count
    instance: Name
    workers: Ids = ()
    heard: Ids = ()
    logs: Annotated[dict[Name, Count], msgspec.Meta(max_length=MOST)] = msgspec.field(default_factory=dict)
    end: bool = False


class Report(Message):
    """From an agent. `instance` is its process's own; what another instance had started has ended with it.

    `state`: preparing, ready, or failed with the `reason`. `ended` and `failed`: why, of workers whose end the pool has
    not heard, and of those that never began. `notified`: what is known of the host's own end. `session` and `serial`
    are those of the newest order that it has.
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
    """From an agent: what a worker has printed, from byte `offset` of its log on."""

    worker: Name
    offset: Count
    content: Annotated[bytes, msgspec.Meta(max_length=CHUNK_BYTES)]


class ToHost(Message):
    """From a pool, to the agent of one of its hosts."""

    host: Name
    order: AgentOrder


class FromHost(Message):
    """To a pool: a host's agent has said that; None: it is not connected any more."""

    host: Name
    said: Report | Output | None = None


# --- connecting -------------------------------------------------------------------------------------------------------
#
# Messages about the connections of a proposed view. What unauthenticated peers in them lead to: docs/protocol.md,
# Reconfiguration.


class Publish(Message):
    """A rendezvous key of group `group`, to be handed to the other members of that group, or to one of them."""

    group: Count
    key: Name
    value: bytes
    to: Name = ""


class Prepared(Message):
    """This worker's connections for the proposed view stand."""

    view: Count


class PeerUnproved(Message):
    """Of the connections for the proposed view, the one to `peer` leads to somebody at `address` who is not `peer`.

    `peer` is the worker itself if strangers keep it from listening at `address`.
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

HEARD_EVERY = 2  # heartbeats


# --- from a worker -----------------------------------------------------------------------------------------


class Hello(Message):
    """First message of a connection. `worker` is the id given by the pool that started the process, "" for none.

    A worker whose connection broke comes back with the id that it was welcomed with, the random `session` of its
    process, and an `attempt` that only grows, so that an old Hello said again can't take its place. `synced`: it holds
    the run's state.
    """

    kind: Name  # "worker", "pool", "observer"; for a host's workers (`hosts.py`) "agent", and its pool's "agents"
    worker: Name = ""
    host: Name = ""
    pid: Count = 0
    pool: Name = ""
    session: Name = ""
    attempt: Count = 0
    synced: bool = False


class Ready(Message):
    """The worker has built its model and opened its data: it asks in.

    `unreached` says why it can't write the run's checkpoints where they belong, "" if it can.
    """

    signature: Signature
    unreached: Text = ""


class Heartbeat(Message):
    """Sent every heartbeat interval by a thread of its own. `lines` come from rank 0 only.

    `number` counts them on their connection; 0 asks for no answer (`Heard`). `shard_us` is the mean time that the
    shards computed since the last heartbeat took, 0 for none; `shards` and `of` are the worker's part of its newest
    training step. `call` is what the worker's script has called in `round`, once it has begun here (see `calls`).
    `done` are all shards that it has computed, `waits`: it has nothing to compute and waits for others, `waits_for` a
    peer that it has waited for too long, `whole`: it holds the state of a whole step. `time_us` is what its time has
    gone to (see `classes`).
    """

    number: Count = 0
    view: Count = 0
    round: Count = 0
    step: Count = 0
    epoch: Count = 0
    shard_us: Count = 0
    shards: Count = 0
    of: Count = 0
    call: Call = Call()
    done: Count = 0
    waits: bool = False
    whole: bool = False
    waits_for: Name = ""
    time_us: Said = ()
    lines: Annotated[tuple[Line, ...], msgspec.Meta(max_length=MAX_LINES)] = ()


class Switched(Message):
    """This worker goes on in `view` from `round` (a leaver: it goes no further)."""

    view: Count
    round: Count
    step: Count


class Synced(Message):
    """A joiner of `view` holds the state now."""

    view: Count


class Suspect(Message):
    """A peer's connection broke, or it has let us wait beyond the stall limit: for `waited_s` so far, 0 otherwise."""

    view: Count
    peer: Name
    reason: Text
    waited_s: Count = 0


class ScriptFailed(Message):
    """The training script raised: the run ends with this traceback, or an error of ours, with its message alone."""

    traceback: Text


class DataUnavailable(Message):
    """This worker's host can't get it the data: a full disk, a store out of reach, a damaged shard. See `feeding`."""

    reason: Text


class Unrecorded(Message):
    """This worker can't write its ledger any more: what is missing in it, and why."""

    reason: Text


class UnknownOperator(Message):
    """This worker has run an operator that is not known to be portable; under `--bits portable`."""

    operator: Name


class LoaderEnded(Message):
    """A DataLoader process of this worker has died, as `reason` says, and others were started in its place."""

    reason: Text


class Finished(Message):
    """The training script ran to its end. `fingerprint` is that of the replicated state.

    It ended in `view` with `round` not begun, after `step`; view 0: it has never been in one. `after` is the time
    since the end of the last step's inner loop.
    """

    fingerprint: Name = ""
    view: Count = 0
    round: Count = 0
    step: Count = 0
    after: StepTime = StepTime()


class NotFinite(Message):
    """The exact loss of `step` is not finite; that of the step before was. Everyone says so."""

    step: Count
    loss: Name


class SettingChanged(Message):
    """The script has altered one of torch's on this worker, as it was seen where the inner loop of `step` began."""

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


class LinesHeard(Message):
    """Answer to every `HEARD_EVERY`th heartbeat: `beat` is its number (see `reconnection`); and to an agent's report.

    `lines` is the newest line of metrics that the coordinator has: nobody needs to keep it, or older ones, any more.
    """

    beat: int = 0
    lines: tuple[int, int] = (-1, 0)


class JoinRefused(Message):
    """The worker is not let in; it exits with this reason."""

    reason: str


class Propose(Message):
    """Prepare this view. It takes effect when the control words agree on it (members), or at once (first view).

    Who begins a first view finds the checkpoint `newest`, or a newer one; or says that it does not (`Short`). `key` is
    that of the view's group, by which its members prove themselves to each other; it is there only on the wire.
    """

    view: View
    newest: Newest = Newest()
    key: bytes = b""

    def __repr__(self) -> str:  # without the key
        return f"Propose(view={self.view!r}, newest={self.newest!r})"


class Goodbye(Message):
    """Exit now with `code`: the others have switched, or the run is over. `save`: but save the state first."""

    reason: str
    code: int = 0
    save: bool = False


class Stacks(Message):
    """Write the stacks of all threads to the log; `reason` says why. No answer."""

    reason: str


class Note(Message):
    """To observers: a line of metrics.jsonl, as it is written there."""

    line: bytes


FromWorker = (
    Hello | Ready | Heartbeat | LeaveRequest | Lapsed | Publish | Prepared | PeerUnproved | Switched | Synced
    | Suspect | Stopped | ScriptFailed | DataUnavailable | Saved | Differs | Drifts | ShardsDiffer | Digests
    | Checkpointed | CannotStart | Restored | Unrecorded | LoaderEnded | Finished | NotFinite | SettingChanged
    | UnknownOperator | Spans | FromPool | ToHost | Report | Output
)  # fmt: skip
FromCoordinator = (
    Welcome | LinesHeard | JoinRefused | Propose | Published | Stop | Resume | Demoted | Goodbye
    | PreemptionDeadline | End | Compare | Stacks | Trace | Saver | Roster | Note | AgentOrder | FromHost
)  # fmt: skip
encode = msgspec.msgpack.Encoder().encode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
decode_from_coordinator = msgspec.msgpack.Decoder(FromCoordinator).decode
_PROSE = ("reason", "traceback", "unreached", "error")  # texts for people, whatever an exception has said
_PROSES = ("damaged", "differences")
_SHOWN_NAMES = ("operator", "setting", "before", "now")  # of torch's and the script's things
MAX_PROSES = 20


def sendable(message: Message) -> Message:
    """`message` as the coordinator takes it: texts for people are shortened.

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
        raise UsageError(f"this can't be sent to the coordinator: {why}; use smaller values, or fewer")
    return message
