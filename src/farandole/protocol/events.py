"""What can happen to a run: one struct an event, which is also its line of metrics.jsonl and its row of the journal.

Who decides writes a struct down, who looks reads one. Invariant: `encode` and `decode` are each other's inverse, so
nothing is lost or changed on its way through a file. A line is JSON: the event's name, which is that of the struct in
plain words, then its time and its fields. What is rare is left out where it is not so.

    {"event": "state lost", "time": 1764000000.5, "reason": "no worker that held the state is left"}

A reader takes what fits one of these structs: all its fields, of their types, and no others. What does not is damaged
(`metrics.py` counts it). A new event is a struct in one of these files, a member of `Event`, and a case in
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
    """`time`: Unix time in seconds, set by whoever writes the event down; who decides has no clock."""

    time: Seconds = 0.0


# --- record -----------------------------------------------------------------------------------------------------------
#
# Strangers, tickets, and the record itself.


class StrangerEvent(Recorded, frozen=True, kw_only=True):
    source: str
    reason: str


class StrangersEvent(Recorded, frozen=True, kw_only=True):
    """`more` of what `reason` says were not written down one by one."""

    reason: str
    more: Count


class MalformedEvent(Recorded, frozen=True, kw_only=True):
    source: str
    reason: str


class NotToldEvent(Recorded, frozen=True, kw_only=True):
    reason: str


class TicketIssuedEvent(Recorded, frozen=True, kw_only=True):
    ticket: str


class TicketRevokedEvent(Recorded, frozen=True, kw_only=True):
    ticket: str


class TicketsDamagedEvent(Recorded, frozen=True, kw_only=True):
    reason: str


class RunStartedEvent(Recorded, frozen=True, kw_only=True):
    """A coordinator has started that knows of none before it: views are numbered from 1 again, and no worker, view or
    stop of an earlier start of the run is in force. `version`: farandole's.
    """

    version: str


class CodeEditedEvent(Recorded, frozen=True, kw_only=True):
    """What is not what it was when the run was on before."""

    files: Names


class LinesLostEvent(Recorded, frozen=True, kw_only=True):
    """So many `lines` of metrics are missing, at least. `step`, `index`: of the last of them, where they stood here.

    `worker`: who was to send them, "" where that is not known.
    """

    worker: str
    lines: Count
    reason: str
    step: Step = -1
    index: Count = 0


class MetricsDamagedEvent(Recorded, frozen=True, kw_only=True):
    lines: Count


class JournalDamagedEvent(Recorded, frozen=True, kw_only=True):
    reason: str


class NotRecordedEvent(Recorded, frozen=True, kw_only=True):
    reason: str


class NotShippedEvent(Recorded, frozen=True, kw_only=True):
    """The state are not beside the checkpoints: another machine could not take the run over as it is now."""

    reason: str


class RecordedAgainEvent(Recorded, frozen=True, kw_only=True):
    """`missing` events are not in the journal."""

    missing: Count


# --- workers ----------------------------------------------------------------------------------------------------------
#
# Workers come and go.


class StartingEvent(Recorded, frozen=True, kw_only=True):
    worker: str
    host: str
    pid: Count


class WaitsEvent(Recorded, frozen=True, kw_only=True):
    """A guest is there before the first of the run's own workers, with which it is to be compared."""

    worker: str
    host: str


class ReadyEvent(Recorded, frozen=True, kw_only=True):
    """It asks in. `unreached`: why it can't write checkpoints."""

    worker: str
    host: str
    pid: Count
    unreached: str = ""


class RefusedEvent(Recorded, frozen=True, kw_only=True):
    worker: str
    host: str
    reason: str


class OtherCodeEvent(Recorded, frozen=True, kw_only=True):
    """It is let in although its code differs: in `what`."""

    worker: str
    what: Names


class ExitedEvent(Recorded, frozen=True, kw_only=True):
    """Its process has ended before it had asked in."""

    worker: str
    host: str
    reason: str


class StartFailedEvent(Recorded, frozen=True, kw_only=True):
    """No process came of what was to be `worker`: nobody was lost."""

    worker: str
    host: str
    reason: str


class NoCapacityEvent(Recorded, frozen=True, kw_only=True):
    """The pool would start more than it can. Once, until it could."""

    pool: str
    reason: str


class HostEvent(Recorded, frozen=True, kw_only=True):
    """What has become of a host of the pool; `host` "" for none, or all. `state`: joined, idle, leaving, gone, ..."""

    pool: str
    host: str
    state: str
    reason: str = ""


class PricedEvent(Recorded, frozen=True, kw_only=True):
    """A host of the pool is paid for by the hour since Unix time `since`; `dollars` are as of `day`, None: unknown."""

    pool: str
    host: str
    dollars: Dollars | None
    since: Seconds
    day: str


class AdviceEvent(Recorded, frozen=True, kw_only=True):
    """A host of the pool may go. Its workers stay."""

    pool: str
    host: str
    reason: str


class NoticeEvent(Recorded, frozen=True, kw_only=True):
    worker: str
    reason: str


class LeftEvent(Recorded, frozen=True, kw_only=True):
    worker: str
    host: str
    reason: str


class LostEvent(Recorded, frozen=True, kw_only=True):
    worker: str
    host: str
    reason: str


class UnfedEvent(Recorded, frozen=True, kw_only=True):
    """Its host can't get it the data: it goes, or where nobody else is left the run ends."""

    worker: str
    host: str
    reason: str


class DiedEvent(Recorded, frozen=True, kw_only=True):
    """What has become of the process of one that was lost before."""

    worker: str
    reason: str


class ExpelledEvent(Recorded, frozen=True, kw_only=True):
    worker: str
    reason: str


class ScaleEvent(Recorded, frozen=True, kw_only=True):
    wanted: Count
    before: Count


class NoReplacementsEvent(Recorded, frozen=True, kw_only=True):
    wanted: Count
    reason: str


class WorkerTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a worker's time has gone to since its process began. `step`: that it was in, -1 for none."""

    host: str
    pool: str
    step: Step
    seconds: dict[TimeClass, Seconds]


class TimeSpentEvent(Recorded, frozen=True, kw_only=True):
    """By worker. Those in `ended` are gone, and it is the last that is written down of them: see `accounting`."""

    workers: dict[str, WorkerTime]
    ended: Names


# --- numerics ---------------------------------------------------------------------------------------------------------
#
# What the bits of a run depend on, and when they are not promised any more.


class NumericsEvent(Recorded, frozen=True, kw_only=True):
    """Those of the run's first worker, which hold for the run: versions, settings, and what each operation gives."""

    worker: str
    facts: dict[str, str]


class OtherVersionsEvent(Recorded, frozen=True, kw_only=True):
    """It is let in although it has other libraries: all operations of the fingerprint agree."""

    worker: str
    what: Names


class SettingChangedEvent(Recorded, frozen=True, kw_only=True):
    """The script has altered a setting of torch's; `worker` was the first to say so. Once for all who say the same."""

    worker: str
    step: Step
    setting: str
    before: str
    now: str


class UnknownOperatorEvent(Recorded, frozen=True, kw_only=True):
    """It is not known to have the same bits on all CPUs; `worker` was the first to say that it runs."""

    worker: str
    operator: str


class BitsNotPromisedEvent(Recorded, frozen=True, kw_only=True):
    """Of the steps after `step`, since `worker` differs in `what`."""

    worker: str
    step: Step
    what: Names


# --- training ---------------------------------------------------------------------------------------------------------
#
# Views, what goes wrong in the training, and its end.

Code = Annotated[int, msgspec.Meta(ge=-255, le=255)]  # that a process exits with


# --- views -----------------------------------------------------------------------------------------------------


class ProposedEvent(Recorded, frozen=True, kw_only=True):
    view: Count
    members: Names
    cause: str


class ViewEvent(Recorded, frozen=True, kw_only=True):
    """It is in force from `step` on. `outcome` is that of the step's exchange, where the view before was stopped."""

    view: Count
    members: Names
    round: Count
    step: Step
    cause: str
    outcome: Literal["", "commit", "redo"] = ""


class SharesEvent(Recorded, frozen=True, kw_only=True):
    """How shards are dealt in `view`: per mille of the fastest worker's."""

    view: Count
    step: Step
    shares: dict[str, Share]
    reason: str


class OutOfReachEvent(Recorded, frozen=True, kw_only=True):
    workers: Names
    reason: str


class CoordinatorBackEvent(Recorded, frozen=True, kw_only=True):
    """Another process has taken over, and waits for `workers`."""

    workers: Names


class StateLostEvent(Recorded, frozen=True, kw_only=True):
    reason: str


class StrangerInGroupEvent(Recorded, frozen=True, kw_only=True):
    """Who has come between `worker` and `peer`; where they are one, before all others."""

    worker: str
    peer: str
    address: str
    view: Count
    again_s: Seconds


# --- what goes wrong in the training ---------------------------------------------------------------------------


class FailedEvent(Recorded, frozen=True, kw_only=True):
    worker: str
    host: str
    traceback: str


class CallsDifferEvent(Recorded, frozen=True, kw_only=True):
    workers: Names
    reason: str


class ReplicasDifferEvent(Recorded, frozen=True, kw_only=True):
    """`first`: the first tensor or value that does, "" while that is not known. `suspects`: each worker that could have
    caused it alone, where that is known.
    """

    workers: Names
    first: str
    reason: str
    suspects: Names = ()


class ComputesWrongEvent(Recorded, frozen=True, kw_only=True):
    """Two others have found the same of one shard, and it another. It leaves, and its host is not asked for again."""

    worker: str
    host: str
    reason: str


class DriftingEvent(Recorded, frozen=True, kw_only=True):
    """Under `--bits any`: the replicas of `workers` are unlike the others', in `step` for the `times`-th time."""

    workers: Names
    step: Step
    times: Count


class UndecidedEvent(Recorded, frozen=True, kw_only=True):
    """`workers` have found different things of one shard, and nobody can tell who is right."""

    workers: Names
    reason: str


class NotFiniteEvent(Recorded, frozen=True, kw_only=True):
    worker: str
    step: Step
    loss: str


class StalledEvent(Recorded, frozen=True, kw_only=True):
    """The training has not moved for `seconds`; `workers` do not say that they wait for others."""

    step: Step
    seconds: Seconds
    workers: Names
    reason: str


class LoaderReplacedEvent(Recorded, frozen=True, kw_only=True):
    worker: str
    reason: str


class LedgerIncompleteEvent(Recorded, frozen=True, kw_only=True):
    worker: str
    reason: str


# --- the end ---------------------------------------------------------------------------------------------------


class StoppingEvent(Recorded, frozen=True, kw_only=True):
    reason: str


class CutShortEvent(Recorded, frozen=True, kw_only=True):
    """The stop does not wait for `workers` any more."""

    step: Step
    workers: Names
    reason: str


class HungEvent(Recorded, frozen=True, kw_only=True):
    worker: str
    host: str
    reason: str


class FinishedEvent(Recorded, frozen=True, kw_only=True):
    """The script has run to its end everywhere; where the states are not `equal`, `fingerprint` has all of theirs.

    `seconds` and its parts: from the end of the last step to the script's, see `StepTime`.
    """

    fingerprint: str
    equal: bool
    seconds: Seconds = 0.0
    evaluation_s: Seconds = 0.0
    once_s: Seconds = 0.0
    pause_s: Seconds = 0.0


class OverEvent(Recorded, frozen=True, kw_only=True):
    code: Code
    reason: str


# --- checkpoints ------------------------------------------------------------------------------------------------------
#
# Checkpoints: written, gone on from, and who writes them.


class CheckpointEvent(Recorded, frozen=True, kw_only=True):
    """`seconds` were taken to write `bytes`, behind the training, which stood still for `copy_ms`."""

    worker: str
    step: Step
    path: str
    bytes: Count
    seconds: Seconds
    copy_ms: Seconds
    finite: bool = True


class CheckpointFailedEvent(Recorded, frozen=True, kw_only=True):
    worker: str
    step: Step
    reason: str


class CheckpointDamagedEvent(Recorded, frozen=True, kw_only=True):
    """One that was passed over."""

    worker: str
    reason: str


class ResumedEvent(Recorded, frozen=True, kw_only=True):
    """`path`: "" for the script's own beginning. `last_finite`: the newest checkpoint of a finite state, else."""

    worker: str
    step: Step
    path: str
    differences: Names
    finite: bool = True
    last_finite: str = ""


class NothingLeftEvent(Recorded, frozen=True, kw_only=True):
    worker: str
    step: Step
    path: str


class SavedEvent(Recorded, frozen=True, kw_only=True):
    """The last checkpoint, written in `seconds`; `whole`: of a whole step, so that the run can go on from it."""

    worker: str
    path: str
    whole: bool
    finite: bool = True
    seconds: Seconds = 0.0


class SavedElsewhereEvent(Recorded, frozen=True, kw_only=True):
    """... but not in the run's store."""

    worker: str
    host: str
    path: str
    whole: bool
    finite: bool = True
    seconds: Seconds = 0.0


class NotSavedEvent(Recorded, frozen=True, kw_only=True):
    """`worker`: "" where nobody is left to do it."""

    reason: str
    worker: str = ""


class SaverEvent(Recorded, frozen=True, kw_only=True):
    worker: str
    before: str
    at_once: bool


class NoSaverEvent(Recorded, frozen=True, kw_only=True):
    reason: str


class NoLeaderEvent(Recorded, frozen=True, kw_only=True):
    reason: str


class ShortEvent(Recorded, frozen=True, kw_only=True):
    """It was to begin the first view, and finds less than the run has saved."""

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
    | SettingChangedEvent | BitsNotPromisedEvent | UnknownOperatorEvent | LinesLostEvent | MetricsDamagedEvent
    | JournalDamagedEvent | RunStartedEvent | NotRecordedEvent | RecordedAgainEvent | NotShippedEvent
)  # fmt: skip
encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(Event).decode


def name_of(event: Event | type[Recorded]) -> str:
    """In plain words, as in a line."""
    return str(event.__struct_config__.tag)


def fields_of(event: Event) -> dict[str, Any]:
    """What its line says besides its name and time."""
    return {k: v for k, v in msgspec.to_builtins(event).items() if k not in ("event", "time")}


def restored(fields: Mapping[str, Any]) -> Event:
    """The event that a line's name, time and fields are.

    Raises:
        msgspec.ValidationError: they are none's.
    """
    return msgspec.convert(fields, Event)
