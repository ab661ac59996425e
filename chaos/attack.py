"""One run of the job, struck by its schedule.

Invariant: while the version under test can't do without (see `schedule.OFF`), at least one worker that certainly holds
the state is left alone at any time: neither killed, nor frozen, nor on its way out. A blow that would break this takes
another worker of the view; if there is none, it is not struck. What was struck when, and at which step, is kept.

On leaving the context nothing of the run is alive, whatever happened.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from chaos.schedule import WORKERS_STRUCK, Blow, Schedule
from chaos.watch import Watch

T = TypeVar("T")

FARANDOLE = [sys.executable, "-m", "farandole"]
ENVIRON = {name: value for name, value in os.environ.items() if not name.startswith("FARANDOLE_")}
PACE_S = 0.03  # a micro-batch takes so much longer while there are blows to come
POLL_S = 0.002  # a proposed view is in force some ten milliseconds later
PATIENCE_S = 3.0  # for a blow's event to come, once the training has begun
THAW_S = 1.5  # after SIGCONT, until a worker counts as sound again
END_S = 10.0  # for guests to end by themselves once the run has
STACKS_S = 2.0
DEADLINE_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Struck:
    """`target` is "" where nobody could be struck; `step` is the newest whose line had come."""

    seconds: float
    blow: Blow
    target: str
    step: int

    def __str__(self) -> str:
        return f"{self.seconds:7.3f} s, step {self.step:3}: {self.blow} -> {self.target or 'not struck'}"


class Attack:
    """A `farandole run` in `folder`, which must not exist, under a schedule. A context; `fight` does it all."""

    def __init__(self, schedule: Schedule, folder: Path, digits: Path) -> None:
        self.schedule = schedule
        self.folder = folder
        self.watch = Watch(folder)
        self.struck: list[Struck] = []
        self.output = folder.with_suffix(".out")
        self._pace = folder.with_suffix(".pace")
        self._pace.write_text(str(PACE_S))
        self._job = [str(Path(__file__).with_name("job.py")), str(digits), "--pace", str(self._pace)]
        self._frozen: dict[int, tuple[float, str]] = {}  # until when, and whose process it is
        self._unsound: dict[str, float] = {}  # workers that may not be all that is left, and until when
        self._scaling: list[subprocess.Popen[bytes]] = []
        self._commands: list[subprocess.Popen[bytes]] = []
        self._guests: list[subprocess.Popen[bytes]] = []
        self._began = time.monotonic()
        numbers = ["--workers", str(schedule.workers), "--min", str(schedule.minimum)]
        self._run = self._start("run", *numbers, "--ledger", "--folder", str(folder), *self._job)

    def __enter__(self) -> Attack:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in (self._run, *self._guests, *self._commands):
            if process.poll() is None:
                process.kill()  # the kernel ends what `farandole run` has started
            process.wait()
        for pid in self.watch.processes():
            self.watch.signal(pid, signal.SIGKILL)
        self._pace.unlink(missing_ok=True)

    def fight(self) -> int | None:
        """Strike, let it end. Returns its exit code; None if it had not ended by the deadline."""
        for blow in self.schedule.blows:
            if not self._wait_for(blow):
                break
            self._strike(blow)
        self._pace.unlink()
        if not self._until(lambda: self._run.poll() is not None, DEADLINE_S):
            self._tell_stacks()
            return None
        self._until(lambda: not self._frozen, DEADLINE_S)
        self._end_guests()
        self.watch.look()
        return self._run.returncode

    @property
    def seconds(self) -> float:
        """Since the start of the run."""
        return time.monotonic() - self._began

    def troubles(self) -> list[str]:
        """Commands on the run that broke, rather than did or declined what was asked."""
        said = self.output.read_text(errors="replace")
        return ["a traceback in the output"] if "Traceback (most recent call last)" in said else []

    # --- when ------------------------------------------------------------------------------------------------

    def _wait_for(self, blow: Blow) -> bool:
        """Until the blow's moment has come; False if the run has ended before."""
        watch = self.watch
        before, patient = watch.seen[blow.event], 0.0

        def come() -> bool:
            nonlocal patient
            if watch.step >= 0 and not patient:
                patient = self.seconds + PATIENCE_S
            return watch.seen[blow.event] > before or self._over() or 0.0 < patient < self.seconds

        if blow.event:
            self._until(come, DEADLINE_S)
        self._until(self._over, self.seconds + blow.delay_s)
        if blow.kind in WORKERS_STRUCK:  # of a scaling down, it has to be known whom it will take
            self._until(lambda: all(command.poll() is not None for command in self._scaling), DEADLINE_S)
        return not self._over()

    def _over(self) -> bool:
        return self.watch.seen["finished"] > 0 or self._run.poll() is not None

    def _until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Follow the run, and wake who has been frozen for long enough, until the condition holds or time is up."""
        while True:
            self.watch.look()
            for pid, (until, _) in list(self._frozen.items()):
                if self.seconds >= until:
                    self.watch.signal(pid, signal.SIGCONT)
                    del self._frozen[pid]
            if condition():
                return True
            if self.seconds >= limit_s:
                return False
            time.sleep(POLL_S)

    # --- what ------------------------------------------------------------------------------------------------

    def _strike(self, blow: Blow) -> None:
        step = self.watch.step
        match blow.kind:
            case "join":
                ticket = self.folder / "ticket"
                if not ticket.exists():
                    target = ""
                else:
                    target = "a guest"
                    mine = ["--die-with", str(os.getpid())]
                    self._guests.append(self._start("join", *mine, str(ticket), *self._job))
            case "scale":
                target = "the run"
                command = self._start("scale", str(blow.workers), "--run", str(self.folder))
                self._commands.append(command)
                self._scaling.append(command)
            case "freeze coordinator":
                target = self._freeze("the coordinator", self.watch.coordinator(), blow.seconds)
            case "kill coordinator":
                target = self._kill("the coordinator", self.watch.coordinator())
            case "kill everyone":
                target = " ".join(self._kill(worker, self.watch.pids[worker]) for worker in self.watch.members)
            case _:
                target = self._strike_worker(blow)
        self.struck.append(Struck(seconds=self.seconds, blow=blow, target=target, step=step))

    def _strike_worker(self, blow: Blow) -> str:
        worker, pid = self._target(blow)
        if pid is None:
            return ""
        match blow.kind:
            case "kill":
                self._unsound[worker] = inf
                return self._kill(worker, pid)
            case "notice":
                self._unsound[worker] = inf
                return worker if self.watch.signal(pid, signal.SIGTERM) else ""
            case "release":
                self._unsound[worker] = inf
                self._commands.append(self._start("release", worker, "--run", str(self.folder)))
                return worker
            case _:
                self._unsound[worker] = max(self._unsound.get(worker, 0.0), self.seconds + blow.seconds + THAW_S)
                return self._freeze(worker, pid, blow.seconds)

    def _target(self, blow: Blow) -> tuple[str, int | None]:
        """Who has the blow's role now, else any worker of the view: a name and a process id."""
        watch = self.watch
        members = list(watch.members)
        match blow.role:
            case "rank 0":
                wanted = members[:1]
            case "last rank":
                wanted = members[-1:]
            case "joiner":
                wanted = [w for w in (*watch.proposed, *members) if w not in watch.holders]
            case "leaver":
                wanted = [w for w in members if w in watch.leaving]
            case "starting":
                if blow.kind != "release" and (pids := watch.starting()):
                    pid = _choose(pids, blow.choice)
                    return f"process {pid}", pid
                wanted = []
            case _:
                wanted = members
        able = [w for w in dict.fromkeys(wanted) if self._may_strike(w)] or [w for w in members if self._may_strike(w)]
        if not able:
            return "", None
        worker = _choose(able, blow.choice)
        return worker, watch.pids[worker]

    def _may_strike(self, worker: str) -> bool:
        """Whether somebody else would remain who holds the state and has not been touched."""
        if worker not in self.watch.pids:
            return False
        sound = {w for w in self.watch.holders - self.watch.leaving if self._unsound.get(w, 0.0) < self.seconds}
        return bool(sound - {worker})

    def _kill(self, name: str, pid: int | None) -> str:
        return name if pid is not None and self.watch.signal(pid, signal.SIGKILL) else ""

    def _freeze(self, name: str, pid: int | None, seconds: float) -> str:
        if pid is None or not self.watch.signal(pid, signal.SIGSTOP):
            return ""
        self._frozen[pid] = (self.seconds + seconds, name)
        return name

    # --- processes -------------------------------------------------------------------------------------------

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """A `farandole` command; PYTHONFAULTHANDLER for `_tell_stacks`."""
        with self.output.open("ab") as output:
            return subprocess.Popen(
                [*FARANDOLE, *arguments], env={**ENVIRON, "PYTHONFAULTHANDLER": "1"}, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def _end_guests(self) -> None:
        """Guests and commands end by themselves once the run has; who had not joined yet is none of its business."""
        for guest in self._guests:
            if guest.pid not in self.watch.pids.values():
                guest.kill()
        processes = (*self._guests, *self._commands)
        self._until(lambda: all(process.poll() is not None for process in processes), self.seconds + END_S)

    def _tell_stacks(self) -> None:
        """Every thread of every process writes where it is into its log, and ends."""
        for pid in self.watch.processes():
            if pid != self._run.pid:
                self.watch.signal(pid, signal.SIGCONT)
                self.watch.signal(pid, signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._run.wait(STACKS_S)


def _choose(several: list[T], choice: float) -> T:
    return several[int(choice * len(several))]
