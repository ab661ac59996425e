"""The events of a run: one struct for each event, which is also its line of metrics.jsonl and its row of the journal.

The coordinator writes structs, and readers get structs. Invariant: `encode` and `decode` are each other's inverse, so
nothing is lost or changed in a file. A line is JSON: the event's name, which is that of the struct in plain words, then
its time and its fields. A field that has its default value may be left out.

    {"event": "state lost", "time": 1764000000.5, "reason": "no worker that held the state is left"}

A reader accepts a line that fits one of these structs: all its fields, of their types, and no others. Other lines are
damaged (`metrics.py` counts them). A new event is a struct in this file, a member of `Event`, and a case in
`observe/text.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from farandole.protocol.values import Count, Dollars, Seconds, Share, TimeClass

# --- base -------------------------------------------------------------------------------------------------------------
#
# What all events have: a name and a time.

Step = Annotated[int, msgspec.Meta(ge=-1, le=2**53)]  # -1: before the first
Names = tuple[str, ...]


def _in_words(struct: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", " ", struct.removesuffix("Event")).lower()


class Recorded(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    tag_field="event",
    tag=_in_words,
):
    """Base of all events. `time`: Unix time in seconds, set when the event is written; its author has no clock."""

    time: Seconds = 0.0


# --- record -----------------------------------------------------------------------------------------------------------
#
# Strangers, tickets, and the record itself.


class StrangerEvent(Recorded, frozen=True, kw_only=True):
    """A connection from `source` did not authenticate, for the `reason`, and was closed."""

    source: str
    reason: str


class StrangersEvent(Recorded, frozen=True, kw_only=True):
    """`more` unauthenticated connections with this `reason` were not recorded one by one."""

    reason: str
    more: Count


class MalformedEvent(Recorded, frozen=True, kw_only=True):
    """An authenticated connection from `source` sent what the protocol does not allow, and was closed."""

    source: str
    reason: str


class NotToldEvent(Recorded, frozen=True, kw_only=True):
    """The coordinator could not write or publish something; the run is not affected. Its log has the traceback."""

    reason: str


class TicketIssuedEvent(Recorded, frozen=True, kw_only=True):
    """`farandole ticket new` has issued `ticket`."""

    ticket: str


class TicketRevokedEvent(Recorded, frozen=True, kw_only=True):
    """`farandole ticket revoke` has revoked `ticket`: it admits nobody any more."""

    ticket: str


class TicketsDamagedEvent(Recorded, frozen=True, kw_only=True):
    """The file of issued tickets can't be read. Tickets that the coordinator already knows stay valid."""

    reason: str


class RunStartedEvent(Recorded, frozen=True, kw_only=True):
    """A coordinator has started without the state of an earlier one: views are numbered from 1 again, and no worker,
    view or stop of an earlier start of the run is in force. `version`: of farandole.
    """

    version: str


class CodeEditedEvent(Recorded, frozen=True, kw_only=True):
    """Files of the run's code that have changed since the run was last active."""

    files: Names


class LinesLostEvent(Recorded, frozen=True, kw_only=True):
    """At least `lines` lines of metrics are missing. `step`, `index`: those of the last one, if they belong here.

    `worker`: the one that had to send them, "" if that is not known.
    """

    worker: str
    lines: Count
    reason: str
    step: Step = -1
    index: Count = 0


class ValuesDifferEvent(Recorded, frozen=True, kw_only=True):
    """`worker` has passed another `value` of `name` to `run.log` than rank 0, whose value is `written`."""

    worker: str
    step: Step
    name: str
    value: str
    written: str


class MetricsDamagedEvent(Recorded, frozen=True, kw_only=True):
    """`lines` of metrics.jsonl fit no event and no line of metrics, and are skipped."""

    lines: Count


class JournalDamagedEvent(Recorded, frozen=True, kw_only=True):
    """The journal can't be read. It is set aside, and a new one is begun."""

    reason: str


class NotRecordedEvent(Recorded, frozen=True, kw_only=True):
    """The run's folder can't be written, so lines, output and checkpoints are missing. Training continues."""

    reason: str


class NotShippedEvent(Recorded, frozen=True, kw_only=True):
    """The coordinator state is not beside the checkpoints: another machine could not take the run over as it is now."""

    reason: str


class RecordedAgainEvent(Recorded, frozen=True, kw_only=True):
    """`missing` events are not in the journal."""

    missing: Count


# --- workers ----------------------------------------------------------------------------------------------------------
#
# Workers come and go.


class StartingEvent(Recorded, frozen=True, kw_only=True):
    """The process of `worker` on `host` has connected to the coordinator. It may not have asked for admission yet."""

    worker: str
    host: str
    pid: Count


class WaitsEvent(Recorded, frozen=True, kw_only=True):
    """An external worker waits for the first of the run's own workers, with which it must be compared."""

    worker: str
    host: str


class ReadyEvent(Recorded, frozen=True, kw_only=True):
    """A worker asks for admission. `unreached`: why it can't write checkpoints, "" if it can."""

    worker: str
    host: str
    pid: Count
    unreached: str = ""


class RefusedEvent(Recorded, frozen=True, kw_only=True):
    """`worker` asked for admission and is not admitted; `reason` names the first difference from the run."""

    worker: str
    host: str
    reason: str


class OtherCodeEvent(Recorded, frozen=True, kw_only=True):
    """A worker was admitted although its code differs in `what`."""

    worker: str
    what: Names


class ExitedEvent(Recorded, frozen=True, kw_only=True):
    """The process of a worker ended before it asked for admission."""

    worker: str
    host: str
    reason: str


class StartFailedEvent(Recorded, frozen=True, kw_only=True):
    """The process of `worker` could not be started. It does not count as a lost worker."""

    worker: str
    host: str
    reason: str


class NoCapacityEvent(Recorded, frozen=True, kw_only=True):
    """The pool can't start all the workers that it should. Reported once, until it could."""

    pool: str
    reason: str


class HostEvent(Recorded, frozen=True, kw_only=True):
    """The state of a host of the pool: joined, idle, leaving, gone, ...; `host` "" stands for none, or all."""

    pool: str
    host: str
    state: str
    reason: str = ""


class PricedEvent(Recorded, frozen=True, kw_only=True):
    """A host of the pool costs `dollars` an hour since Unix time `since`, as of `day`; None: the price is unknown."""

    pool: str
    host: str
    dollars: Dollars | None
    since: Seconds
    day: str


class AdviceEvent(Recorded, frozen=True, kw_only=True):
    """Rebalance advice: a host of the pool may be preempted. Its workers stay."""

    pool: str
    host: str
    reason: str


class NoticeEvent(Recorded, frozen=True, kw_only=True):
    """`worker` will be preempted: it leaves between two steps, and a replacement is requested."""

    worker: str
    reason: str


class LeftEvent(Recorded, frozen=True, kw_only=True):
    """`worker` has left the run as planned: after a preemption notice, a release, or a smaller target."""

    worker: str
    host: str
    reason: str


class LostEvent(Recorded, frozen=True, kw_only=True):
    """`worker` is gone without a planned leave: killed, crashed, or unreachable. The others compute its shards."""

    worker: str
    host: str
    reason: str


class UnfedEvent(Recorded, frozen=True, kw_only=True):
    """The data is unavailable on the worker's host: the worker leaves, or the run ends if no other worker is left."""

    worker: str
    host: str
    reason: str


class DiedEvent(Recorded, frozen=True, kw_only=True):
    """How the process of a worker ended that was lost before."""

    worker: str
    reason: str


class ExpelledEvent(Recorded, frozen=True, kw_only=True):
    """`worker` will be removed from the view for this `reason`, whatever it reports itself."""

    worker: str
    reason: str


class ScaleEvent(Recorded, frozen=True, kw_only=True):
    """The target number of workers changed from `before` to `wanted`."""

    wanted: Count
    before: Count


class NoReplacementsEvent(Recorded, frozen=True, kw_only=True):
    """Workers are lost or refused again and again, so the target was lowered to `wanted`."""

    wanted: Count
    reason: str


class SentBytes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bytes that a worker sent to another host since its process began: in `exchange` rounds, and as `state`."""

    exchange: Count = 0
    state: Count = 0


class WorkerTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds that a worker spent in each time class since its process began. `step`: its current one, -1 for none.

    `sent`: what it sent to each other host; None: unknown, as in files of earlier versions. `zone`: that of its host,
    "" if it reports none.
    """

    host: str
    pool: str
    step: Step
    seconds: dict[TimeClass, Seconds]
    sent: dict[str, SentBytes] | None = None
    zone: str = ""


class TimeSpentEvent(Recorded, frozen=True, kw_only=True):
    """The time spent, by worker. For workers in `ended`, which have left, this is the last record."""

    workers: dict[str, WorkerTime]
    ended: Names


# --- numerics ---------------------------------------------------------------------------------------------------------
#
# What the bits of a run depend on, and when they are not promised any more.


class NumericsEvent(Recorded, frozen=True, kw_only=True):
    """The facts of the run's first worker, which hold for the run: versions, settings, each operation's fingerprint."""

    worker: str
    facts: dict[str, str]


class OtherVersionsEvent(Recorded, frozen=True, kw_only=True):
    """A worker was admitted although its libraries differ in `what`: all operations of the fingerprint agree."""

    worker: str
    what: Names


class SettingChangedEvent(Recorded, frozen=True, kw_only=True):
    """The script has changed a setting of torch; `worker` was the first to report it. Equal reports are dropped."""

    worker: str
    step: Step
    setting: str
    before: str
    now: str


class UnknownOperatorEvent(Recorded, frozen=True, kw_only=True):
    """An operator runs that is not known to give the same bits on all CPUs; `worker` was the first to report it."""

    worker: str
    operator: str


class BitsNotPromisedEvent(Recorded, frozen=True, kw_only=True):
    """Results after `step` are not reproducible, since the admitted `worker` differs in `what`."""

    worker: str
    step: Step
    what: Names


# --- training ---------------------------------------------------------------------------------------------------------
#
# Views, what goes wrong in the training, and its end.

Code = Annotated[int, msgspec.Meta(ge=-255, le=255)]  # exit code of a process


# --- views -----------------------------------------------------------------------------------------------------


class ProposedEvent(Recorded, frozen=True, kw_only=True):
    """View `view` of `members` is being prepared: they connect in the background while training continues."""

    view: Count
    members: Names
    cause: str


class ViewEvent(Recorded, frozen=True, kw_only=True):
    """A view is in force from `step` on. `outcome`: that of the step's exchange, if the previous view was stopped."""

    view: Count
    members: Names
    round: Count
    step: Step
    cause: str
    outcome: Literal["", "commit", "redo"] = ""


class SharesEvent(Recorded, frozen=True, kw_only=True):
    """The shares of shards in `view`, in per mille of the fastest worker's."""

    view: Count
    step: Step
    shares: dict[str, Share]
    reason: str


class OutOfReachEvent(Recorded, frozen=True, kw_only=True):
    """The coordinator has no contact with `workers`; `reason` says what happens until they are back."""

    workers: Names
    reason: str


class CoordinatorBackEvent(Recorded, frozen=True, kw_only=True):
    """Another coordinator process has taken over, and waits for `workers` to reconnect."""

    workers: Names


class StateLostEvent(Recorded, frozen=True, kw_only=True):
    """No worker that held the state is left. The next workers continue from the newest checkpoint."""

    reason: str


class StrangerInGroupEvent(Recorded, frozen=True, kw_only=True):
    """An unauthenticated party at `address` is in the connection of `worker` to `peer`; if they are equal, it keeps
    `worker` from listening. `again_s`: seconds until the next attempt.
    """

    worker: str
    peer: str
    address: str
    view: Count
    again_s: Seconds


# --- what goes wrong in the training ---------------------------------------------------------------------------


class FailedEvent(Recorded, frozen=True, kw_only=True):
    """The script failed on `worker` with `traceback`, or an error of farandole ended the worker."""

    worker: str
    host: str
    traceback: str


class CallsDifferEvent(Recorded, frozen=True, kw_only=True):
    """The scripts of `workers` make different calls at the same place; `reason` names both. The run ends."""

    workers: Names
    reason: str


class ReplicasDifferEvent(Recorded, frozen=True, kw_only=True):
    """The replicas of `workers` differ from the others'. `first`: the first tensor or value that differs, "" if that is
    not known. `suspects`: each worker that could have caused it alone, if that is known.
    """

    workers: Names
    first: str
    reason: str
    suspects: Names = ()


class ComputesWrongEvent(Recorded, frozen=True, kw_only=True):
    """Two other workers computed the same result of one shard, and `worker` another. It leaves, and its host is not
    used again.
    """

    worker: str
    host: str
    reason: str


class DriftingEvent(Recorded, frozen=True, kw_only=True):
    """Under `--bits any`: the replicas of `workers` differ from the others' in `step`, for the `times`-th time."""

    workers: Names
    step: Step
    times: Count


class UndecidedEvent(Recorded, frozen=True, kw_only=True):
    """`workers` computed different results of one shard, and no third worker can decide who is right."""

    workers: Names
    reason: str


class NotFiniteEvent(Recorded, frozen=True, kw_only=True):
    """The loss of `step` is NaN or infinite. Recorded once for each change from finite."""

    worker: str
    step: Step
    loss: str


class StalledEvent(Recorded, frozen=True, kw_only=True):
    """The training has made no progress for `seconds`; `workers` do not report that they wait for others."""

    step: Step
    seconds: Seconds
    workers: Names
    reason: str


class LoaderReplacedEvent(Recorded, frozen=True, kw_only=True):
    """A DataLoader process of `worker` died, and was started again. No sample is lost."""

    worker: str
    reason: str


class LedgerIncompleteEvent(Recorded, frozen=True, kw_only=True):
    """`worker` can't write its ledger, so that ledger lacks records. Training continues."""

    worker: str
    reason: str


# --- the end ---------------------------------------------------------------------------------------------------


class StoppingEvent(Recorded, frozen=True, kw_only=True):
    """The run is about to end: `farandole stop`, a signal, a limit or a failure decided it."""

    reason: str


class CutShortEvent(Recorded, frozen=True, kw_only=True):
    """The requested end of the run does not wait for `workers` any more."""

    step: Step
    workers: Names
    reason: str


class HungEvent(Recorded, frozen=True, kw_only=True):
    """The script of `worker` did not end although its last step was done, and the run did not wait for it."""

    worker: str
    host: str
    reason: str


class FinishedEvent(Recorded, frozen=True, kw_only=True):
    """The script ran to its end on all workers. If their states are not `equal`, `fingerprint` holds all fingerprints.

    `seconds` and its parts: from the end of the last step to the script's, see `StepTime`.
    """

    fingerprint: str
    equal: bool
    seconds: Seconds = 0.0
    evaluation_s: Seconds = 0.0
    once_s: Seconds = 0.0
    pause_s: Seconds = 0.0


class OverEvent(Recorded, frozen=True, kw_only=True):
    """The run is over. `code`: exit code of `farandole run`."""

    code: Code
    reason: str


# --- checkpoints ------------------------------------------------------------------------------------------------------
#
# Checkpoints: written, gone on from, and who writes them.


class CheckpointEvent(Recorded, frozen=True, kw_only=True):
    """A checkpoint of `bytes` was written in `seconds`, in the background; training was blocked for `copy_ms` ms."""

    worker: str
    step: Step
    path: str
    bytes: Count
    seconds: Seconds
    copy_ms: Seconds
    finite: bool = True


class CheckpointFailedEvent(Recorded, frozen=True, kw_only=True):
    """The checkpoint of `step` could not be written. Training continues; the next one is tried when due."""

    worker: str
    step: Step
    reason: str


class CheckpointDamagedEvent(Recorded, frozen=True, kw_only=True):
    """A damaged checkpoint was skipped."""

    worker: str
    reason: str


class ResumedEvent(Recorded, frozen=True, kw_only=True):
    """The run continues from `path`; "": from the script's initial state. `last_finite`: the newest checkpoint with a
    finite state, if this one is not `finite`.
    """

    worker: str
    step: Step
    path: str
    differences: Names
    finite: bool = True
    last_finite: str = ""


class NothingLeftEvent(Recorded, frozen=True, kw_only=True):
    """The checkpoint at `path` is already at the end that the script sets, so no step is left to train."""

    worker: str
    step: Step
    path: str


class SavedEvent(Recorded, frozen=True, kw_only=True):
    """The last checkpoint, written in `seconds`. `whole`: it is of a complete step, so the run can continue from it."""

    worker: str
    path: str
    whole: bool
    finite: bool = True
    seconds: Seconds = 0.0


class SavedElsewhereEvent(Recorded, frozen=True, kw_only=True):
    """The last checkpoint was written to `path` on `host`, but not to the run's store."""

    worker: str
    host: str
    path: str
    whole: bool
    finite: bool = True
    seconds: Seconds = 0.0


class NotSavedEvent(Recorded, frozen=True, kw_only=True):
    """The last checkpoint was not written. `worker`: "" if no worker is left to write it."""

    reason: str
    worker: str = ""


class SaverEvent(Recorded, frozen=True, kw_only=True):
    """`worker` writes the checkpoints instead of `before`. `at_once`: now, not from the next one on."""

    worker: str
    before: str
    at_once: bool


class NoSaverEvent(Recorded, frozen=True, kw_only=True):
    """No worker can write checkpoints to the run's store."""

    reason: str


class NoLeaderEvent(Recorded, frozen=True, kw_only=True):
    """The first view can't begin: no worker that is ready reaches the place of the checkpoints."""

    reason: str


class ShortEvent(Recorded, frozen=True, kw_only=True):
    """A worker can't begin the first view: it finds an older checkpoint than the run has saved."""

    worker: str
    host: str
    reason: str


# --- all of them ------------------------------------------------------------------------------------------------------

Event = (
    StartingEvent | WaitsEvent | ReadyEvent | RefusedEvent | OtherCodeEvent | ExitedEvent | StartFailedEvent
    | NoCapacityEvent | AdviceEvent | HostEvent | NoticeEvent | LeftEvent | LostEvent | UnfedEvent | TimeSpentEvent
    | PricedEvent | DiedEvent | ExpelledEvent | ScaleEvent | NoReplacementsEvent | ProposedEvent | ViewEvent
    | SharesEvent | OutOfReachEvent | CoordinatorBackEvent | StateLostEvent | StrangerInGroupEvent | CheckpointEvent
    | CheckpointFailedEvent | CheckpointDamagedEvent | ResumedEvent | NothingLeftEvent | SavedEvent
    | SavedElsewhereEvent | NotSavedEvent | SaverEvent | NoSaverEvent | NoLeaderEvent | ShortEvent | FailedEvent
    | CallsDifferEvent | ReplicasDifferEvent | ComputesWrongEvent | DriftingEvent | UndecidedEvent | NotFiniteEvent
    | StalledEvent | LoaderReplacedEvent | LedgerIncompleteEvent | StoppingEvent | CutShortEvent | HungEvent
    | FinishedEvent | OverEvent | StrangerEvent | StrangersEvent | MalformedEvent | NotToldEvent | TicketIssuedEvent
    | TicketRevokedEvent | TicketsDamagedEvent | CodeEditedEvent | NumericsEvent | OtherVersionsEvent
    | SettingChangedEvent | BitsNotPromisedEvent | UnknownOperatorEvent | LinesLostEvent | ValuesDifferEvent
    | MetricsDamagedEvent | JournalDamagedEvent | RunStartedEvent | NotRecordedEvent | RecordedAgainEvent
    | NotShippedEvent
)  # fmt: skip
encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(Event).decode


def name_of(event: Event | type[Recorded]) -> str:
    """Return the name of an event, as it is in a line."""
    return str(event.__struct_config__.tag)


def fields_of(event: Event) -> dict[str, Any]:
    """Return the fields of an event's line, without its name and time."""
    return {k: v for k, v in msgspec.to_builtins(event).items() if k not in ("event", "time")}


def restored(fields: Mapping[str, Any]) -> Event:
    """Return the event with the name, time and fields of a line.

    Raises:
        msgspec.ValidationError: no event has these fields.
    """
    return msgspec.convert(fields, Event)
