"""Where checkpoints are kept: a folder, or any place that fsspec knows.

A checkpoint is two objects: `step-00000123-TOKEN.pt`, the state, and then, written last, `step-00000123-TOKEN.json`,
its manifest, which says how long the first is and what its SHA-256 is. Invariant: a checkpoint counts only if its
manifest can be read and both fit; so a writer may die at any moment, and what it leaves is passed over. The token makes
names unique: two workers that have lost each other may write the same step at the same time and do not meet.

What a failed script has left between two steps is called `after-step-...` and never found by looking for the newest.

Loads no torch: the command line looks here before anything is started.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import fsspec
import msgspec
from fsspec.implementations.local import LocalFileSystem

from farandole.checkpoint.manifest import Manifest as Manifest
from farandole.checkpoint.sealing import Produce
from farandole.errors import FarandoleError, UsageError
from farandole.platform.extras import how_to_install

PAYLOAD, MANIFEST = ".pt", ".json"
_NAME = re.compile(r"(after-)?step-(\d{8,})-([0-9a-f]{8})\.(pt|json)")
_CHUNK = 1 << 20
MAX_MANIFEST_BYTES = 1 << 24  # four times what a worker's signature may have, as people read it


class DamagedError(FarandoleError):
    """A checkpoint that does not count, and why."""


@dataclass(frozen=True)
class Entry:
    """One checkpoint of a store, seen by its name only."""

    step: int
    whole: bool
    stem: str


class Store:
    """The checkpoints at `url`: a folder's path, or "s3://bucket/prefix" and the like.

    Raises:
        UsageError: no such kind of place, or its package is not installed.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/") or url
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

    # --- reading ---------------------------------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        """Those that have a manifest, the newest first."""
        return self._entries(self._names(), MANIFEST)

    def unfinished(self) -> list[Entry]:
        """States without a manifest: their writers died, or are still at it."""
        names = self._names()
        return [entry for entry in self._entries(names, PAYLOAD) if entry.stem + MANIFEST not in names]

    def manifest(self, stem: str) -> Manifest:
        """One manifest.

        Raises:
            DamagedError: there is none, or it can't be read.
            OSError: the store can't be reached.
        """
        try:
            place, size = self._found(stem + MANIFEST)
            if size > MAX_MANIFEST_BYTES:
                raise DamagedError(f"{stem + MANIFEST} has {size} bytes, and a manifest at most {MAX_MANIFEST_BYTES}")
            found = msgspec.json.decode(self.files.cat_file(place), type=Manifest)
        except FileNotFoundError:
            raise DamagedError(f"{stem + MANIFEST} is missing") from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise DamagedError(f"{stem + MANIFEST} can't be read: {error}") from None
        if not stem.startswith(_begin(found)):
            raise DamagedError(f"{stem + MANIFEST} is another checkpoint's: it tells of {_begin(found)}...")
        return found

    @contextlib.contextmanager
    def open_verified(self, stem: str, manifest: Manifest) -> Generator[BinaryIO]:
        """The state of a checkpoint, from its beginning, once all of it has been seen to fit its manifest.

        Raises:
            DamagedError: it does not fit.
            OSError: the store can't be reached.
        """
        with contextlib.ExitStack() as stack:
            try:
                source: Any = stack.enter_context(self.files.open(self._found(stem + PAYLOAD)[0], "rb"))
            except FileNotFoundError:
                raise DamagedError(f"{stem + PAYLOAD} is missing") from None
            copy = None if self.local else stack.enter_context(tempfile.TemporaryFile())
            digest, size = hashlib.sha256(), 0
            while size <= manifest.size and (piece := source.read(_CHUNK)):
                digest.update(piece)
                size += len(piece)
                if copy is not None:
                    copy.write(piece)
            if size != manifest.size:
                more = " or more" if size > manifest.size else ""
                raise DamagedError(f"{stem + PAYLOAD} has {size} bytes{more} where its manifest says {manifest.size}")
            if digest.hexdigest() != manifest.sha256:
                raise DamagedError(f"{stem + PAYLOAD} has another SHA-256 than its manifest says")
            found: Any = copy or source
            found.seek(0)
            yield found

    # --- writing ---------------------------------------------------------------------------------------------

    def name(self, manifest: Manifest) -> str:
        """A new checkpoint's stem, like nobody else's."""
        return f"{_begin(manifest)}{secrets.token_hex(4)}"

    def write(self, stem: str, produce: Produce, keep: int) -> None:
        """Write a checkpoint: `produce` writes the state and returns the manifest. Then remove what is superseded.

        Raises:
            OSError: the place is full or can't be reached; what was there before is untouched.
        """
        payload = self._at(stem + PAYLOAD)
        try:
            self._make()
            with self._create(payload) as file:
                try:
                    manifest = produce(file)
                    self._settle(file)
                except BaseException:
                    if self._objects:
                        file.discard()
                        file.closed = True  # closing it would make an object of what is there
                    raise
        except BaseException:
            with contextlib.suppress(OSError):
                self.files.rm_file(payload)
            raise
        self.put(stem + MANIFEST, manifest)
        self.prune(keep)

    def prune(self, keep: int) -> None:
        """Leave the newest `keep`, the newest finite one, and nothing older that was never finished."""
        names = self._names()
        finished = [entry for entry in self._entries(names, MANIFEST) if entry.whole]
        oldest = finished[keep - 1].step if len(finished) >= keep else -1
        stale = [entry for entry in self._entries(names, PAYLOAD) if entry.whole and entry.step < oldest]
        spared = self.newest_finite(finished) if len(finished) > keep else None
        for stem in {entry.stem: None for entry in (*finished[keep:], *stale) if entry != spared}:
            for suffix in (MANIFEST, PAYLOAD):
                if stem + suffix in names:
                    with contextlib.suppress(FileNotFoundError):  # another writer was faster
                        self.files.rm_file(self._at(stem + suffix))

    def newest_finite(self, entries: Sequence[Entry]) -> Entry | None:
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
        probe = self._at(f".probe-{secrets.token_hex(4)}")
        try:
            self._make()
            self._create(probe).close()
            self.files.rm_file(probe)
        except Exception as error:  # noqa: BLE001  every kind of place has errors of its own
            raise UsageError(f"checkpoints at {self.url} can't be written: {first_line(error)}") from None

    def _make(self) -> None:
        if not self._objects:  # there it would make a bucket out of a misspelt name
            self.files.makedirs(self.path, exist_ok=True)

    def put(self, name: str, content: bytes) -> None:
        """A small file: it is there whole or not at all, and lasts."""
        place = self._at(name)
        if not self.local:
            self.files.pipe_file(place, content)
            return
        partial = f"{place}.{secrets.token_hex(4)}.partial"
        try:
            with self._create(partial) as file:
                file.write(content)
                self._settle(file)
            os.replace(partial, place)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise
        folder = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

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
        self.files.invalidate_cache()
        try:
            found: list[str] = self.files.ls(self.path, detail=False)
        except FileNotFoundError:
            return set()
        return {name.rstrip("/").rpartition("/")[2] for name in found}

    @staticmethod
    def _entries(names: set[str], suffix: str) -> list[Entry]:
        forms = [form for name in names if name.endswith(suffix) and (form := _NAME.fullmatch(name))]
        entries = [Entry(int(form[2]), form[1] is None, form[0].removesuffix(suffix)) for form in forms]
        return sorted(entries, key=lambda entry: (entry.step, entry.stem), reverse=True)


def _begin(manifest: Manifest) -> str:
    return f"{'' if manifest.whole else 'after-'}step-{manifest.step:08d}-"


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def step_of(path: str) -> int | None:
    """The step in a checkpoint's path, or URL; None if it is no checkpoint's."""
    form = _NAME.fullmatch(path.rpartition("/")[2])
    return int(form[2]) if form else None
