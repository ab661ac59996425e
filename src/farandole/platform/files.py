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


# --- files ------------------------------------------------------------------------------------------------------------
#
# Files that another process may read at any moment: they appear whole or not at all. They are private, too. And
# what is in such a file, which anything may have happened to since.
#
# And files of the user's that are read while a run is on, which may be anything.

T = TypeVar("T")


def decoded(content: bytes | str, kind: type[T]) -> T:
    """JSON, as a value of that type.

    Raises:
        msgspec.MsgspecError: it is none, whatever it is instead.
    """
    try:
        return msgspec.json.decode(content, type=kind)
    except (UnicodeError, RecursionError) as error:  # which msgspec lets through
        raise msgspec.DecodeError(str(error)) from None


def write_atomically(path: Path, content: bytes) -> None:
    """Write beside `path`, then rename. Its mode is 0600 from the first byte: a secret is never readable in between."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(beside, path)
    except OSError:  # the disk is full: nothing half-written stays
        beside.unlink(missing_ok=True)
        raise


def open_regular(path: Path) -> BinaryIO:
    """A regular file, for reading, without a buffer. A pipe is never waited for.

    Raises:
        OSError: it can't be opened, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "no regular file", str(path))
        os.set_blocking(descriptor, True)
        return cast("BinaryIO", os.fdopen(descriptor, "rb", buffering=0))
    except BaseException:
        os.close(descriptor)
        raise


# --- descriptors ------------------------------------------------------------------------------------------------------
#
# As many open files as this process may have: who listens takes a descriptor for each that connects.


def allow_all() -> None:
    """Raise the soft limit of open files to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# --- file lock --------------------------------------------------------------------------------------------------------
#
# Locks on files: held by a process for as long as it has the file open, and released by the kernel when it dies.
#
# A file system may keep no locks (Lustre mounted without `flock`, NFS mounted without its lock service, some FUSE
# file systems). Then nobody can know whether another process holds one. That is an error of its own, and never taken
# for "held by another" or for "held by us": both would be wrong, and the second would let two runs into one folder.

_HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


class NoFileLocks(UsageError):
    """The file system of `place` keeps no locks; `remedy` says what to do."""

    def __init__(self, place: Path | str, error: OSError, remedy: str) -> None:
        super().__init__(f"{place} is on a file system that keeps no locks ({error.strerror}): {remedy}")


def take(handle: int, place: Path | str, remedy: str, *, wait: bool = False) -> bool:
    """Take the lock on an open file. False: another process has it. `wait`: until that one has released it.

    Raises:
        NoFileLocks: the file system of `place` keeps no locks.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno in _HELD:
            return False
        raise NoFileLocks(place, error, remedy) from None
    return True


def held(handle: int) -> bool:
    """True if another process holds the lock on an open file. False also where the file system keeps no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _HELD
    fcntl.flock(handle, fcntl.LOCK_UN)
    return False


def release_in_children(handle: int) -> None:
    """Have processes that are forked from this one without an exec close their copy of a held lock's file, so that the
    lock does not outlive this process in them.
    """
    file = _identity(handle)

    def close() -> None:
        if _identity(handle) == file:  # else the number is another file's by now
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
# may block is one that nobody waits for without a limit. The jobs of one `FileThread` are done in the order in which
# they were given.
#
# Who knows what when: a job is finished or given up, under its lock, and never both. One that is given up before it has
# begun is never done. One that is given up while it runs may still be done later: `late` then tells. Until it returns,
# `stuck` is true, and `run` refuses every job at once.

_log = logging.getLogger(__name__)
LIMIT_S = 2.0  # below it, a disk is slow; beyond, it doesn't answer
MAX_PENDING = 100_000  # jobs


class _Job:
    """`result` or `error` is there once `ended` is set."""

    def __init__(self, call: Callable[[], object], late: Callable[[], object] | None) -> None:
        self.call, self.late = call, late
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self.given_up = False
        self.result: object = None
        self.error: BaseException | None = None


class FileThread:
    """`name`: of the thread. `limit_s`: the longest wait for a job, in seconds."""

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
        """Do `call` after all earlier jobs, and return its result.

        Args:
            late: is called, in the thread, if the call was given up and succeeds later.

        Raises:
            TimeoutError: it was given up after `limit_s`, or one before it has not returned yet.
            BaseException: what `call` raises.
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
        """Do `call` after all earlier jobs; don't wait. What it raises is logged. False: too many are pending."""
        if self._jobs.qsize() >= MAX_PENDING:
            return False
        self._jobs.put(call)
        return True

    def end(self) -> None:
        """The thread ends after the jobs so far; don't wait."""
        self._jobs.put(None)

    def close(self) -> bool:
        """The thread ends after the jobs so far. Returns False if they are not done within the limit."""
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
        except BaseException as error:  # noqa: BLE001  it is raised where it is waited for
            job.error = error
        with job.lock:
            job.ended.set()
        if job.given_up:
            if not given_up and job.error is None and job.late is not None:
                job.late()
            self._given_up.discard(job)


def bounded(call: Callable[[], T], limit_s: float = LIMIT_S) -> T:
    """The result of `call`, in a thread of its own. Raises as `FileThread.run` does."""
    thread = FileThread("file", limit_s)
    try:
        return thread.run(call)
    finally:
        thread.end()
