"""The cache's folder: copies of files of elsewhere, within a limit, shared by any number of processes.

- **Whole or not there.** A copy is written under another name, compared with the size and MD5 that are known of it, and
  renamed. Its name carries the MD5.
- **Compared before it is used** (`cache_folder.py`), whoever left it there.
- **Once.** One file lock a copy: of several processes that want it one fetches, the others wait, or do something else.
  The kernel drops the lock of a process that is killed, and the next one begins anew.
- **The limit is kept before a copy comes, not after it**: what comes counts with its full length, which its name tells,
  from before its first byte. Whoever has a removed copy open can read on. Locks, and notes of a hundred bytes a copy,
  do not count.
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
# Whether a copy in the cache is what its MD5 says, asked before it is used, whoever left it there.
#
# MD5 takes 1.3 s for a GB, too long for each process of a machine. So who has compared a copy notes beside it, in
# `NAME.seen`, which file that was: inode, length, and the times of its last changes, of which nobody can set the
# second. Invariant: a copy is taken as it is only if this process has compared that very file, or if the note says so
# and only this user, or root, could have written the note and the file. Else it is compared. Whoever can write as
# this user needs no cache to do harm; whoever has written to the file has moved its times; and where others can
# write, as in a cache that several users share, each process compares for itself, once. Left out: a disk that loses
# bits behind its times.
#
# The note's own time of change says when the copy was last opened: to touch the copy would be to change it.

NOTE = ".seen"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_BLOCK = 1 << 20


class Verified:
    """Of one process: which files it has compared."""

    def __init__(self) -> None:
        self._compared: set[str] = set()

    def __call__(self, path: Path, descriptor: int, size: int, md5: str) -> bool:
        """Whether the copy at `path`, opened as `descriptor`, has this length and MD5. If so it is noted."""
        found = os.fstat(descriptor)
        known = _identity(found, md5)
        if known not in self._compared and not (_ours(found) and _noted(path) == known):
            same = found.st_size == size and md5_of(descriptor) == md5
            if not same or known != _identity(os.fstat(descriptor), md5):  # written to meanwhile
                return False
        self.note(path, descriptor, md5)
        return True

    def note(self, path: Path, descriptor: int, md5: str) -> None:
        """The copy at `path` has been compared with `md5`, and was opened just now."""
        found = os.fstat(descriptor)
        known = _identity(found, md5)
        self._compared.add(known)
        with contextlib.suppress(OSError):  # a full disk, another user's cache: it is compared again, that is all
            if _noted(path) == known:
                os.utime(note_of(path))
            else:
                write_note(note_of(path), known.encode())


def opened(path: Path) -> int:
    """A descriptor for reading; no link is followed, and a FIFO is not waited for."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)


def note_of(path: Path) -> Path:
    return path.with_name(path.name + NOTE)


def last_used(path: Path) -> int:
    """When a copy was last opened, in ns."""
    for file in (note_of(path), path):
        with contextlib.suppress(FileNotFoundError):
            return file.stat().st_mtime_ns
    return 0


def md5sum(path: Path) -> str:
    with path.open("rb") as file:
        return md5_of(file.fileno())


def md5_of(descriptor: int) -> str:
    digest, at = hashlib.md5(usedforsecurity=False), 0
    while block := os.pread(descriptor, _BLOCK, at):  # whoever else has it open shares its position
        digest.update(block)
        at += len(block)
    return digest.hexdigest()


def _identity(found: os.stat_result, md5: str) -> str:
    return f"{md5} {found.st_ino} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"


def _ours(found: os.stat_result) -> bool:
    """Whether nobody but this user and root could have written it."""
    return stat.S_ISREG(found.st_mode) and found.st_uid in (os.geteuid(), 0) and not found.st_mode & _OTHERS_WRITE


def _noted(path: Path) -> str:
    """What the note beside `path` says, if it can be believed."""
    return (read_note(note_of(path)) or b"")[:256].decode(errors="replace")


def read_note(note: Path) -> bytes | None:
    """All of it, if nobody but this user, or root, could have written it."""
    try:
        descriptor = opened(note)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        return file.read() if _ours(os.fstat(descriptor)) else None


def write_note(note: Path, content: bytes) -> None:
    """All of it or nothing: others read it."""
    part = note.with_name(f"{note.name}.{os.getpid()}{NOTE}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)
    os.replace(part, note)


# --- keeping ----------------------------------------------------------------------------------------------------------
#
# Which shards a cache fetches next, and which copies make way for them: pure.
#
# - Shards come in the order in which the samples want them, as far as there is room.
# - A copy that is wanted does not make way for another one that is. So where the data is larger than the cache, in a
#   shuffled order, a part of it stays here for good, and of the rest samples are read one by one (`fetcher.py`): to
#   exchange copies would fetch a whole shard for almost every sample. In the dataset's own order what has been read is
#   wanted no more.
# - Of copies that are not wanted the least recently used goes first, and none that somebody else has used within
#   `STAYS_S`: two runs with caches too small for both would else go on fetching what the other one has removed.

STAYS_S = 180.0


@dataclass(frozen=True)
class RemoteFile:
    """A file elsewhere, of so many bytes, with its MD5 in hex."""

    url: str
    size: int
    md5: str

    @property
    def name(self) -> str:
        """Of its copy: what is made anew elsewhere under the same name is another copy here."""
        return f"{self.md5}-{self.url.rsplit('/', 1)[-1]}"


@dataclass(frozen=True)
class Copy:
    """A file in the cache, or one that is being fetched. `used_s`: how long ago it was used last."""

    name: str
    size: int
    used_s: float
    coming: bool = False


@dataclass(frozen=True)
class Next:
    """`file` is fetched, after copies of these names have gone."""

    file: RemoteFile
    makes_way: tuple[str, ...] = ()


def choose(
    wanted: Sequence[RemoteFile], there: Collection[Copy], limit: int, busy: Collection[str] = ()
) -> Next | None:
    """What is fetched next; None: nothing. `wanted`: in that order. `busy`: names that somebody is fetching, or that
    could not be fetched just now.
    """
    copies = {copy.name: copy for copy in there}
    names = {file.name for file in wanted}
    idle = sorted(
        (copy for copy in there if copy.name not in names and not copy.coming and copy.used_s > STAYS_S),
        key=lambda copy: -copy.used_s,
    )
    total = sum(copy.size for copy in there)
    for file in wanted:
        if file.name in copies or file.name in busy:
            continue
        makes_way = room_for(total + file.size - limit, idle)
        if makes_way is not None:
            return Next(file, makes_way)
    return None


def room_for(excess: int, idle: Sequence[Copy]) -> tuple[str, ...] | None:
    """The first of these copies that together have so many bytes; None: all of them have less."""
    gone: list[str] = []
    for copy in idle:
        if excess <= 0:
            break
        gone.append(copy.name)
        excess -= copy.size
    return tuple(gone) if excess <= 0 else None


# --- folder -----------------------------------------------------------------------------------------------------------

PIECE_BYTES = 8 << 20  # asked for at once, of a file that is copied
PART, LOCK, TABLE = ".part", ".lock", ".samples"
Read = Callable[[int, int], bytes]


class Folder:
    """`path`, of at most `limit_bytes`. Of one process; threads may share one."""

    def __init__(self, path: str | os.PathLike[str], limit_bytes: int) -> None:
        self.path = Path(path).expanduser()
        self.limit_bytes = limit_bytes
        self._verified = Verified()

    def there(self, file: RemoteFile) -> int | None:
        """A descriptor of the copy, for reading, if it is there, and is what it should be.

        Raises:
            ShardError: something is there that can't be read.
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
        """Whether a copy is there, whatever is in it."""
        return os.path.lexists(self.path / file.name)

    def copies(self) -> list[Copy]:
        """All that counts. Those of others may come and go meanwhile."""
        now, found = time.time(), list[Copy]()
        with suppress(FileNotFoundError):
            for path in self.path.iterdir():
                if path.suffix in (LOCK, NOTE, TABLE):
                    continue
                with suppress(FileNotFoundError):
                    coming = path.suffix == PART
                    name = path.with_suffix("").stem if coming else path.name
                    used_s = max(0.0, now - last_used(path) / 1e9)
                    found.append(Copy(name=name, size=_length(path), used_s=used_s, coming=coming))
        return found

    def remove(self, name: str) -> None:
        """A copy that makes way, or is no good."""
        with suppress(OSError):
            (self.path / name).unlink()
            note_of(self.path / name).unlink(missing_ok=True)

    def use(self, file: RemoteFile) -> None:
        """It is in use: it does not make way for what others want."""
        with suppress(OSError):
            os.utime(note_of(self.path / file.name))

    def fetch(
        self, file: RemoteFile, read: Read, makes_way: Sequence[str] | None, *, waits: bool, piece: int = PIECE_BYTES
    ) -> bool:
        """Have a copy of `file`, which `read(start, stop)` gives. `makes_way`: copies that go first; None: as many of
        the least recently used as it takes. `piece`: how many bytes are read at once. False: somebody else is at it,
        and `waits` is not asked for.

        Raises:
            ShardError: what was read is not the file.
            OSError: it can't be written.
            UsageError: there is no room for it.
        """
        if file.size > self.limit_bytes:
            raise UsageError(
                f"shard {file.url} has {file.size} bytes and the cache may have {self.limit_bytes}; "
                f"raise cache_bytes, or make smaller shards"
            )
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            with FileLock(self.path / (file.name + LOCK), timeout=-1 if waits else 0):
                if (descriptor := self.there(file)) is not None:
                    os.close(descriptor)  # somebody else was faster
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
        """Held by whoever changes which files there are, so that their lengths can be added up."""
        return FileLock(self.path / ("room" + LOCK))

    def _take_room(self, part: Path, size: int, makes_way: Sequence[str] | None) -> None:
        with self._room():
            part.unlink(missing_ok=True)  # of one who was killed
            self._clear_parts()
            there = self.copies()
            excess = sum(copy.size for copy in there) + size - self.limit_bytes
            if makes_way is None:
                idle = sorted((copy for copy in there if not copy.coming), key=lambda copy: -copy.used_s)
                makes_way = room_for(excess, idle)
            gone = set(makes_way or ())
            excess -= sum(copy.size for copy in there if copy.name in gone)
            if excess > 0:
                coming = sum(copy.size for copy in there if copy.coming)
                raise UsageError(
                    f"the cache {self.path} may have {self.limit_bytes} bytes, and {coming} of them are being "
                    f"downloaded by other processes; raise cache_bytes to at least the shards that all processes of "
                    f"this machine read at once"
                )
            for name in gone:
                self.remove(name)
            part.touch()

    def _clear_parts(self) -> None:
        """Of those who were killed. What somebody is fetching just now stays."""
        for path in self.path.glob("*" + PART):
            with suppress(Timeout), FileLock(self.path / (path.with_suffix("").stem + LOCK), timeout=0):
                path.unlink(missing_ok=True)

    # --- tables of shards whose index has none --------------------------------------------------------------------

    def table(self, file: RemoteFile) -> bytes | None:
        """What was noted of the samples of a shard, if it can be believed."""
        return read_note(self.path / (file.name + TABLE))

    def note_table(self, file: RemoteFile, content: bytes) -> None:
        """That is lost where it can't be written, and made again."""
        with suppress(OSError):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_note(self.path / (file.name + TABLE), content)


def _length(path: Path) -> int:
    return int(path.with_suffix("").suffix[1:]) if path.suffix == PART else path.stat().st_size
