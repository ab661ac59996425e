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

from collections.abc import Mapping
from typing import Any

import msgspec

from farandole.membership.events.base import Recorded
from farandole.membership.events.checkpoints import (
    Checkpoint,
    CheckpointDamaged,
    CheckpointFailed,
    NoLeader,
    NoSaver,
    NothingLeft,
    NotSaved,
    Resumed,
    Saved,
    SavedElsewhere,
    Saver,
    Short,
)
from farandole.membership.events.numerics import (
    BitsNotPromised,
    Numerics,
    OtherVersions,
    SettingChanged,
    UnknownOperator,
)
from farandole.membership.events.record import (
    CodeEdited,
    JournalDamaged,
    LinesLost,
    Malformed,
    MetricsDamaged,
    NotRecorded,
    NotShipped,
    NotTold,
    RecordedAgain,
    RunStarted,
    Stranger,
    Strangers,
    TicketIssued,
    TicketRevoked,
    TicketsDamaged,
)
from farandole.membership.events.training import (
    CallsDiffer,
    ComputesWrong,
    CoordinatorBack,
    CutShort,
    Drifting,
    Failed,
    Finished,
    Hung,
    LedgerIncomplete,
    LoaderReplaced,
    NotFinite,
    OutOfReach,
    Over,
    Proposed,
    ReplicasDiffer,
    Shares,
    Stalled,
    StateLost,
    Stopping,
    StrangerInGroup,
    Undecided,
    View,
)
from farandole.membership.events.workers import (
    Advice,
    Died,
    Exited,
    Expelled,
    Host,
    Left,
    Lost,
    NoCapacity,
    NoReplacements,
    Notice,
    OtherCode,
    Priced,
    Ready,
    Refused,
    Scale,
    StartFailed,
    Starting,
    TimeSpent,
    Unfed,
    Waits,
)

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
