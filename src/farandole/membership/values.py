"""What messages are made of: bounded fields, and the values that several of them carry.

Every bound is one that an honest worker never meets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated

import msgspec

from farandole.errors import UsageError

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
MAX_LINES = 1000  # in a heartbeat
MAX_LINE_BYTES = 4000  # so that a full heartbeat is a message that can be sent
MAX_TEXT = 64 * 1024
MAX_NAMED = 10_000  # tensors and values that are told apart; of names that fit into a message

Name = Annotated[str, msgspec.Meta(max_length=256, pattern=r"^[^\x00-\x1f\x7f-\x9f]*\Z")]  # people's terminals show it
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]  # SQLite and JSON hold no larger ones
Digest = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Share = Annotated[int, msgspec.Meta(ge=1, le=1000)]  # of a step's shards: per mille of the fastest worker's
Value = bool | int | float | Text | None  # what a line of metrics may hold: nothing nested


class Message(msgspec.Struct, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the class name is the tag on the wire."""


class Signature(msgspec.Struct, frozen=True, kw_only=True):
    """What must be equal in all workers of a run, in the order in which differences are reported.

    `facts` are (name, value) pairs: library versions, kind of device, threads, data length, batch policy, then one
    pair for each parameter and buffer: its name and "shape dtype".
    """

    facts: Annotated[tuple[tuple[Text, Text], ...], msgspec.Meta(max_length=100_000)]


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line of metrics.jsonl: `index` 0 is the step itself, 1.. are `run.log` calls after it."""

    step: Count
    index: Count
    fields: Mapping[Name, Value]

    def __post_init__(self) -> None:
        try:
            size = len(msgspec.msgpack.encode(self))
        except (OverflowError, UnicodeEncodeError) as error:
            raise UsageError(
                f"a line of metrics of step {self.step} can't be sent ({error}); log smaller values"
            ) from None
        if size > MAX_LINE_BYTES:
            raise UsageError(f"a line of metrics of {size} bytes; at most {MAX_LINE_BYTES}: log less at a time")


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
    many are kept; and the checkpoint, or the place of some, that a run without any of its own begins with. `mark` lies
    at the place for it to be known by ("": nothing).
    """

    url: str = ""
    every: str = "10m"
    keep: int = 3
    resume: str = ""
    mark: str = ""


class Newest(msgspec.Struct, frozen=True, kw_only=True):
    """The newest checkpoint that a run is known to have; without `path` there is none."""

    step: Count = 0
    path: Text = ""
