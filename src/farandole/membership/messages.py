"""Every message between workers, pools, observers and the coordinator, as typed structs.

Only these are ever decoded from a control connection; anything else is refused, and so is what goes beyond the bounds
that a worker's fields carry. `sendable` holds a message to the same bounds before it is sent. One connection is one
ordered stream in each direction; nothing is assumed about the order across connections.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from farandole.errors import UsageError
from farandole.membership.checkpoints import Checkpointed as Checkpointed
from farandole.membership.checkpoints import End as End
from farandole.membership.checkpoints import Restored as Restored
from farandole.membership.checkpoints import Saved as Saved
from farandole.membership.checkpoints import Saver as Saver
from farandole.membership.checkpoints import Short as Short
from farandole.membership.classes import Said
from farandole.membership.comparison import Compare as Compare
from farandole.membership.comparison import Computed as Computed
from farandole.membership.comparison import Differs as Differs
from farandole.membership.comparison import Digests as Digests
from farandole.membership.comparison import Drifts as Drifts
from farandole.membership.comparison import PartDigests as PartDigests
from farandole.membership.comparison import Unlike as Unlike
from farandole.membership.connecting import Prepared as Prepared
from farandole.membership.connecting import Publish as Publish
from farandole.membership.connecting import Published as Published
from farandole.membership.connecting import Unproved as Unproved
from farandole.membership.deadline import Deadline as Deadline
from farandole.membership.deadline import Lapsed as Lapsed
from farandole.membership.deadline import Leaving as Leaving
from farandole.membership.hosts import FromHost as FromHost
from farandole.membership.hosts import Order as Order
from farandole.membership.hosts import Output as Output
from farandole.membership.hosts import Report as Report
from farandole.membership.hosts import ToHost as ToHost
from farandole.membership.reports import Demoted as Demoted
from farandole.membership.reports import Resume as Resume
from farandole.membership.reports import Stop as Stop
from farandole.membership.reports import Stopped as Stopped
from farandole.membership.spans import Spans as Spans
from farandole.membership.spans import Trace as Trace
from farandole.membership.supply import Advised as Advised
from farandole.membership.supply import Capacity as Capacity
from farandole.membership.supply import Exited as Exited
from farandole.membership.supply import FromPool as FromPool
from farandole.membership.supply import HostPriced as HostPriced
from farandole.membership.supply import HostSeen as HostSeen
from farandole.membership.supply import NoCapacity as NoCapacity
from farandole.membership.supply import Noticed as Noticed
from farandole.membership.supply import Roster as Roster
from farandole.membership.supply import StartFailed as StartFailed
from farandole.membership.terms import RunTerms as RunTerms
from farandole.membership.values import MAX_LINES as MAX_LINES
from farandole.membership.values import MAX_MESSAGE_BYTES as MAX_MESSAGE_BYTES
from farandole.membership.values import Call as Call
from farandole.membership.values import Checkpoints as Checkpoints
from farandole.membership.values import Count, Name, Text, abridged, refusal, shortened
from farandole.membership.values import Line as Line
from farandole.membership.values import Message as Message
from farandole.membership.values import Metrics as Metrics
from farandole.membership.values import Newest as Newest
from farandole.membership.values import Signature as Signature
from farandole.membership.values import StepTime as StepTime
from farandole.membership.view import View
from farandole.platform.output import LONGEST_NAME, one_line

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


class Failed(Message):
    """The training script raised: the run ends with this traceback, or an error of ours, with its message alone."""

    traceback: Text


class Unfed(Message):
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


class Heard(Message):
    """Answer to every `HEARD_EVERY`th heartbeat: `beat` is its number (see `reconnection`); and to an agent's report.

    `lines` is the newest line of metrics that the coordinator has: nobody needs to keep it, or older ones, any more.
    """

    beat: int = 0
    lines: tuple[int, int] = (-1, 0)


class Refused(Message):
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
    Hello | Ready | Heartbeat | Leaving | Lapsed | Publish | Prepared | Unproved | Switched | Synced | Suspect | Stopped
    | Failed | Unfed | Saved | Differs | Drifts | Unlike | Digests | Checkpointed | Short | Restored | Unrecorded
    | LoaderEnded | Finished | NotFinite | SettingChanged | UnknownOperator | Spans | FromPool | ToHost | Report
    | Output
)  # fmt: skip
FromCoordinator = (
    Welcome | Heard | Refused | Propose | Published | Stop | Resume | Demoted | Goodbye | Deadline | End | Compare
    | Stacks | Trace | Saver | Roster | Note | Order | FromHost
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
