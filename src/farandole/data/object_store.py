"""`ObjectStore` reads ranges of remote files: within a deadline, with retries, and never more bytes than requested.

- *Retries*: any error of a client except "no such file" and "permission denied" is tried again, up to `ATTEMPTS` times,
  each for `ATTEMPT_S` at most. The pauses between attempts double and vary, so that a hundred hosts do not come back at
  the same time.
- *Deadline*: after `deadline_s` in all it raises an error with the last cause. That the deadline ended an attempt is no
  cause if an earlier attempt has one.
- *Checks*: an answer must have as many bytes as requested, or it is an error: an overloaded store sends an HTML page.
  If a server ignores the range and sends a file from its beginning, the bytes are read up to the end of the range.

Threads may share one. Clients of stores keep threads and draw from Python's generator: so all of this runs in a process
of its own (`fetcher.py`), except for stores that only this process knows.
"""

from __future__ import annotations

import asyncio
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
CONNECTIONS = 32  # connections that one client may keep
_PIECE = 1 << 16
Report = Callable[[str], None]


class ObjectStore:
    """The store clients of one process. `deadline_s`: the limit for one range in seconds, all attempts included."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self.deadline_s = deadline_s
        self.ignores_ranges: set[str] = set()  # folders whose server sends whole files
        self._chance = random.Random()  # its own generator: Python's global one belongs to the script

    def read(self, url: str, start: int, stop: int, report: Report | None = None) -> bytes:
        """Returns bytes `[start, stop)` of the file at `url`. Calls `report` with the cause of each failed attempt.

        Raises:
            ShardError: the bytes can't be read.
            UsageError: the kind of URL is unknown, or its package is not installed.
        """
        began, pause, why = time.monotonic(), FIRST_PAUSE_S, ""
        for attempt in range(1, ATTEMPTS + 1):
            at_most_s = min(ATTEMPT_S, began + self.deadline_s - time.monotonic())
            try:
                return self._once(url, start, stop, at_most_s)
            except (UsageError, ShardError):
                raise
            except FileNotFoundError:
                raise missing(url) from None
            except Exception as error:
                if not (why and at_most_s < ATTEMPT_S and isinstance(error, asyncio.TimeoutError)):
                    why = f"{type(error).__name__}: {str(error) or 'no answer'}"
                pause = min(2 * pause, LONGEST_PAUSE_S) * self._chance.uniform(0.5, 1.0)
                remaining_s = began + self.deadline_s - time.monotonic()
                if isinstance(error, PermissionError) or attempt == ATTEMPTS or remaining_s <= pause:
                    raise unreached(url, why, attempt, time.monotonic() - began) from error
                if report is not None:
                    report(f"{why} (attempt {attempt} of {ATTEMPTS})")
                time.sleep(pause)
        raise AssertionError("the last attempt raises")

    def _once(self, url: str, start: int, stop: int, at_most_s: float) -> bytes:
        files, path = filesystem(url)
        protocol = url.partition("://")[0]
        if protocol in ("http", "https"):
            content: Any = sync(files.loop, self._from_http, files, path, start, stop, timeout=at_most_s)
            return content
        data: Any
        if isinstance(files, AsyncFileSystem):
            data = sync(files.loop, files._cat_file, path, start=start, end=stop, timeout=at_most_s)  # pyright: ignore
        else:
            data = files.cat_file(path, start=start, end=stop)
        if len(data) != stop - start:
            raise OSError(f"received {len(data)} bytes instead of {stop - start}")
        return data

    async def _from_http(self, files: Any, url: str, start: int, stop: int) -> bytes:
        """Makes the request without fsspec's own method, which would accept any answer of a server."""
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
                raise OSError(f"the file has {answer.content_length} bytes, and {stop} are needed")
            if answer.status == 200:
                self.ignores_ranges.add(url.rpartition("/")[0])
            received = bytearray()
            async for piece in answer.content.iter_chunked(_PIECE):
                if skipped >= len(piece):
                    skipped -= len(piece)
                    continue
                received += piece[skipped:]
                skipped = 0
                if len(received) >= stop - start:
                    break
            if len(received) < stop - start or (answer.status == 206 and len(received) > stop - start):
                raise OSError(f"received {len(received)} bytes instead of {stop - start}")
            return bytes(received[: stop - start])


def local_path(url: str) -> str | None:
    """Returns the path if `url` names a file of this machine, else None."""
    return url if "://" not in url else url.removeprefix("file://") if url.startswith("file://") else None


def filesystem(url: str) -> tuple[Any, str]:
    """Returns fsspec's filesystem of `url`, and the path in it. Each process has its own: clients don't survive a fork.

    Raises:
        UsageError: the kind of URL is unknown, or its package is not installed.
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
    """Returns the error for a shard that the index names and that does not exist."""
    return ShardError(f"shard {url} is missing, but the index names it; run `farandole data prepare` again")


class Torn(ShardError):
    """The bytes that were read are not those of the file."""


def torn(url: str, why: str) -> Torn:
    """Returns the error for a damaged shard; `why` is a sentence part."""
    return Torn(f"shard {url} is damaged: {why}; run `farandole data prepare` again")


def unreached(url: str, why: str, attempts: int, seconds: float) -> ShardError:
    """Returns the error for a shard that can't be read after that many attempts."""
    tries = "" if attempts == 1 else f", tried {attempts} times in {seconds:.0f} s"
    return ShardError(f"shard {url} can't be read ({why}{tries}); check that this host can reach it")


# --- remote -----------------------------------------------------------------------------------------------------------
#
# `reading` wraps reads from a store: it gives one kind of error, and does not change a sample's random numbers.
#
# A client of a remote store draws from Python's global generator when it retries, which would change the numbers that
# a sample's augmentation draws afterwards: so the generator's state is restored.


@contextlib.contextmanager
def reading(url: str) -> Generator[None, None, None]:
    """Wraps all requests to the store of `url`. Raises `ShardError` for any error of the store."""
    state = random.getstate()
    try:
        yield
    except (FarandoleError, MemoryError):
        raise
    except FileNotFoundError:
        raise ShardError(f"{url} does not exist; name a file, or a folder of such files") from None
    except Exception as error:
        raise ShardError(
            f"{url} can't be read ({type(error).__name__}: {error}); check that it is complete and that this host can "
            f"reach it"
        ) from error
    finally:
        random.setstate(state)


# --- memory cache -----------------------------------------------------------------------------------------------------
#
# An LRU cache of decoded parts of files, by their numbers, up to a limit of memory. Each process has its own.

T = TypeVar("T")


class LruBytes(Generic[T]):
    """An LRU cache of at most `limit_bytes`, and the newest value of any size. Evicted values remain usable."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._values: OrderedDict[int, tuple[T, int]] = OrderedDict()
        self._bytes = 0

    def get(self, number: int) -> T | None:
        entry = self._values.get(number)
        if entry is None:
            return None
        self._values.move_to_end(number)
        return entry[0]

    def put(self, number: int, value: T, size: int) -> T:
        """Stores `value`, of `size` bytes, and returns it. Evicts the least recently used until there is room."""
        while self._values and self._bytes + size > self.limit_bytes:
            self._bytes -= self._values.popitem(last=False)[1][1]
        self._values[number] = value, size
        self._bytes += size
        return value


# --- store clock ------------------------------------------------------------------------------------------------------
#
# The clock measures on what the making of samples spends its time, for `farandole probe`; without it no clock is read.
#
# Each process that makes samples has a clock, which is in one phase at a time:
#
#     fetching      waiting for data that is not on this machine yet
#     reading       reading this machine's copy
#     computing     the rest of `dataset[sample]`: decoding, transforms
#     collating     collating a micro-batch of its samples
#     handing over  passing the micro-batch to the training process
#
# A dataset that reads from a store marks its phases; the loader marks all others:
#
#     with object_store.time_reading():                   # around each read, in `__getitem__`
#         with object_store.fetching():                   # only where it has to wait
#             with object_store.request(url) as request:  # around each request, in any thread
#                 request.bytes = len(data)
#
# If another process makes the requests, the receiver of an answer calls `requested` instead of `request`.
#
# Invariant: one phase at a time, the innermost, so that the phases add up to the time in which a micro-batch was made.
# They are those of the thread that makes samples: prefetching by other threads appears in `request` alone. Without the
# probe a phase costs 0.3 us. Nothing here draws random numbers, and samples do not depend on it.


@dataclass(frozen=True, kw_only=True)
class Making:
    """The cost of making `samples` samples: seconds by phase, and the requests to the store meanwhile.

    `url`: that of the last request. `request_s`: the sum over the requests, of which several may run in parallel.
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
        """The sum of all phases."""
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
    """Sums over micro-batches: `cold` of those that waited for the store, `warm` of the others."""

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
    """A micro-batch, and the cost of making it."""

    batch: Any
    making: Making


class Request:
    """One request to a store; its maker sets the number of bytes received."""

    bytes = 0


# --- calls by a dataset -------------------------------------------------------------------------------------------


def fetching() -> AbstractContextManager[None]:
    """Marks the phase in which a dataset waits for the store."""
    return _on("fetching")


def time_reading() -> AbstractContextManager[None]:
    """Marks the phase in which a dataset reads its data."""
    return _on("reading")


@contextlib.contextmanager
def request(url: str) -> Generator[Request]:
    """Measures one request to `url`, in any thread."""
    current, began = Request(), time.perf_counter()
    try:
        yield current
    finally:
        requested(url, current.bytes, time.perf_counter() - began)


def requested(url: str, size: int, seconds: float) -> None:
    """Counts a request to `url` that is over, with its bytes and seconds."""
    if _clock is not None:
        _clock.requests.append((size, seconds, url))


# --- calls by the loader ------------------------------------------------------------------------------------------


def start(clock: Callable[[], float] = time.perf_counter) -> None:
    """Starts the clock of this process, and of processes forked from it."""
    global _clock
    _clock = _Clock(clock)


@contextlib.contextmanager
def making() -> Generator[None]:
    """Marks the time in which this thread makes samples; starts the clock if needed."""
    if _clock is None:
        start()
    assert _clock is not None
    _clock.thread = threading.get_ident()
    with _Phase(_clock, "computing"):
        yield


def collating() -> AbstractContextManager[None]:
    """Marks the phase in which a micro-batch is collated."""
    return _on("collating")


def handing_over() -> AbstractContextManager[None]:
    """Marks the phase in which a micro-batch is passed to the training process."""
    return _on("handing_over")


def take(samples: int) -> Making:
    """Returns the cost since the last call, in which `samples` samples were made, and resets it."""
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
        """Switches to `phase`; returns the phase before."""
        now = self._now()
        if self.phase is not None:
            self._seconds[self.phase] = self._seconds.get(self.phase, 0.0) + now - self._since
        self._since = now
        before, self.phase = self.phase, phase
        return before

    def take(self, samples: int) -> Making:
        requests = [self.requests.popleft() for _ in range(len(self.requests))]
        phases, self._seconds = self._seconds, {}
        return Making(
            samples=samples, requests=len(requests), bytes=sum(size for size, _, _ in requests),
            request_s=sum(seconds for _, seconds, _ in requests), url=requests[-1][2] if requests else "", **phases,
        )  # fmt: skip


_clock: _Clock | None = None  # this process's clock
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
