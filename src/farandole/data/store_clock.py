"""What the making of samples takes its time for, where `farandole probe` watches; elsewhere nobody reads a clock.

Each process that makes samples has a clock, which is in one phase at a time:

    fetching      waiting for what is not on this machine yet
    reading       this machine's copy
    computing     the rest of `dataset[sample]`: decoding, transforms
    collating     a micro-batch of its samples
    handing over  the micro-batch to the training process

A dataset that reads from a store says so; all else is said by the loader:

    with store_clock.reading():                        # around what it reads, in `__getitem__`
        with store_clock.fetching():                   # only where it has to wait
            with store_clock.request(url) as request:  # around each request, in whichever thread makes it
                request.bytes = len(data)

Where another process makes the requests, whoever has an answer of it says `requested` instead of the last.

Invariant: one phase at a time, the innermost, so that the phases add up to the time in which a micro-batch was made.
They are those of the thread that makes samples: what others fetch ahead shows in `request` alone. With nobody watching
a phase costs 0.3 us. Nothing here draws, and what is made does not depend on it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any, NamedTuple


@dataclass(frozen=True, kw_only=True)
class Making:
    """What it took to make `samples`: seconds by phase; and what was asked of the store meanwhile, last at `url`.

    `request_s`: the sum over the requests, of which several may have been under way at once.
    """

    samples: int = 0
    fetching: float = 0.0
    reading: float = 0.0
    computing: float = 0.0
    collating: float = 0.0
    handing_over: float = 0.0
    requests: int = 0
    bytes: int = 0
    request_s: float = 0.0
    url: str = ""

    @property
    def seconds(self) -> float:
        return self.fetching + self.reading + self.computing + self.collating + self.handing_over

    def plus(self, other: Making) -> Making:
        summed: dict[str, Any] = {
            each.name: getattr(self, each.name) + getattr(other, each.name)
            for each in fields(self)
            if each.name != "url"
        }
        return Making(**summed, url=other.url or self.url)


@dataclass(frozen=True)
class Makings:
    """Sums over micro-batches: `cold` are those that waited for the store, `warm` the others."""

    cold: Making = Making()
    warm: Making = Making()

    @property
    def both(self) -> Making:
        return self.cold.plus(self.warm)

    def plus(self, other: Making | Makings) -> Makings:
        if isinstance(other, Makings):
            return Makings(self.cold.plus(other.cold), self.warm.plus(other.warm))
        return (
            Makings(self.cold.plus(other), self.warm) if other.fetching else Makings(self.cold, self.warm.plus(other))
        )


NOTHING = Makings()


class Timed(NamedTuple):
    """A micro-batch, and what it took to make."""

    batch: Any
    making: Making


class Request:
    """One request to a store; whoever makes it says how many bytes have come."""

    bytes = 0


# --- what a dataset says ------------------------------------------------------------------------------------------


def fetching() -> AbstractContextManager[None]:
    return _on("fetching")


def reading() -> AbstractContextManager[None]:
    return _on("reading")


@contextlib.contextmanager
def request(url: str) -> Generator[Request]:
    """One request to `url`, in any thread."""
    made, began = Request(), time.perf_counter()
    try:
        yield made
    finally:
        requested(url, made.bytes, time.perf_counter() - began)


def requested(url: str, size: int, seconds: float) -> None:
    """The same where nobody waits for it: a request to `url` that is over, with its bytes."""
    if _clock is not None:
        _clock.requests.append((size, seconds, url))


# --- what the loader says -----------------------------------------------------------------------------------------


def start(clock: Callable[[], float] = time.perf_counter) -> None:
    """From now on this process's clock runs, and that of processes forked from it."""
    global _clock
    _clock = _Clock(clock)


@contextlib.contextmanager
def making() -> Generator[None]:
    """This thread makes samples."""
    if _clock is None:
        start()
    assert _clock is not None
    _clock.thread = threading.get_ident()
    with _Phase(_clock, "computing"):
        yield


def collating() -> AbstractContextManager[None]:
    return _on("collating")


def handing_over() -> AbstractContextManager[None]:
    return _on("handing_over")


def take(samples: int) -> Making:
    """What has been counted since the last time, which has made so many samples."""
    assert _clock is not None, "nothing has been made yet"
    return _clock.take(samples)


class _Clock:
    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._since = 0.0
        self._seconds: dict[str, float] = {}
        self.phase: str | None = None
        self.thread = 0
        self.requests: deque[tuple[int, float, str]] = deque()  # appended to by any thread, which needs no lock

    def turn(self, phase: str | None) -> str | None:
        """Into `phase`; returns the one that it was in."""
        now = self._now()
        if self.phase is not None:
            self._seconds[self.phase] = self._seconds.get(self.phase, 0.0) + now - self._since
        self._since = now
        before, self.phase = self.phase, phase
        return before

    def take(self, samples: int) -> Making:
        requests = [self.requests.popleft() for _ in range(len(self.requests))]
        seconds, self._seconds = self._seconds, {}
        return Making(
            samples=samples, requests=len(requests), bytes=sum(size for size, _, _ in requests),
            request_s=sum(took for _, took, _ in requests), url=requests[-1][2] if requests else "", **seconds,
        )  # fmt: skip


_clock: _Clock | None = None  # of this process
_NOTHING = contextlib.nullcontext()


def _on(phase: str) -> AbstractContextManager[None]:
    clock = _clock
    if clock is None or clock.phase is None or clock.thread != threading.get_ident():
        return _NOTHING
    return _Phase(clock, phase)


class _Phase:
    def __init__(self, clock: _Clock, phase: str) -> None:
        self._clock, self._phase = clock, phase
        self._outer: str | None = None

    def __enter__(self) -> None:
        self._outer = self._clock.turn(self._phase)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._clock.turn(self._outer)
