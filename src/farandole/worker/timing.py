"""The accounting of a worker's time, measured at points that the training thread passes anyway.

The thread is in one class of `TimeClass` (`protocol/values.py`) at a time, and calls `enter` for the next one: when it
requests a micro-batch, when it gets one, when it waits, when it continues. The clock is read once at each such change,
about ten times a step, and the time up to then counts for the old class. So each moment is in exactly one class: the
classes add up to the time since the process began, exactly, in whole nanoseconds.

It is the wall time of the training thread; on an accelerator, of the thread that launches the work. Work of other
threads (sending, saving, fetching) is in no class, because it takes none of the worker's time. Durations are of the
monotonic clock. The spans are kept only for a trace (`Tracer`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from farandole.collective.exchange import Wait, WaitRecord
from farandole.protocol.messages import MOST_PEERS, MOST_TAKEN, Spans, Trace
from farandole.protocol.values import SAID, TimeClass
from farandole.protocol.worker.session import PeerWait

# --- meter ------------------------------------------------------------------------------------------------------------


class Meter:
    """The meter of one worker's time. The training thread writes it, and the connection's thread reads it.

    It begins in the class `start`, in which the worker has already been for `already_s` seconds.

    Attributes:
        current: the current class.
    """

    def __init__(self, already_s: float = 0.0, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self.current: TimeClass = "start"
        self._spent = dict.fromkeys(SAID, 0)  # ns
        self._since = clock() - round(1e9 * already_s)
        self._keep: Callable[[TimeClass, int, int], None] | None = None

    def enter(self, name: TimeClass) -> None:
        """Changes the class to `name`."""
        if name == self.current:
            return
        with self._lock:
            self._pass()
            self.current = name

    def now(self) -> int:
        return self._clock()

    def cut(self, keep: Callable[[TimeClass, int, int], None] | None) -> int:
        """Ends the current span and begins a new one of the same class. Returns the time of the cut, in nanoseconds.

        From then on each span (class, beginning, end; in nanoseconds) is passed to `keep` when it ends; None: to none.
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
        """Returns the nanoseconds so far during a change of view, or while there were too few workers."""
        with self._lock:
            spent = self._spent["pause"] + self._spent["few"]
            return spent + (self._clock() - self._since if self.current in ("pause", "few") else 0)

    def said(self) -> tuple[int, ...]:
        """Returns the time in each class so far, in microseconds, in the order of `SAID`."""
        with self._lock:
            spent = dict(self._spent)
            spent[self.current] += self._clock() - self._since
        return tuple(ns // 1000 for ns in spent.values())


# --- shard timer ------------------------------------------------------------------------------------------------------
#
# The time of this worker's shards. The heartbeats report it to the coordinator, which assigns shards by speed.
#
# It is the wall time from the moment when a micro-batch is loaded to the end of its backward pass: a worker that gets
# half a core shows twice the time. Waiting for data and for peers is not included: the number of shards does not change
# it.


class ShardTimer:
    """The timer of one worker's shards. The training thread writes it, and the connection's thread reads it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began = 0.0
        self._seconds = 0.0
        self._count = 0
        self._part = (0, 0)

    def open(self) -> None:
        """Starts the timer: a shard's micro-batch is loaded."""
        self._began = time.monotonic()

    def close(self) -> None:
        """Stops the timer: the shard is computed."""
        with self._lock:
            self._seconds += time.monotonic() - self._began
            self._count += 1

    def step_ended(self, shards: int, of: int) -> None:
        """Records the end of a training step in which this worker computed `shards` of `of` shards."""
        self._part = (shards, of)

    def take(self) -> tuple[int, int, int]:
        """Returns the mean time of a shard since the last call, in µs, 0 for none; shards and `of` of the last step."""
        with self._lock:
            mean_us = max(1, round(1e6 * self._seconds / self._count)) if self._count else 0
            self._seconds, self._count = 0.0, 0
        return mean_us, self._part[0], self._part[1]


# --- tracer -----------------------------------------------------------------------------------------------------------
#
# The recording of this worker's next steps for a trace (`farandole trace`). Nothing is recorded without a trace.
#
#     requested  on the connection's thread: a `Trace` message has arrived
#     recording  from the beginning of the next training step, on the training thread: the meter passes each span as it
#                ends, the exchanges record their waits for peers
#     answered   when a step begins and enough steps are recorded; when the script ends; at once, if the request says so
#
# Workers receive the request at slightly different times, and so possibly in different steps. So each records one step
# more than requested, and for at least `SPARE_S`: the program that merges the answers uses the steps that all have.
#
# The training does not depend on any of this. Without a trace, a step costs two comparisons here, and a span one. The
# coordinator sets a limit for the number of spans: at the limit the recording is full and ends.

SPARE_S = 0.5
KIND = {name: place for place, name in enumerate(SAID)}


@dataclass
class _Recording:
    """A recording in progress.

    `steps` are [number, begin, end of its round (0: not yet)], in nanoseconds of the monotonic clock.
    """

    request: Trace
    wall_ns: int
    steps: list[list[int]] = field(default_factory=list[list[int]])
    spans: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    enough_ns: int | None = None  # the time at which it had as many steps as requested

    def span(self, name: TimeClass, began_ns: int, ended_ns: int) -> None:
        if not self.full:
            self.spans.append((KIND[name], began_ns, ended_ns))

    @property
    def full(self) -> bool:
        return len(self.spans) >= self.request.most

    def done(self, now_ns: int) -> bool:
        """Returns True if the recording has enough. Called when a step begins, so that earlier steps are complete."""
        if len(self.steps) == self.request.steps:
            self.enough_ns = now_ns
        spared = self.enough_ns is not None and now_ns - self.enough_ns >= 1e9 * SPARE_S
        return self.full or spared or len(self.steps) >= MOST_TAKEN


class Tracer:
    """The tracer of one worker. `meter` measures its time, and `tell` sends its answers.

    Its exchanges record their waits for peers in `waits`.
    """

    def __init__(self, meter: Meter, tell: Callable[[Spans], None], wall_ns: Callable[[], int] = time.time_ns) -> None:
        self.waits = WaitRecord()
        self._meter = meter
        self._tell = tell
        self._wall_ns = wall_ns
        self._lock = threading.Lock()
        self._request: Trace | None = None  # a request whose recording has not begun
        self._recording: _Recording | None = None
        self._answer: Spans | None = None  # the newest
        self._closed = False

    def ask(self, request: Trace, waiting: PeerWait | None = None) -> None:
        """Handles a request, on the connection's thread. `waiting`: the current wait of this worker for a peer."""
        with self._lock:
            if self._answer is not None and self._answer.number == request.number:
                self._tell(self._answer)  # again, because the connection was lost
            elif request.steps == 0 or self._closed:
                self._take(request, waiting)
            elif self._recording is None or self._recording.request.number != request.number:
                self._request = request

    def begins(self, step: int) -> None:
        """Records the beginning of a training step."""
        if self._request is None and self._recording is None:
            return
        with self._lock:
            recording = self._recording
            if self._request is not None:
                recording = self._begin(self._request)
            elif recording is not None and recording.done(self._meter.now()):
                self._take(recording.request)
                return
            if recording is not None:
                recording.steps.append([step, self._meter.cut(recording.span), 0])

    def ended(self) -> None:
        """Records the end of a training step's round."""
        recording = self._recording
        if recording is not None and recording.steps:
            recording.steps[-1][2] = self._meter.now()

    def closes(self) -> None:
        """Answers the open request, if any, because the script has ended."""
        with self._lock:
            self._closed = True
            request = self._request or (self._recording.request if self._recording is not None else None)
            if request is not None:
                self._take(request)

    def _begin(self, request: Trace) -> _Recording:
        self._request = None
        self._recording = recording = _Recording(request, self._wall_ns() - self._meter.now())
        self.waits.most = request.most
        self.waits.recorded = []
        return recording

    def _take(self, request: Trace, waiting: PeerWait | None = None) -> None:
        """Ends the recording and sends it; sends an empty answer if it has not begun."""
        recording, waits = self._recording, self.waits.recorded or []
        self._request = self._recording = self.waits.recorded = None
        now = self._meter.cut(None)
        self._answer = Spans(number=request.number)
        if recording is not None and recording.request.number == request.number:
            if waiting is not None:  # the current wait has not ended, so it is not recorded yet
                waits = [*waits, Wait(waiting[1], round(1e9 * waiting[2]), now)]
            self._answer = _answer(recording, waits)
        self._tell(self._answer)


def _answer(recording: _Recording, waits: list[Wait]) -> Spans:
    """Returns the answer of a recording; times are in whole microseconds since the first step began."""
    most, origin = recording.request.most, recording.steps[0][1]
    peers: dict[str, int] = {}
    for wait in waits:
        if len(peers) < MOST_PEERS:
            peers.setdefault(wait.peer, len(peers))

    def us(ns: int) -> int:
        return max(ns - origin, 0) // 1000

    return Spans(
        number=recording.request.number,
        wall_us=(recording.wall_ns + origin) // 1000,
        steps=tuple((step, us(began), us(ended) if ended else 0) for step, began, ended in recording.steps),
        spans=tuple((kind, us(began), us(ended) - us(began)) for kind, began, ended in recording.spans),
        peers=tuple(peers),
        waits=tuple((peers[w.peer], us(w.began_ns), us(w.ended_ns) - us(w.began_ns))
                    for w in waits[-most:] if w.peer in peers),
        full=recording.full or len(waits) >= most,
    )  # fmt: skip
