"""What messages are made of: bounded fields, and the values that several of them carry.

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

# --- values -----------------------------------------------------------------------------------------------------------

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
MAX_LINES = 1000  # in a heartbeat
MAX_LINE_BYTES = 4000  # so that a full heartbeat is a message that can be sent
MAX_TEXT = 64 * 1024
MAX_LOGGED = 100  # values in one call of `run.log`
MAX_NAMED = 10_000  # tensors and values that are told apart; of names that fit into a message
MAX_NAMED_BYTES = 1024 * 1024  # all their names together: a message holds two such lists
MAX_FACTS = 100_000  # in a signature
MAX_FACT = 2000  # characters; a longer one is abridged
Name = Annotated[str, msgspec.Meta(max_length=LONGEST_NAME, pattern=NAME)]  # people's terminals show it
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Digest = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Share = Annotated[int, msgspec.Meta(ge=1, le=1000)]  # of a step's shards: per mille of the fastest worker's
Workers = Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e11)]  # that a step took, or Unix time: until the year 5138
Dollars = Annotated[float, msgspec.Meta(gt=0, le=1e6)]  # an hour
Missing = Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]
LARGEST = 2**63 - 1  # whole number
Value = (
    bool | Annotated[int, msgspec.Meta(ge=-LARGEST, le=LARGEST)] | float | Text | None
)  # what a line of `run.log` may hold: nothing nested
RESERVED = ("event", "step", "time", "view", "worker")  # what a line of metrics says of itself


class Message(msgspec.Struct, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the class name is the tag on the wire."""


class Signature(msgspec.Struct, frozen=True, kw_only=True):
    """What must be equal in all workers of a run, in the order in which differences are reported.

    `facts` are (name, value) pairs: library versions, kind of device, threads, data length, batch policy, then one
    pair for each parameter and buffer: its name and "shape dtype".
    """

    facts: Annotated[tuple[tuple[Text, Text], ...], msgspec.Meta(max_length=MAX_FACTS)]

    @staticmethod
    def of(facts: Iterable[tuple[str, str]]) -> Signature:
        """The signature of these facts. A name or value of more than `MAX_FACT` characters is abridged.

        Raises:
            UsageError: there are too many facts for a message.
        """
        found = tuple((abridged(name), abridged(value)) for name, value in facts)
        size = sum(len(name.encode()) + len(value.encode()) + 8 for name, value in found)
        if len(found) > MAX_FACTS or size > MAX_MESSAGE_BYTES - MAX_TEXT * 4:
            raise UsageError(
                f"the model and the data come to {len(found)} facts of {size} bytes (one for each parameter and "
                f"buffer); a run compares at most {MAX_FACTS} of {MAX_MESSAGE_BYTES - MAX_TEXT * 4} bytes: use fewer "
                f"parameters and buffers, or shorter names"
            )
        return Signature(facts=found)


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """Wall time of a step, or of what follows the last one; the others are disjoint parts of its `seconds`."""

    seconds: Seconds = 0.0
    evaluation_s: Seconds = 0.0
    once_s: Seconds = 0.0
    pause_s: Seconds = 0.0

    def written(self) -> dict[str, float]:
        """The fields of an event: what there was none of is left out."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value}


def throughput(samples: int, seconds: float) -> float:
    """Samples a second, to six digits."""
    return float(f"{samples / seconds:.6g}") if seconds > 0 else 0.0


class Metrics(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a worker tells of one training step. `total` is the number of steps that the script asks for, if known.

    `seconds` and its parts are those of `StepTime`, and `samples_per_s` is `samples` divided by `seconds`.
    `learning_rate` is what the script and its schedule had set, in the first optimizer's first group; in this step it
    was multiplied by `factor`.
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

    A number in place of the fields: so many lines are missing, of which this would have been the last.

    Raises:
        UsageError: what was given to `run.log` can't be a line; names it.
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
            raise UsageError(f"a line of metrics of {size} bytes; at most {MAX_LINE_BYTES}: log less at a time")

    @property
    def missing(self) -> int:
        """How many lines are missing here; 0: it is a line."""
        return self.fields if isinstance(self.fields, int) else 0


_decode_metrics = msgspec.msgpack.Decoder(Metrics).decode


def _check_logged(fields: Mapping[str, Value]) -> None:
    if len(fields) > MAX_LOGGED:
        raise UsageError(f"run.log of {len(fields)} values; at most {MAX_LOGGED}: log less at a time")
    for name, value in fields.items():
        if isinstance(value, int) and abs(value) > LARGEST:
            raise UsageError(f"run.log({name}={value}) can't be sent, it is beyond 2**63; log smaller values")
        if name in RESERVED:
            raise UsageError(f"run.log({name}=...): a line of metrics has its own {name}; choose another name")
        if not is_name(name):
            raise UsageError(
                f"run.log({name!r}=...): a name has at most {LONGEST_NAME} characters, all of them to be seen; choose "
                f"another one"
            )


class Call(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a worker's script has called that takes a round, in words; `number` stands for it and its sizes.

    0: nothing, the round has not begun here.
    """

    doing: Name = ""
    number: Count = 0

    @staticmethod
    def of(doing: str, sizes: str = "") -> Call:
        """`sizes`: whatever decides how large the round's messages are."""
        digest = hashlib.sha256(f"{doing}\n{sizes}".encode(errors="replace")).digest()
        return Call(doing=one_line(doing)[:LONGEST_NAME], number=(int.from_bytes(digest[:8], "big") >> 11) or 1)


NOTHING = Call()


class Checkpoints(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run's checkpoints are, "" for its folder; how often they are written ("10m", "500steps", "never"); how
    many are kept; and the checkpoint, or the place of some, that a run without any of its own begins with. `identity`:
    the run's, which lies at the place for it to be known by, and is in each of its checkpoints; "": none is looked for.
    """

    url: str = ""
    every: str = "10m"
    keep: int = 3
    resume: str = ""
    identity: str = msgspec.field(default="", name="mark")  # its name in files of earlier versions


class Newest(msgspec.Struct, frozen=True, kw_only=True):
    """The newest checkpoint that a run is known to have; without `path` there is none."""

    step: Count = 0
    path: Text = ""


def abridged(text: str, most: int = MAX_FACT) -> str:
    """`text` as it is; or its beginning, its length and a digest of all of it, where it has more than `most`
    characters. What UTF-8 can't hold is replaced.
    """
    if len(text) > most:
        digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
        text = f"{text[: most // 2]}... ({len(text)} characters, SHA-256 {digest})"
    return text.encode(errors="replace").decode()


def shortened(text: str) -> str:
    """Prose of at most `MAX_TEXT` characters: of a longer one the beginning and the end, which say what happened. What
    UTF-8 can't hold is replaced.
    """
    if len(text) > MAX_TEXT:
        half = MAX_TEXT // 2 - 50
        text = f"{text[:half]}\n... ({len(text) - 2 * half} characters left out) ...\n{text[-half:]}"
    return text.encode(errors="replace").decode()


def refusal(value: Any, decode: Callable[[bytes], Any]) -> str:
    """Why the other side would not take `value`, which it reads with `decode`: the field, the value and the limit, in
    words; "" if it would.
    """
    try:
        data = msgspec.msgpack.encode(value)
        if len(data) > MAX_MESSAGE_BYTES:
            return f"{type(value).__name__} of {len(data)} bytes, at most {MAX_MESSAGE_BYTES} are taken"
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
    """The field at a path of msgspec's, such as `$.lines[0].fields[8]`, and its value."""
    name = type(value).__name__
    inner: Any = value
    for found in _STEP.finditer(path):
        key, at = found[1], int(found[2] or 0)
        try:
            fields = getattr(inner, "__struct_fields__", ())  # of a struct that is sent as an array
            key = fields[at] if key is None and fields else key
            inner = inner[at] if key is None else getattr(inner, key)
        except (AttributeError, IndexError, KeyError, TypeError):
            break
        name += f"[{at}]" if key is None else f".{key}"
    return f"{name} is {inner!r:.200}"


# --- classes ----------------------------------------------------------------------------------------------------------
#
# What a worker's time goes to: the classes, in one table, and which of them the time between two steps' work is in.
#
# At any moment a worker is in exactly one class, that of its training thread, and it changes from one to the next at
# moments that the thread passes anyway (`worker/timing.py`). So the classes add up to the worker's time, by
# construction.
#
#     who says it   a worker, of itself, in each heartbeat: so many microseconds in each class since its process began
#     who keeps it  the coordinator (`accounting.py`), which adds what a worker could not say any more
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
SAID = CLASSES[:-1]  # of itself no worker says that it is lost
Said = Annotated[tuple[Count, ...], msgspec.Meta(max_length=len(SAID))]  # microseconds, in that order; empty: nothing
