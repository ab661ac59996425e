"""A pool of worker processes on this machine. No process of the pool, and no process that a worker started, outlives
it.

- Workers are forked from a process that has torch loaded (`Forks`), or start with an interpreter of their own. The
  following holds for both, since both are children of this process.
- Each worker runs in its own session: Ctrl-C in the terminal does not reach it, and its process group contains what it
  started (DataLoader workers). When a worker has exited, by itself or killed, the rest of its group is killed before
  the worker is reaped, while its id still can't belong to another process. This is immediate (a pidfd reports it) and
  has to be: forked children hold copies of the worker's sockets, so its peers see it gone only when the last copy is
  closed.
- When this process ends, kill -9 included, the kernel kills each worker's group, which is bound to a lifeline
  (`platform/process.py`). DataLoader workers have a watchdog of their own, but it misses a parent that died while they
  started.
- A process that has made its own session is found and killed too, if the pool has a `tell` to report it (see `Strays`).
- Until that is set up, and where the system has no such signal, a new interpreter ends by itself (`farandole join
  --die-with`, see `platform/process.py`). It has started nothing yet, or its DataLoader workers notice within 5 s.

Start workers from the thread that lasts longest, the main thread: `--die-with` is bound to it.
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
# Processes that a worker's script started in their own session and left behind are found and killed with their worker.
#
# A worker's process group is killed when the worker has exited, but a process that made its own session (a daemon) is
# in none of our groups. On Linux this process therefore becomes the *subreaper* of all that it starts, directly or not:
# when the parent of such a process ends, it becomes a child of this process instead of the system's. The environment
# with which it started names its worker. It is killed once that worker has exited. A process that has cleared its
# environment may belong to somebody else (children that a shell left us when it became this process): it is left alone.
#
# Not covered: a report about those; systems other than Linux; external workers (`farandole join`); a `farandole run`
# that is killed.

PR_SET_CHILD_SUBREAPER = 36
END_S = 2.0  # time until the last ones must be gone
STRAY_POLL_S = 0.01
SHOWN = 80  # characters of a command line


class Strays:
    """Finds and kills strays. Create it before the first worker starts. `tell` gets a line for each killed process."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._strays: dict[int, str] = {}  # strays, with their worker
        self._sessions: set[int] = set()  # the workers' sessions
        self._before: set[int] = set()
        self._linux = sys.platform == "linux"
        if self._linux:
            self._before = set(_children())
            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def add_session(self, session: int) -> None:
        """Record the session of a started worker."""
        self._sessions.add(session)

    def sweep(self, workers: Collection[str], running: Collection[str]) -> bool:
        """Kill the strays of `workers` that are no longer `running`. Returns True if some are still there."""
        if not self._linux:
            return False
        remaining = False
        for pid in _children():
            stat = _stat(pid)
            if stat is None or pid in self._before or pid in self._sessions:
                continue
            dead, session = stat
            if dead:
                if pid in self._strays or session in self._sessions:
                    _reap(pid)
                    self._strays.pop(pid, None)
                continue
            worker = self._strays.get(pid) or _worker(pid)
            if worker not in workers:
                continue
            reported = (
                pid in self._strays or session in self._sessions
            )  # in the worker's session: killed with it already
            self._strays[pid] = worker
            if worker not in running:
                remaining = True
                if not reported:
                    self._tell(f"killing process {pid}, which {worker} left behind: {_command(pid)}")
                _kill(pid)
        return remaining

    def end(self, workers: Collection[str]) -> None:
        """No worker is running: wait until none of their processes is."""
        deadline = time.monotonic() + END_S
        while self.sweep(workers, ()) and time.monotonic() < deadline:
            time.sleep(STRAY_POLL_S)


def _children() -> list[int]:
    """The children of all threads of this process."""
    pids: list[int] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            pids += [int(pid) for pid in path.read_text().split()]
    return pids


def _stat(pid: int) -> tuple[bool, int] | None:
    """True if the process has ended and waits to be reaped, and its session. None: it does not exist."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0] in "ZX", int(fields[3])


def _worker(pid: int) -> str:
    """The worker named in the environment with which the process started, "" for none."""
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
    """Kill a child. It has not been reaped, so its number does not belong to another process."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


# --- forks ------------------------------------------------------------------------------------------------------------
#
# The fork server of a pool: it forks workers one after the other, and each has started when the server answers.
#
# Invariant: each requested start becomes one process, forked or with a new interpreter; or none, if it was cancelled
# before its turn. The server loads torch while the coordinator starts. A server that ends, or does not answer for
# `PATIENCE_S`, is replaced as soon as a worker is wanted. A server that has never forked anything is not replaced.
# Then, as where a forked process would differ from a new one, each worker starts its own interpreter, and this is
# reported once.

SERVER = "farandole.worker.fork_server"
SLOW = "each worker starts its own interpreter, which takes seconds"
PATIENCE_S = 60.0  # loading torch takes 3 s, forking 0.1 s


@dataclass(frozen=True, kw_only=True)
class Start:
    """A worker to start, with its whole environment and its log file."""

    worker: str
    environ: Mapping[str, str]
    log: BinaryIO


class Forks:
    """Starts workers through the fork server. Needs a running event loop.

    `words` follow the interpreter in the workers' command; `loaded`: the modules that the server loads. `began`: called
    with each start, its process, and the lifeline to which the process is bound. `afresh`: called with a start that
    can't be forked. `tell`: called with a line for the users who watch the run.
    """

    def __init__(
        self, words: Sequence[str], loaded: Sequence[str], environ: Mapping[str, str], *,
        began: Callable[[Start, Forked, Lifeline], None], afresh: Callable[[Start], None], tell: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._words = list(words)
        self._loaded = list(loaded)
        self._environ = environ
        self._loop = asyncio.get_running_loop()
        self._on_started, self._afresh, self._tell = began, afresh, tell
        self._waiting: deque[Start] = deque()
        self._pending: tuple[Start, Lifeline] | None = None  # requested and not answered
        self._server: ForkServer | None = None
        self._fit = self._proven = self._over = False
        self._patience: asyncio.TimerHandle | None = None
        self._begin()

    @property
    def is_waiting(self) -> bool:
        """A process may exist whose id the server has not reported yet."""
        return self._pending is not None

    def start(self, start: Start) -> None:
        """Request a start. Returns at once."""
        if self._over:
            self._afresh(start)
            return
        self._waiting.append(start)
        if self._server is None:
            self._begin()
        self._send_next()

    def call_off(self, worker: str) -> Start | None:
        """Cancel a start that is still waiting. Returns it; None if its turn has come."""
        for start in self._waiting:
            if start.worker == worker:
                self._waiting.remove(start)
                return start
        return None

    def close(self) -> None:
        """End the server and its unanswered starts. A pool does this last; further calls do nothing."""
        self._over = True
        self._end_server()
        pending, self._pending = self._pending, None
        if pending:
            pending[0].log.close()
            pending[1].abandon()
        while self._waiting:
            self._waiting.popleft().log.close()

    def _begin(self) -> None:
        self._fit = self._proven = False
        try:
            self._server = take_spare(self._environ) or ForkServer.start(SERVER, self._loaded, self._environ)
        except OSError as error:
            self._give_up(f"the fork server can't be started ({error.strerror})")
            return
        self._loop.add_reader(self._server.fileno(), self._on_answer)
        self._wait()

    def _send_next(self) -> None:
        if self._server is None or not self._fit or self._pending or not self._waiting:
            return
        try:
            lifeline = Lifeline()
        except OSError:  # no descriptors: a start with a new interpreter reports why
            self._afresh(self._waiting.popleft())
            return
        start = self._waiting.popleft()
        self._pending = start, lifeline
        command = Command(words=self._words, environ=start.environ, folder=str(Path.cwd()))
        with Path(os.devnull).open("rb") as nothing:
            streams = nothing.fileno(), start.log.fileno(), start.log.fileno()
            try:
                self._server.ask(command, streams, self._pending[1])
            except OSError:
                self._on_server_lost()
                return
        self._wait()

    def _wait(self) -> None:
        self._patience = self._loop.call_later(PATIENCE_S, self._on_server_lost)

    def _on_answer(self) -> None:
        assert self._server is not None
        assert self._patience is not None
        self._patience.cancel()
        answer = self._server.receive()
        if answer is None:
            self._on_server_lost()
        elif not self._fit:
            if answer["unfit"]:
                self._give_up(answer["unfit"])
                return
            self._fit = True
        elif self._pending:
            (start, lifeline), self._pending = self._pending, None
            if "pid" in answer:
                self._proven = True
                lifeline.handed_over()
                self._on_started(start, Forked(answer["pid"]), lifeline)
            else:
                lifeline.abandon()
                self._afresh(start)
        self._send_next()

    def _on_server_lost(self) -> None:
        """Send the unanswered request to the next server, see `platform/process.py`."""
        self._end_server()
        if self._pending:
            (start, lifeline), self._pending = self._pending, None
            lifeline.abandon()
            self._waiting.appendleft(start)
        if not self._proven:
            self._give_up("the fork server has died")
        elif self._waiting:
            self._tell("the fork server has died; starting another one")
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
OWN = "local"  # the name of `farandole run`'s pool
SWEEP_S = 1.0  # how often strays are searched
POLL_S = 0.05  # where the system has no pidfd


def join_command(ticket: Path, script: str, arguments: Sequence[str], prepare: str = "") -> list[str]:
    """The command of a worker, the same in every pool. The worker ends when this process does."""
    head = [sys.executable, "-m", "farandole", "join", "--die-with", str(os.getpid())]
    return [*head, *(("--prepare", prepare) if prepare else ()), str(ticket), script, *arguments]


def load_ahead(threads: int, environ: Mapping[str, str]) -> None:
    """Start the fork server of this process's later pool, so that it loads torch meanwhile. Arguments as for the
    pool.
    """
    if forking.SUPPORTED and not forking.has_spare():
        environ = _environ(environ, threads)
        with contextlib.suppress(OSError):  # then the pool fails too, and reports it
            forking.keep_spare(ForkServer.start(SERVER, LOADED, environ), environ)


def _environ(environ: Mapping[str, str], threads: int) -> dict[str, str]:
    """The environment that all workers of the pool share."""
    return {
        **environ, "FARANDOLE_POOL": OWN, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1",
        "FARANDOLE_WORKER": "",  # a worker may start a run whose fork server is not that worker's: see `Strays`
    }  # fmt: skip


class LocalPool:
    """A pool of processes on this machine. Needs a running event loop. Log files are `logs`/ID.log.

    `tell` shows a line to the users who watch the run. Each worker has the lowest free slot as its FARANDOLE_SLOT,
    which selects its GPU. `fresh`: each worker starts its own interpreter. So does a command that is not `python -m
    MODULE`.
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
        self._killed: set[str] = set()  # workers that were killed while they were starting
        self._closed = False
        self._processes: dict[str, subprocess.Popen[bytes] | Forked] = {}
        self._lifelines: dict[str, Lifeline] = {}
        self._events = Events()
        self._host = Host(name=socket.gethostname())
        self._forks: Forks | None = None
        forks = not fresh and self._command[:2] == [sys.executable, "-m"]
        if forks and not forking.SUPPORTED:
            (tell or _ignore)(f"{SLOW}: farandole forks them on Linux only")
        elif forks:
            self._forks = Forks(
                self._command[1:],
                LOADED,
                self._environ,
                began=self._on_started,
                afresh=self._start_afresh,
                tell=tell or _ignore,
            )
        self._strays = Strays(tell) if tell else None

    def list(self) -> Sequence[Host]:
        """This machine, without a limit of workers."""
        return (self._host,)

    def start(self, worker: str, host: str) -> None:
        del host  # there is only one
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
            self._on_not_started(start, error.strerror or str(error))
            return
        hang_on(lifeline.read_end, process.pid)
        lifeline.handed_over()
        self._on_started(start, process, lifeline)

    def _on_started(self, start: Start, process: subprocess.Popen[bytes] | Forked, lifeline: Lifeline) -> None:
        start.log.close()
        worker = start.worker
        self._processes[worker], self._lifelines[worker] = process, lifeline
        if self._strays:
            self._strays.add_session(process.pid)
        self._watch(worker, process.pid)
        self._events.put(Started(worker, self._host.name))
        if worker in self._killed:
            self.stop(worker)

    def _on_not_started(self, start: Start, reason: str) -> None:
        start.log.close()
        del self._slots[start.worker]
        self._events.put(WorkerStartFailed(start.worker, reason))

    def _log(self, worker: str) -> BinaryIO:
        path = self._logs / f"{worker}.log"
        try:
            make(self._logs)
            return append(path)
        except OSError as error:  # a full disk: the worker is worth more than its output
            if self._tell:
                self._tell(f"{path} can't be written ({error.strerror}): the output of {worker} is lost")
            return Path(os.devnull).open("ab")

    def _sweep(self) -> None:
        assert self._strays is not None
        if self._forks is None or not self._forks.is_waiting:  # else a process may exist whose id is not known yet
            self._strays.sweep(self._workers, self._slots)
        self._sweeping = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def stop(self, worker: str) -> None:
        """Send SIGKILL to the worker's process group, which is its session's. It stays ours until `_reap` has run."""
        if process := self._processes.get(worker):
            kill_group(process.pid)
        elif self._forks and (start := self._forks.call_off(worker)):
            self._on_not_started(start, "killed before it had started")
        elif worker in self._slots:
            self._killed.add(worker)

    def kill_all(self) -> None:
        """Kill all at once, without an event loop, as the last act of a dying caller. Further calls do nothing, and
        nothing starts any more.
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
        """Reap an ended process. Its group is killed first, while the process is a zombie that keeps the number."""
        process = self._processes.pop(worker, None)
        if process is None:
            return  # kill_all has reaped it
        kill_group(process.pid)
        code = process.wait()
        del self._slots[worker]
        self._lifelines.pop(worker).cut()
        reason = f"killed by signal {-code}" if code < 0 else f"exited with code {code}"
        self._events.put(WorkerExited(worker, reason))


def _ignore(line: str) -> None:
    del line


# --- preparation ------------------------------------------------------------------------------------------------------
#
# The preparation that must succeed on a host before its workers may join.
#
#     --prepare COMMAND   once for each host and run, such as fetching the data
#     --setup COMMAND     once for each host and pack, in the folder of the run's code: installs what the code needs. If
#                         it leaves a `.venv` there, the workers use its interpreter
#
# The first worker runs it, and the other workers of that host wait for its end. Invariant: it never runs twice at the
# same time. The command inherits the lock. So what a killed worker has begun is waited for and then run again, since no
# process saw it succeed. PYTHON is the interpreter that has farandole here. The output is the worker's; the output of a
# setup goes to a file beside the folder.
#
# The success of `--prepare` is recorded in `~/.cache/farandole/prepared`, under a name that reveals nothing of the
# run's secret. The success of `--setup` is recorded beside the folder, as long as the folder exists. Not covered:
# undoing either. This imports nothing heavy, because the command may be what installs torch.

FOLDER = Path("~/.cache/farandole/prepared")
ENVIRONMENT = ".venv"
HAS_FARANDOLE = "import importlib.util, sys; sys.exit(importlib.util.find_spec('farandole') is None)"
_NO_LOCKS = "two workers would prepare the host at once; put the user's home, or its ~/.cache, on one that has locks"
LAST_WORDS = 500  # characters of the output's last line


def prepare(command: str, *, run: str, host: str) -> None:
    """Return once the shell command `command` has succeeded on `host` for `run`, a text that only this run has.

    Raises:
        HostNotPrepared: the command failed.
    """
    folder = FOLDER.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / _name(run, host, command)
    _do_once(command, "--prepare", mark=mark.with_suffix(".done"), lock=mark.with_suffix(".lock"), host=host)


def set_up(command: str, folder: Path, *, host: str) -> Path | None:
    """Return once `command` of `--setup` has succeeded on `host` for the pack in `folder`, the current working folder.

    Returns the interpreter that it created there, None if there is none or it is this process's.

    Raises:
        HostNotPrepared: the command failed, or workers can't start with that interpreter.
    """
    if not command:
        return None
    mark, lock = set_up_mark(folder, _name(host, command))
    _do_once(command, "--setup", mark=mark, lock=lock, host=host, log=mark.with_suffix(".log"))
    environment = folder / ENVIRONMENT
    python = environment / "bin" / "python"
    if not python.exists() or Path(sys.prefix).resolve() == environment.resolve():
        return None
    prefix = f"--setup {command!r} has left {python} on {host}"
    try:
        has_farandole = (
            subprocess.run([python, "-c", HAS_FARANDOLE], stdin=subprocess.DEVNULL, check=False).returncode == 0
        )
    except OSError as error:
        raise HostNotPrepared(f"{prefix}, which does not run: {error.strerror}") from None
    if not has_farandole:
        raise HostNotPrepared(
            f"{prefix}, which has no farandole: let the setup install it too, or install what the code needs with "
            f'"$PYTHON" -m pip'
        )
    return python


def _name(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _do_once(command: str, option: str, *, mark: Path, lock: Path, host: str, log: Path | None = None) -> None:
    """Run the command unless `mark` exists. Its output goes to `log`, if given. Raises HostNotPrepared: it failed."""
    if mark.exists():
        return
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not files.take(descriptor, lock, _NO_LOCKS):
            tell(f"farandole: another worker prepares {host}; waiting for it")
            files.take(descriptor, lock, _NO_LOCKS, wait=True)
        if mark.exists():
            return
        tell(f"farandole: preparing {host}: {command}")
        environ = {**os.environ, "PYTHON": sys.executable}
        with open(log, "wb", opener=files.opener) if log else contextlib.nullcontext() as output:
            code = subprocess.run(
                command, shell=True, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=(descriptor,),
                env=environ, check=False,
            ).returncode  # fmt: skip
        if code:
            how = f"exit code {code}" if code > 0 else f"signal {-code}"
            where = f"{log} there{_last_words(log)}" if log else "this worker's output"
            raise HostNotPrepared(
                f"{option} {command!r} failed on {host} with {how}, so its workers can't join; its output is in {where}"
            )
        os.close(os.open(mark, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        tell(f"farandole: {host} is prepared")
    finally:
        os.close(descriptor)


def _last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    return f": {last[:LAST_WORDS]}" if last else ""
