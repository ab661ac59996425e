"""The cache's folder: copies of files of elsewhere, within a limit, shared by any number of processes.

- **Whole or not there.** A copy is written under another name, compared with the size and MD5 that are known of it, and
  renamed. Its name carries the MD5.
- **Compared before it is used** (`verification.py`), whoever left it there.
- **Once.** One file lock a copy: of several processes that want it one fetches, the others wait, or do something else.
  The kernel drops the lock of a process that is killed, and the next one begins anew.
- **The limit is kept before a copy comes, not after it**: what comes counts with its full length, which its name tells,
  from before its first byte. Whoever has a removed copy open can read on. Locks, and notes of a hundred bytes a copy,
  do not count.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from farandole.data.keeping import Copy, File, room_for
from farandole.data.store import torn
from farandole.data.verification import NOTE, Verified, last_used, md5sum, note_of, opened, read_note, write_note
from farandole.errors import ShardError, UsageError

PIECE_BYTES = 8 << 20  # asked for at once, of a file that is copied
PART, LOCK, TABLE = ".part", ".lock", ".samples"

Read = Callable[[int, int], bytes]


class Folder:
    """`path`, of at most `limit_bytes`. Of one process; threads may share one."""

    def __init__(self, path: str | os.PathLike[str], limit_bytes: int) -> None:
        self.path = Path(path).expanduser()
        self.limit_bytes = limit_bytes
        self._verified = Verified()

    def there(self, file: File) -> int | None:
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

    def has(self, file: File) -> bool:
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

    def use(self, file: File) -> None:
        """It is in use: it does not make way for what others want."""
        with suppress(OSError):
            os.utime(note_of(self.path / file.name))

    def fetch(
        self, file: File, read: Read, makes_way: Sequence[str] | None, *, waits: bool, piece: int = PIECE_BYTES
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

    def _write(self, file: File, part: Path, read: Read, piece: int) -> None:
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

    def table(self, file: File) -> bytes | None:
        """What was noted of the samples of a shard, if it can be believed."""
        return read_note(self.path / (file.name + TABLE))

    def note_table(self, file: File, content: bytes) -> None:
        """That is lost where it can't be written, and made again."""
        with suppress(OSError):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_note(self.path / (file.name + TABLE), content)


def _length(path: Path) -> int:
    return int(path.with_suffix("").suffix[1:]) if path.suffix == PART else path.stat().st_size
