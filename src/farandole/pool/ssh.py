"""Hosts of a hosts file, reached by the system's `ssh`: the user's configuration, agent and jump hosts count.

SSH only starts a host's agent (`agent.py`), which then reaches the run by itself; the ticket goes to it on standard
input. The file is watched: a new line's host joins, the workers of one whose line is gone leave gracefully, whichever
it is. The host on which a line says `localhost` needs no SSH.

A host is in `list` when its agent is connected and the host is prepared. What is tried when is in `reach.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from farandole.control.ticket import Ticket
from farandole.membership.hosts import Job
from farandole.pool.base import Event, Events, Host, Notice, Seen
from farandole.pool.hosts_file import Line, Watched
from farandole.pool.link import Link
from farandole.pool.reach import Reach

_log = logging.getLogger(__name__)

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
WATCH_S = 0.1  # how often the file is looked at
TRY_S = 60.0  # for ssh to come back
END_S = 10.0  # for agents to end, when the run is over
LEAVE_S = 3600.0  # for the workers of a host whose line is gone
UNLISTED = "its line is gone from the hosts file"
LAST_WORDS = 300  # characters of what ssh has said


class SshPool:
    """Needs a running event loop. `logs`: where workers' output goes. `close` it in any case."""

    def __init__(
        self, watched: Watched, *, ticket: Ticket, job: Job, logs: Path, name: str = "ssh", ssh: Sequence[str] = SSH,
        python: str = "python3",
    ) -> None:  # fmt: skip
        self.name = name
        self._watched, self._ssh, self._python = watched, tuple(ssh), python
        self._ticket = msgspec.json.encode(ticket)
        self._events = Events()
        self._link = Link(ticket, name, job, logs, self._events, self._heard)
        self._reach = Reach()
        self._loop = asyncio.get_running_loop()
        self._tries: set[asyncio.Task[None]] = set()
        self._tasks = [asyncio.create_task(self._link.serve()), asyncio.create_task(self._watch())]
        self._reach.update(watched.lines, self._loop.time())

    # --- the seam ------------------------------------------------------------------------------------------

    def list(self) -> Sequence[Host]:
        far = self._link.far.hosts
        return tuple(line.host for name, line in self._watched.lines.items() if name in far and far[name].ready)

    def start(self, worker: str, host: str) -> None:
        self._link.start(worker, host)

    def stop(self, worker: str) -> None:
        self._link.stop(worker)

    async def events(self) -> Sequence[Event]:
        return await self._events.take()

    def remember(self, worker: str, host: str) -> None:
        """It was there, for an earlier process of this pool."""
        self._link.remember(worker, host)

    def over(self) -> None:
        """The run is."""
        self._link.over()

    async def close(self) -> None:
        """The run is over, or is given up: agents end, with all that they have started."""
        for task in (self._tasks[1], *self._tries):
            task.cancel()
        far = self._link.far.hosts
        for host in tuple(far):
            self._link.end(host)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._disconnected(), END_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._tries, return_exceptions=True)

    async def _disconnected(self) -> None:
        while any(far.connected for far in self._link.far.hosts.values()):
            await asyncio.sleep(WATCH_S / 2)

    # --- hosts come and go ---------------------------------------------------------------------------------

    def _see(self, host: str, state: str, reason: str = "") -> None:
        self._events.put(Seen(host, state, reason))

    async def _watch(self) -> None:
        while True:
            now = self._loop.time()
            wrong = self._watched.again()
            if wrong:
                self._see("", "hosts file", wrong)
            new, gone = self._reach.update(self._watched.lines, now)
            for name in new:
                self._link.begins(name)
            for name in gone:
                self._goes(name)
            for name in self._reach.due(now) if self._link.connected else ():
                self._try(name)
            await asyncio.sleep(WATCH_S)

    def _goes(self, name: str) -> None:
        """Its workers leave, then its agent ends. A host of which nobody is there is gone."""
        far = self._link.far.hosts.get(name)
        if far and (far.connected or far.workers):
            self._see(name, "leaving", UNLISTED)
        if far and far.workers:
            self._events.put(Notice(name, LEAVE_S, UNLISTED))
        self._heard(name)

    def _heard(self, name: str) -> None:
        """Something has changed at its agent, or with its line."""
        far = self._link.far.hosts.get(name)
        reached = self._reach.hosts.get(name)
        now = self._loop.time()
        if far and far.connected:
            if reached is None or reached.state == "leaving":
                self._reach.connected(name, ready=far.ready)
                if not far.workers:
                    self._link.end(name)
            elif far.state == "failed":
                if self._reach.unfit(name, now, far.reason):
                    self._see(name, "not prepared", f"{far.reason}; it is tried again")
                self._link.end(name)  # another agent tries again
            elif self._reach.connected(name, ready=far.ready):
                self._see(name, "joined")
            return
        if self._reach.lost(name, now, with_all=not self._link.connected):
            self._see(name, "out of reach", "its agent's connection is gone")
        if (reached is None or reached.state == "leaving") and not (far and far.workers):
            self._link.far.forget(name)
            self._reach.forget(name)
            if reached:
                self._see(name, "gone", UNLISTED)

    def _try(self, name: str) -> None:
        self._link.begins(name)
        task = asyncio.create_task(self._launch(self._watched.lines[name]))
        self._tries.add(task)
        task.add_done_callback(self._tries.discard)

    async def _launch(self, line: Line) -> None:
        """Have its agent started, if none is there."""
        reason = await launch(self._command(line), self._ticket)
        if self._reach.tried(line.name, self._loop.time(), reason):
            self._see(line.name, "idle", f"{reason}; it is tried again")

    def _command(self, line: Line) -> list[str]:
        python = line.python or (sys.executable if line.local else self._python)
        words = [python, "-m", "farandole", "agent", "-", "--pool", self.name, "--host", line.name]
        words += ["--interface", line.interface] if line.interface else []
        return words if line.local else there(self._ssh, line, words)


def there(ssh: Sequence[str], line: Line, words: Sequence[str]) -> list[str]:
    """The command that runs `words` on that host."""
    port = ("-p", str(line.port)) if line.port else ()
    return [*ssh, *port, line.address, "--", shlex.join(words)]


async def launch(command: Sequence[str], given: bytes) -> str:
    """Run it with that on its standard input. Returns "", or in one line why it failed."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    try:
        output, _ = await asyncio.wait_for(process.communicate(given), TRY_S)
    except asyncio.TimeoutError:
        return f"nothing came back within {TRY_S:g} s"
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()  # so that its pipes are closed before the loop is
    return "" if process.returncode == 0 else _why(output.decode(errors="replace"), process.returncode or 0)


OTHER_PYTHON = "name the right one with python=PATH"
REMEDIES = {
    "Host key verification failed": "its key is not the one that is known; see that it is the right host, then "
    "`ssh-keygen -R` it and connect to it by hand once",
    "Permission denied": "it does not take this user's key; copy it there with ssh-copy-id, or name USER@HOST",
    "Could not resolve hostname": "no such name; write the host as ssh knows it",
    "No module named farandole": f"its Python has no farandole; install it there, or {OTHER_PYTHON}",
    "No such file or directory": f"the interpreter is not there; {OTHER_PYTHON}",
    "not found": f"the interpreter is not there; {OTHER_PYTHON}",
}


def _why(said: str, code: int) -> str:
    """What has gone wrong, and what to do, from what ssh and the host have printed."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    for sign, remedy in REMEDIES.items():
        if any(sign in line for line in lines):
            told = next(line for line in lines if sign in line)
            return f"{told[:LAST_WORDS]}: {remedy}"
    return lines[-1][-LAST_WORDS:] if lines else f"ssh ended with code {code}"
