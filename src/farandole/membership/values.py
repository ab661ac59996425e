"""What messages are made of: bounded fields, and the values that several of them carry.

Every bound is one that an honest worker never meets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated

import msgspec

from farandole.errors import UsageError
from farandole.platform.plain import LONGEST_NAME, NAME, is_name

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
MAX_LINES = 1000  # in a heartbeat
MAX_LINE_BYTES = 4000  # so that a full heartbeat is a message that can be sent
MAX_TEXT = 64 * 1024
MAX_LOGGED = 100  # values in one call of `run.log`
MAX_NAMED = 10_000  # tensors and values that are told apart; of names that fit into a message

Name = Annotated[str, msgspec.Meta(max_length=LONGEST_NAME, pattern=NAME)]  # people's terminals show it
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]  # SQLite and JSON hold no larger ones
Digest = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Share = Annotated[int, msgspec.Meta(ge=1, le=1000)]  # of a step's shards: per mille of the fastest worker's
Workers = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e11)]  # that a step took, or Unix time: until the year 5138
Dollars = Annotated[float, msgspec.Meta(gt=0, le=1e6)]  # an hour
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

    facts: Annotated[tuple[tuple[Text, Text], ...], msgspec.Meta(max_length=100_000)]


class Metrics(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a worker tells of one training step. `total` is the number of steps that the script asks for, if known.

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


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line of metrics.jsonl: `index` 0 is the step itself, 1.. are `run.log` calls after it.

    Raises:
        UsageError: what was given to `run.log` can't be a line; names it.
    """

    step: Count
    index: Count
    fields: Metrics | Annotated[Mapping[Name, Value], msgspec.Meta(max_length=MAX_LOGGED)]

    def __post_init__(self) -> None:
        if isinstance(self.fields, Metrics) != (self.index == 0):
            raise ValueError(f"line {self.index} of step {self.step}: a step's metrics are line 0, and nothing else is")
        try:
            size = len(msgspec.msgpack.encode(self))
        except (OverflowError, UnicodeEncodeError) as error:
            raise UsageError(
                f"a line of metrics of step {self.step} can't be sent ({error}); log smaller values"
            ) from None
        if size > MAX_LINE_BYTES:
            raise UsageError(f"a line of metrics of {size} bytes; at most {MAX_LINE_BYTES}: log less at a time")
        if not isinstance(self.fields, Metrics):
            _check_logged(self.fields)


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
        digest = hashlib.sha256(f"{doing}\n{sizes}".encode()).digest()
        return Call(doing=doing, number=(int.from_bytes(digest[:8], "big") >> 11) or 1)


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
