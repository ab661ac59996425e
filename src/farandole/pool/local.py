"""Worker processes on this machine. No process of this pool outlives it, and none that a worker started outlives it.

- Workers are forked from a process that has torch loaded (`forks.py`), or begin with an interpreter of their own. What
  follows holds for both, for both are children of this process.
- Each worker runs in a session of its own: Ctrl-C in the terminal does not reach it, and its process group holds what
  it started (DataLoader workers). When a worker has exited, by itself or killed, the rest of its group is killed
  before it is reaped, while its id still can't be another's. That is prompt (a pidfd tells), and has to be: forked
  children hold copies of the worker's sockets, so only with the last of them do its peers see it gone.
- When this process ends, kill -9 included, the kernel kills each worker's group, which hangs on a lifeline
  (`platform/process.py`). DataLoader workers have a watchdog of their own, but it does not see a parent that died
  while they started.
- What has made a session of its own is found and ended too, where the pool may `tell` of it (see `strays.py`).
- Until that is arranged, and where the system has no such signal, a new interpreter sees to its own end (`farandole
  join --die-with`, see `platform/process.py`); it has started nothing yet, or its DataLoader workers notice within 5 s.

Start workers from the thread that lasts longest, the main one: `--die-with` is tied to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from farandole.platform import process as forking
from farandole.platform.files import append, make
from farandole.platform.process import Forked, ForkServer, Lifeline, hang_on, kill_group
from farandole.pool.base import Event, Events, Gone, Host, Started, StartFailed
from farandole.pool.forks import SERVER, SLOW, Forks, Start
from farandole.pool.strays import Strays
from farandole.settings import SLOT

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
            self._events.put(StartFailed(worker, "its pool is closed"))
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
        self._events.put(StartFailed(start.worker, reason))

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
        self._events.put(Gone(worker, reason))


def _nobody(line: str) -> None:
    del line
