"""Whose agent a process is, and what is kept of it on its host. A host has one agent for each run and pool: `lock`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from farandole.control.ticket import Ticket, newest
from farandole.errors import FarandoleError
from farandole.platform import cpu, files
from farandole.platform.files import make, opener, write_atomically

FOLDER = Path("~/.cache/farandole/agents")
DIGITS = 16
UNFIT = 4  # the exit code of an agent that was told to end, and whose host could not be prepared
NOTE = "note: "  # before what whoever starts an agent is told besides
LOGS, TICKET, LOCK, LOG = "logs", "ticket", "lock", "agent.log"


def mark(ticket: Ticket, pool: str, host: str) -> str:
    """The name of an agent's folder and processes: the run's part, and its own. It tells nothing of the secret."""
    return _digest(ticket.secret) + _digest(ticket.secret, pool, host)


def of_run(name: str) -> str:
    """The run's part of a mark."""
    return name[:DIGITS]


def _digest(*of: str) -> str:
    return hashlib.sha256("\0".join(of).encode()).hexdigest()[:DIGITS]


def place(ticket: Ticket, pool: str, host: str) -> Path:
    """The agent's folder, the user's own."""
    folder = FOLDER.expanduser() / mark(ticket, pool, host)
    make(folder)
    make(folder / LOGS)
    return folder


def leave_ticket(folder: Path, ticket: Ticket) -> None:
    """Where the agent, and its workers, find it; also for an agent that is there, unless it has a later one."""
    write_atomically(folder / TICKET, msgspec.json.encode(newest(ticket, str(folder / TICKET))))


def lock(folder: Path) -> int | None:
    """Held while it is open; None: another process has it."""
    descriptor = opener(str(folder / LOCK), os.O_RDWR | os.O_CREAT)
    try:
        if files.take(descriptor, folder, "have this user's home on one that does"):
            return descriptor
    except FarandoleError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


@dataclass(frozen=True, kw_only=True)
class Post:
    """Whose agent it is, and what it knows from the start. `interface`: the address that its workers' data plane binds
    to, "" for the one that leads to the coordinator. `notices`: the cloud that is asked for the host's own end, see
    `notices/watch.py`. `threads`: of its workers; for 0 nothing is loaded for them before the run's order is there.
    """

    folder: Path
    pool: str
    host: str
    interface: str = ""
    notices: str = ""
    threads: int = 0

    def command(self, ticket: Path) -> list[str]:
        """What an interpreter is given to be that agent."""
        words = ["-m", "farandole", "agent", str(ticket), "--pool", self.pool, "--host", self.host]
        words += ["--interface", self.interface, "--notices", self.notices]
        return [*words, "--threads", str(self.threads)]


def environ(ticket: Ticket) -> Mapping[str, str]:
    """Of the workers. What is frozen when torch is loaded is in it."""
    return {**os.environ, **cpu.of(ticket.bits)}
