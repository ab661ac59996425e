"""The store of checkpoints: a folder, or any location that fsspec supports.

A checkpoint is two objects: `step-00000123-RUN-TOKEN.pt`, the state, and then, written last,
`step-00000123-RUN-TOKEN.json`, its manifest, which has the size and the SHA-256 of the state. Invariant: a checkpoint
counts only if its manifest can be read and the two match; so a writer may die at any moment, and its incomplete
checkpoint is ignored. RUN is the beginning of its run's identity (`owner.py`). The token makes names unique: two
workers that have lost each other may write the same step at the same time without a conflict.

A store that is opened for a run sees only this run's checkpoints, and removes no others. Checkpoints of earlier
versions have no identity in their names: they belong to the run that their manifest names, by its folder's name.

All written data is read back before it counts: the state, by size and SHA-256, then the manifest. Only after that are
older checkpoints removed, and the checkpoint is reported as saved: a store may acknowledge data that it did not keep. A
folder's files are synced to the disk first. The data read back then may come from the system's cache, so this detects a
file system that loses data, but not such a disk.

Each call is retried if that can help, and has a limit (see "attempts" below).

The state that a failed script leaves between two steps is called `after-step-...`. It is never the newest checkpoint.

This module does not import torch: the command line uses it before anything is started.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import random
import re
import secrets
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, BinaryIO, Protocol, TypeVar

import fsspec
import msgspec
from fsspec.implementations.local import LocalFileSystem

from farandole.errors import FarandoleError, UsageError
from farandole.platform.extras import how_to_install
from farandole.protocol.values import Count, Name, Text

# --- manifest ---------------------------------------------------------------------------------------------------------
#
# A checkpoint's manifest: its facts, readable without the state.

Facts = Annotated[tuple[tuple[Text, Text], ...], msgspec.Meta(max_length=100_000)]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest of a checkpoint.

    `run`: the run's name, which is its folder's name; `run_id`: its identity, "" in manifests of earlier versions.
    `facts`: those of the writer's signature; `finite`: True if all parameters and the last loss are finite. `whole`:
    False for a state between two steps. `size`: bytes of the state; `time`: seconds since the epoch.
    """

    epoch: Count
    offset: Count
    step: Count
    whole: bool
    run: Name
    worker: Name
    seed: int
    facts: Facts
    time: float
    size: Count = 0
    sha256: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""
    finite: bool = True
    run_id: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{32})?\Z")] = ""

    def fact(self, name: str) -> str:
        """Return the fact `name`, "" if it is missing."""
        return dict(self.facts).get(name, "")


# --- sealing ----------------------------------------------------------------------------------------------------------
#
# Counts and hashes a state while it is written to a store, so that the manifest can state its size and hash. The
# manifest is written last: a writer that dies before has written no checkpoint.


class Sink(Protocol):
    """The target of a state that is written."""

    def write(self, data: Any, /) -> int: ...

    def flush(self) -> None: ...


Produce = Callable[[Sink], bytes]


class Sealing:
    """A sink that counts and hashes the data that it passes to another sink, and then completes the manifest."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._digest = hashlib.sha256()
        self.size = 0
        self.failure: OSError | None = None

    def write(self, data: Any, /) -> int:
        if self.failure is not None:
            raise self.failure
        self._digest.update(data)
        try:
            self._sink.write(data)
        except OSError as error:
            self.failure = error
            raise
        size = memoryview(data).nbytes
        self.size += size
        return size

    def flush(self) -> None:
        self._sink.flush()

    def seal(self, manifest: Manifest) -> bytes:
        """Return the manifest as JSON, with size, SHA-256 and time."""
        sealed = msgspec.structs.replace(manifest, size=self.size, sha256=self._digest.hexdigest(), time=time.time())
        return msgspec.json.format(msgspec.json.encode(sealed)) + b"\n"


# --- attempts ---------------------------------------------------------------------------------------------------------
#
# Calls to a store of checkpoints: with a time limit, retries if these can help, and a log line for long waits.
#
# - *Retries*: after any error of a remote store's client, except "not found" and "not allowed". For a folder: after
#   transient errors of a network file system or a disk (EIO, ESTALE, a timeout), but not for a full disk. Up to
#   `attempts` times in `limit_s`, after pauses that double and vary, so that many runs do not retry at the same time.
# - *Log*: after `log_after_s` without an answer, the location and the operation, once per call.
# - *Limit*: a call that does not return within `limit_s` is abandoned. It runs on its own thread, which continues then:
#   a system call on a dead mount can't be cancelled. If no thread can be started, the call runs without a limit.
#
# The pauses use this module's own random generator, because Python's global one belongs to the script.

T = TypeVar("T")
_log = logging.getLogger(__name__)
_chance = random.Random()
_FINAL = (
    FileNotFoundError,
    PermissionError,
    FileExistsError,
    NotADirectoryError,
    IsADirectoryError,
    ImportError,
    TypeError,
    MemoryError,
    NotImplementedError,
)
_PASSING = {
    errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ETIMEDOUT, errno.ENETDOWN,
    errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED,
    errno.ENOTCONN, errno.EREMOTEIO,
}  # fmt: skip


class NotKept(OSError):
    """A store has acknowledged a checkpoint, but its content is not the data that was written."""


class NotDelivered(OSError):
    """The uploader process could not write the checkpoint, and a retry would not help."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """The limits of retries and of waiting for a store. Times in seconds."""

    attempts: int = 6
    limit_s: float = 60.0
    log_after_s: float = 5.0
    first_pause_s: float = 0.2
    longest_pause_s: float = 5.0

    def pause(self, number: int) -> float:
        """Return the seconds to wait after failed attempt `number`, counted from 1."""
        return min(self.first_pause_s * 2.0 ** (number - 1), self.longest_pause_s) * _chance.uniform(0.5, 1.0)


def passing(error: BaseException, *, local: bool) -> bool:
    """Return True if the same call may succeed a moment later."""
    if isinstance(error, NotKept):
        return True
    if isinstance(error, (FarandoleError, NotDelivered, *_FINAL)):
        return False
    if local:
        return isinstance(error, TimeoutError) or (isinstance(error, OSError) and error.errno in _PASSING)
    return isinstance(error, Exception)


def insist(call: Callable[[], T], operation: str, patience: Patience, *, local: bool) -> T:
    """Return the result of `call`, with retries and a limit.

    `operation`: the location and the operation for messages, as in "checkpoints at URL: listing".

    Raises:
        TimeoutError: the call has not returned within the limit.
        Exception: the last exception of the call.
    """
    until = time.monotonic() + patience.limit_s
    return attempt(
        lambda: within(call, operation, until - time.monotonic(), patience.log_after_s),
        operation,
        patience,
        local=local,
    )


def attempt(call: Callable[[], T], operation: str, patience: Patience, *, local: bool) -> T:
    """Like `insist`, for a call that has its own limits: no attempt begins after `limit_s`.

    Raises:
        Exception: the last exception of the call.
    """
    began = time.monotonic()
    for number in range(1, patience.attempts + 1):
        try:
            return call()
        except Exception as error:
            pause, now = patience.pause(number), time.monotonic()
            over = number == patience.attempts or now + pause >= began + patience.limit_s
            if over or not passing(error, local=local):
                if number > 1:
                    notes = vars(error).setdefault("__notes__", [])  # like `add_note` of Python 3.11
                    notes.append(f"tried {number} times in {now - began:.0f} s")
                raise
            _log.info("%s: %s; retrying", operation, error)
            time.sleep(pause)
    raise AssertionError("the last attempt raises")


def within(call: Callable[[], T], operation: str, limit_s: float, log_after_s: float = Patience.log_after_s) -> T:
    """Return the result of `call`, or raise its exception. It runs on its own thread.

    Raises:
        TimeoutError: the call has not returned within `limit_s` seconds.
    """
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001  raised below
            failures.append(error)

    thread = threading.Thread(target=run, name="store", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread can be started
        return call()
    thread.join(min(log_after_s, limit_s))
    if thread.is_alive() and log_after_s < limit_s:
        _log.warning("%s: no answer for %.0f s; timeout after %.0f s", operation, log_after_s, limit_s)
        thread.join(limit_s - log_after_s)
    if failures:
        raise failures[0]
    if not results:
        raise TimeoutError(f"no answer within {limit_s:.0f} s")
    return results[0]


# --- store ------------------------------------------------------------------------------------------------------------

PAYLOAD, MANIFEST = ".pt", ".json"
_NAME = re.compile(r"(after-)?step-(\d{8,})-(?:([0-9a-f]{8})-)?([0-9a-f]{8})\.(pt|json)")
_CHUNK, _REMOTE_CHUNK = 1 << 20, 8 << 20
_PIECE_S = 300.0  # limit for one write to a remote store: a client sends many megabytes at once
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)  # errors of file systems without hard links
MAX_MANIFEST_BYTES = 1 << 24  # four times the largest signature of a worker, as formatted text


class DamagedError(FarandoleError):
    """A checkpoint does not count. The message has the reason."""


@dataclass(frozen=True)
class RunIdentity:
    """A run's identity in its checkpoints: `id`, 32 hexadecimal digits, and `name`, which other runs may share."""

    id: str
    name: str


@dataclass(frozen=True)
class CheckpointName:
    """The parts of a checkpoint's name. `run`: the beginning of its run's identity, "" in names of old versions."""

    step: int
    whole: bool
    stem: str
    run: str = ""


class Store:
    """The checkpoints at `url`: a folder's path, or a URL such as "s3://bucket/prefix". `run`: only those of this run.

    Raises:
        UsageError: the kind of URL is unknown, or its package is not installed.
    """

    def __init__(self, url: str, run: RunIdentity | None = None, patience: Patience | None = None) -> None:
        self.url = url.rstrip("/") or url
        self.run = run
        self.patience = patience or Patience()
        try:
            filesystem, path = fsspec.url_to_fs(self.url)
        except ImportError as error:
            raise UsageError(f"checkpoints at {url}: {error}; for S3: {how_to_install('s3')}") from None
        except (ValueError, OSError) as error:
            raise UsageError(f"checkpoints at {url}: {error}; use a folder or a URL that fsspec supports") from None
        self.files: Any = filesystem
        self.path = str(path).rstrip("/")
        self.local = isinstance(filesystem, LocalFileSystem)
        self._objects = bool(filesystem.async_impl)  # S3 and similar stores: no folders, whole objects only

    def ask(self, operation: str, call: Callable[[], T]) -> T:
        """Return the result of `call`, with retries and a limit. `operation`: the operation, for messages."""
        return insist(call, f"checkpoints at {self.url}: {operation}", self.patience, local=self.local)

    # --- reading ---------------------------------------------------------------------------------------------

    def entries(self) -> list[CheckpointName]:
        """Return the checkpoints that have a manifest, the newest first."""
        return [entry for entry in self._entries(self._names(), MANIFEST) if self._belongs(entry, unreadable=True)]

    def unfinished(self) -> list[CheckpointName]:
        """Return the states without a manifest: their writers have died, or are still writing."""
        names = self._names()
        return [
            entry
            for entry in self._entries(names, PAYLOAD)
            if entry.stem + MANIFEST not in names and self._belongs(entry, unreadable=False)
        ]

    def manifest(self, stem: str) -> Manifest:
        """Return the manifest of checkpoint `stem`.

        Raises:
            DamagedError: there is none, or it can't be read.
            OSError: the store can't be reached.
        """
        try:
            manifest = msgspec.json.decode(self.small(stem + MANIFEST), type=Manifest)
        except FileNotFoundError:
            raise DamagedError(f"{stem + MANIFEST} is missing") from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise DamagedError(f"{stem + MANIFEST} can't be read: {error}") from None
        if not stem.startswith(_begin(manifest)):
            raise DamagedError(f"{stem + MANIFEST} belongs to another checkpoint, {_begin(manifest)}...")
        return manifest

    def small(self, name: str) -> bytes:
        """Return the content of a small file.

        Raises:
            FileNotFoundError: it does not exist.
            DamagedError: it is no regular file, or is too large.
            OSError: the store can't be reached.
        """

        def read() -> bytes:
            place, size = self._place_and_size(name)
            if size > MAX_MANIFEST_BYTES:
                raise DamagedError(f"{name} has {size} bytes, but a manifest has at most {MAX_MANIFEST_BYTES}")
            return self.files.cat_file(place)

        return self.ask(f"reading {name}", read)

    @contextlib.contextmanager
    def open_verified(self, stem: str, manifest: Manifest) -> Generator[BinaryIO]:
        """Open the state of a checkpoint, after all of it has been verified against its manifest.

        Raises:
            DamagedError: the state does not match.
            OSError: the store can't be reached.
        """
        with contextlib.ExitStack() as stack:
            copy: Any = None if self.local else stack.enter_context(tempfile.TemporaryFile())
            source = self._verify(stem, manifest, stack, copy)
            file: Any = copy or source
            file.seek(0)
            yield file

    def _verify(self, stem: str, manifest: Manifest, stack: contextlib.ExitStack, copy: Any = None) -> Any:
        """Verify the state against its manifest, without the client's cache of names. Copy the data to `copy` if given.

        Returns the open file if the store is a folder, so that the caller uses exactly the file that was verified.
        """
        name = stem + PAYLOAD
        try:
            self.files.invalidate_cache()
            place, stored = self.ask(f"looking at {name}", lambda: self._place_and_size(name))
            source: Any = stack.enter_context(open(place, "rb")) if self.local else None  # noqa: SIM115
        except FileNotFoundError:
            raise DamagedError(f"{name} is missing") from None
        if not self.local and stored not in (0, manifest.size):
            raise DamagedError(f"{name} has {stored} bytes, but its manifest states {manifest.size}")
        digest, size = hashlib.sha256(), 0
        for piece in self._pieces(name, place, source, manifest.size):
            digest.update(piece)
            size += len(piece)
            if copy is not None:
                copy.write(piece)
        if size != manifest.size:
            more = " or more" if size > manifest.size else ""
            raise DamagedError(f"{name} has {size} bytes{more}, but its manifest states {manifest.size}")
        if digest.hexdigest() != manifest.sha256:
            raise DamagedError(f"{name} does not have the SHA-256 that its manifest states")
        return source

    def _pieces(self, name: str, place: str, source: Any, size: int) -> Iterator[bytes]:
        """Yield the first `size` bytes of a state, or fewer if it is shorter.

        A longer file of a folder gives one byte more.
        """

        def read(start: int, stop: int) -> bytes:
            if source is not None:
                source.seek(start)
                return source.read(stop - start)
            return self.files.cat_file(place, start=start, end=stop)

        at, chunk, until = 0, _CHUNK if source is not None else _REMOTE_CHUNK, size + (source is not None)
        while at < until:
            start, stop = at, min(at + chunk, until)
            piece = self.ask(f"reading {name}", lambda start=start, stop=stop: read(start, stop))
            yield piece
            at += len(piece)
            if len(piece) < stop - start:
                return

    # --- writing ---------------------------------------------------------------------------------------------

    def name(self, manifest: Manifest) -> str:
        """Return a new checkpoint's stem, which is unique."""
        return f"{_begin(manifest)}{secrets.token_hex(4)}"

    def write(self, stem: str, produce: Produce, keep: int) -> None:
        """Write a checkpoint and read it back. Then remove old checkpoints.

        `produce` writes the state and returns the manifest. `keep`: the number of checkpoints to keep.

        Raises:
            OSError: the store is full or can't be reached. Older checkpoints are not changed.
            NotKept: the store's content is not the data that was written. Older checkpoints are not changed.
        """
        payload = self._at(stem + PAYLOAD)
        try:
            self.ask("making the folder", self._make)
            manifest = self._write(payload, produce)
            self._read_back(stem, manifest)
        except BaseException:
            for name in (stem + MANIFEST, stem + PAYLOAD):
                with contextlib.suppress(Exception):
                    within(lambda name=name: self.files.rm_file(self._at(name)), self.url, self.patience.limit_s)
            raise
        try:
            self.prune(keep, step_of(stem + PAYLOAD))
        except Exception as error:  # noqa: BLE001  this one is saved; the next one removes the old ones
            _log.warning(
                "checkpoints at %s: %s is saved, but older ones could not be removed: %s",
                self.url, stem, first_line(error),
            )  # fmt: skip

    def _write(self, payload: str, produce: Produce) -> bytes:
        file = self.ask("creating a file", lambda: self._create(payload))
        try:
            manifest = produce(file if self.local else _Limited(file, f"checkpoints at {self.url}: writing"))
            self._settle(file)
            within(file.close, f"checkpoints at {self.url}: writing", _PIECE_S)
        except BaseException:
            with contextlib.suppress(Exception):
                if self._objects:
                    file.discard()
                    file.closed = True  # `close` would create an object of the incomplete data
                file.close()
            raise
        return manifest

    def _read_back(self, stem: str, manifest: bytes) -> None:
        """Verify the stored state; then write the manifest, and verify it too. Raises NotKept if one differs."""
        try:
            with contextlib.ExitStack() as stack:
                self._verify(stem, msgspec.json.decode(manifest, type=Manifest), stack)
            self.put(stem + MANIFEST, manifest)
            self.files.invalidate_cache()
            if self.small(stem + MANIFEST) != manifest:
                raise DamagedError(f"{stem + MANIFEST} does not have the content that was written")
        except (DamagedError, FileNotFoundError) as error:
            raise NotKept(f"{self.url} has not kept the data that was written: {first_line(error)}") from None

    def prune(self, keep: int, until: int | None = None) -> None:
        """Remove old checkpoints, except the newest `keep` and the newest finite one; also remove old unfinished ones.

        Checkpoints of steps after `until`, the one that was just written, do not count: they may be damaged, and the
        run was resumed from an older one.
        """
        names = self._names()
        finished, unfinished = (
            [
                entry
                for entry in self._entries(names, suffix)
                if entry.whole and (until is None or entry.step <= until) and self._belongs(entry, unreadable=False)
            ]
            for suffix in (MANIFEST, PAYLOAD)
        )
        oldest = finished[keep - 1].step if len(finished) >= keep else -1
        stale = [entry for entry in unfinished if entry.step < oldest]
        spared = self.newest_finite(finished) if len(finished) > keep else None
        for stem in {entry.stem: None for entry in (*finished[keep:], *stale) if entry != spared}:
            for suffix in (MANIFEST, PAYLOAD):
                if stem + suffix in names:
                    with contextlib.suppress(FileNotFoundError):  # another writer was faster
                        self.ask("removing", partial(self.files.rm_file, self._at(stem + suffix)))

    def newest_finite(self, entries: Sequence[CheckpointName]) -> CheckpointName | None:
        """Return the first of `entries`, which are sorted from the newest on, that is finite; None if there is none."""
        for entry in entries:
            with contextlib.suppress(DamagedError):
                if self.manifest(entry.stem).finite:
                    return entry
        return None

    def check(self) -> None:
        """Verify that the store can be written to.

        Raises:
            UsageError: it can't be written to.
        """

        def probe() -> None:
            place = self._at(f".probe-{secrets.token_hex(4)}")
            self._make()
            self._create(place).close()
            self.files.rm_file(place)

        try:
            self.ask("trying to write", probe)
        except Exception as error:  # noqa: BLE001  each kind of store has its own errors
            raise UsageError(f"checkpoints at {self.url} can't be written: {first_line(error)}") from None

    def _make(self) -> None:
        if not self._objects:  # an object store would create a bucket from a misspelt name
            self.files.makedirs(self.path, exist_ok=True)

    def put(self, name: str, content: bytes) -> None:
        """Write a small file, atomically and durably."""
        self.ask(f"writing {name}", lambda: self._put(name, content))

    def put_new(self, name: str, content: bytes) -> bool:
        """Like `put`, but only if the file does not exist. Returns False if it exists.

        Of two concurrent calls only one succeeds, in a folder and in a store with conditional writes (S3, Google Cloud
        Storage). In other stores both may succeed.
        """
        try:
            self.ask(f"writing {name}", lambda: self._put(name, content, new=True))
        except FileExistsError:
            return False
        return True

    def _put(self, name: str, content: bytes, *, new: bool = False) -> None:
        place = self._at(name)
        if not self.local:
            self._put_object(place, content, new=new)
            return
        partial_ = f"{place}.{secrets.token_hex(4)}.partial"
        try:
            with self._create(partial_) as file:
                file.write(content)
                self._settle(file)
            if not new:
                os.replace(partial_, place)
            else:
                self._link(partial_, place, content)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(partial_)
        folder = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _link(self, partial_: str, place: str, content: bytes) -> None:
        try:
            os.link(partial_, place)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            with self._create(place) as file:
                file.write(content)
                self._settle(file)

    def _put_object(self, place: str, content: bytes, *, new: bool) -> None:
        if new:
            self.files.invalidate_cache()
            if self.files.exists(place):
                raise FileExistsError(place)
            try:
                self.files.pipe_file(place, content, mode="create")
                return
            except (FileExistsError, FileNotFoundError, PermissionError):
                raise
            except Exception as error:  # each store without conditional writes has its own error
                if self.files.exists(place):
                    raise FileExistsError(place) from error
        self.files.pipe_file(place, content)

    def _create(self, place: str) -> Any:
        """Create a file for writing. It is readable for those who may read its folder: in a run's folder, its owner."""
        if not self.local:
            return self.files.open(place, "wb")
        mode = os.stat(self.path).st_mode & 0o666
        return os.fdopen(
            os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode), "wb"
        )

    def _settle(self, file: Any) -> None:
        """Flush the file, and sync it to the disk in a folder: after a power failure no manifest may lack its state."""
        file.flush()
        if self.local:
            os.fsync(file.fileno())

    # --- names -----------------------------------------------------------------------------------------------

    def place(self, stem: str) -> str:
        """The path or URL of a checkpoint's state."""
        return self._at(stem + PAYLOAD) if self.local else f"{self.url}/{stem}{PAYLOAD}"

    def _place_and_size(self, name: str) -> tuple[str, int]:
        """Return the path and the size of a file, 0 if the store does not report the size.

        Raises:
            DamagedError: it is no regular file; a reader of a FIFO would wait for ever.
            FileNotFoundError: it does not exist.
        """
        place = self._at(name)
        if not self.local:
            return place, self.files.size(place) or 0
        status = os.stat(place)
        if not stat.S_ISREG(status.st_mode):
            raise DamagedError(f"{name} is no regular file")
        return place, status.st_size

    def _at(self, name: str) -> str:
        return f"{self.path}/{name}"

    def _names(self) -> set[str]:
        def listed() -> list[str]:
            self.files.invalidate_cache()
            return self.files.ls(self.path, detail=False)

        try:
            paths = self.ask("listing", listed)
        except FileNotFoundError:
            return set()
        return {path.rstrip("/").rpartition("/")[2] for path in paths}

    def _belongs(self, entry: CheckpointName, *, unreadable: bool) -> bool:
        """Return True if a checkpoint belongs to this store's run. `unreadable`: the result if it can't be read."""
        if self.run is None:
            return True
        if entry.run:
            return self.run.id.startswith(entry.run)
        try:
            return self.manifest(entry.stem).run == self.run.name
        except DamagedError:
            return unreadable

    @staticmethod
    def _entries(names: set[str], suffix: str) -> list[CheckpointName]:
        forms = [form for name in names if name.endswith(suffix) and (form := _NAME.fullmatch(name))]
        entries = [
            CheckpointName(int(form[2]), form[1] is None, form[0].removesuffix(suffix), form[3] or "") for form in forms
        ]
        return sorted(entries, key=lambda entry: (entry.step, entry.stem), reverse=True)


class _Limited:
    """A file of a remote store with a time limit for each write."""

    def __init__(self, file: Any, operation: str) -> None:
        self._file, self._operation = file, operation

    def write(self, data: Any, /) -> int:
        return within(lambda: self._file.write(data), self._operation, _PIECE_S)

    def flush(self) -> None:
        self._file.flush()


def _begin(manifest: Manifest) -> str:
    run_prefix = f"{manifest.run_id[:8]}-" if manifest.run_id else ""
    return f"{'' if manifest.whole else 'after-'}step-{manifest.step:08d}-{run_prefix}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, with its notes."""
    line = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    notes = [note for note in getattr(error, "__notes__", ()) if "\n" not in note]
    return f"{line} ({'; '.join(notes)})" if notes else line


def step_of(path: str) -> int | None:
    """Return the step in a checkpoint's path or URL; None if it is not the name of a checkpoint."""
    form = _NAME.fullmatch(path.rpartition("/")[2])
    return int(form[2]) if form else None


# --- place ------------------------------------------------------------------------------------------------------------
#
# A location of checkpoints that a user or a setting names: a store, or one checkpoint in it.


def look(place: str, run: RunIdentity | None = None) -> tuple[Store, list[CheckpointName] | None]:
    """Return the store at `place`, restricted to `run` if it is given; with the one entry if `place` is a file.

    Raises:
        UsageError: the file is no checkpoint, or holds the state of a failed script between two steps.
    """
    if not place.endswith(PAYLOAD):
        return Store(place, run), None
    folder, _, name = place.rpartition("/")
    store, stem = Store(folder or "."), name.removesuffix(PAYLOAD)
    for entry in store.entries():
        if entry.stem == stem:
            if not entry.whole:
                why = "saved when the script failed between two steps, so its update may be incomplete"
                raise UsageError(f"{place}: {why}; resume from a step-... file in the same folder")
            return store, [entry]
    raise UsageError(f"{place}: no checkpoint with a manifest {stem}{MANIFEST} in the same folder")


@contextlib.contextmanager
def reaching(place: str) -> Generator[None]:
    """Convert any exception of a store's client within the context to a FarandoleError.

    Raises:
        FarandoleError: the store can't be read.
    """
    try:
        yield
    except FarandoleError:
        raise
    except Exception as error:
        raise FarandoleError(
            f"checkpoints at {place} can't be read ({type(error).__name__}: {first_line(error)}); make the store "
            f"reachable, and start the run again"
        ) from error


def newest(place: str, run: RunIdentity | None = None) -> Manifest | None:
    """Return the newest manifest at `place` that can be read; only of `run` if it is given. None if there is none."""
    store, entries = look(place, run)
    for entry in entries or store.entries():
        with contextlib.suppress(DamagedError):
            if entry.whole:
                return store.manifest(entry.stem)
    return None


def incomplete(place: str, *, after: int = -1, run: RunIdentity | None = None) -> str:
    """Return a message about states at `place` of a later step than `after` without a manifest; "" if there are none.

    No run can resume from them. The result is right only while no process writes there. `run`: only those of this run.
    """
    store, one = look(place, run)
    unfinished = [] if one else [entry for entry in store.unfinished() if entry.step > after]
    if not unfinished:
        return ""
    more = f", and {len(unfinished) - 1} more" if len(unfinished) > 1 else ""
    return (
        f"{store.place(unfinished[0].stem)} is incomplete{more}: its writer was killed, and no run can resume from it; "
        f"remove it, or let the next checkpoints remove it"
    )


def incomplete_here(place: str, *, after: int = -1) -> str:
    """Like `incomplete` for a readable folder; "" for a remote store, which may be slow."""
    if "://" in place:
        return ""
    try:
        return incomplete(place, after=after)
    except (OSError, FarandoleError):
        return ""
