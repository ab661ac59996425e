"""The parts of messages: bounded field types, and the values that several messages carry.

The coordinator decodes a message with these bounds, and expels a sender that exceeds one. A script can ask for values
beyond them (2**60 epochs, a name of 1,000 characters), so the sender checks each value with the same decoder where it
is made: `refusal` names the field, the value and the limit.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, get_args

import msgspec

from farandole.errors import UsageError
from farandole.platform.bounds import MAX_COUNT
from farandole.platform.output import LONGEST_NAME, NAME, is_name, one_line
from farandole.run_options import default

# --- values -----------------------------------------------------------------------------------------------------------

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
MAX_LINES = 1000  # of metrics in a heartbeat
MAX_COMPARED = 8  # lines of `run.log` in a heartbeat that are only compared with rank 0's
MAX_LINE_BYTES = 4000  # so that a heartbeat with MAX_LINES fits into a message
MAX_TEXT = 64 * 1024
MAX_LOGGED = 100  # values in one call of `run.log`
MAX_NAMED = 10_000  # tensors and values that are compared one by one, if their names fit into a message
MAX_NAMED_BYTES = 1024 * 1024  # of all their names together: a message holds two such lists
MAX_FACTS = 100_000  # in a signature
MAX_FACT = 2000  # characters of a fact; a longer one is abridged
Name = Annotated[str, msgspec.Meta(max_length=LONGEST_NAME, pattern=NAME)]  # safe to show in a terminal
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
FAILURES = range(1, 128)  # exit codes of a run that has failed; larger ones are those of signals, which stop a run
ExitCode = Annotated[int, msgspec.Meta(ge=FAILURES.start, lt=FAILURES.stop)]
Digest = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Share = Annotated[int, msgspec.Meta(ge=1, le=1000)]  # of a step's shards: per mille of the fastest worker's
Workers = Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e11)]  # a duration, or Unix time until the year 5138
Dollars = Annotated[float, msgspec.Meta(gt=0, le=1e6)]  # for an hour of a host
Missing = Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]
LARGEST = 2**63 - 1  # whole number
Value = (
    bool | Annotated[int, msgspec.Meta(ge=-LARGEST, le=LARGEST)] | float | Text | None
)  # a value of `run.log`: nothing nested
RESERVED = ("event", "step", "time", "view", "worker")  # the own fields of a line of metrics


class Message(msgspec.Struct, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the class name is the tag on the wire."""


class Signature(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that must be equal in all workers of a run, in the order in which differences are reported.

    `facts` are (name, value) pairs: library versions, kind of device, threads, data length, batch policy, then one
    pair for each parameter and buffer: its name and "shape dtype".
    """

    facts: Annotated[tuple[tuple[Text, Text], ...], msgspec.Meta(max_length=MAX_FACTS)]

    @staticmethod
    def of(facts: Iterable[tuple[str, str]]) -> Signature:
        """Return the signature of `facts`. A name or value of more than `MAX_FACT` characters is abridged.

        Raises:
            UsageError: there are too many facts for a message.
        """
        short = tuple((abridged(name), abridged(value)) for name, value in facts)
        size = sum(len(name.encode()) + len(value.encode()) + 8 for name, value in short)
        if len(short) > MAX_FACTS or size > MAX_MESSAGE_BYTES - MAX_TEXT * 4:
            raise UsageError(
                f"the model and the data have {len(short)} facts of {size} bytes (one for each parameter and buffer); "
                f"a run compares at most {MAX_FACTS} of {MAX_MESSAGE_BYTES - MAX_TEXT * 4} bytes: use fewer "
                f"parameters and buffers, or shorter names"
            )
        return Signature(facts=short)


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """Wall time in `seconds` of a step, or of what follows the last one; the other fields are disjoint parts of it.

    `evaluation_s`: evaluations. `once_s`: `run.once`. `pause_s`: pauses for view changes.
    """

    seconds: Seconds = 0.0
    evaluation_s: Seconds = 0.0
    once_s: Seconds = 0.0
    pause_s: Seconds = 0.0

    def written(self) -> dict[str, float]:
        """Return the fields of an event; those that are 0 are left out."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value}


def throughput(samples: int, seconds: float) -> float:
    """Return samples per second, rounded to six digits."""
    return float(f"{samples / seconds:.6g}") if seconds > 0 else 0.0


class Metrics(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The metrics of one training step. `total` is the number of steps that the script requests, if known.

    `seconds` and its parts are those of `StepTime`; `samples_per_s` is `samples` divided by `seconds`. `learning_rate`
    is the value that the script and its schedule had set, in the first optimizer's first group; this step multiplied
    it by `factor`. `time`: Unix time in seconds.
    """

    epoch: Count
    samples: Count
    loss: float
    seconds: Seconds
    samples_per_s: Annotated[float, msgspec.Meta(ge=0)]
    view: Count
    workers: Workers
    time: Seconds
    total: Count | None = None
    skipped: Count = 0
    left_out: Count = 0
    learning_rate: float | None = None
    factor: float = 1.0
    evaluation_s: Seconds = 0.0
    once_s: Seconds = 0.0
    pause_s: Seconds = 0.0

    @property
    def training_s(self) -> float:
        """The step's time without evaluations, `run.once` and pauses."""
        return max(0.0, self.seconds - self.evaluation_s - self.once_s - self.pause_s)


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line of metrics.jsonl: `index` 0 is the step itself, 1.. are `run.log` calls after it.

    An integer as `fields` is the number of lines that are missing; this would have been the last of them.

    Raises:
        UsageError: the arguments of `run.log` can't be a line; names them.
    """

    step: Count
    index: Count
    fields: Metrics | Missing | Annotated[Mapping[Name, Value], msgspec.Meta(max_length=MAX_LOGGED)]

    def __post_init__(self) -> None:
        if self.missing:
            return
        if isinstance(self.fields, Metrics) != (self.index == 0):
            raise ValueError(f"line {self.index} of step {self.step}: a step's metrics are line 0, and nothing else is")
        if isinstance(self.fields, Mapping):
            _check_logged(self.fields)
        elif isinstance(self.fields, Metrics) and (why := refusal(self.fields, _decode_metrics)):
            raise UsageError(f"the line of metrics of step {self.step} can't be sent: {why}")
        try:
            size = len(msgspec.msgpack.encode(self))
        except (OverflowError, TypeError, UnicodeEncodeError) as error:
            raise UsageError(
                f"a line of metrics of step {self.step} can't be sent ({error}); log other values"
            ) from None
        if size > MAX_LINE_BYTES:
            raise UsageError(f"a line of metrics has {size} bytes, at most {MAX_LINE_BYTES} fit: log less at a time")

    @property
    def missing(self) -> int:
        """The number of lines that are missing here; 0 if this is a line."""
        return self.fields if isinstance(self.fields, int) else 0


_decode_metrics = msgspec.msgpack.Decoder(Metrics).decode


def _check_logged(fields: Mapping[str, Value]) -> None:
    if len(fields) > MAX_LOGGED:
        raise UsageError(f"run.log of {len(fields)} values, at most {MAX_LOGGED} are allowed: log less at a time")
    for name, value in fields.items():
        if isinstance(value, int) and abs(value) > LARGEST:
            raise UsageError(f"run.log({name}={value}) can't be sent: it is beyond 2**63; log smaller values")
        if name in RESERVED:
            raise UsageError(f"run.log({name}=...): a line of metrics has a field {name} already; choose another name")
        if not is_name(name):
            raise UsageError(
                f"run.log({name!r}=...): a name has at most {LONGEST_NAME} characters, all of them visible; choose "
                f"another one"
            )


class Call(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A call of a worker's script that takes a round, as text; `number` is a hash of it and of its message sizes.

    `number` 0: no call, the round has not begun here.
    """

    doing: Name = ""
    number: Count = 0

    @staticmethod
    def of(doing: str, sizes: str = "") -> Call:
        """Return the call for `doing`. `sizes`: all that determines the sizes of the round's messages, as text."""
        digest = hashlib.sha256(f"{doing}\n{sizes}".encode(errors="replace")).digest()
        return Call(doing=one_line(doing)[:LONGEST_NAME], number=(int.from_bytes(digest[:8], "big") >> 11) or 1)


NOTHING = Call()


def doing_step(step: int) -> str:
    """Return the text of the call for the training step `step`, as in `Call.doing`."""
    return f"step {step}"


class Checkpoints(msgspec.Struct, frozen=True, kw_only=True):
    """The settings for a run's checkpoints.

    Attributes:
        url: where they are written, "" for the folder of the run.
        every: how often they are written: "10m", "500steps" or "never".
        keep: how many are kept.
        resume: the checkpoint, or the place of checkpoints, that a run without any of its own begins with.
        identity: the id of the run, stored at `url` and in each of its checkpoints; "": none is looked for.
    """

    url: str = ""
    every: str = default("every")
    keep: int = default("keep")
    resume: str = ""
    identity: str = msgspec.field(default="", name="mark")  # its name in files of earlier versions


class Newest(msgspec.Struct, frozen=True, kw_only=True):
    """The newest checkpoint that a run is known to have; an empty `path` stands for none."""

    step: Count = 0
    path: Text = ""


def abridged(text: str, most: int = MAX_FACT) -> str:
    """Return `text`, or its beginning, length and digest if it has more than `most` characters.

    Characters that UTF-8 can't encode are replaced.
    """
    if len(text) > most:
        digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
        text = f"{text[: most // 2]}... ({len(text)} characters, SHA-256 {digest})"
    return text.encode(errors="replace").decode()


def shortened(text: str) -> str:
    """Return `text`, or its beginning and end if it has more than `MAX_TEXT` characters: those say what happened.

    Characters that UTF-8 can't encode are replaced.
    """
    if len(text) > MAX_TEXT:
        half = MAX_TEXT // 2 - 50
        text = f"{text[:half]}\n... ({len(text) - 2 * half} characters left out) ...\n{text[-half:]}"
    return text.encode(errors="replace").decode()


def refusal(value: Any, decode: Callable[[bytes], Any]) -> str:
    """Return why the other side, which decodes with `decode`, would refuse `value`; "" if it would accept it.

    The text names the field, the value and the limit.
    """
    try:
        data = msgspec.msgpack.encode(value)
        if len(data) > MAX_MESSAGE_BYTES:
            return f"{type(value).__name__} of {len(data)} bytes, at most {MAX_MESSAGE_BYTES} are accepted"
        decode(data)
    except (OverflowError, TypeError, UnicodeEncodeError) as error:
        fields = ((name, getattr(value, name, None)) for name in getattr(value, "__struct_fields__", ()))
        shown = ", ".join(f"{name}={one!r:.40}" for name, one in fields)
        return f"{type(value).__name__}({shown:.400}): {error}"
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at ")
        return f"{_of(value, path)}: {reason[:1].lower()}{reason[1:]}"
    return ""


_STEP = re.compile(r"\.([^.\[\]`]+)|\[(\d+)\]")


def _of(value: Any, path: str) -> str:
    """Return the field at a path of msgspec, such as `$.lines[0].fields[8]`, and its value, as text."""
    name = type(value).__name__
    inner: Any = value
    for match in _STEP.finditer(path):
        key, at = match[1], int(match[2] or 0)
        try:
            fields = getattr(inner, "__struct_fields__", ())  # of a struct that is sent as an array
            key = fields[at] if key is None and fields else key
            inner = inner[at] if key is None else getattr(inner, key)
        except (AttributeError, IndexError, KeyError, TypeError):
            break
        name += f"[{at}]" if key is None else f".{key}"
    return f"{name} is {inner!r:.200}"


class LinkUse(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a worker has sent to the workers of another `host`, and how that went, since its process began.

    Sums over all of its connections to that host, so they only grow; `rtt_us` is the newest value.

    Attributes:
        exchange_bytes: bytes of rounds: gradients, buffers, evaluations. After compression, without TCP's own bytes.
        state_bytes: bytes of the state for joiners.
        acknowledged_bytes: bytes that the peers' kernels have acknowledged.
        sending_us: microseconds in which a connection had bytes to send, its receiver had room for them, and they were
            not acknowledged yet.
        resent_bytes: bytes that TCP has sent again, because they were lost.
        rtt_us: the round-trip time in microseconds, the largest of the connections; 0 if unknown.
        waited_us: microseconds for which this worker's rounds waited for messages from that host.
        saved_bytes: bytes that compression has saved: with them `exchange_bytes` would be greater.
    """

    host: Name
    exchange_bytes: Count = 0
    state_bytes: Count = 0
    acknowledged_bytes: Count = 0
    sending_us: Count = 0
    resent_bytes: Count = 0
    rtt_us: Count = 0
    waited_us: Count = 0
    saved_bytes: Count = 0


MOST_LINKS = 1000  # other hosts in a heartbeat


# --- classes ----------------------------------------------------------------------------------------------------------
#
# What a worker's time goes to: the classes, in one table, and which of them the time between two steps' work is in.
#
# At any moment a worker is in exactly one class, that of its training thread, and it changes from one to the next at
# moments that the thread passes anyway (`worker/timing.py`). So the classes add up to the worker's time, by
# construction.
#
#     who says it   a worker, of itself, in each heartbeat: so many microseconds in each class since its process began
#     who keeps it  the coordinator (`protocol/coordinator/accounting.py`), which adds what a worker could not say any
#                   more
#     who reads it  `protocol/coordinator/account.py`, from the lines of metrics.jsonl
#
# Left out: what a class costs, and which of them is worth anything; that is for whoever reads.

TimeClass = Literal["start", "spare", "data", "compute", "again", "exchange", "pause", "few", "save", "end", "lost"]
CLASSES: tuple[TimeClass, ...] = get_args(TimeClass)
MEANING: dict[TimeClass, str] = {
    "start": "it starts, until its first step begins",
    "spare": "ready, and no view that takes it is on its way",
    "data": "it waits for a micro-batch",
    "compute": "forward, backward, update, all else the script does",
    "again": "what had been computed before",
    "exchange": "it waits for the others of its step",
    "pause": "a view is stopped, or takes effect",
    "few": "fewer workers are there than --min",
    "save": "the state is copied for a checkpoint",
    "end": "its script has ended, or it leaves",
    "lost": "from its last word until the run let it go",
}
SAID = CLASSES[:-1]  # the classes that a worker reports of itself: all but "lost"
Said = Annotated[
    tuple[Count, ...], msgspec.Meta(max_length=len(SAID))
]  # microseconds in each of SAID; empty: no report
