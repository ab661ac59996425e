"""Every message between workers, pools, observers and the coordinator, as typed structs.

Only these are ever decoded from a control connection; anything else is refused, and so is what goes beyond the bounds
that a worker's fields carry. One connection is one ordered stream in each direction; nothing is assumed about the
order across connections.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from farandole.membership.comparison import Compare as Compare
from farandole.membership.comparison import Differs as Differs
from farandole.membership.comparison import Digests as Digests
from farandole.membership.values import MAX_LINES as MAX_LINES
from farandole.membership.values import MAX_MESSAGE_BYTES as MAX_MESSAGE_BYTES
from farandole.membership.values import Checkpoints as Checkpoints
from farandole.membership.values import Count, Name, Text
from farandole.membership.values import Line as Line
from farandole.membership.values import Message as Message
from farandole.membership.values import Signature as Signature
from farandole.membership.view import Lineage, View

HEARD_EVERY = 2  # heartbeats


# --- from a worker -----------------------------------------------------------------------------------------


class Hello(Message):
    """First message of a connection. `worker` is the id given by the pool that started the process, "" for none.

    A worker whose connection broke comes back with the id that it was welcomed with, the random `session` of its
    process, and an `attempt` that only grows, so that an old Hello said again can't take its place. `level`: it holds
    the run's state.
    """

    kind: Name  # "worker", "pool" or "observer"
    worker: Name = ""
    host: Name = ""
    pid: Count = 0
    pool: Name = ""
    session: Name = ""
    attempt: Count = 0
    level: bool = False


class Ready(Message):
    """The worker has built its model and opened its data: it asks in."""

    signature: Signature


class Heartbeat(Message):
    """Sent every heartbeat interval by a thread of its own. `lines` come from rank 0 only.

    `number` counts them on their connection; 0 asks for no answer (`Heard`). `shard_us` is the mean time that the
    shards computed since the last heartbeat took, 0 for none; `shards` and `of` are the worker's part of its newest
    training step.
    """

    number: Count = 0
    view: Count = 0
    round: Count = 0
    step: Count = 0
    epoch: Count = 0
    shard_us: Count = 0
    shards: Count = 0
    of: Count = 0
    lines: Annotated[tuple[Line, ...], msgspec.Meta(max_length=MAX_LINES)] = ()


class Leaving(Message):
    """The worker has had notice (SIGTERM, SIGINT, spot interruption) and wants to leave gracefully."""

    reason: Text


class Publish(Message):
    """A rendezvous key of group `group`, to be handed to the other members of that group."""

    group: Count
    key: Name
    value: bytes


class Prepared(Message):
    """This worker's connections for the proposed view stand."""

    view: Count


class Switched(Message):
    """This worker goes on in `view` from `round` (a leaver: it goes no further)."""

    view: Count
    round: Count
    step: Count


class Level(Message):
    """A joiner of `view` holds the state now."""

    view: Count


class Suspect(Message):
    """A peer's connection broke, or it has let us wait beyond the stall limit."""

    view: Count
    peer: Name
    reason: Text


class Stopped(Message):
    """Answer to Stop: this worker has abandoned its view and will neither end a round nor switch until told.

    `round` is the round it is in (or will begin next), `holds` whether it holds every reduced bucket of it, `view`
    the view applied in it (whole: the coordinator may be another one than proposed it), `lineage` how the round's
    shards were dealt, `level` whether it holds the state, `step` the training step
    (for the record only).
    """

    stop: Count
    view: View | None
    round: Count
    step: Count
    holds: bool
    level: bool
    lineage: Lineage


class Failed(Message):
    """The training script raised: the run ends with this traceback."""

    traceback: Text


class Saved(Message):
    """Answer to End(save=True): the checkpoint's path, or why there is none.

    `between`: the script failed between two steps here, so this worker's state is of neither.
    """

    path: Text = ""
    error: Text = ""
    between: bool = False


class Checkpointed(Message):
    """A checkpoint of the beginning of `step` was written to `path`, or was not, because of `error`.

    `seconds` is how long the writing took, `copy_ms` how long the training thread was blocked.
    """

    step: Count
    path: Text = ""
    error: Text = ""
    bytes: Count = 0
    seconds: float = 0.0
    copy_ms: float = 0.0


class Restored(Message):
    """The first view begins at `step` with the state of `path`; "" for the script's own beginning.

    `damaged` are newer ones that had to be passed over, `differences` what may change the bits, in words.
    """

    step: Count
    path: Text = ""
    damaged: tuple[Text, ...] = ()
    differences: tuple[Text, ...] = ()


class Finished(Message):
    """The training script ran to its end. `fingerprint` is that of the replicated state."""

    fingerprint: Name = ""


class Exited(Message):
    """From a pool: this process of its own has ended, for certain."""

    worker: Name
    reason: Text


# --- from the coordinator ----------------------------------------------------------------------------------


class Welcome(Message):
    """Answer to Hello: the worker's id and what the run fixes for everyone.

    `lines` is the newest line of metrics that the coordinator has, as (step, index).
    """

    run: str
    worker: str
    folder: str
    seed: int
    threads: int
    minimum: int
    heartbeat_s: float
    heartbeat_timeout_s: float
    stall_s: float
    orphan_s: float
    lines: tuple[int, int]
    ledger: bool = False
    checkpoints: Checkpoints = Checkpoints()


class Heard(Message):
    """Answer to every `HEARD_EVERY`th heartbeat: `beat` is its number. See `reconnection`.

    `lines` is the newest line of metrics that the coordinator has: nobody needs to keep it, or older ones, any more.
    """

    beat: int
    lines: tuple[int, int] = (-1, 0)


class Refused(Message):
    """The worker is not let in; it exits with this reason."""

    reason: str


class Propose(Message):
    """Prepare this view. It takes effect when the control words agree on it (members), or at once (first view)."""

    view: View


class Published(Message):
    """A rendezvous key from another member of group `group`."""

    group: int
    key: str
    value: bytes


class Stop(Message):
    """Abandon the view and any proposed one; answer Stopped."""

    stop: int


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


class Leave(Message):
    """You have notice: leave gracefully (`farandole release`, `farandole scale`)."""

    reason: str


class Goodbye(Message):
    """Exit now with `code`: the others have switched, or the run is over."""

    reason: str
    code: int = 0


class End(Message):
    """The run ends: save the state of the last whole step if `save`, answer Saved, await Goodbye.

    `between`: nobody has that; save what the script has left between two steps.
    """

    save: bool
    reason: str
    between: bool = False


class Roster(Message):
    """To pools: how many workers of theirs the run wants, those it counts as lost for good, whether it is over.

    `leaving` have notice; `released` have been let go and exit by themselves; `evicted` are to be killed: the run goes
    on without them. `over` carries the exit code, -1 while it goes on.
    """

    wanted: int
    leaving: tuple[str, ...] = ()
    released: tuple[str, ...] = ()
    evicted: tuple[str, ...] = ()
    over: int = -1
    reason: str = ""


class Note(Message):
    """To observers: a line that also went to metrics.jsonl."""

    line: dict[str, Any]


FromWorker = (
    Hello
    | Ready
    | Heartbeat
    | Leaving
    | Publish
    | Prepared
    | Switched
    | Level
    | Suspect
    | Stopped
    | Failed
    | Saved
    | Differs
    | Digests
    | Checkpointed
    | Restored
    | Finished
    | Exited
)
FromCoordinator = (
    Welcome | Heard | Refused | Propose | Published | Stop | Resume | Demoted | Leave | Goodbye | End | Compare | Roster
    | Note
)  # fmt: skip

encode = msgspec.msgpack.Encoder().encode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
decode_from_coordinator = msgspec.msgpack.Decoder(FromCoordinator).decode
