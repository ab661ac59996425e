"""A `farandole run` of the job, what is started beside it, and its end for certain.

On leaving the context nothing of the run is alive, whatever happened. Whoever waits, waits in `until`, which follows
the run and wakes the processes whose time in SIGSTOP is over.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import psutil

from chaos.watch import Watch

FARANDOLE = [sys.executable, "-m", "farandole"]
ENVIRON = {name: value for name, value in os.environ.items() if not name.startswith("FARANDOLE_")}
JOB = Path(__file__).with_name("job.py")
PACE_S = 0.01  # a micro-batch takes so much longer while there are faults to come
POLL_S = 0.002  # a proposed view is in force some ten milliseconds later
END_S = 60.0  # for external workers and commands to end by themselves once the run has; one may be on its way back
STACKS_S = 2.0
FILLING_BYTES = 1 << 16
DEADLINE_S = 120.0


class Launched:
    """In `folder`, a new one or that of a run to be resumed. `job`: a script that takes data, arguments, `--pace FILE`.
    `within`: what commands are put behind, where they run elsewhere. `environ` is added to the environment of the run,
    its pool's workers, and external workers; those may have another, `external workers`. What is written beside the
    run is named after `beside`, the folder unless told otherwise.
    """

    def __init__(self, folder: Path, data: Path, options: Sequence[str], *, job: Path = JOB,
                 arguments: Sequence[str] = (), within: Sequence[str] = (), environ: dict[str, str] | None = None,
                 external_workers: dict[str, str] | None = None,
                 pace_s: float = PACE_S, beside: Path | None = None) -> None:  # fmt: skip
        self.folder = folder
        self.watch = Watch(folder)
        beside = beside or folder
        self.output = beside.with_suffix(".out")
        self.external_workers: list[subprocess.Popen[bytes]] = []
        self.commands: list[subprocess.Popen[bytes]] = []
        self._pace = beside.with_suffix(".pace")
        self._pace.write_text(str(pace_s))
        self._pace_s, self._hung = pace_s, list[int]()
        self._script = job
        self.job = [str(job), str(data), *arguments, "--pace", str(self._pace)]
        self._frozen: dict[int, float] = {}  # process ids, and until when
        self._full_until: float | None = None
        self._kept_whole: set[Path] | None = None  # states that the store has had when it was told to lie
        self._let_in = 0  # second runs that were not refused
        self._began = time.monotonic()
        self._of_external_workers = external_workers or environ
        command = [*FARANDOLE, "run", *options, "--ledger", "--folder", str(folder), *self.job]
        self.process = self.start([*within, *command], environ)

    def __enter__(self) -> Launched:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in (self.process, *self.external_workers, *self.commands):
            if process.poll() is None:
                process.kill()  # the kernel ends what `farandole run` has started
            process.wait()
        for pid in self.watch.processes():
            self.watch.signal(pid, signal.SIGKILL)
        self._pace.unlink(missing_ok=True)

    @property
    def seconds(self) -> float:
        """Since the start of the run."""
        return time.monotonic() - self._began

    @property
    def over(self) -> bool:
        """Whether there is nothing left to disturb."""
        return self.watch.seen["finished"] > 0 or self.process.poll() is not None

    def until(self, condition: Callable[[], bool], limit_s: float = DEADLINE_S) -> bool:
        """Whether the condition held within `limit_s` from now."""
        until_s = self.seconds + limit_s
        while True:
            self.watch.look()
            for pid, until in list(self._frozen.items()):
                if self.seconds >= until:
                    self.watch.signal(pid, signal.SIGCONT)
                    del self._frozen[pid]
            if self._full_until is not None and self.seconds >= self._full_until:
                self._make_room()
            self._keep_half()
            if condition():
                return True
            if self.seconds >= until_s:
                return False
            time.sleep(POLL_S)

    def wait(self, seconds: float) -> None:
        """As long as the run is not over."""
        self.until(lambda: self.over, seconds)

    def finish(self, limit_s: float = DEADLINE_S) -> int | None:
        """Let it train on undisturbed. Returns its exit code; None if it had not ended within `limit_s`."""
        self._pace.unlink()
        self._make_room()
        if not self.until(lambda: self.process.poll() is not None, limit_s):
            self._tell_stacks()
            return None
        self.until(lambda: not self._frozen)
        for external_worker in self.external_workers:  # who had not joined yet is none of the run's business
            if external_worker.pid not in self.watch.pids.values():
                external_worker.kill()
        processes = (*self.external_workers, *self.commands)
        self.until(lambda: all(process.poll() is not None for process in processes), END_S)
        return self.process.returncode

    def troubles(self) -> list[str]:
        """Returns what no fault excuses: a traceback in the output of the run, of its external workers or of a command;
        a second run that was let into the run's place.
        """
        said = self.output.read_text(errors="replace")
        found = ["a traceback in the output"] if "Traceback (most recent call last)" in said else []
        return found + (["a second run was let in"] if self._let_in else [])

    # --- acting ----------------------------------------------------------------------------------------------

    def command(self, *arguments: str) -> subprocess.Popen[bytes]:
        """`farandole scale 3` and the like, on this run; does not wait for it."""
        command = self.start([*FARANDOLE, *arguments, "--run", str(self.folder)])
        self.commands.append(command)
        return command

    def join(self, *arguments: str, within: Sequence[str] = (), environ: dict[str, str] | None = None) -> bool:
        """An external worker by hand, whose script gets `arguments` too; False if there is no ticket yet."""
        ticket = self.folder / "ticket"
        if not ticket.exists():
            return False
        mine = ["--die-with", str(os.getpid())]
        self.external_workers.append(
            self.start(
                [*within, *FARANDOLE, "join", *mine, str(ticket), *self.job, *arguments],
                environ or self._of_external_workers,
            )
        )
        return True

    def kill(self, pid: int | None) -> bool:
        return pid is not None and self.watch.signal(pid, signal.SIGKILL)

    def freeze(self, pid: int | None, seconds: float) -> bool:
        if pid is None or not self.watch.signal(pid, signal.SIGSTOP):
            return False
        self._frozen[pid] = self.seconds + seconds
        return True

    def hang(self, pid: int) -> bool:
        """Its script stands still from its next micro-batch on, for good; the process is alive."""
        self._hung.append(pid)
        self.pace(self._pace_s)
        return self.watch.alive(pid)

    def pace(self, pace_s: float) -> None:
        """From now on a micro-batch takes so many seconds more."""
        self._pace_s = pace_s
        whole = self._pace.with_suffix(".whole")
        whole.write_text(" ".join(map(str, (self._pace_s, *self._hung))))
        whole.replace(self._pace)

    def edit(self) -> bool:
        """The script's file says something else from now on: who read it would come to other bits."""
        other = self._script.with_suffix(".other")
        text = self._script.read_text()
        other.write_text(text.replace("RATE = 0.05", "RATE = 0.06"))
        other.replace(self._script)
        return True

    def kill_loader(self, pid: int, choice: float) -> bool:
        """kill -9 to one of the loader processes of `pid`; False if it has none now."""
        with contextlib.suppress(psutil.NoSuchProcess):
            loaders = sorted(child.pid for child in psutil.Process(pid).children())
            return bool(loaders) and self.kill(loaders[int(choice * len(loaders))])
        return False

    def fill(self, seconds: float) -> bool:
        """Not a byte goes on the folder's disk for so long, which is a small one."""
        self._full_until = self.seconds + seconds
        with contextlib.suppress(OSError), self._filler.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(FILLING_BYTES))
        with contextlib.suppress(OSError), self._filler.open("ab", buffering=0) as file:
            while True:
                file.write(b"\0")
        return True

    def intrude(self) -> bool:
        """Two that want what is this run's: its place for checkpoints, and its folder. They have to be refused. False
        if the run was over before they were.
        """
        second = self.output.with_suffix(".second")
        job = self.job[: self.job.index("--pace")]
        run = [*FARANDOLE, "run", "--workers", "1", "--folder", str(second)]
        commands = (
            ([*run, "--checkpoints", str(self.folder / "checkpoints"), *job], {}),
            ([sys.executable, *job], {"FARANDOLE_FOLDER": str(self.folder)}),
        )
        if not (self.folder / "settings.json").exists():
            return False
        silent = subprocess.DEVNULL
        intruders = [
            subprocess.Popen(command, env={**ENVIRON, **environ}, stdin=silent, stdout=silent, stderr=silent)
            for command, environ in commands
        ]
        ended = lambda: all(process.poll() is not None for process in intruders)  # noqa: E731
        self.until(lambda: ended() or self.over)
        refused = ended()
        for process in intruders:
            process.kill()
            process.wait()
        self._let_in += sum(process.returncode == 0 for process in intruders) if refused else 0
        shutil.rmtree(second, ignore_errors=True)
        return refused

    def lie(self) -> bool:
        """Of the next state that is written to the run's folder half is lost before its manifest is there."""
        self._kept_whole = self._states()
        return True

    def _states(self) -> set[Path]:
        return set((self.folder / "checkpoints").glob("*.pt"))

    def _keep_half(self) -> None:
        if self._kept_whole is None:
            return
        for state in self._states() - self._kept_whole:
            with contextlib.suppress(OSError):
                size = state.stat().st_size
                if size and not state.with_suffix(".json").exists():
                    os.truncate(state, size // 2)
                    self._kept_whole = None
                    return

    def _make_room(self) -> None:
        self._full_until = None
        self._filler.unlink(missing_ok=True)

    @property
    def _filler(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.filler")

    def start(self, command: Sequence[str], environ: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        """PYTHONFAULTHANDLER is for `_tell_stacks`."""
        with self.output.open("ab") as output:
            return subprocess.Popen(
                command, env={**ENVIRON, "PYTHONFAULTHANDLER": "1", **(environ or {})}, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def _tell_stacks(self) -> None:
        """Every thread of every process writes where it is, the pool's into their log files, and ends."""
        for pid in self.watch.processes():
            if pid != self.process.pid:
                self.watch.signal(pid, signal.SIGCONT)
                self.watch.signal(pid, signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STACKS_S)
