"""What a worker's time goes to, measured where the training thread passes anyway.

The thread is in one class of `protocol/values.py` at a time, and `enter`s the next one as it goes: where it asks for
a micro-batch, where it has one, where it waits, where it goes on. The clock is read once at each such change, some ten
times a step, and belongs to the class before it up to then. So no moment is in two classes and none in none: the
classes add up to the time since the process began, exactly, in whole nanoseconds.

It is the wall's time of the thread that trains: on an accelerator, of the thread that launches the work. What other
threads do beside it (sending, saving, fetching) is in no class, for it takes none of the worker's time. Durations are
of the monotonic clock. The spans themselves are kept for a trace alone (`timing.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from farandole.collective.exchange import Wait, Waits
from farandole.protocol.messages import MOST_PEERS, MOST_TAKEN, Spans, Trace
from farandole.protocol.values import SAID, TimeClass
from farandole.protocol.worker.session import Waiting

# --- meter ------------------------------------------------------------------------------------------------------------


class Meter:
    """Written by the training thread, read by that of the connection. It begins in `start`, where the worker has been
    for `already_s` seconds.

    Attributes:
        current: the class in which it is.
    """

    def __init__(self, already_s: float = 0.0, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self.current: TimeClass = "start"
        self._spent = dict.fromkeys(SAID, 0)  # ns
        self._since = clock() - round(1e9 * already_s)
        self._keep: Callable[[TimeClass, int, int], None] | None = None

    def enter(self, name: TimeClass) -> None:
        """From now on it is in `name`."""
        if name == self.current:
            return
        with self._lock:
            self._pass()
            self.current = name

    def now(self) -> int:
        return self._clock()

    def cut(self, keep: Callable[[TimeClass, int, int], None] | None) -> int:
        """What it is in ends here, and begins again. From here on each such span (class, beginning, end; nanoseconds)
        goes to `keep`, as it ends. Returns when that is.
        """
        with self._lock:
            self._pass()
            self._keep = keep
            return self._since

    def _pass(self) -> None:
        now = self._clock()
        self._spent[self.current] += now - self._since
        if self._keep is not None and now > self._since:
            self._keep(self.current, self._since, now)
        self._since = now

    def paused(self) -> int:
        """Nanoseconds so far in which a view was stopped or took effect, or too few workers were there."""
        with self._lock:
            spent = self._spent["pause"] + self._spent["few"]
            return spent + (self._clock() - self._since if self.current in ("pause", "few") else 0)

    def said(self) -> tuple[int, ...]:
        """So far, in microseconds, in the order of `SAID`."""
        with self._lock:
            spent = dict(self._spent)
            spent[self.current] += self._clock() - self._since
        return tuple(ns // 1000 for ns in spent.values())


# --- shard timer ------------------------------------------------------------------------------------------------------
#
# How long this worker's shards take: what the heartbeats tell the coordinator, so that it can deal them by speed.
#
# Counted is the wall time from when a micro-batch is in hand to the end of its backward pass: a worker that gets half a
# core shows twice the time. Waiting for data and for peers is not in it: more or fewer shards would not change that.


class ShardTimer:
    """Written by the training thread, read by that of the connection."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began = 0.0
        self._seconds = 0.0
        self._count = 0
        self._part = (0, 0)

    def open(self) -> None:
        """A shard's micro-batch is in hand."""
        self._began = time.monotonic()

    def close(self) -> None:
        """... and is computed."""
        with self._lock:
            self._seconds += time.monotonic() - self._began
            self._count += 1

    def step_ended(self, shards: int, of: int) -> None:
        """A training step has ended, `shards` of its `of` shards computed here."""
        self._part = (shards, of)

    def take(self) -> tuple[int, int, int]:
        """The mean time of a shard since this was last asked, in µs, 0 for none; shards and `of` of the newest step."""
        with self._lock:
            mean_us = max(1, round(1e6 * self._seconds / self._count)) if self._count else 0
            self._seconds, self._count = 0.0, 0
        return mean_us, self._part[0], self._part[1]


# --- tracer -----------------------------------------------------------------------------------------------------------
#
# What this worker does in its next steps, kept for whoever asks (`farandole trace`), and for nobody else.
#
#     asked      on the connection's thread: a `Trace` has come
#     recording  from where the next training step begins, on the training thread: the meter hands over each span as it
#                ends, the exchanges whom they have waited for
#     answered   where a step begins and enough are kept; where the script ends; at once, if that is asked for
#
# Workers hear of a trace within a moment of each other, and so not all in the same step. So each keeps on for one step
# more than was asked for, and for `SPARE_S` at least: whoever puts the answers together finds the steps that all have.
#
# Nothing of the training hangs on any of it. While nobody asks, a step costs two comparisons here, and a span one. What
# is kept is bounded by what the coordinator has allowed: with that many the recording is over, full.

SPARE_S = 0.5
KIND = {name: place for place, name in enumerate(SAID)}


@dataclass
class _Recording:
    """`steps`: number, when it began, when its round ended (0: not yet); in nanoseconds of the monotonic clock."""

    asked: Trace
    wall_ns: int
    steps: list[list[int]] = field(default_factory=list[list[int]])
    spans: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    enough_ns: int | None = None  # since when it has as many steps as were asked for

    def span(self, name: TimeClass, began_ns: int, ended_ns: int) -> None:
        if not self.full:
            self.spans.append((KIND[name], began_ns, ended_ns))

    @property
    def full(self) -> bool:
        return len(self.spans) >= self.asked.most

    def done(self, now_ns: int) -> bool:
        """As a step begins, and all before it are whole."""
        if len(self.steps) == self.asked.steps:
            self.enough_ns = now_ns
        spared = self.enough_ns is not None and now_ns - self.enough_ns >= 1e9 * SPARE_S
        return self.full or spared or len(self.steps) >= MOST_TAKEN


class Tracer:
    """Of one worker, whose time `meter` takes; what it answers goes to `tell`. `waits` is for its exchanges."""

    def __init__(self, meter: Meter, tell: Callable[[Spans], None], wall_ns: Callable[[], int] = time.time_ns) -> None:
        self.waits = Waits()
        self._meter = meter
        self._tell = tell
        self._wall_ns = wall_ns
        self._lock = threading.Lock()
        self._asked: Trace | None = None  # and not begun
        self._recording: _Recording | None = None
        self._answer: Spans | None = None  # the newest
        self._closed = False

    def ask(self, asked: Trace, waiting: Waiting | None = None) -> None:
        """On the connection's thread. `waiting`: whom this worker waits for."""
        with self._lock:
            if self._answer is not None and self._answer.number == asked.number:
                self._tell(self._answer)  # again: the connection had broken
            elif asked.steps == 0 or self._closed:
                self._take(asked, waiting)
            elif self._recording is None or self._recording.asked.number != asked.number:
                self._asked = asked

    def begins(self, step: int) -> None:
        """A training step does."""
        if self._asked is None and self._recording is None:
            return
        with self._lock:
            recording = self._recording
            if self._asked is not None:
                recording = self._begin(self._asked)
            elif recording is not None and recording.done(self._meter.now()):
                self._take(recording.asked)
                return
            if recording is not None:
                recording.steps.append([step, self._meter.cut(recording.span), 0])

    def ended(self) -> None:
        """A training step's round has."""
        recording = self._recording
        if recording is not None and recording.steps:
            recording.steps[-1][2] = self._meter.now()

    def closes(self) -> None:
        """The script has ended."""
        with self._lock:
            self._closed = True
            asked = self._asked or (self._recording.asked if self._recording is not None else None)
            if asked is not None:
                self._take(asked)

    def _begin(self, asked: Trace) -> _Recording:
        self._asked = None
        self._recording = recording = _Recording(asked, self._wall_ns() - self._meter.now())
        self.waits.most = asked.most
        self.waits.kept = []
        return recording

    def _take(self, asked: Trace, waiting: Waiting | None = None) -> None:
        """Tell what has been recorded, nothing where that has not begun; the recording is over."""
        recording, waits = self._recording, self.waits.kept or []
        self._asked = self._recording = self.waits.kept = None
        now = self._meter.cut(None)
        self._answer = Spans(number=asked.number)
        if recording is not None and recording.asked.number == asked.number:
            if waiting is not None:  # it goes on, and is not among them
                waits = [*waits, Wait(waiting[1], round(1e9 * waiting[2]), now)]
            self._answer = _answer(recording, waits)
        self._tell(self._answer)


def _answer(recording: _Recording, waits: list[Wait]) -> Spans:
    """Whole microseconds since the first step began."""
    most, origin = recording.asked.most, recording.steps[0][1]
    peers: dict[str, int] = {}
    for wait in waits:
        if len(peers) < MOST_PEERS:
            peers.setdefault(wait.peer, len(peers))

    def us(ns: int) -> int:
        return max(ns - origin, 0) // 1000

    return Spans(
        number=recording.asked.number,
        wall_us=(recording.wall_ns + origin) // 1000,
        steps=tuple((step, us(began), us(ended) if ended else 0) for step, began, ended in recording.steps),
        spans=tuple((kind, us(began), us(ended) - us(began)) for kind, began, ended in recording.spans),
        peers=tuple(peers),
        waits=tuple((peers[w.peer], us(w.began_ns), us(w.ended_ns) - us(w.began_ns))
                    for w in waits[-most:] if w.peer in peers),
        full=recording.full or len(waits) >= most,
    )  # fmt: skip
