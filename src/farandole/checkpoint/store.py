"""Where checkpoints are kept: a folder, or any place that fsspec knows.

A checkpoint is two objects: `step-00000123-RUN-TOKEN.pt`, the state, and then, written last,
`step-00000123-RUN-TOKEN.json`, its manifest, which says how long the first is and what its SHA-256 is. Invariant: a
checkpoint counts only if its manifest can be read and both fit; so a writer may die at any moment, and what it leaves
is passed over. RUN is the beginning of its run's identity (`owner.py`). The token makes names unique:
two workers that have lost each other may write the same step at the same time and do not meet.

A store that is opened for a run sees that run's checkpoints only, and removes no others. Those of earlier versions have
no identity in their names: they count for the run whose name stands in their manifest, and that is its folder's.

What is written is read back before it counts: the state, by size and SHA-256, then the manifest. Only after that is
anything older removed, and only then is a checkpoint said to be saved: a store may acknowledge what it did not keep. A
folder's files are synced to the disk first; what is read back then may come from the system's cache, so this finds a
file system that lies and not a disk that does.

Each call is tried again where that can help, and has a limit (`store.py`).

What a failed script has left between two steps is called `after-step-...` and never found by looking for the newest.

Loads no torch: the command line looks here before anything is started.
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
# A checkpoint's manifest: what is known of it unopened.

Facts = Annotated[tuple[tuple[Text, Text], ...], msgspec.Meta(max_length=100_000)]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`run`: the run's name, which is its folder's; `run_id`: its identity, "" in those of earlier versions.
    `facts`: of its signature; `finite`: all parameters, and the last loss.
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
        return dict(self.facts).get(name, "")


# --- sealing ----------------------------------------------------------------------------------------------------------
#
# A state on its way into a store: counted and hashed as it passes, so that the manifest that follows it can say what
# it must be. The manifest is written last: a writer that dies before has written no checkpoint.


class Sink(Protocol):
    """What a state is written into."""

    def write(self, data: Any, /) -> int: ...

    def flush(self) -> None: ...


Produce = Callable[[Sink], bytes]


class Sealing:
    """A sink that counts and hashes what passes through it on its way into another, and then seals the manifest."""

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
        sealed = msgspec.structs.replace(manifest, size=self.size, sha256=self._digest.hexdigest(), time=time.time())
        return msgspec.json.format(msgspec.json.encode(sealed)) + b"\n"


# --- attempts ---------------------------------------------------------------------------------------------------------
#
# Calls to a store of checkpoints: within a limit, tried again where that can help, and never waited for in silence.
#
# - *What is tried again*: whatever a remote store's client raises, but for "there is no such thing" and "you may
#   not". Of a folder: what a network file system or a disk may have for a moment (EIO, ESTALE, a timeout), and not a
#   full disk. Up to `attempts` times in `limit_s`, after pauses that double and vary, so that many runs do not come
#   back at once.
# - *What is told*: after `told_s` without an answer, the place and what it was asked, once a call.
# - *What is given up*: a call that does not come back within `limit_s`. It runs on a thread of its own, which is left
#   behind then: a system call on a dead mount can't be taken back. Where no thread is to be had, it is made without a
#   limit.
#
# The pauses come from a generator of this module's own: Python's is the script's.

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
    """A store has acknowledged a checkpoint, and what is there is not what was written."""


class NotDelivered(OSError):
    """The uploader could not write, and another attempt would not help."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How often and how long a store is asked. Times in seconds."""

    attempts: int = 6
    limit_s: float = 60.0
    told_s: float = 5.0
    first_pause_s: float = 0.2
    longest_pause_s: float = 5.0

    def pause(self, number: int) -> float:
        """After the failure of that attempt, counted from 1."""
        return min(self.first_pause_s * 2.0 ** (number - 1), self.longest_pause_s) * _chance.uniform(0.5, 1.0)


def passing(error: BaseException, *, local: bool) -> bool:
    """True if the same call may succeed a moment later."""
    if isinstance(error, NotKept):
        return True
    if isinstance(error, (FarandoleError, NotDelivered, *_FINAL)):
        return False
    if local:
        return isinstance(error, TimeoutError) or (isinstance(error, OSError) and error.errno in _PASSING)
    return isinstance(error, Exception)


def insist(call: Callable[[], T], what: str, patience: Patience, *, local: bool) -> T:
    """The result of `call`. `what` says what it does, and where, as in "checkpoints at URL: listing".

    Raises:
        TimeoutError: it has not come back within the limit.
        Exception: what it has raised last.
    """
    until = time.monotonic() + patience.limit_s
    return attempt(lambda: within(call, what, until - time.monotonic(), patience.told_s), what, patience, local=local)


def attempt(call: Callable[[], T], what: str, patience: Patience, *, local: bool) -> T:
    """As `insist`, for a call that has limits of its own: none begins after `limit_s`.

    Raises:
        Exception: what it has raised last.
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
                    notes = vars(error).setdefault("__notes__", [])  # as `add_note` does from Python 3.11 on
                    notes.append(f"tried {number} times in {now - began:.0f} s")
                raise
            _log.info("%s: %s; tried again", what, error)
            time.sleep(pause)
    raise AssertionError("the last attempt raises")


def within(call: Callable[[], T], what: str, limit_s: float, told_s: float = Patience.told_s) -> T:
    """The result of `call`, or what it raises.

    Raises:
        TimeoutError: it has not come back within `limit_s`.
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
    except RuntimeError:  # none is to be had
        return call()
    thread.join(min(told_s, limit_s))
    if thread.is_alive() and told_s < limit_s:
        _log.warning("%s: no answer for %.0f s; it is given up after %.0f s", what, told_s, limit_s)
        thread.join(limit_s - told_s)
    if failures:
        raise failures[0]
    if not results:
        raise TimeoutError(f"no answer within {limit_s:.0f} s")
    return results[0]


# --- store ------------------------------------------------------------------------------------------------------------

PAYLOAD, MANIFEST = ".pt", ".json"
_NAME = re.compile(r"(after-)?step-(\d{8,})-(?:([0-9a-f]{8})-)?([0-9a-f]{8})\.(pt|json)")
_CHUNK, _REMOTE_CHUNK = 1 << 20, 8 << 20
_PIECE_S = 300.0  # for a remote store to take one piece: a client sends many megabytes at once
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)  # of a file system without hard links
MAX_MANIFEST_BYTES = 1 << 24  # four times what a worker's signature may have, as people read it


class DamagedError(FarandoleError):
    """A checkpoint that does not count, and why."""


@dataclass(frozen=True)
class RunIdentity:
    """A run, as its checkpoints name it: its identity (32 hexadecimal digits), and its name, which others may have."""

    id: str
    name: str


@dataclass(frozen=True)
class CheckpointName:
    """One checkpoint of a store, seen by its name only. `run`: the beginning of its run's identity, "" in old ones."""

    step: int
    whole: bool
    stem: str
    run: str = ""


class Store:
    """The checkpoints at `url`: a folder's path, or "s3://bucket/prefix" and the like. With `run`: that run's alone.

    Raises:
        UsageError: no such kind of place, or its package is not installed.
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
            raise UsageError(f"checkpoints at {url}: {error}; name a folder or a URL that fsspec knows") from None
        self.files: Any = filesystem
        self.path = str(path).rstrip("/")
        self.local = isinstance(filesystem, LocalFileSystem)
        self._objects = bool(filesystem.async_impl)  # S3 and its like: no folders, whole objects only

    def ask(self, what: str, call: Callable[[], T]) -> T:
        """What `call` returns, which does `what` here: tried again where that can help, and within a limit."""
        return insist(call, f"checkpoints at {self.url}: {what}", self.patience, local=self.local)

    # --- reading ---------------------------------------------------------------------------------------------

    def entries(self) -> list[CheckpointName]:
        """Those that have a manifest, the newest first."""
        return [entry for entry in self._entries(self._names(), MANIFEST) if self._ours(entry, unreadable=True)]

    def unfinished(self) -> list[CheckpointName]:
        """States without a manifest: their writers died, or are still at it."""
        names = self._names()
        return [
            entry
            for entry in self._entries(names, PAYLOAD)
            if entry.stem + MANIFEST not in names and self._ours(entry, unreadable=False)
        ]

    def manifest(self, stem: str) -> Manifest:
        """One manifest.

        Raises:
            DamagedError: there is none, or it can't be read.
            OSError: the store can't be reached.
        """
        try:
            found = msgspec.json.decode(self.small(stem + MANIFEST), type=Manifest)
        except FileNotFoundError:
            raise DamagedError(f"{stem + MANIFEST} is missing") from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise DamagedError(f"{stem + MANIFEST} can't be read: {error}") from None
        if not stem.startswith(_begin(found)):
            raise DamagedError(f"{stem + MANIFEST} is another checkpoint's: it tells of {_begin(found)}...")
        return found

    def small(self, name: str) -> bytes:
        """What is in a small file.

        Raises:
            FileNotFoundError: it is not there.
            DamagedError: it is no file, or no small one.
            OSError: the store can't be reached.
        """

        def read() -> bytes:
            place, size = self._found(name)
            if size > MAX_MANIFEST_BYTES:
                raise DamagedError(f"{name} has {size} bytes, and a manifest at most {MAX_MANIFEST_BYTES}")
            return self.files.cat_file(place)

        return self.ask(f"reading {name}", read)

    @contextlib.contextmanager
    def open_verified(self, stem: str, manifest: Manifest) -> Generator[BinaryIO]:
        """The state of a checkpoint, from its beginning, once all of it has been seen to fit its manifest.

        Raises:
            DamagedError: it does not fit.
            OSError: the store can't be reached.
        """
        with contextlib.ExitStack() as stack:
            copy: Any = None if self.local else stack.enter_context(tempfile.TemporaryFile())
            source = self._verify(stem, manifest, stack, copy)
            found: Any = copy or source
            found.seek(0)
            yield found

    def _verify(self, stem: str, manifest: Manifest, stack: contextlib.ExitStack, copy: Any = None) -> Any:
        """See that the state fits its manifest, whatever a cache of names says. What is read goes to `copy`, too. The
        open file, where it is one of a folder: what is used afterwards is what was looked at.
        """
        name = stem + PAYLOAD
        try:
            self.files.invalidate_cache()
            place, there = self.ask(f"looking at {name}", lambda: self._found(name))
            source: Any = stack.enter_context(open(place, "rb")) if self.local else None  # noqa: SIM115
        except FileNotFoundError:
            raise DamagedError(f"{name} is missing") from None
        if not self.local and there not in (0, manifest.size):
            raise DamagedError(f"{name} has {there} bytes where its manifest says {manifest.size}")
        digest, size = hashlib.sha256(), 0
        for piece in self._pieces(name, place, source, manifest.size):
            digest.update(piece)
            size += len(piece)
            if copy is not None:
                copy.write(piece)
        if size != manifest.size:
            more = " or more" if size > manifest.size else ""
            raise DamagedError(f"{name} has {size} bytes{more} where its manifest says {manifest.size}")
        if digest.hexdigest() != manifest.sha256:
            raise DamagedError(f"{name} has another SHA-256 than its manifest says")
        return source

    def _pieces(self, name: str, place: str, source: Any, size: int) -> Iterator[bytes]:
        """The first `size` bytes of a state, or as many as there are; one more of a folder's file that is longer."""

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
        """A new checkpoint's stem, like nobody else's."""
        return f"{_begin(manifest)}{secrets.token_hex(4)}"

    def write(self, stem: str, produce: Produce, keep: int) -> None:
        """Write a checkpoint: `produce` writes the state and returns the manifest. Read it back. Then remove what is
        superseded.

        Raises:
            OSError: the place is full or can't be reached; what was there before is untouched.
            NotKept: what is there now is not what was written; likewise.
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
        except Exception as error:  # noqa: BLE001  this one is saved; the next one removes what is left now
            _log.warning(
                "checkpoints at %s: %s is saved, but those before it could not be removed: %s",
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
                    file.closed = True  # closing it would make an object of what is there
                file.close()
            raise
        return manifest

    def _read_back(self, stem: str, manifest: bytes) -> None:
        """See that the state is there as it was written; then write the manifest, and see the same of it."""
        try:
            with contextlib.ExitStack() as stack:
                self._verify(stem, msgspec.json.decode(manifest, type=Manifest), stack)
            self.put(stem + MANIFEST, manifest)
            self.files.invalidate_cache()
            if self.small(stem + MANIFEST) != manifest:
                raise DamagedError(f"{stem + MANIFEST} has another content than was written")
        except (DamagedError, FileNotFoundError) as error:
            raise NotKept(f"{self.url} has not kept what was written there: {first_line(error)}") from None

    def prune(self, keep: int, until: int | None = None) -> None:
        """Leave the newest `keep`, the newest finite one, and nothing older that was never finished. What is of a step
        after `until`, the one that was just written, does not count: it may be damaged, and was passed over then.
        """
        names = self._names()
        finished, begun = (
            [
                entry
                for entry in self._entries(names, suffix)
                if entry.whole and (until is None or entry.step <= until) and self._ours(entry, unreadable=False)
            ]
            for suffix in (MANIFEST, PAYLOAD)
        )
        oldest = finished[keep - 1].step if len(finished) >= keep else -1
        stale = [entry for entry in begun if entry.step < oldest]
        spared = self.newest_finite(finished) if len(finished) > keep else None
        for stem in {entry.stem: None for entry in (*finished[keep:], *stale) if entry != spared}:
            for suffix in (MANIFEST, PAYLOAD):
                if stem + suffix in names:
                    with contextlib.suppress(FileNotFoundError):  # another writer was faster
                        self.ask("removing", partial(self.files.rm_file, self._at(stem + suffix)))

    def newest_finite(self, entries: Sequence[CheckpointName]) -> CheckpointName | None:
        """Of `entries`, the newest first."""
        for entry in entries:
            with contextlib.suppress(DamagedError):
                if self.manifest(entry.stem).finite:
                    return entry
        return None

    def check(self) -> None:
        """See that the place can be written to.

        Raises:
            UsageError: it can't.
        """

        def probe() -> None:
            place = self._at(f".probe-{secrets.token_hex(4)}")
            self._make()
            self._create(place).close()
            self.files.rm_file(place)

        try:
            self.ask("trying to write", probe)
        except Exception as error:  # noqa: BLE001  every kind of place has errors of its own
            raise UsageError(f"checkpoints at {self.url} can't be written: {first_line(error)}") from None

    def _make(self) -> None:
        if not self._objects:  # there it would make a bucket out of a misspelt name
            self.files.makedirs(self.path, exist_ok=True)

    def put(self, name: str, content: bytes) -> None:
        """A small file: it is there whole or not at all, and lasts."""
        self.ask(f"writing {name}", lambda: self._put(name, content))

    def put_new(self, name: str, content: bytes) -> bool:
        """As `put`, if there is no such file. False: there is one. Of two at once only one succeeds, in a folder and in
        a store that knows conditional writes (S3, Google's); in others both may.
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
            except Exception as error:  # who does not know conditional writes says so in its own way
                if self.files.exists(place):
                    raise FileExistsError(place) from error
        self.files.pipe_file(place, content)

    def _create(self, place: str) -> Any:
        """A new file, for writing. Who may read its folder may read it: in a run's own folder nobody else."""
        if not self.local:
            return self.files.open(place, "wb")
        mode = os.stat(self.path).st_mode & 0o666
        return os.fdopen(
            os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode), "wb"
        )

    def _settle(self, file: Any) -> None:
        """Local: what the manifest speaks of must be on the disk before it is, if the power goes."""
        file.flush()
        if self.local:
            os.fsync(file.fileno())

    # --- names -----------------------------------------------------------------------------------------------

    def place(self, stem: str) -> str:
        """The path or URL of a checkpoint's state."""
        return self._at(stem + PAYLOAD) if self.local else f"{self.url}/{stem}{PAYLOAD}"

    def _found(self, name: str) -> tuple[str, int]:
        """Where a file is and how long, 0 where nobody says.

        Raises:
            DamagedError: it is no file; a FIFO would have its reader wait for ever.
            FileNotFoundError: there is none.
        """
        place = self._at(name)
        if not self.local:
            return place, self.files.size(place) or 0
        found = os.stat(place)
        if not stat.S_ISREG(found.st_mode):
            raise DamagedError(f"{name} is no file")
        return place, found.st_size

    def _at(self, name: str) -> str:
        return f"{self.path}/{name}"

    def _names(self) -> set[str]:
        def listed() -> list[str]:
            self.files.invalidate_cache()
            return self.files.ls(self.path, detail=False)

        try:
            found = self.ask("listing", listed)
        except FileNotFoundError:
            return set()
        return {name.rstrip("/").rpartition("/")[2] for name in found}

    def _ours(self, entry: CheckpointName, *, unreadable: bool) -> bool:
        """True if a checkpoint is of this store's run. `unreadable`: what holds of one that can't be read."""
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
    """A remote store's file, each of whose writes has a limit."""

    def __init__(self, file: Any, what: str) -> None:
        self._file, self._what = file, what

    def write(self, data: Any, /) -> int:
        return within(lambda: self._file.write(data), self._what, _PIECE_S)

    def flush(self) -> None:
        self._file.flush()


def _begin(manifest: Manifest) -> str:
    whose = f"{manifest.run_id[:8]}-" if manifest.run_id else ""
    return f"{'' if manifest.whole else 'after-'}step-{manifest.step:08d}-{whose}"


def first_line(error: BaseException) -> str:
    """What an error says, with its notes, in one line."""
    line = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    notes = [note for note in getattr(error, "__notes__", ()) if "\n" not in note]
    return f"{line} ({'; '.join(notes)})" if notes else line


def step_of(path: str) -> int | None:
    """The step in a checkpoint's path, or URL; None if it is no checkpoint's."""
    form = _NAME.fullmatch(path.rpartition("/")[2])
    return int(form[2]) if form else None


# --- place ------------------------------------------------------------------------------------------------------------
#
# A place of checkpoints as a user or a setting names it: a store, or one checkpoint in it.
#
# Loads no torch: the command line looks here before anything is started.


def look(place: str, run: RunIdentity | None = None) -> tuple[Store, list[CheckpointName] | None]:
    """The store at `place`, of `run` alone if it is given; with the one entry, if it names a file.

    Raises:
        UsageError: the file is no checkpoint's, or of what a failed script left between two steps.
    """
    if not place.endswith(PAYLOAD):
        return Store(place, run), None
    folder, _, name = place.rpartition("/")
    store, stem = Store(folder or "."), name.removesuffix(PAYLOAD)
    for entry in store.entries():
        if entry.stem == stem:
            if not entry.whole:
                why = "saved where the script failed between two steps, so its update may be done by half"
                raise UsageError(f"{place}: {why}; resume from a step-... beside it")
            return store, [entry]
    raise UsageError(f"{place}: no checkpoint there with its manifest {stem}{MANIFEST} beside it")


@contextlib.contextmanager
def reaching(place: str) -> Generator[None]:
    """Whatever a store's client raises within, as an error of ours.

    Raises:
        FarandoleError: the place can't be read.
    """
    try:
        yield
    except FarandoleError:
        raise
    except Exception as error:
        raise FarandoleError(
            f"checkpoints at {place} can't be read ({type(error).__name__}: {first_line(error)}); see that the place "
            f"can be reached, and start the run again"
        ) from error


def newest(place: str, run: RunIdentity | None = None) -> Manifest | None:
    """The newest manifest at `place` that can be read, of `run` alone if it is given."""
    store, entries = look(place, run)
    for entry in entries or store.entries():
        with contextlib.suppress(DamagedError):
            if entry.whole:
                return store.manifest(entry.stem)
    return None


def incomplete(place: str, *, after: int = -1, run: RunIdentity | None = None) -> str:
    """A word on the states at `place` of a later step than `after` that are there without their manifest: nothing goes
    on from them. "" for none. Nobody may be writing there. Of `run` alone, if it is given.
    """
    store, one = look(place, run)
    left = [] if one else [entry for entry in store.unfinished() if entry.step > after]
    if not left:
        return ""
    more = f" and {len(left) - 1} more like it" if len(left) > 1 else ""
    return (
        f"{store.place(left[0].stem)} is incomplete{more}: its writer was killed, and nothing can go on from it; "
        f"remove it, or leave it to the next checkpoints"
    )


def incomplete_here(place: str, *, after: int = -1) -> str:
    """The same of a place on this machine's disk that can be read, "" of any other: a store may take its time."""
    if "://" in place:
        return ""
    try:
        return incomplete(place, after=after)
    except (OSError, FarandoleError):
        return ""
