"""Copies of remote files in a local folder of bounded size, shared by any number of processes.

- **Whole or not there.** A copy is downloaded under another name, compared with the size and MD5 that are known of it,
  and renamed. Its name carries the MD5, so a file that is made anew elsewhere is another copy here.
- **Compared before it is used** (`verification.py`), whoever left it there: a copy that is not what its MD5 says is
  fetched anew.
- **Once.** One file lock a copy: of several processes that miss it one downloads, the others wait and find it. The
  kernel drops the lock of a process that is killed, and the next one begins anew.
- **The limit is kept before a download, not after it**: the least recently opened copies go until there is room, and
  a download counts with its full length, which its name tells, from before its first byte. More than that length is
  never taken from a server. Whoever has a removed copy open can read on; `Copies.open` gives such space back when it
  opens the next one. Locks, and notes of a hundred bytes a copy, do not count.

A client of a remote store draws from Python's global generator when it retries, which would show in what a sample's
augmentation draws after it: its state is put back.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import fsspec
from filelock import BaseFileLock, FileLock, Timeout

from farandole.data.verification import NOTE, Verified, last_used, md5sum, note_of, opened
from farandole.errors import ShardError, UsageError

DEFAULT_FOLDER = Path("~/.cache/farandole")
_OPEN = 128  # descriptors that one process keeps; the usual limit is 1024
_PART, _LOCK = ".part", ".lock"


class Copies:
    """The cache in `folder`, of at most `limit_bytes`. Picklable; each process keeps its own descriptors."""

    def __init__(self, folder: str | os.PathLike[str], limit_bytes: int) -> None:
        self.folder = Path(folder).expanduser()
        self.limit_bytes = limit_bytes
        self._open: OrderedDict[str, int] = OrderedDict()
        self._verified = Verified()

    def open(self, url: str, size: int, md5: str) -> int:
        """A descriptor of the file at `url`, for reading by `os.pread`; it stays the cache's, to close.

        A local file is opened where it is.

        Raises:
            ShardError: it is not there, or is not what it should be.
            UsageError: it is larger than the cache.
        """
        descriptor = self._open.get(url)
        if descriptor is not None:
            self._open.move_to_end(url)
            return descriptor
        for other in [other for other, known in self._open.items() if os.fstat(known).st_nlink == 0]:
            os.close(self._open.pop(other))  # removed by whoever needed the room: now it is room
        if len(self._open) >= _OPEN:
            os.close(self._open.popitem(last=False)[1])
        local = local_path(url)
        descriptor = self._open_copy(url, size, md5) if local is None else _open_local(local, size)
        self._open[url] = descriptor
        return descriptor

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict(), "_verified": Verified()}

    def __del__(self) -> None:
        if "_open" in self.__dict__:  # else the constructor has failed
            self.close()

    # --- one copy ---------------------------------------------------------------------------------------------

    def _open_copy(self, url: str, size: int, md5: str) -> int:
        name = f"{md5}-{url.rsplit('/', 1)[-1]}"
        path = self.folder / name
        descriptor = self._there(path, size, md5)
        if descriptor is not None:
            return descriptor
        if size > self.limit_bytes:
            raise UsageError(
                f"shard {url} has {size} bytes and the cache may have {self.limit_bytes}; "
                f"raise cache_bytes, or make smaller shards"
            )
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileLock(self.folder / (name + _LOCK)):
            descriptor = self._there(path, size, md5)
            if descriptor is not None:
                return descriptor  # somebody else was faster
            part = self.folder / f"{name}.{size}{_PART}"
            try:
                self._take_room(part, size)
                _download(url, part, size, md5)
                with self._room():
                    os.replace(part, path)
                    descriptor = opened(path)  # before anybody can remove it
                    self._verified.note(path, descriptor, md5)
                    return descriptor
            finally:
                with self._room():
                    part.unlink(missing_ok=True)

    def _there(self, path: Path, size: int, md5: str) -> int | None:
        """A descriptor of the copy at `path` if it is there, and is what it should be."""
        try:
            descriptor = opened(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ShardError(f"the copy {path} can't be read: {error.strerror}; remove it") from None
        if self._verified(path, descriptor, size, md5):
            return descriptor
        os.close(descriptor)
        return None

    def _room(self) -> BaseFileLock:
        """Held by whoever changes which files there are, so that their lengths can be added up."""
        return FileLock(self.folder / ("room" + _LOCK))

    def _take_room(self, part: Path, size: int) -> None:
        with self._room():
            part.unlink(missing_ok=True)  # of one who was killed
            there = [path for path in self.folder.iterdir() if path.suffix not in (_LOCK, NOTE)]
            total = sum(map(_length, there))
            for path in sorted(there, key=last_used):
                if total + size <= self.limit_bytes:
                    break
                length = _length(path)
                if self._removed(path):
                    total -= length
            if total + size > self.limit_bytes:
                raise UsageError(
                    f"the cache {self.folder} may have {self.limit_bytes} bytes, and {total} of them are being "
                    f"downloaded by other processes; raise cache_bytes to at least the shards that all processes of "
                    f"this machine read at once"
                )
            part.touch()

    def _removed(self, path: Path) -> bool:
        """Whether `path` has gone. What somebody is downloading just now stays."""
        try:
            with (
                FileLock(self.folder / (path.with_suffix("").stem + _LOCK), timeout=0)
                if path.suffix == _PART
                else contextlib.nullcontext()
            ):
                path.unlink()
                note_of(path).unlink(missing_ok=True)
        except Timeout:
            return False
        return True


def local_path(url: str) -> str | None:
    """The path of a URL that names a file of this machine, else None."""
    return url if "://" not in url else url.removeprefix("file://") if url.startswith("file://") else None


def filesystem(url: str) -> tuple[Any, str]:
    """fsspec's filesystem of `url`, and the path in it; one of this process's own, since clients don't survive a fork.

    Raises:
        UsageError: no such kind of place, or its package is not installed.
    """
    try:
        files, path = fsspec.url_to_fs(url)
    except ImportError as error:
        raise UsageError(f'{url}: {error}; for S3: pip install "farandole[s3]"') from None
    except ValueError as error:
        raise UsageError(f"{url}: {error}; name a folder or a URL that fsspec knows") from None
    return files, str(path)


def _download(url: str, part: Path, size: int, md5: str) -> None:
    drawn = random.getstate()
    try:
        files, path = filesystem(url)
        files.get_file(path, str(part), callback=_AtMost(url, size))
    except (UsageError, ShardError):
        raise
    except FileNotFoundError:
        raise missing(url) from None
    except Exception as error:
        raise ShardError(
            f"shard {url} can't be read ({type(error).__name__}: {error}); see that it can be reached from here"
        ) from error
    finally:
        random.setstate(drawn)
    found = part.stat().st_size
    if found != size:
        raise torn(url, f"it has {found} bytes where the index says {size}")
    if md5sum(part) != md5:
        raise torn(url, "its MD5 is not the one in the index")


class _AtMost(fsspec.Callback):
    """Ends the download of a file that is longer than the index says."""

    def __init__(self, url: str, limit_bytes: int) -> None:
        super().__init__()
        self._url, self._limit_bytes = url, limit_bytes

    def relative_update(self, inc: int = 1) -> None:
        super().relative_update(inc)
        if self.value > self._limit_bytes:
            raise torn(self._url, f"it has more than the {self._limit_bytes} bytes that the index says")


def _open_local(path: str, size: int) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO would have it wait for ever
    except FileNotFoundError:
        raise missing(path) from None
    except OSError as error:
        raise ShardError(f"shard {path} can't be read: {error.strerror}") from None
    found = os.fstat(descriptor).st_size
    if found != size:
        os.close(descriptor)
        raise torn(path, f"it has {found} bytes where the index says {size}")
    return descriptor


def _length(path: Path) -> int:
    return int(path.with_suffix("").suffix[1:]) if path.suffix == _PART else path.stat().st_size


def missing(url: str) -> ShardError:
    return ShardError(f"shard {url} is missing, and the index names it; run `farandole data prepare` again")


def torn(url: str, why: str) -> ShardError:
    return ShardError(f"shard {url} is damaged: {why}; run `farandole data prepare` again")
