"""Worker processes on this machine. No process of this pool outlives it, and none that a worker started outlives it.

- Workers are forked from a process that has torch loaded (`local.py`), or begin with an interpreter of their own. What
  follows holds for both, for both are children of this process.
- Each worker runs in a session of its own: Ctrl-C in the terminal does not reach it, and its process group holds what
  it started (DataLoader workers). When a worker has exited, by itself or killed, the rest of its group is killed
  before it is reaped, while its id still can't be another's. That is prompt (a pidfd tells), and has to be: forked
  children hold copies of the worker's sockets, so only with the last of them do its peers see it gone.
- When this process ends, kill -9 included, the kernel kills each worker's group, which hangs on a lifeline
  (`platform/process.py`). DataLoader workers have a watchdog of their own, but it does not see a parent that died
  while they started.
- What has made a session of its own is found and ended too, where the pool may `tell` of it (see `local.py`).
- Until that is arranged, and where the system has no such signal, a new interpreter sees to its own end (`farandole
  join --die-with`, see `platform/process.py`); it has started nothing yet, or its DataLoader workers notice within 5 s.

Start workers from the thread that lasts longest, the main one: `--die-with` is tied to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from farandole.code.pack import set_up_mark
from farandole.errors import HostNotPrepared
from farandole.platform import files
from farandole.platform import process as forking
from farandole.platform.files import append, make
from farandole.platform.output import tell
from farandole.platform.process import Command, Forked, ForkServer, Lifeline, hang_on, kill_group, take_spare
from farandole.pool.base import Event, Events, Host, Started, WorkerExited, WorkerStartFailed
from farandole.settings import SLOT

# --- strays -----------------------------------------------------------------------------------------------------------
#
# What a worker's script has started in a session of its own, and left: it is found, and ended with its worker.
#
# A worker's process group is killed when the worker has exited, but whoever made a session of its own (a daemon) is
# in none of ours. On Linux this process therefore asks to be the *subreaper* of all that it starts, directly or not:
# when the parent of such a process ends, it becomes a child of ours instead of the system's. Whose it was says the
# environment that it began with, in which its worker's name stands. It is ended once that worker has exited. One that
# has cleared its environment might be somebody else's (children that a shell left us when it became this process): it
# is left alone.
#
# Left out: a word about those; other systems than Linux, guests (`farandole join`), and a `farandole run` that is
# killed.

PR_SET_CHILD_SUBREAPER = 36
END_S = 2.0  # for the last ones to be gone
STRAY_POLL_S = 0.01
SHOWN = 80  # characters of a command line


class Strays:
    """Build it before the first worker is started. `tell` gets a line about each process that is ended."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._ours: dict[int, str] = {}  # strays, and whose
        self._sessions: set[int] = set()  # of workers
        self._before: set[int] = set()
        self._linux = sys.platform == "linux"
        if self._linux:
            self._before = set(_children())
            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def began(self, session: int) -> None:
        """A worker was started, in a session of its own."""
        self._sessions.add(session)

    def sweep(self, workers: Collection[str], running: Collection[str]) -> bool:
        """End those of `workers` that are not `running` any more. Whether there are any that have not gone yet."""
        if not self._linux:
            return False
        left = False
        for pid in _children():
            stat = _stat(pid)
            if stat is None or pid in self._before or pid in self._sessions:
                continue
            dead, session = stat
            if dead:
                if pid in self._ours or session in self._sessions:
                    _reap(pid)
                    self._ours.pop(pid, None)
                continue
            worker = self._ours.get(pid) or _worker(pid)
            if worker not in workers:
                continue
            told = pid in self._ours or session in self._sessions  # of the worker's own: killed with it already
            self._ours[pid] = worker
            if worker not in running:
                left = True
                if not told:
                    self._tell(f"process {pid}, which {worker} left behind, is ended: {_command(pid)}")
                _kill(pid)
        return left

    def end(self, workers: Collection[str]) -> None:
        """No worker is running: wait until nothing of theirs is."""
        deadline = time.monotonic() + END_S
        while self.sweep(workers, ()) and time.monotonic() < deadline:
            time.sleep(STRAY_POLL_S)


def _children() -> list[int]:
    """Of this process, those of all its threads."""
    found: list[int] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(pid) for pid in path.read_text().split()]
    return found


def _stat(pid: int) -> tuple[bool, int] | None:
    """Whether it has ended and waits to be reaped, and its session."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0] in "ZX", int(fields[3])


def _worker(pid: int) -> str:
    """The worker in whose environment it began, "" for none."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    mark = b"FARANDOLE_WORKER="
    return next((item.removeprefix(mark).decode(errors="replace") for item in environ if item.startswith(mark)), "")


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()[:SHOWN]
    except OSError:
        return ""


def _kill(pid: int) -> None:
    """It is a child that nobody has reaped, so its number is not another's."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


# --- forks ------------------------------------------------------------------------------------------------------------
#
# A pool's fork server: workers are asked of it one after the other, and have begun when it answers.
#
# Invariant: each start that is asked for becomes one process, forked or begun afresh; or none, if it was called off
# before its turn. The server loads torch while the coordinator starts. One that ends, or says nothing for
# `PATIENCE_S`, is replaced by another as soon as a worker is wanted. One that has never forked anything is not: then,
# as where a forked process would not be what a new one is, each worker starts an interpreter of its own, and that is
# said once.

SERVER = "farandole.worker.fork_server"
SLOW = "each worker starts an interpreter of its own, which takes seconds"
PATIENCE_S = 60.0  # loading torch takes 3 s, forking a tenth


@dataclass(frozen=True, kw_only=True)
class Start:
    """A worker to be started, with its whole environment and its log file."""

    worker: str
    environ: Mapping[str, str]
    log: BinaryIO


class Forks:
    """Needs a running event loop. `words` follow the interpreter in the workers' command; `loaded`: modules.

    began: called with each start, its process, and the lifeline that this hangs on. afresh: called with a start for
    which nothing can be forked. tell: a line for whoever watches the run.
    """

    def __init__(
        self, words: Sequence[str], loaded: Sequence[str], environ: Mapping[str, str], *,
        began: Callable[[Start, Forked, Lifeline], None], afresh: Callable[[Start], None], tell: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._words = list(words)
        self._loaded = list(loaded)
        self._environ = environ
        self._loop = asyncio.get_running_loop()
        self._began, self._afresh, self._tell = began, afresh, tell
        self._waiting: deque[Start] = deque()
        self._asked: tuple[Start, Lifeline] | None = None  # and not answered
        self._server: ForkServer | None = None
        self._fit = self._proven = self._over = False
        self._patience: asyncio.TimerHandle | None = None
        self._begin()

    @property
    def asking(self) -> bool:
        """There may be a process that nobody has named yet."""
        return self._asked is not None

    def start(self, start: Start) -> None:
        """Returns at once."""
        if self._over:
            self._afresh(start)
            return
        self._waiting.append(start)
        if self._server is None:
            self._begin()
        self._ask()

    def call_off(self, worker: str) -> Start | None:
        """The start of a worker whose turn has not come; None where it has."""
        for start in self._waiting:
            if start.worker == worker:
                self._waiting.remove(start)
                return start
        return None

    def close(self) -> None:
        """End the server, and what nobody has named yet. The last thing that a pool does; more than once is once."""
        self._over = True
        self._end_server()
        asked, self._asked = self._asked, None
        if asked:
            asked[0].log.close()
            asked[1].abandon()
        while self._waiting:
            self._waiting.popleft().log.close()

    def _begin(self) -> None:
        self._fit = self._proven = False
        try:
            self._server = take_spare(self._environ) or ForkServer.start(SERVER, self._loaded, self._environ)
        except OSError as error:
            self._give_up(f"the fork server can't be started ({error.strerror})")
            return
        self._loop.add_reader(self._server.fileno(), self._heard)
        self._wait()

    def _ask(self) -> None:
        if self._server is None or not self._fit or self._asked or not self._waiting:
            return
        try:
            lifeline = Lifeline()
        except OSError:  # no descriptors: who begins afresh is told why
            self._afresh(self._waiting.popleft())
            return
        start = self._waiting.popleft()
        self._asked = start, lifeline
        command = Command(words=self._words, environ=start.environ, folder=str(Path.cwd()))
        with Path(os.devnull).open("rb") as nothing:
            streams = nothing.fileno(), start.log.fileno(), start.log.fileno()
            try:
                self._server.ask(command, streams, self._asked[1])
            except OSError:
                self._lost()
                return
        self._wait()

    def _wait(self) -> None:
        self._patience = self._loop.call_later(PATIENCE_S, self._lost)

    def _heard(self) -> None:
        assert self._server is not None
        assert self._patience is not None
        self._patience.cancel()
        word = self._server.receive()
        if word is None:
            self._lost()
        elif not self._fit:
            if word["unfit"]:
                self._give_up(word["unfit"])
                return
            self._fit = True
        elif self._asked:
            (start, lifeline), self._asked = self._asked, None
            if "pid" in word:
                self._proven = True
                lifeline.handed_over()
                self._began(start, Forked(word["pid"]), lifeline)
            else:
                lifeline.abandon()
                self._afresh(start)
        self._ask()

    def _lost(self) -> None:
        """What it was asked for and has not answered is asked of the next one: see `platform/process.py`."""
        self._end_server()
        if self._asked:
            (start, lifeline), self._asked = self._asked, None
            lifeline.abandon()
            self._waiting.appendleft(start)
        if not self._proven:
            self._give_up("the fork server has died")
        elif self._waiting:
            self._tell("the fork server has died; another one is started")
            self._begin()

    def _give_up(self, reason: str) -> None:
        self._over = True
        self._end_server()
        self._tell(f"{SLOW}: {reason}")
        while self._waiting:
            self._afresh(self._waiting.popleft())

    def _end_server(self) -> None:
        if self._patience:
            self._patience.cancel()
        if self._server:
            self._loop.remove_reader(self._server.fileno())
            self._server.close()
            self._server = None


# --- local ------------------------------------------------------------------------------------------------------------

LOADED = ("farandole.__main__", "farandole.script", "farandole.data.loader", "farandole.evaluation.evaluation")
OWN = "local"  # the name of the pool of `farandole run`
SWEEP_S = 1.0  # how often strays are looked for
POLL_S = 0.05  # where the system has no pidfd


def join_command(ticket: Path, script: str, arguments: Sequence[str], prepare: str = "") -> list[str]:
    """The one door: what every pool runs. The worker ends when this process does."""
    head = [sys.executable, "-m", "farandole", "join", "--die-with", str(os.getpid())]
    return [*head, *(("--prepare", prepare) if prepare else ()), str(ticket), script, *arguments]


def load_ahead(threads: int, environ: Mapping[str, str]) -> None:
    """Have the fork server of the pool that this process will have load torch meanwhile; both as the pool's."""
    if forking.SUPPORTED and not forking.has_spare():
        environ = _environ(environ, threads)
        with contextlib.suppress(OSError):  # then the pool will see, and say so
            forking.keep_spare(ForkServer.start(SERVER, LOADED, environ), environ)


def _environ(environ: Mapping[str, str], threads: int) -> dict[str, str]:
    """What all workers of the pool have."""
    return {
        **environ, "FARANDOLE_POOL": OWN, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1",
        "FARANDOLE_WORKER": "",  # where a worker starts a run, the fork server is not that worker's: see `Strays`
    }  # fmt: skip


class LocalPool:
    """Needs a running event loop. Log files are `logs`/ID.log. `tell` shows a line to whoever watches the run.

    Each worker has the lowest free slot as its FARANDOLE_SLOT, which says what GPU of the host is its own. `fresh`:
    each starts an interpreter of its own, and so does a command that is not `python -m MODULE`.
    """

    def __init__(
        self, command: Sequence[str], *, logs: Path, threads: int, environ: Mapping[str, str],
        tell: Callable[[str], None] | None = None, name: str = OWN, fresh: bool = False,
    ) -> None:  # fmt: skip
        self.name = name
        self._tell = tell
        self._workers: set[str] = set()
        self._sweeping: asyncio.TimerHandle | None = None
        self._command = list(command)
        self._logs = logs
        self._environ = {**_environ(environ, threads), "FARANDOLE_POOL": name}
        self._slots: dict[str, int] = {}
        self._killed: set[str] = set()  # while they were starting
        self._closed = False
        self._processes: dict[str, subprocess.Popen[bytes] | Forked] = {}
        self._lifelines: dict[str, Lifeline] = {}
        self._events = Events()
        self._host = Host(name=socket.gethostname())
        self._forks: Forks | None = None
        forks = not fresh and self._command[:2] == [sys.executable, "-m"]
        if forks and not forking.SUPPORTED:
            (tell or _nobody)(f"{SLOW}: farandole forks them on Linux only")
        elif forks:
            self._forks = Forks(
                self._command[1:],
                LOADED,
                self._environ,
                began=self._began,
                afresh=self._start_afresh,
                tell=tell or _nobody,
            )
        self._strays = Strays(tell) if tell else None

    def list(self) -> Sequence[Host]:
        """This machine, which takes as many as are asked for."""
        return (self._host,)

    def start(self, worker: str, host: str) -> None:
        del host  # there is one
        if self._closed:
            self._events.put(WorkerStartFailed(worker, "its pool is closed"))
            return
        slot = next(slot for slot in itertools.count() if slot not in self._slots.values())
        self._slots[worker] = slot
        self._workers.add(worker)
        environ = {**self._environ, "FARANDOLE_WORKER": worker, SLOT: str(slot)}
        start = Start(worker=worker, environ=environ, log=self._log(worker))
        if self._strays:
            self._sweeping = self._sweeping or asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)
        if self._forks:
            self._forks.start(start)
        else:
            self._start_afresh(start)

    def _start_afresh(self, start: Start) -> None:
        lifeline: Lifeline | None = None
        try:
            lifeline = Lifeline()
            process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=start.log, stderr=subprocess.STDOUT, env=start.environ,
                start_new_session=True, pass_fds=(lifeline.read_end,),
            )  # fmt: skip
        except OSError as error:  # too many processes, no memory, no descriptors
            if lifeline:
                lifeline.abandon()
            self._never_began(start, error.strerror or str(error))
            return
        hang_on(lifeline.read_end, process.pid)
        lifeline.handed_over()
        self._began(start, process, lifeline)

    def _began(self, start: Start, process: subprocess.Popen[bytes] | Forked, lifeline: Lifeline) -> None:
        start.log.close()
        worker = start.worker
        self._processes[worker], self._lifelines[worker] = process, lifeline
        if self._strays:
            self._strays.began(process.pid)
        self._watch(worker, process.pid)
        self._events.put(Started(worker, self._host.name))
        if worker in self._killed:
            self.stop(worker)

    def _never_began(self, start: Start, reason: str) -> None:
        start.log.close()
        del self._slots[start.worker]
        self._events.put(WorkerStartFailed(start.worker, reason))

    def _log(self, worker: str) -> BinaryIO:
        path = self._logs / f"{worker}.log"
        try:
            make(self._logs)
            return append(path)
        except OSError as error:  # a full disk: the worker is worth more than what it prints
            if self._tell:
                self._tell(f"{path} can't be written ({error.strerror}): what {worker} prints is lost")
            return Path(os.devnull).open("ab")

    def _sweep(self) -> None:
        assert self._strays is not None
        if self._forks is None or not self._forks.asking:  # else there may be one that is not known yet
            self._strays.sweep(self._workers, self._slots)
        self._sweeping = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def stop(self, worker: str) -> None:
        """SIGKILL to the worker's process group, which is its session's: it is ours until `_reap` has run."""
        if process := self._processes.get(worker):
            kill_group(process.pid)
        elif self._forks and (start := self._forks.call_off(worker)):
            self._never_began(start, "killed before it had started")
        elif worker in self._slots:
            self._killed.add(worker)

    def kill_all(self) -> None:
        """At once and without an event loop: the last thing that a dying caller does. More than once is once; nothing
        starts any more.
        """
        self._closed = True
        if self._forks:
            self._forks.close()
        for worker, process in tuple(self._processes.items()):
            self.stop(worker)
            process.wait()
            del self._processes[worker]
            self._lifelines.pop(worker).cut()
        if self._sweeping:
            self._sweeping.cancel()
        if self._strays:
            self._strays.end(self._workers)

    async def events(self) -> Sequence[Event]:
        return await self._events.take()

    def _watch(self, worker: str, pid: int) -> None:
        loop = asyncio.get_running_loop()
        if sys.platform == "linux":
            pidfd = os.pidfd_open(pid)

            def ended() -> None:
                loop.remove_reader(pidfd)
                os.close(pidfd)
                self._reap(worker)

            loop.add_reader(pidfd, ended)
        else:
            loop.call_later(POLL_S, self._poll, worker, pid)

    def _poll(self, worker: str, pid: int) -> None:
        process = self._processes.get(worker)
        if process is not None and process.poll() is None:
            asyncio.get_running_loop().call_later(POLL_S, self._poll, worker, pid)
        else:
            self._reap(worker)

    def _reap(self, worker: str) -> None:
        """The process has ended: its group first, while it is a zombie that keeps the number, then itself."""
        process = self._processes.pop(worker, None)
        if process is None:
            return  # kill_all was here
        kill_group(process.pid)
        code = process.wait()
        del self._slots[worker]
        self._lifelines.pop(worker).cut()
        reason = f"killed by signal {-code}" if code < 0 else f"exited with code {code}"
        self._events.put(WorkerExited(worker, reason))


def _nobody(line: str) -> None:
    del line


# --- preparation ------------------------------------------------------------------------------------------------------
#
# What must have succeeded on a host before its workers may join.
#
#     --prepare COMMAND   once a host and run, such as fetching the data
#     --setup COMMAND     once a host and pack, in the folder of the run's code: installing what the code needs. If it
#                         leaves a `.venv` there, the workers have that one's interpreter
#
# Who comes first runs it, the others of that host wait for its end. Invariant: it never runs twice at the same time.
# The lock is handed on to the command, so what a killed worker has begun is waited for, and then begun again, since
# nobody saw it succeed. PYTHON is the interpreter that has farandole here. Its output is the worker's, or, of a
# setup, in a file beside the folder.
#
# That `--prepare` succeeded is remembered in `~/.cache/farandole/prepared`, under a name that tells nothing of the
# run's secret; that `--setup` did, beside the folder, and for as long as that is there. Left out: undoing them.
# Imports nothing heavy: the command may be what installs torch.

FOLDER = Path("~/.cache/farandole/prepared")
ENVIRONMENT = ".venv"
HAS_US = "import importlib.util, sys; sys.exit(importlib.util.find_spec('farandole') is None)"
_NO_LOCKS = "two workers would prepare the host at once; have the user's home, or its ~/.cache, on one that does"
LAST_WORDS = 500  # characters of what it said


def prepare(command: str, *, run: str, host: str) -> None:
    """Return once `command`, a line for the shell, has succeeded on `host` for `run`, any text that only the run has.

    Raises:
        HostNotPrepared: it failed.
    """
    folder = FOLDER.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / _name(run, host, command)
    _do_once(command, "--prepare", done=mark.with_suffix(".done"), lock=mark.with_suffix(".lock"), host=host)


def set_up(command: str, folder: Path, *, host: str) -> Path | None:
    """The same for `--setup`, in a pack's `folder`, which is the working folder already. Returns the interpreter that
    it has made there, if that is another than this process's.

    Raises:
        HostNotPrepared: it failed, or workers can't begin with that interpreter.
    """
    if not command:
        return None
    done, lock = set_up_mark(folder, _name(host, command))
    _do_once(command, "--setup", done=done, lock=lock, host=host, log=done.with_suffix(".log"))
    environment = folder / ENVIRONMENT
    python = environment / "bin" / "python"
    if not python.exists() or Path(sys.prefix).resolve() == environment.resolve():
        return None
    left = f"--setup {command!r} has left {python} on {host}"
    try:
        has_us = subprocess.run([python, "-c", HAS_US], stdin=subprocess.DEVNULL, check=False).returncode == 0
    except OSError as error:
        raise HostNotPrepared(f"{left}, which does not run: {error.strerror}") from None
    if not has_us:
        raise HostNotPrepared(
            f"{left}, which has no farandole: let it install that, too, or install what the code needs with "
            f'"$PYTHON" -m pip'
        )
    return python


def _name(*of: str) -> str:
    return hashlib.sha256("\0".join(of).encode()).hexdigest()[:32]


def _do_once(command: str, option: str, *, done: Path, lock: Path, host: str, log: Path | None = None) -> None:
    """What it says goes to `log`, if there is one. Raises HostNotPrepared: it failed."""
    if done.exists():
        return
    held = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not files.take(held, lock, _NO_LOCKS):
            tell(f"farandole: another worker prepares {host}; waiting for it")
            files.take(held, lock, _NO_LOCKS, wait=True)
        if done.exists():
            return
        tell(f"farandole: preparing {host}: {command}")
        environ = {**os.environ, "PYTHON": sys.executable}
        with open(log, "wb", opener=files.opener) if log else contextlib.nullcontext() as output:
            code = subprocess.run(
                command, shell=True, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=(held,),
                env=environ, check=False,
            ).returncode  # fmt: skip
        if code:
            how = f"exit code {code}" if code > 0 else f"signal {-code}"
            where = f"{log} there{_last_words(log)}" if log else "this worker's output"
            raise HostNotPrepared(
                f"{option} {command!r} failed on {host} with {how}, so its workers can't join; what it said is in "
                f"{where}"
            )
        os.close(os.open(done, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        tell(f"farandole: {host} is prepared")
    finally:
        os.close(held)


def _last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    return f": {last[:LAST_WORDS]}" if last else ""
