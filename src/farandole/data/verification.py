"""Whether a copy in the cache is what its MD5 says, asked before it is used, whoever left it there.

MD5 takes 1.3 s for a GB, too long for each process of a machine. So who has compared a copy notes beside it, in
`NAME.seen`, which file that was: inode, length, and the times of its last changes, of which nobody can set the second.
Invariant: a copy is taken as it is only if this process has compared that very file, or if the note says so and only
this user, or root, could have written the note and the file. Else it is compared. Whoever can write as this user needs
no cache to do harm; whoever has written to the file has moved its times; and where others can write, as in a cache that
several users share, each process compares for itself, once. Left out: a disk that loses bits behind its times.

The note's own time of change says when the copy was last opened: to touch the copy would be to change it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from pathlib import Path

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
