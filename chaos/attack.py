"""A run struck by its schedule: processes killed and frozen, workers that join and leave.

Invariant: while the version under test can't do without (see `schedule.OFF`), at least one worker that certainly holds
the state is left alone at any time: neither killed, nor frozen, nor on its way out. A blow that would break this takes
another worker of the view, or waits for one; if none comes, it is not struck. What was struck, when and at which step,
is kept.
"""

from __future__ import annotations

import signal
import subprocess
from dataclasses import dataclass
from math import inf
from typing import TypeVar

from chaos.job import UNLIKE
from chaos.launched import Launched
from chaos.schedule import WORKERS_STRUCK, Blow, Schedule

T = TypeVar("T")

SHORT_S = 1.0  # patience for a blow's event, once the training has begun; more for what may need a worker to start up:
PATIENCE_S = {"ready": 4.0, "proposed": 4.0, "view": 4.0}
TARGET_S = 2.5  # for somebody who may be struck
THAW_S = 1.5  # after SIGCONT, until a worker counts as sound again


@dataclass(frozen=True, kw_only=True)
class Struck:
    """`target` is "" where nobody could be struck; `step` is the newest whose line had come."""

    seconds: float
    kind: str
    what: str
    target: str
    step: int

    def __str__(self) -> str:
        return f"{self.seconds:7.3f} s, step {self.step:3}: {self.what} -> {self.target or 'not struck'}"


class Attack:
    """Use once: `fight`, then look at `struck`. `patience_s`: wait at least so long for the event of a blow;
    `target_s`: at most so long for somebody who may be struck."""

    def __init__(
        self, schedule: Schedule, run: Launched, *, patience_s: float = SHORT_S, target_s: float = TARGET_S
    ) -> None:
        self.schedule = schedule
        self._patience_s = patience_s
        self._target_s = target_s
        self.struck: list[Struck] = []
        self._run = run
        self._watch = run.watch
        self._unsound: dict[str, float] = {}  # workers that may not be all that is left, and until when
        self._scaling: list[subprocess.Popen[bytes]] = []

    def fight(self) -> None:
        """Until all is struck, or the run is over."""
        for blow in self.schedule.blows:
            self._wait_for(blow)
            if self._run.over:
                return
            step = self._watch.step
            target = self._strike(blow)
            self.struck.append(
                Struck(seconds=self._run.seconds, kind=blow.kind, what=str(blow), target=target, step=step)
            )

    def _wait_for(self, blow: Blow) -> None:
        """Until the blow's moment has come."""
        run, watch = self._run, self._watch
        before, limit = watch.seen[blow.event], max(PATIENCE_S.get(blow.event, SHORT_S), self._patience_s)
        patient = run.seconds + limit

        def come() -> bool:
            nonlocal patient
            if watch.step < 0:
                patient = run.seconds + limit
            return watch.seen[blow.event] > before or run.over or patient < run.seconds

        if blow.event:
            run.until(come)
        run.wait(blow.delay_s)
        if blow.kind in WORKERS_STRUCK:  # of a scaling down, it has to be known whom it will take
            run.until(lambda: all(command.poll() is not None for command in self._scaling))

    # --- what ------------------------------------------------------------------------------------------------

    def _strike(self, blow: Blow) -> str:
        """Returns who was struck, "" for nobody."""
        run, coordinator = self._run, self._watch.coordinator()
        match blow.kind:
            case "join":
                return "a guest" if run.join() else ""
            case "refusals":
                return "two guests" if all(run.join("--unlike", what) for what in UNLIKE) else ""
            case "scale":
                self._scaling.append(run.command("scale", str(blow.workers)))
                return "the run"
            case "freeze coordinator":
                return "the coordinator" if run.freeze(coordinator, blow.seconds) else ""
            case "kill coordinator":
                return "the coordinator" if run.kill(coordinator) else ""
            case "kill everyone":
                return ", ".join(w for w in self._watch.members if run.kill(self._watch.pids.get(w)))
            case "edit":
                return "the script" if run.edit() else ""
            case "fill disk":
                return "the run's folder" if run.fill(blow.seconds) else ""
            case "second run":
                return "the run's place" if run.intrude() else ""
            case "lie":
                return "the store" if run.lie() else ""
            case _:
                return self._strike_worker(blow)

    def _strike_worker(self, blow: Blow) -> str:
        run = self._run
        run.until(lambda: run.over or self._target(blow) is not None, self._target_s)
        target = self._target(blow)
        if run.over or target is None:
            return ""
        worker, pid = target
        gone = blow.kind in ("kill", "notice", "release", "hang", "hang up")
        self._unsound[worker] = inf if gone else max(self._unsound.get(worker, 0), run.seconds + blow.seconds + THAW_S)
        match blow.kind:
            case "kill":
                struck = run.kill(pid)
            case "notice":
                struck = self._watch.signal(pid, signal.SIGTERM)
            case "hang up":
                struck = self._watch.signal(pid, signal.SIGHUP)
            case "hang":
                struck = run.hang(pid)
            case "kill loader":
                struck = run.kill_loader(pid, blow.choice)
            case "release":
                run.command("release", worker)
                struck = True
            case _:
                struck = run.freeze(pid, blow.seconds)
        return worker if struck else ""

    # --- to whom -----------------------------------------------------------------------------------------------

    def _target(self, blow: Blow) -> tuple[str, int] | None:
        """Who has the blow's role now, else any worker of the view: a name and a process id."""
        watch = self._watch
        if blow.role == "starting" and blow.kind != "release" and (pids := watch.starting()):
            pid = _choose(pids, blow.choice)
            return f"process {pid}", pid
        members = list(watch.members)
        wanted = {
            "rank 0": members[:1],
            "last rank": members[-1:],
            "joiner": [w for w in (*watch.proposed, *members) if w not in watch.holders],
            "leaver": [w for w in members if w in watch.leaving],
        }.get(blow.role, members)
        able = [w for w in dict.fromkeys(wanted) if self._may_strike(w)] or [w for w in members if self._may_strike(w)]
        if not able:
            return None
        worker = _choose(able, blow.choice)
        return worker, watch.pids[worker]

    def _may_strike(self, worker: str) -> bool:
        """Whether it is alive and somebody else would remain who holds the state and has not been touched."""
        watch = self._watch
        sound = {w for w in watch.holders - watch.leaving if self._unsound.get(w, 0.0) < self._run.seconds}
        return bool(sound - {worker}) and worker in watch.pids and watch.alive(watch.pids[worker])


def _choose(several: list[T], choice: float) -> T:
    return several[int(choice * len(several))]
