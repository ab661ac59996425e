"""Private files: the files in a run's folder belong to the run's own user alone.

Folders are created with mode 0700 and files with 0600, from the first byte and whatever the umask is. `opener` opens
our files: it follows no symbolic link, and accepts an existing file only if it is a regular file of this process's user
with one name. Root may use any user's folder.

Invariant: all that a run reads and writes in its folder was put there by its own user. The reasons:

- No other user can put anything into the folder as long as no other user can write it. A folder that others can write,
  or that another user owns, is refused before anything in it is read (`check`), and so is each folder in it.
- Files that others have put there before the folder was closed to them are theirs: the owner of a file or of a symbolic
  link is the user who created it. So all of it is checked before a run begins (`check_all`), and a file once more when
  it is opened: the open file, not its name, so that nothing can change in between.
- A hard link has the owner of the file that it leads to, and that file has more than one name.

A symbolic link to a *folder* is followed if this user made it (a separate disk for the checkpoints). Modes of existing
files are tightened, not judged: a folder that only its owner can write is the stronger evidence.

Not covered: the folders above. A user who can rename a folder can put another one in its place. That folder, and what
that user made in it, is that user's, so nothing in it is taken for ours, but new files go there. A sticky folder, such
as /tmp, does not have this danger.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import logging
import os
import pwd
import resource
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO, TypeVar, cast

import msgspec

from farandole.errors import NotPrivate, UsageError

# --- private ----------------------------------------------------------------------------------------------------------

FOLDER_MODE, FILE_MODE = 0o700, 0o600
OTHERS, OTHERS_WRITE = 0o077, 0o022


def make(folder: Path) -> None:
    """Create a private folder, or check that the existing one can be used.

    Raises:
        NotPrivate: it belongs to another user, or others can write it.
        OSError: it can't be created.
    """
    try:
        folder.mkdir(mode=FOLDER_MODE, parents=True)
    except FileExistsError:
        check(folder)


def check(folder: Path) -> None:
    """Check that no other user can put anything into a folder.

    Raises:
        NotPrivate: others can, or it belongs to another user, or the symbolic link that leads to it does.
        OSError: it does not exist.
    """
    info = os.lstat(folder)
    if stat.S_ISLNK(info.st_mode):
        if info.st_uid != os.geteuid():  # it may change at any moment, for root too
            raise NotPrivate(owned(folder, info))
        info = os.stat(folder)
    if foreign(info):
        raise NotPrivate(owned(folder, info))
    if not stat.S_ISDIR(info.st_mode):
        raise NotPrivate(f"{folder} is not a folder; name another one")
    if info.st_mode & OTHERS_WRITE:
        remedy = "" if info.st_mode & stat.S_ISVTX else f"chmod 700 {folder}, or "
        raise NotPrivate(f"others can write to {folder} (mode {_mode(info)}): {remedy}name a folder of your own")


def check_all(place: Path) -> None:
    """Check that this user owns everything at `place` and below it.

    Raises:
        NotPrivate: something belongs to another user.
    """
    for path, info in below(place):
        if foreign(info):
            raise NotPrivate(owned(path, info))


def read(path: Path) -> bytes:
    """The content of a file. Raises as `opener` does."""
    with open(path, "rb", opener=opener) as file:
        return file.read()


def append(path: Path) -> io.FileIO:
    """Open a file to read and append, without a buffer. Raises as `opener` does."""
    return open(path, "ab+", buffering=0, opener=opener)


def add(file: io.FileIO, line: bytes) -> None:
    """Append a line to a file that `append` has opened: all of it or nothing.

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
    """Remove a last line that a crash has torn: it would merge with the next one. `tail`: the end of the file."""
    file.truncate(file.seek(0, os.SEEK_END) - (len(tail) - (tail.rfind(b"\n") + 1)))


def write(path: Path, content: bytes) -> None:
    """Replace the content of a file. Raises as `opener` does."""
    with open(path, "wb", opener=opener) as file:
        file.write(content)


def check_file(path: Path) -> None:
    """Check that `opener` would open a file, for code that opens it in another way.

    Raises:
        NotPrivate: it would not.
        OSError: it does not exist.
    """
    info = os.lstat(path)
    _check(str(path), info)
    if info.st_mode & OTHERS:
        _tighten(path)


def opener(path: str, flags: int) -> int:
    """Open a private file, as in `open(path, ..., opener=opener)`.

    Raises:
        NotPrivate: the existing file is not ours; it has not been touched.
        OSError: it can't be opened.
    """
    safe = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # the last one: a pipe would block
    try:
        descriptor = os.open(path, flags & ~os.O_TRUNC | safe, FILE_MODE)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            _check(path, os.lstat(path))  # its message is better
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
    """Yield `place` and everything below it; no link is followed."""
    with contextlib.suppress(FileNotFoundError):
        info = os.lstat(place)
        yield place, info
        if stat.S_ISDIR(info.st_mode):
            names: list[str] = []
            with contextlib.suppress(PermissionError):  # another user's folder, which the caller knows by now
                names = sorted(os.listdir(place))
            for name in names:
                yield from below(place / name)


def foreign(info: os.stat_result) -> bool:
    """Returns True if it belongs to another user; always False for root."""
    return os.geteuid() not in (0, info.st_uid)


def objection(path: Path, info: os.stat_result) -> str:
    """The reason why another user may have changed `path`, "" if only this user can. This applies to root too."""
    if info.st_uid != os.geteuid():
        return f"{path} belongs to {user(info.st_uid)}"
    if not (stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode)):
        return f"{path} is not a regular file"
    return f"others can write to {path} (mode {_mode(info)})" if info.st_mode & OTHERS_WRITE else ""


def owned(path: Path | str, info: os.stat_result) -> str:
    """The error text for a file or folder of another user."""
    return (
        f"{path} belongs to {user(info.st_uid)}, and you are {user(os.geteuid())}; all files in a run's folder must "
        f"belong to its user: remove it, or take it over if you trust its owner (chown), or name another folder"
    )


def user(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def _check(path: str, info: os.stat_result) -> None:
    if stat.S_ISLNK(info.st_mode):
        raise NotPrivate(f"{path} is a symbolic link, which is not followed here; remove it")
    if not stat.S_ISREG(info.st_mode):
        raise NotPrivate(f"{path} is not a regular file; remove it")
    if foreign(info):
        raise NotPrivate(owned(path, info))
    if info.st_nlink > 1:
        raise NotPrivate(
            f"{path} is one of {info.st_nlink} names of a file (hard links), which would all change; remove it"
        )


def _tighten(file: Path | int) -> None:
    with contextlib.suppress(OSError):  # some file systems have no modes
        os.chmod(file, FILE_MODE)


def _mode(info: os.stat_result) -> str:
    return f"{stat.S_IMODE(info.st_mode):04o}"


# --- files ------------------------------------------------------------------------------------------------------------
#
# Files that another process may read at any moment: they appear whole or not at all, and are private. Also decoding
# their content, which may have been changed since it was written.
#
# And reading files of the user during a run, which may be anything.

T = TypeVar("T")


def decoded(content: bytes | str, kind: type[T]) -> T:
    """Decode JSON as a value of type `kind`.

    Raises:
        msgspec.MsgspecError: the content is invalid in any way.
    """
    try:
        return msgspec.json.decode(content, type=kind)
    except (UnicodeError, RecursionError) as error:  # msgspec does not catch these
        raise msgspec.DecodeError(str(error)) from None


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file beside `path`, then rename it. Its mode is 0600 from the first byte: a secret is never readable."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(beside, path)
    except OSError:  # the disk is full: no incomplete file stays
        beside.unlink(missing_ok=True)
        raise


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading, without a buffer. A pipe does not block.

    Raises:
        OSError: it can't be opened, or is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        os.set_blocking(descriptor, True)
        return cast("BinaryIO", os.fdopen(descriptor, "rb", buffering=0))
    except BaseException:
        os.close(descriptor)
        raise


# --- descriptors ------------------------------------------------------------------------------------------------------
#
# Raises the limit of open files of this process: a server takes a descriptor for each connection.


def allow_all() -> None:
    """Raise the soft limit of open files to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# --- file lock --------------------------------------------------------------------------------------------------------
#
# Locks on files: a process holds one for as long as it has the file open, and the kernel releases it when it dies.
#
# A file system may have no locks (Lustre mounted without `flock`, NFS mounted without its lock service, some FUSE file
# systems). Then it is unknown whether another process holds one. That is an error of its own. It never counts as "held
# by another" or as "held by us": both would be wrong, and the second would let two runs into one folder.

_LOCKED_ERRORS = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


class NoFileLocks(UsageError):
    """The file system of `place` has no locks. `remedy`: the text that tells the user what to do."""

    def __init__(self, place: Path | str, error: OSError, remedy: str) -> None:
        super().__init__(f"{place} is on a file system without locks ({error.strerror}): {remedy}")


def take(handle: int, place: Path | str, remedy: str, *, wait: bool = False) -> bool:
    """Take the lock on an open file. Returns False if another process holds it. `wait`: until that one has released it.

    Raises:
        NoFileLocks: the file system of `place` has no locks.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno in _LOCKED_ERRORS:
            return False
        raise NoFileLocks(place, error, remedy) from None
    return True


def is_locked(handle: int) -> bool:
    """True if another process holds the lock on an open file. False also if the file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _LOCKED_ERRORS
    fcntl.flock(handle, fcntl.LOCK_UN)
    return False


def release_in_children(handle: int) -> None:
    """Make processes that are forked from this one without an exec close their copy of a locked file, so that the lock
    does not outlive this process in them.
    """
    file = _identity(handle)

    def close() -> None:
        if _identity(handle) == file:  # else the number belongs to another file by now
            os.close(handle)

    os.register_at_fork(after_in_child=close)


def _identity(handle: int) -> tuple[int, int] | None:
    try:
        info = os.fstat(handle)
    except OSError:
        return None
    return info.st_dev, info.st_ino


# --- file thread ------------------------------------------------------------------------------------------------------
#
# A thread for files, so that an event loop doesn't wait for a disk that doesn't answer.
#
# A write to a mount whose server is gone blocks its thread, in the kernel, until the server is back. So the thread that
# may block is one that nobody waits for without a limit. The jobs of one `FileThread` run in the order in which they
# were given.
#
# The states of a job: it is finished or given up, under its lock, and never both. A job that is given up before it has
# begun is never run. A job that is given up while it runs may still finish later: then `late` is called. Until it
# returns, `stuck` is true, and `run` refuses every job at once.

_log = logging.getLogger(__name__)
LIMIT_S = 2.0  # a disk that needs less is slow; one that needs more does not answer
MAX_PENDING = 100_000  # jobs


class _Job:
    """One job. `result` or `error` is set once `ended` is set."""

    def __init__(self, call: Callable[[], object], late: Callable[[], object] | None) -> None:
        self.call, self.late = call, late
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self.given_up = False
        self.result: object = None
        self.error: BaseException | None = None


class FileThread:
    """A thread for file operations. `name`: of the thread. `limit_s`: the longest wait for a job, in seconds."""

    def __init__(self, name: str, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._jobs: SimpleQueue[_Job | Callable[[], object] | None] = SimpleQueue()
        self._given_up: set[_Job] = set()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def stuck(self) -> bool:
        """True if a job that was given up has not returned yet."""
        return bool(self._given_up)

    def run(self, call: Callable[[], T], late: Callable[[], object] | None = None) -> T:
        """Run `call` after all earlier jobs, and return its result.

        Args:
            late: called in the thread if the call was given up and succeeds later.

        Raises:
            TimeoutError: the call was given up after `limit_s`, or an earlier one has not returned yet.
            BaseException: any exception of `call`.
        """
        if self.stuck:
            raise TimeoutError(f"the disk has not answered for more than {self._limit_s:g} s")
        job = _Job(call, late)
        self._jobs.put(job)
        if not job.ended.wait(self._limit_s):
            with job.lock:
                if not job.ended.is_set():
                    job.given_up = True
                    self._given_up.add(job)
                    raise TimeoutError(f"the disk has not answered for {self._limit_s:g} s")
        if job.error is not None:
            raise job.error
        return cast("T", job.result)

    def post(self, call: Callable[[], object]) -> bool:
        """Run `call` after all earlier jobs, without waiting. Its errors are logged. Returns False if too many wait."""
        if self._jobs.qsize() >= MAX_PENDING:
            return False
        self._jobs.put(call)
        return True

    def end(self) -> None:
        """Let the thread end after the jobs so far; do not wait."""
        self._jobs.put(None)

    def close(self) -> bool:
        """Let the thread end after the jobs so far. Returns False if they are not done within the limit."""
        self.end()
        self._thread.join(0.0 if self.stuck else self._limit_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, _Job):
                self._do(job)
            else:
                try:
                    job()
                except Exception:  # noqa: BLE001  later jobs must not wait for a thread that has ended
                    _log.exception("a job of the thread %s failed", self._thread.name)

    def _do(self, job: _Job) -> None:
        with job.lock:
            given_up = job.given_up
        try:
            if not given_up:
                job.result = job.call()
        except BaseException as error:  # noqa: BLE001  it is raised where the result is awaited
            job.error = error
        with job.lock:
            job.ended.set()
        if job.given_up:
            if not given_up and job.error is None and job.late is not None:
                job.late()
            self._given_up.discard(job)


def bounded(call: Callable[[], T], limit_s: float = LIMIT_S) -> T:
    """The result of `call`, run in a thread of its own. Raises as `FileThread.run` does."""
    thread = FileThread("file", limit_s)
    try:
        return thread.run(call)
    finally:
        thread.end()
