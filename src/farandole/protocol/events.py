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
    return re.sub(r"(?<!^)(?=[A-Z])", " ", struct).lower()


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


class Stranger(Recorded, frozen=True, kw_only=True):
    source: str
    reason: str


class Strangers(Recorded, frozen=True, kw_only=True):
    """`more` of what `reason` says were not written down one by one."""

    reason: str
    more: Count


class Malformed(Recorded, frozen=True, kw_only=True):
    source: str
    reason: str


class NotTold(Recorded, frozen=True, kw_only=True):
    reason: str


class TicketIssued(Recorded, frozen=True, kw_only=True):
    ticket: str


class TicketRevoked(Recorded, frozen=True, kw_only=True):
    ticket: str


class TicketsDamaged(Recorded, frozen=True, kw_only=True):
    reason: str


class RunStarted(Recorded, frozen=True, kw_only=True):
    """A coordinator has started that knows of none before it: views are numbered from 1 again, and no worker, view or
    stop of an earlier start of the run is in force. `version`: farandole's.
    """

    version: str


class CodeEdited(Recorded, frozen=True, kw_only=True):
    """What is not what it was when the run was on before."""

    files: Names


class LinesLost(Recorded, frozen=True, kw_only=True):
    """So many `lines` of metrics are missing, at least. `step`, `index`: of the last of them, where they stood here.

    `worker`: who was to send them, "" where that is not known.
    """

    worker: str
    lines: Count
    reason: str
    step: Step = -1
    index: Count = 0


class MetricsDamaged(Recorded, frozen=True, kw_only=True):
    lines: Count


class JournalDamaged(Recorded, frozen=True, kw_only=True):
    reason: str


class NotRecorded(Recorded, frozen=True, kw_only=True):
    reason: str


class NotShipped(Recorded, frozen=True, kw_only=True):
    """The books are not beside the checkpoints: another machine could not take the run over as it is now."""

    reason: str


class RecordedAgain(Recorded, frozen=True, kw_only=True):
    """`missing` events are not in the journal."""

    missing: Count


# --- workers ----------------------------------------------------------------------------------------------------------
#
# Workers come and go.


class Starting(Recorded, frozen=True, kw_only=True):
    worker: str
    host: str
    pid: Count


class Waits(Recorded, frozen=True, kw_only=True):
    """A guest is there before the first of the run's own workers, with which it is to be compared."""

    worker: str
    host: str


class Ready(Recorded, frozen=True, kw_only=True):
    """It asks in. `unreached`: why it can't write checkpoints."""

    worker: str
    host: str
    pid: Count
    unreached: str = ""


class Refused(Recorded, frozen=True, kw_only=True):
    worker: str
    host: str
    reason: str


class OtherCode(Recorded, frozen=True, kw_only=True):
    """It is let in although its code differs: in `what`."""

    worker: str
    what: Names


class Exited(Recorded, frozen=True, kw_only=True):
    """Its process has ended before it had asked in."""

    worker: str
    host: str
    reason: str


class StartFailed(Recorded, frozen=True, kw_only=True):
    """No process came of what was to be `worker`: nobody was lost."""

    worker: str
    host: str
    reason: str


class NoCapacity(Recorded, frozen=True, kw_only=True):
    """The pool would start more than it can. Once, until it could."""

    pool: str
    reason: str


class Host(Recorded, frozen=True, kw_only=True):
    """What has become of a host of the pool; `host` "" for none, or all. `state`: joined, idle, leaving, gone, ..."""

    pool: str
    host: str
    state: str
    reason: str = ""


class Priced(Recorded, frozen=True, kw_only=True):
    """A host of the pool is paid for by the hour since Unix time `since`; `dollars` are as of `day`, None: unknown."""

    pool: str
    host: str
    dollars: Dollars | None
    since: Seconds
    day: str


class Advice(Recorded, frozen=True, kw_only=True):
    """A host of the pool may go. Its workers stay."""

    pool: str
    host: str
    reason: str


class Notice(Recorded, frozen=True, kw_only=True):
    worker: str
    reason: str


class Left(Recorded, frozen=True, kw_only=True):
    worker: str
    host: str
    reason: str


class Lost(Recorded, frozen=True, kw_only=True):
    worker: str
    host: str
    reason: str


class Unfed(Recorded, frozen=True, kw_only=True):
    """Its host can't get it the data: it goes, or where nobody else is left the run ends."""

    worker: str
    host: str
    reason: str


class Died(Recorded, frozen=True, kw_only=True):
    """What has become of the process of one that was lost before."""

    worker: str
    reason: str


class Expelled(Recorded, frozen=True, kw_only=True):
    worker: str
    reason: str


class Scale(Recorded, frozen=True, kw_only=True):
    wanted: Count
    before: Count


class NoReplacements(Recorded, frozen=True, kw_only=True):
    wanted: Count
    reason: str


class WorkerTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a worker's time has gone to since its process began. `step`: that it was in, -1 for none."""

    host: str
    pool: str
    step: Step
    seconds: dict[TimeClass, Seconds]


class TimeSpent(Recorded, frozen=True, kw_only=True):
    """By worker. Those in `ended` are gone, and it is the last that is written down of them: see `accounting`."""

    workers: dict[str, WorkerTime]
    ended: Names


# --- numerics ---------------------------------------------------------------------------------------------------------
#
# What the bits of a run depend on, and when they are not promised any more.


class Numerics(Recorded, frozen=True, kw_only=True):
    """Those of the run's first worker, which hold for the run: versions, settings, and what each operation gives."""

    worker: str
    facts: dict[str, str]


class OtherVersions(Recorded, frozen=True, kw_only=True):
    """It is let in although it has other libraries: all operations of the fingerprint agree."""

    worker: str
    what: Names


class SettingChanged(Recorded, frozen=True, kw_only=True):
    """The script has altered a setting of torch's; `worker` was the first to say so. Once for all who say the same."""

    worker: str
    step: Step
    setting: str
    before: str
    now: str


class UnknownOperator(Recorded, frozen=True, kw_only=True):
    """It is not known to have the same bits on all CPUs; `worker` was the first to say that it runs."""

    worker: str
    operator: str


class BitsNotPromised(Recorded, frozen=True, kw_only=True):
    """Of the steps after `step`, since `worker` differs in `what`."""

    worker: str
    step: Step
    what: Names


# --- training ---------------------------------------------------------------------------------------------------------
#
# Views, what goes wrong in the training, and its end.

Code = Annotated[int, msgspec.Meta(ge=-255, le=255)]  # that a process exits with


# --- views -----------------------------------------------------------------------------------------------------


class Proposed(Recorded, frozen=True, kw_only=True):
    view: Count
    members: Names
    cause: str


class View(Recorded, frozen=True, kw_only=True):
    """It is in force from `step` on. `outcome` is that of the step's exchange, where the view before was stopped."""

    view: Count
    members: Names
    round: Count
    step: Step
    cause: str
    outcome: Literal["", "commit", "redo"] = ""


class Shares(Recorded, frozen=True, kw_only=True):
    """How shards are dealt in `view`: per mille of the fastest worker's."""

    view: Count
    step: Step
    shares: dict[str, Share]
    reason: str


class OutOfReach(Recorded, frozen=True, kw_only=True):
    workers: Names
    reason: str


class CoordinatorBack(Recorded, frozen=True, kw_only=True):
    """Another process has taken over, and waits for `workers`."""

    workers: Names


class StateLost(Recorded, frozen=True, kw_only=True):
    reason: str


class StrangerInGroup(Recorded, frozen=True, kw_only=True):
    """Who has come between `worker` and `peer`; where they are one, before all others."""

    worker: str
    peer: str
    address: str
    view: Count
    again_s: Seconds


# --- what goes wrong in the training ---------------------------------------------------------------------------


class Failed(Recorded, frozen=True, kw_only=True):
    worker: str
    host: str
    traceback: str


class CallsDiffer(Recorded, frozen=True, kw_only=True):
    workers: Names
    reason: str


class ReplicasDiffer(Recorded, frozen=True, kw_only=True):
    """`first`: the first tensor or value that does, "" while that is not known. `suspects`: each worker that could have
    caused it alone, where that is known.
    """

    workers: Names
    first: str
    reason: str
    suspects: Names = ()


class ComputesWrong(Recorded, frozen=True, kw_only=True):
    """Two others have found the same of one shard, and it another. It leaves, and its host is not asked for again."""

    worker: str
    host: str
    reason: str


class Drifting(Recorded, frozen=True, kw_only=True):
    """Under `--bits any`: the replicas of `workers` are unlike the others', in `step` for the `times`-th time."""

    workers: Names
    step: Step
    times: Count


class Undecided(Recorded, frozen=True, kw_only=True):
    """`workers` have found different things of one shard, and nobody can tell who is right."""

    workers: Names
    reason: str


class NotFinite(Recorded, frozen=True, kw_only=True):
    worker: str
    step: Step
    loss: str


class Stalled(Recorded, frozen=True, kw_only=True):
    """The training has not moved for `seconds`; `workers` do not say that they wait for others."""

    step: Step
    seconds: Seconds
    workers: Names
    reason: str


class LoaderReplaced(Recorded, frozen=True, kw_only=True):
    worker: str
    reason: str


class LedgerIncomplete(Recorded, frozen=True, kw_only=True):
    worker: str
    reason: str


# --- the end ---------------------------------------------------------------------------------------------------


class Stopping(Recorded, frozen=True, kw_only=True):
    reason: str


class CutShort(Recorded, frozen=True, kw_only=True):
    """The stop does not wait for `workers` any more."""

    step: Step
    workers: Names
    reason: str


class Hung(Recorded, frozen=True, kw_only=True):
    worker: str
    host: str
    reason: str


class Finished(Recorded, frozen=True, kw_only=True):
    """The script has run to its end everywhere; where the states are not `equal`, `fingerprint` has all of theirs.

    `seconds` and its parts: from the end of the last step to the script's, see `StepTime`.
    """

    fingerprint: str
    equal: bool
    seconds: Seconds = 0.0
    evaluation_s: Seconds = 0.0
    once_s: Seconds = 0.0
    pause_s: Seconds = 0.0


class Over(Recorded, frozen=True, kw_only=True):
    code: Code
    reason: str


# --- checkpoints ------------------------------------------------------------------------------------------------------
#
# Checkpoints: written, gone on from, and who writes them.


class Checkpoint(Recorded, frozen=True, kw_only=True):
    """`seconds` were taken to write `bytes`, behind the training, which stood still for `copy_ms`."""

    worker: str
    step: Step
    path: str
    bytes: Count
    seconds: Seconds
    copy_ms: Seconds
    finite: bool = True


class CheckpointFailed(Recorded, frozen=True, kw_only=True):
    worker: str
    step: Step
    reason: str


class CheckpointDamaged(Recorded, frozen=True, kw_only=True):
    """One that was passed over."""

    worker: str
    reason: str


class Resumed(Recorded, frozen=True, kw_only=True):
    """`path`: "" for the script's own beginning. `last_finite`: the newest checkpoint of a finite state, else."""

    worker: str
    step: Step
    path: str
    differences: Names
    finite: bool = True
    last_finite: str = ""


class NothingLeft(Recorded, frozen=True, kw_only=True):
    worker: str
    step: Step
    path: str


class Saved(Recorded, frozen=True, kw_only=True):
    """The last checkpoint, written in `seconds`; `whole`: of a whole step, so that the run can go on from it."""

    worker: str
    path: str
    whole: bool
    finite: bool = True
    seconds: Seconds = 0.0


class SavedElsewhere(Recorded, frozen=True, kw_only=True):
    """... but not in the run's store."""

    worker: str
    host: str
    path: str
    whole: bool
    finite: bool = True
    seconds: Seconds = 0.0


class NotSaved(Recorded, frozen=True, kw_only=True):
    """`worker`: "" where nobody is left to do it."""

    reason: str
    worker: str = ""


class Saver(Recorded, frozen=True, kw_only=True):
    worker: str
    before: str
    at_once: bool


class NoSaver(Recorded, frozen=True, kw_only=True):
    reason: str


class NoLeader(Recorded, frozen=True, kw_only=True):
    reason: str


class Short(Recorded, frozen=True, kw_only=True):
    """It was to begin the first view, and finds less than the run has saved."""

    worker: str
    host: str
    reason: str


# ---   init   ---------------------------------------------------------------------------------------------------------

Event = (
    Starting | Waits | Ready | Refused | OtherCode | Exited | StartFailed | NoCapacity | Advice | Host | Notice | Left
    | Lost | Unfed
    | TimeSpent | Priced
    | Died | Expelled | Scale | NoReplacements | Proposed | View | Shares | OutOfReach | CoordinatorBack | StateLost
    | StrangerInGroup | Checkpoint | CheckpointFailed | CheckpointDamaged | Resumed | NothingLeft | Saved
    | SavedElsewhere | NotSaved | Saver | NoSaver | NoLeader | Short | Failed | CallsDiffer | ReplicasDiffer
    | ComputesWrong | Drifting | Undecided
    | NotFinite | Stalled | LoaderReplaced | LedgerIncomplete | Stopping | CutShort | Hung | Finished | Over
    | Stranger | Strangers | Malformed | NotTold | TicketIssued | TicketRevoked | TicketsDamaged | CodeEdited
    | Numerics | OtherVersions | SettingChanged | BitsNotPromised | UnknownOperator | LinesLost | MetricsDamaged
    | JournalDamaged | RunStarted
    | NotRecorded | RecordedAgain | NotShipped
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
