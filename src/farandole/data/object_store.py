"""A file elsewhere, read by ranges: each within a deadline, tried again where that helps, and never more than asked
for.

- *What is tried again*: whatever a client raises but "there is no such file" and "you may not": up to `ATTEMPTS` times,
  each for `ATTEMPT_S` at most, after pauses that double and vary, so that a hundred hosts do not come back at once.
- *What is given up*: after `deadline_s` in all, with the last thing that went wrong.
- *What is believed*: a range has as many bytes as were asked for, or it is no answer: a store that is overloaded sends
  a page in HTML. Where a server sends a file from its beginning, whatever range was asked for, it is listened to as far
  as that range goes.

Threads may share one. Clients of stores keep threads and draw from Python's generator: so all of this runs in a process
of its own (`fetcher.py`), but for stores that only this process knows.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

import fsspec
from fsspec.asyn import AsyncFileSystem, sync
from fsspec.config import conf

from farandole.errors import FarandoleError, ShardError, UsageError
from farandole.platform.extras import how_to_install

# --- store ------------------------------------------------------------------------------------------------------------

DEADLINE_S = 120.0
ATTEMPT_S = 30.0
ATTEMPTS = 20
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0
CONNECTIONS = 32  # that a client may keep
_PIECE = 1 << 16
Told = Callable[[str], None]


class ObjectStore:
    """Of one process. `deadline_s`: how long one range may take, with all attempts."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self.deadline_s = deadline_s
        self.ignores_ranges: set[str] = set()  # places that send files from their beginning whatever is asked
        self._chance = random.Random()  # of its own: Python's is the script's

    def read(self, url: str, start: int, stop: int, told: Told | None = None) -> bytes:
        """Bytes `[start, stop)` of the file at `url`. `told` hears of each attempt that has failed.

        Raises:
            ShardError: they can't be had.
            UsageError: no such kind of place, or its package is not installed.
        """
        began, pause = time.monotonic(), FIRST_PAUSE_S
        for attempt in range(1, ATTEMPTS + 1):
            left = began + self.deadline_s - time.monotonic()
            try:
                return self._once(url, start, stop, min(ATTEMPT_S, left))
            except (UsageError, ShardError):
                raise
            except FileNotFoundError:
                raise missing(url) from None
            except Exception as error:
                why = f"{type(error).__name__}: {str(error) or 'no answer'}"
                pause = min(2 * pause, LONGEST_PAUSE_S) * self._chance.uniform(0.5, 1.0)
                left = began + self.deadline_s - time.monotonic()
                if isinstance(error, PermissionError) or attempt == ATTEMPTS or left <= pause:
                    raise unreached(url, why, attempt, time.monotonic() - began) from error
                if told is not None:
                    told(f"{why} (attempt {attempt} of {ATTEMPTS})")
                time.sleep(pause)
        raise AssertionError("the last attempt raises")

    def _once(self, url: str, start: int, stop: int, at_most_s: float) -> bytes:
        files, path = filesystem(url)
        protocol = url.partition("://")[0]
        if protocol in ("http", "https"):
            found: Any = sync(files.loop, self._from_http, files, path, start, stop, timeout=at_most_s)
            return found
        data: Any
        if isinstance(files, AsyncFileSystem):
            data = sync(files.loop, files._cat_file, path, start=start, end=stop, timeout=at_most_s)  # pyright: ignore
        else:
            data = files.cat_file(path, start=start, end=stop)
        if len(data) != stop - start:
            raise OSError(f"{len(data)} bytes came where {stop - start} were asked for")
        return data

    async def _from_http(self, files: Any, url: str, start: int, stop: int) -> bytes:
        """By hand: the client would take whatever a server sends."""
        session = await files.set_session()
        headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        async with session.get(files.encode_url(url), headers=headers) as answer:
            if answer.status == 404:
                raise FileNotFoundError(url)
            if answer.status in (401, 403):
                raise PermissionError(f"{answer.status} {answer.reason}")
            if answer.status not in (200, 206):
                raise OSError(f"{answer.status} {answer.reason}")
            skipped = start if answer.status == 200 else 0
            if answer.status == 200 and answer.content_length is not None and answer.content_length < stop:
                raise OSError(f"{answer.content_length} bytes came where {stop} were needed")
            if answer.status == 200:
                self.ignores_ranges.add(url.rpartition("/")[0])
            kept = bytearray()
            async for piece in answer.content.iter_chunked(_PIECE):
                if skipped >= len(piece):
                    skipped -= len(piece)
                    continue
                kept += piece[skipped:]
                skipped = 0
                if len(kept) >= stop - start:
                    break
            if len(kept) < stop - start or (answer.status == 206 and len(kept) > stop - start):
                raise OSError(f"{len(kept)} bytes came where {stop - start} were asked for")
            return bytes(kept[: stop - start])


def local_path(url: str) -> str | None:
    """The path of a URL that names a file of this machine, else None."""
    return url if "://" not in url else url.removeprefix("file://") if url.startswith("file://") else None


def filesystem(url: str) -> tuple[Any, str]:
    """fsspec's filesystem of `url`, and the path in it; one of this process's own, since clients don't survive a fork.

    Raises:
        UsageError: no such kind of place, or its package is not installed.
    """
    options: dict[str, Any] = {}
    if url.startswith(("s3://", "s3a://")) and "config_kwargs" not in conf.get("s3", {}):
        options["config_kwargs"] = {"max_pool_connections": CONNECTIONS}
    try:
        files, path = fsspec.url_to_fs(url, **options)
    except ImportError as error:
        raise UsageError(f"{url}: {error}; for S3: {how_to_install('s3')}") from None
    except ValueError as error:
        raise UsageError(f"{url}: {error}; name a folder or a URL that fsspec knows") from None
    return files, str(path)


def missing(url: str) -> ShardError:
    return ShardError(f"shard {url} is missing, and the index names it; run `farandole data prepare` again")


class Torn(ShardError):
    """What came is not the file."""


def torn(url: str, why: str) -> Torn:
    return Torn(f"shard {url} is damaged: {why}; run `farandole data prepare` again")


def unreached(url: str, why: str, attempts: int, seconds: float) -> ShardError:
    tried = "" if attempts == 1 else f", tried {attempts} times in {seconds:.0f} s"
    return ShardError(f"shard {url} can't be read ({why}{tried}); see that it can be reached from here")


# --- remote -----------------------------------------------------------------------------------------------------------
#
# Reading from places that somebody else keeps: one kind of error, and no trace in what a sample draws.
#
# A client of a remote store draws from Python's global generator when it retries, which would show in what a sample's
# augmentation draws after it: its state is put back.


@contextlib.contextmanager
def reading(url: str) -> Generator[None, None, None]:
    """Around all that asks the store of `url` for anything. Raises `ShardError` for whatever goes wrong there."""
    drawn = random.getstate()
    try:
        yield
    except (FarandoleError, MemoryError):
        raise
    except FileNotFoundError:
        raise ShardError(f"{url} is not there; name a file, or a folder of such files") from None
    except Exception as error:
        raise ShardError(
            f"{url} can't be read ({type(error).__name__}: {error}); see that it is whole and can be reached from here"
        ) from error
    finally:
        random.setstate(drawn)


# --- kept -------------------------------------------------------------------------------------------------------------
#
# What was decoded last, kept in memory up to a limit: parts of files by their numbers. Each process has its own.

T = TypeVar("T")


class LruBytes(Generic[T]):
    """At most `limit_bytes` together, and the newest whatever its size. What was taken out may be used on."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._values: OrderedDict[int, tuple[T, int]] = OrderedDict()
        self._bytes = 0

    def get(self, number: int) -> T | None:
        found = self._values.get(number)
        if found is None:
            return None
        self._values.move_to_end(number)
        return found[0]

    def put(self, number: int, value: T, size: int) -> T:
        """Keep `value`, of `size` bytes; the least recently used go until there is room. Returns it."""
        while self._values and self._bytes + size > self.limit_bytes:
            self._bytes -= self._values.popitem(last=False)[1][1]
        self._values[number] = value, size
        self._bytes += size
        return value


# --- store clock ------------------------------------------------------------------------------------------------------
#
# What the making of samples takes its time for, where `farandole probe` watches; elsewhere nobody reads a clock.
#
# Each process that makes samples has a clock, which is in one phase at a time:
#
#     fetching      waiting for what is not on this machine yet
#     reading       this machine's copy
#     computing     the rest of `dataset[sample]`: decoding, transforms
#     collating     a micro-batch of its samples
#     handing over  the micro-batch to the training process
#
# A dataset that reads from a store says so; all else is said by the loader:
#
#     with store_clock.reading():                        # around what it reads, in `__getitem__`
#         with store_clock.fetching():                   # only where it has to wait
#             with store_clock.request(url) as request:  # around each request, in whichever thread makes it
#                 request.bytes = len(data)
#
# Where another process makes the requests, whoever has an answer of it says `requested` instead of the last.
#
# Invariant: one phase at a time, the innermost, so that the phases add up to the time in which a micro-batch was
# made. They are those of the thread that makes samples: what others fetch ahead shows in `request` alone. With nobody
# watching a phase costs 0.3 us. Nothing here draws, and what is made does not depend on it.


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


def time_reading() -> AbstractContextManager[None]:
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
