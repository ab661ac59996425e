"""The messages of a trace: what each worker did in the next steps, told once it has been asked for.

A *span* is a stretch of time in which the training thread was in one class (`classes`); a *wait* one in which the
worker's exchange waited for a peer's message. Times are whole microseconds on a clock of the worker's own, which
`wall_us` sets against Unix time. Who asks, who answers and what is kept of it is in `tracing`.

All that a worker may say is bounded, whatever it says: `most` of each, which the coordinator makes smaller the more
workers there are.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from farandole.membership.classes import SAID
from farandole.membership.values import Count, Message, Name

MOST_STEPS = 1000  # that may be asked for
MOST_SPANS = 20_000  # of a worker, and so many waits
MOST_PEERS = 1000
MOST_TAKEN = 2000  # steps in an answer: those that were asked for, and some more (`worker/timing.py`)

Kind = Annotated[int, msgspec.Meta(ge=0, le=len(SAID) - 1)]  # a class, as its place in `SAID`


class Trace(Message):
    """To a worker: tell what you do in the next `steps` steps; with 0, at once, as far as it goes.

    `number` is this trace's own; a worker has one at a time, the newest. At most `most` spans, and waits.
    """

    number: Count
    steps: Annotated[int, msgspec.Meta(ge=0, le=MOST_STEPS)]
    most: Annotated[int, msgspec.Meta(ge=1, le=MOST_SPANS)] = MOST_SPANS


class Spans(Message):
    """A worker's answer to the trace of that `number`.

    `steps`: each one's number, when it began, and when its round ended, 0 if it has not. `spans`: class, beginning,
    duration; `waits`: the place of the peer in `peers`, beginning, duration. `full`: more than that would not fit.
    """

    number: Count
    wall_us: Count = 0
    steps: Annotated[tuple[tuple[Count, Count, Count], ...], msgspec.Meta(max_length=MOST_TAKEN)] = ()
    spans: Annotated[tuple[tuple[Kind, Count, Count], ...], msgspec.Meta(max_length=MOST_SPANS)] = ()
    peers: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MOST_PEERS)] = ()
    waits: Annotated[tuple[tuple[Count, Count, Count], ...], msgspec.Meta(max_length=MOST_SPANS)] = ()
    full: bool = False


class Traced(msgspec.Struct, frozen=True, kw_only=True):
    """How far a trace is: of the workers that were `asked`, in rank order, those that have `answered`, those that are
    `gone` without, and those that still owe theirs. `number` 0: none has been asked for.
    """

    number: int = 0
    steps: int = 0
    asked: tuple[str, ...] = ()
    answered: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    owed: tuple[str, ...] = ()
