"""The cache folder: copies of remote files, within a limit, shared by any number of processes.

- **Whole or not there.** A copy is written under another name, compared with its known size and MD5, and renamed. Its
  name contains the MD5.
- **Compared before use** (`Verified`), whichever process or user has left it.
- **Fetched once.** Each copy has one file lock. Of several processes that need it one fetches; the others wait, or do
  something else. The kernel drops the lock of a process that is killed, and the next process starts again.
- **The limit is kept before a copy arrives, not after it.** A file that is being fetched counts with its full length,
  which its name contains, from before its first byte. A process that has a removed copy open can continue to read it.
  Locks, and notes of a hundred bytes a copy, do not count.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from farandole.data.object_store import torn
from farandole.errors import ShardError, UsageError

# --- verification -----------------------------------------------------------------------------------------------------
#
# A copy in the cache is compared with its MD5 before it is used, whichever process or user has left it.
#
# MD5 takes 1.3 s for a GB, too long for each process of a machine. So a process that has compared a copy writes a note
# beside it, `NAME.seen`, which identifies the file: inode, length, mtime and ctime. No user can set the ctime.
# Invariant: a copy is accepted without comparison only if this process has compared that very file, or if the note
# identifies it and only this user, or root, could have written the note and the file. Otherwise it is compared. An
# attacker who can write as this user needs no cache to do harm; a write to the file changes its times; and if other
# users can write, as in a shared cache, each process compares for itself, once. Left out: a disk that loses bits
# without a change of the times.
#
# The note's mtime is the time when the copy was last opened; touching the copy itself would change its identity.

NOTE = ".seen"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_BLOCK = 1 << 20


class Verified:
    """The files that this process has compared with their MD5."""

    def __init__(self) -> None:
        self._compared: set[str] = set()

    def __call__(self, path: Path, descriptor: int, size: int, md5: str) -> bool:
        """Returns True if the copy at `path`, open as `descriptor`, has this length and MD5. If so, writes its note."""
        status = os.fstat(descriptor)
        identity = _identity(status, md5)
        if identity not in self._compared and not (_ours(status) and _trusted_note(path) == identity):
            same = status.st_size == size and md5_of(descriptor) == md5
            if not same or identity != _identity(os.fstat(descriptor), md5):  # it was written to meanwhile
                return False
        self.note(path, descriptor, md5)
        return True

    def note(self, path: Path, descriptor: int, md5: str) -> None:
        """Records that the copy at `path` was compared with `md5`, and was opened just now."""
        identity = _identity(os.fstat(descriptor), md5)
        self._compared.add(identity)
        with contextlib.suppress(OSError):  # a full disk, another user's cache: the copy is just compared again
            if _trusted_note(path) == identity:
                os.utime(note_of(path))
            else:
                write_note(note_of(path), identity.encode())


def opened(path: Path) -> int:
    """Returns a descriptor for reading. Follows no symbolic link, and does not wait for a FIFO."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)


def note_of(path: Path) -> Path:
    return path.with_name(path.name + NOTE)


def last_used(path: Path) -> int:
    """Returns the time when a copy was last opened, in ns; 0 if the copy does not exist."""
    for file in (note_of(path), path):
        with contextlib.suppress(FileNotFoundError):
            return file.stat().st_mtime_ns
    return 0


def md5sum(path: Path) -> str:
    with path.open("rb") as file:
        return md5_of(file.fileno())


def md5_of(descriptor: int) -> str:
    digest, at = hashlib.md5(usedforsecurity=False), 0
    while block := os.pread(descriptor, _BLOCK, at):  # a forked process shares the descriptor's position
        digest.update(block)
        at += len(block)
    return digest.hexdigest()


def _identity(status: os.stat_result, md5: str) -> str:
    return f"{md5} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def _ours(status: os.stat_result) -> bool:
    """Returns True if only this user and root could have written the file."""
    return stat.S_ISREG(status.st_mode) and status.st_uid in (os.geteuid(), 0) and not status.st_mode & _OTHERS_WRITE


def _trusted_note(path: Path) -> str:
    """Returns the text of the note beside `path`; "" if there is none, or if it can't be trusted."""
    return (read_note(note_of(path)) or b"")[:256].decode(errors="replace")


def read_note(note: Path) -> bytes | None:
    """Returns the content of a note; None if there is none, or if another user than root could have written it."""
    try:
        descriptor = opened(note)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        return file.read() if _ours(os.fstat(descriptor)) else None


def write_note(note: Path, content: bytes) -> None:
    """Writes the whole note or nothing, since other processes read it."""
    part = note.with_name(f"{note.name}.{os.getpid()}{NOTE}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)
    os.replace(part, note)


# --- keeping ----------------------------------------------------------------------------------------------------------
#
# `choose` selects the shard that a cache fetches next, and the copies that are evicted for it: pure.
#
# - Shards are fetched in the order in which the samples need them, while there is room.
# - A wanted copy is not evicted for another wanted one. So if the data is larger than the cache, in a shuffled order, a
#   part of it stays here for good, and samples of the rest are read one by one (`fetcher.py`): exchanging copies would
#   fetch a whole shard for almost every sample. In the dataset's own order a shard that was read is no longer wanted.
# - Of the copies that are not wanted the least recently used is evicted first, but none that another process has used
#   within `STAYS_S`: otherwise two runs with a cache too small for both would keep fetching what the other removed.

STAYS_S = 180.0


@dataclass(frozen=True)
class RemoteFile:
    """A remote file: its URL, its size in bytes, its MD5 in hex."""

    url: str
    size: int
    md5: str

    @property
    def name(self) -> str:
        """The name of its copy. It contains the MD5, so a changed remote file of the same name is another copy."""
        return f"{self.md5}-{self.url.rsplit('/', 1)[-1]}"


@dataclass(frozen=True)
class Copy:
    """A file in the cache, or (`coming`) one that is being fetched. `used_s`: seconds since its last use."""

    name: str
    size: int
    used_s: float
    coming: bool = False


@dataclass(frozen=True)
class Next:
    """The decision to fetch `file`, after the copies named in `makes_way` are removed."""

    file: RemoteFile
    makes_way: tuple[str, ...] = ()


def choose(
    needed_files: Sequence[RemoteFile], present: Collection[Copy], limit: int, busy: Collection[str] = ()
) -> Next | None:
    """Returns what to fetch next, or None.

    `needed_files`: files in the order of need. `present`: all copies. `limit`: bytes. `busy`: names that another
    process is fetching, or that could not be fetched just now.
    """
    copies = {copy.name: copy for copy in present}
    names = {file.name for file in needed_files}
    idle = sorted(
        (copy for copy in present if copy.name not in names and not copy.coming and copy.used_s > STAYS_S),
        key=lambda copy: -copy.used_s,
    )
    total = sum(copy.size for copy in present)
    for file in needed_files:
        if file.name in copies or file.name in busy:
            continue
        makes_way = room_for(total + file.size - limit, idle)
        if makes_way is not None:
            return Next(file, makes_way)
    return None


def room_for(excess: int, idle: Sequence[Copy]) -> tuple[str, ...] | None:
    """Returns the names of the first copies that together have `excess` bytes; None: all together have less."""
    names: list[str] = []
    for copy in idle:
        if excess <= 0:
            break
        names.append(copy.name)
        excess -= copy.size
    return tuple(names) if excess <= 0 else None


# --- folder -----------------------------------------------------------------------------------------------------------

PIECE_BYTES = 8 << 20  # size of a request when a file is copied
PART, LOCK, TABLE = ".part", ".lock", ".samples"
Read = Callable[[int, int], bytes]


class Folder:
    """The cache folder at `path`, of at most `limit_bytes`. Each process has its own object; threads may share one."""

    def __init__(self, path: str | os.PathLike[str], limit_bytes: int) -> None:
        self.path = Path(path).expanduser()
        self.limit_bytes = limit_bytes
        self._verified = Verified()

    def open_copy(self, file: RemoteFile) -> int | None:
        """Returns a descriptor of the copy, for reading; None if there is none with the right content.

        Raises:
            ShardError: the copy exists and can't be read.
        """
        path = self.path / file.name
        try:
            descriptor = opened(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ShardError(f"the copy {path} can't be read: {error.strerror}; remove it") from None
        if self._verified(path, descriptor, file.size, file.md5):
            return descriptor
        os.close(descriptor)
        return None

    def has(self, file: RemoteFile) -> bool:
        """Returns True if a copy exists, with any content."""
        return os.path.lexists(self.path / file.name)

    def copies(self) -> list[Copy]:
        """Returns all copies that count to the limit. Other processes may add and remove copies meanwhile."""
        now, copies = time.time(), list[Copy]()
        with suppress(FileNotFoundError):
            for path in self.path.iterdir():
                if path.suffix in (LOCK, NOTE, TABLE):
                    continue
                with suppress(FileNotFoundError):
                    coming = path.suffix == PART
                    name = path.with_suffix("").stem if coming else path.name
                    used_s = max(0.0, now - last_used(path) / 1e9)
                    copies.append(Copy(name=name, size=_length(path), used_s=used_s, coming=coming))
        return copies

    def remove(self, name: str) -> None:
        """Removes a copy and its note."""
        with suppress(OSError):
            (self.path / name).unlink()
            note_of(self.path / name).unlink(missing_ok=True)

    def use(self, file: RemoteFile) -> None:
        """Marks a copy as used now, so that it is not evicted for files that other processes want."""
        with suppress(OSError):
            os.utime(note_of(self.path / file.name))

    def fetch(
        self, file: RemoteFile, read: Read, makes_way: Sequence[str] | None, *, waits: bool, piece: int = PIECE_BYTES
    ) -> bool:
        """Copies `file` to the cache by `read(start, stop)`, unless there is a copy. Returns True if there is one now.

        `makes_way`: copies to remove first; None: as many of the least recently used as needed. `piece`: bytes of one
        read. If another process is fetching it, waits for that if `waits`, and returns False otherwise.

        Raises:
            ShardError: the bytes that were read are not those of the file.
            OSError: it can't be written.
            UsageError: there is no room for it.
        """
        if file.size > self.limit_bytes:
            raise UsageError(
                f"shard {file.url} has {file.size} bytes and the limit of the cache is {self.limit_bytes}; "
                f"raise cache_bytes, or make smaller shards"
            )
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            with FileLock(self.path / (file.name + LOCK), timeout=-1 if waits else 0):
                if (descriptor := self.open_copy(file)) is not None:
                    os.close(descriptor)  # another process was faster
                    return True
                part = self.path / f"{file.name}.{file.size}{PART}"
                try:
                    self._take_room(part, file.size, makes_way)
                    self._write(file, part, read, piece)
                    return True
                finally:
                    with self._room():
                        part.unlink(missing_ok=True)
        except Timeout:
            return False

    def _write(self, file: RemoteFile, part: Path, read: Read, piece: int) -> None:
        with part.open("wb") as target:
            for start in range(0, file.size, piece):
                target.write(read(start, min(start + piece, file.size)))
        if md5sum(part) != file.md5:
            raise torn(file.url, "its MD5 is not the one in the index")
        with self._room():
            path = self.path / file.name
            os.replace(part, path)
            descriptor = opened(path)
            try:
                self._verified.note(path, descriptor, file.md5)
            finally:
                os.close(descriptor)

    def _room(self) -> FileLock:
        """The lock for adding and removing files, so that the sum of their lengths is consistent."""
        return FileLock(self.path / ("room" + LOCK))

    def _take_room(self, part: Path, size: int, makes_way: Sequence[str] | None) -> None:
        with self._room():
            part.unlink(missing_ok=True)  # left by a process that was killed
            self._clear_parts()
            copies = self.copies()
            excess = sum(copy.size for copy in copies) + size - self.limit_bytes
            if makes_way is None:
                idle = sorted((copy for copy in copies if not copy.coming), key=lambda copy: -copy.used_s)
                makes_way = room_for(excess, idle)
            removed = set(makes_way or ())
            excess -= sum(copy.size for copy in copies if copy.name in removed)
            if excess > 0:
                coming = sum(copy.size for copy in copies if copy.coming)
                raise UsageError(
                    f"the limit of the cache {self.path} is {self.limit_bytes} bytes, and {coming} of them are being "
                    f"downloaded by other processes; raise cache_bytes to at least the size of the shards that all "
                    f"processes of this machine read at once"
                )
            for name in removed:
                self.remove(name)
            part.touch()

    def _clear_parts(self) -> None:
        """Removes the parts that killed processes left. Parts that a process is fetching now stay."""
        for path in self.path.glob("*" + PART):
            with suppress(Timeout), FileLock(self.path / (path.with_suffix("").stem + LOCK), timeout=0):
                path.unlink(missing_ok=True)

    # --- tables of shards whose index has none --------------------------------------------------------------------

    def table(self, file: RemoteFile) -> bytes | None:
        """Returns the stored table of the samples of a shard; None if there is none, or if it can't be trusted."""
        return read_note(self.path / (file.name + TABLE))

    def note_table(self, file: RemoteFile, content: bytes) -> None:
        """Stores the table of the samples of a shard. If it can't be written, it will be computed again."""
        with suppress(OSError):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_note(self.path / (file.name + TABLE), content)


def _length(path: Path) -> int:
    return int(path.with_suffix("").suffix[1:]) if path.suffix == PART else path.stat().st_size
