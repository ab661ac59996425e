"""Private files: what is in a run's folder is for the run's own user alone.

Folders are made with mode 0700 and files with 0600, from the first byte and whatever the umask is. A file of ours is
opened by `opener`, which follows no symbolic link and takes what is there already only if it is a regular file of this
process's user with one name. Root may use a folder of anybody's.

Invariant: what a run reads and writes in its folder has been put there by its own user. For:

- Nobody else can put anything into the folder as long as nobody else can write it. One that others can write, or that
  another owns, is refused before anything in it is read (`check`), and each folder in it likewise.
- What others have put there before it was closed to them is theirs: the owner of a file or of a symbolic link is who
  made it. So all of it is looked at before a run begins (`check_all`), and a file once more when it is opened: the file
  that is open, not its name, so that nothing can change in between.
- A hard link has the owner of the file that it leads to, and more than one name.

A symbolic link to a *folder* is followed if this user made it (a disk of its own for the checkpoints). Modes of files
that are there already are tightened, not judged: a folder that only its owner can write says more.

Left out: the folders above. Who can rename a folder can put another in its place; that one is theirs, and what they
made in it, so nothing in it is taken for ours, but new files go there. A sticky folder, as /tmp, has no such danger.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

from farandole.errors import NotPrivate

FOLDER_MODE, FILE_MODE = 0o700, 0o600
OTHERS, OTHERS_WRITE = 0o077, 0o022


def make(folder: Path) -> None:
    """Make a folder that is private, or see that the one which is there can be used.

    Raises:
        NotPrivate: it belongs to another, or others can write it.
        OSError: it can't be made.
    """
    try:
        folder.mkdir(mode=FOLDER_MODE, parents=True)
    except FileExistsError:
        check(folder)


def check(folder: Path) -> None:
    """See that nobody else can put anything into a folder.

    Raises:
        NotPrivate: others can, or it belongs to another, or the symbolic link that leads to it does.
        OSError: it is not there.
    """
    info = os.lstat(folder)
    if stat.S_ISLNK(info.st_mode):
        if info.st_uid != os.geteuid():  # it may change at any moment, for root too
            raise NotPrivate(owned(folder, info))
        info = os.stat(folder)
    if foreign(info):
        raise NotPrivate(owned(folder, info))
    if not stat.S_ISDIR(info.st_mode):
        raise NotPrivate(f"{folder} is no folder; name another one")
    if info.st_mode & OTHERS_WRITE:
        remedy = "" if info.st_mode & stat.S_ISVTX else f"chmod 700 {folder}, or "
        raise NotPrivate(f"others can write to {folder} (mode {_mode(info)}): {remedy}name a folder of your own")


def check_all(place: Path) -> None:
    """See that this user has made whatever is at `place` and below it.

    Raises:
        NotPrivate: something belongs to another.
    """
    for path, info in below(place):
        if foreign(info):
            raise NotPrivate(owned(path, info))


def read(path: Path) -> bytes:
    """What is in a file. Raises as `opener` does."""
    with open(path, "rb", opener=opener) as file:
        return file.read()


def append(path: Path) -> io.FileIO:
    """A file to read and add to, without a buffer. Raises as `opener` does."""
    return open(path, "ab+", buffering=0, opener=opener)


def add(file: io.FileIO, line: bytes) -> None:
    """A line at the end of a file that `append` has opened: all of it or nothing.

    Raises:
        OSError: there is no room for it.
    """
    size, written = file.seek(0, os.SEEK_END), 0
    try:
        written = file.write(line)
    finally:
        if written < len(line):
            file.truncate(size)
    if written < len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def cut_torn(file: io.FileIO, tail: bytes) -> None:
    """Without the line, at its end, that a crash has torn: it would swallow the next one. `tail`: the file's."""
    file.truncate(file.seek(0, os.SEEK_END) - (len(tail) - (tail.rfind(b"\n") + 1)))


def write(path: Path, content: bytes) -> None:
    """Write a file anew. Raises as `opener` does."""
    with open(path, "wb", opener=opener) as file:
        file.write(content)


def check_file(path: Path) -> None:
    """See that a file is one that `opener` would open, for those who open it in a way of their own.

    Raises:
        NotPrivate: it is not.
        OSError: it is not there.
    """
    info = os.lstat(path)
    _check(str(path), info)
    if info.st_mode & OTHERS:
        _tighten(path)


def opener(path: str, flags: int) -> int:
    """For `open(path, ..., opener=opener)`.

    Raises:
        NotPrivate: what is there is not ours; it has not been touched.
        OSError: it can't be opened.
    """
    safe = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # the last: a pipe that is there would be waited for
    try:
        descriptor = os.open(path, flags & ~os.O_TRUNC | safe, FILE_MODE)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            _check(path, os.lstat(path))  # says it better
        raise
    try:
        info = os.fstat(descriptor)
        _check(path, info)
        if info.st_mode & OTHERS:
            _tighten(descriptor)
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def below(place: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Whatever is at `place`, and all that is in it; no link is followed."""
    with contextlib.suppress(FileNotFoundError):
        info = os.lstat(place)
        yield place, info
        if stat.S_ISDIR(info.st_mode):
            names: list[str] = []
            with contextlib.suppress(PermissionError):  # another's, which is known by now
                names = sorted(os.listdir(place))
            for name in names:
                yield from below(place / name)


def foreign(info: os.stat_result) -> bool:
    """Whether it belongs to another. To root nothing does."""
    return os.geteuid() not in (0, info.st_uid)


def objection(path: Path, info: os.stat_result) -> str:
    """Why what `path` says may be another's word, "" if it is this user's own. For root too."""
    if info.st_uid != os.geteuid():
        return f"{path} belongs to {user(info.st_uid)}"
    if not (stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode)):
        return f"{path} is no regular file"
    return f"others can write to {path} (mode {_mode(info)})" if info.st_mode & OTHERS_WRITE else ""


def owned(path: Path | str, info: os.stat_result) -> str:
    """What to say of another's file or folder."""
    return (
        f"{path} belongs to {user(info.st_uid)}, and you are {user(os.geteuid())}; what is in a run's folder has to be "
        f"its user's own: remove it, or take it over if you trust its owner (chown), or name another folder"
    )


def user(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def _check(path: str, info: os.stat_result) -> None:
    if stat.S_ISLNK(info.st_mode):
        raise NotPrivate(f"{path} is a symbolic link, and none is followed there; remove it")
    if not stat.S_ISREG(info.st_mode):
        raise NotPrivate(f"{path} is no regular file; remove it")
    if foreign(info):
        raise NotPrivate(owned(path, info))
    if info.st_nlink > 1:
        raise NotPrivate(
            f"{path} is one of {info.st_nlink} names of a file (hard links), which all would change; remove it"
        )


def _tighten(file: Path | int) -> None:
    with contextlib.suppress(OSError):  # some file systems keep no modes
        os.chmod(file, FILE_MODE)


def _mode(info: os.stat_result) -> str:
    return f"{stat.S_IMODE(info.st_mode):04o}"
