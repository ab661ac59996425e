"""A run as seen from outside: the lines of its metrics.jsonl as they come, and its processes.

Besides following, it keeps the one thing that a careful attacker must know: which workers *certainly* hold the state.
A joiner counts when the step in which it has come has ended, because that can't end without its word. Step lines come
with heartbeats, half a second late, so this errs on the side of "does not".

Only processes that name the run's folder on their command line are ever looked at or signalled.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import TypeVar

import psutil

from farandole.protocol import events
from farandole.protocol.events import Recorded
from farandole.protocol.metrics import LOG, Line, LogLine, StepLine, parse_line

E = TypeVar("E", bound=Recorded)


class Watch:
    """Of the run in `folder`. Call `look` often: it reads what is new.

    Attributes:
        lines: everything so far. members: of the newest view. proposed: members of a view on its way.
        step: the newest whose line has come. holders: members that certainly hold the state.
        leaving: workers that have notice. pids: of those that have asked in. seen: each event, how often, by name.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[Line] = []
        self.members: tuple[str, ...] = ()
        self.proposed: tuple[str, ...] = ()
        self.step = -1
        self.holders: set[str] = set()
        self.leaving: set[str] = set()
        self.pids: dict[str, int] = {}
        self.seen: Counter[str] = Counter()
        self._entered: dict[str, int] = {}  # the step in which a member has, or will have, got the state
        self._read = 0  # bytes of whole lines

    def look(self) -> None:
        try:
            with (self.folder / "metrics.jsonl").open("rb") as file:
                file.seek(self._read)
                new = file.read()
        except FileNotFoundError:
            return
        *whole, _torn = new.split(b"\n")  # a line that a killed coordinator left torn, the next one takes away
        self._read += sum(len(text) + 1 for text in whole)
        for text in whole:
            if (line := parse_line(text)) is not None:
                self.lines.append(line)
                self._follow(line)
        if whole:
            self.holders = {worker for worker in self.members if self.step >= self._entered[worker]}

    def _follow(self, line: Line) -> None:
        if not isinstance(line, StepLine):
            self.seen[LOG if isinstance(line, LogLine) else events.name_of(line)] += 1
        match line:
            case events.ReadyEvent(worker=worker, pid=pid):
                self.pids[worker] = pid
            case events.ProposedEvent(members=members):
                self.proposed = members
            case events.ViewEvent(members=members, step=step):
                self.members, self.proposed = members, ()
                # who is not in it has lost what it had: a joiner whose view was stopped begins again
                first = members[:1] if not self._entered else ()  # everyone takes its state
                self._entered = {w: -1 if w in first else self._entered.get(w, step) for w in members}
            case events.NoticeEvent(worker=worker):
                self.leaving.add(worker)
            case events.LostEvent(worker=worker) | events.LeftEvent(worker=worker):
                self.members = tuple(member for member in self.members if member != worker)
            case events.StateLostEvent():
                self._entered.clear()
                self.step, self.members = -1, ()
            case events.ResumedEvent(worker=worker, step=step):
                self._entered = {w: -1 if w == worker else step for w in self.members}
                self.step = step - 1
            case StepLine(step=step):
                self.step = max(self.step, step)
            case _:
                pass

    def events(self, kind: type[E]) -> list[E]:
        return [line for line in self.lines if isinstance(line, kind)]

    # --- processes -------------------------------------------------------------------------------------------

    def processes(self) -> dict[int, list[str]]:
        """Everything alive that belongs to the run: command lines by process id."""
        found: dict[int, list[str]] = {}
        for process in psutil.process_iter(["cmdline", "status"]):
            command = process.info["cmdline"] or []
            if process.info["status"] != psutil.STATUS_ZOMBIE and self._is_ours(command):
                found[process.pid] = command
        return found

    def starting(self) -> list[int]:
        """Workers that have not asked in yet."""
        known = set(self.pids.values())
        return sorted(pid for pid, command in self.processes().items() if "join" in command and pid not in known)

    def coordinator(self) -> int | None:
        try:
            return json.loads((self.folder / "coordinator.json").read_bytes())["pid"]
        except FileNotFoundError:
            return None

    def signal(self, pid: int, number: signal.Signals) -> bool:
        """False if the process is gone."""
        if not self.alive(pid):
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False

    def alive(self, pid: int) -> bool:
        """Whether it is a process of the run; one that nobody has reaped yet is none."""
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        except (FileNotFoundError, ProcessLookupError):
            return False
        return self._is_ours(command)

    def _is_ours(self, command: list[str]) -> bool:
        """The folder's own name is followed by the end or a slash: run 1 is not run 10."""
        return any(word == str(self.folder) or word.startswith(f"{self.folder}/") for word in command)
