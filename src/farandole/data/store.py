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

import random
import time
from collections.abc import Callable
from typing import Any

import fsspec
from fsspec.asyn import AsyncFileSystem, sync
from fsspec.config import conf

from farandole.errors import ShardError, UsageError
from farandole.platform.extras import how_to_install

DEADLINE_S = 120.0
ATTEMPT_S = 30.0
ATTEMPTS = 20
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0
CONNECTIONS = 32  # that a client may keep
_PIECE = 1 << 16

Told = Callable[[str], None]


class Store:
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
