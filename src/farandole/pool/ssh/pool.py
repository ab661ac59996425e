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
from collections.abc import Sequence
from pathlib import Path

import msgspec

from farandole.control.ticket import Ticket
from farandole.membership.hosts import Job
from farandole.platform.process import aside, within
from farandole.pool.agents.link import Link
from farandole.pool.agents.post import NOTE
from farandole.pool.base import Event, Events, Host, Notice, Seen
from farandole.pool.ssh import hosts_file
from farandole.pool.ssh.hosts_file import Line, Watched
from farandole.pool.ssh.reach import Reach
from farandole.pool.ssh.there import SSH, There, ask

_log = logging.getLogger(__name__)

WATCH_S = 0.05  # how often the file is looked at
FILE_S = 10.0  # for it to be read, before that is told
END_S = 10.0  # for agents to end, when the run is over
LEAVE_S = 3600.0  # for the workers of a host whose line is gone
UNLISTED = "its line is gone from the hosts file"


class SshPool:
    """Needs a running event loop. `logs`: where workers' output goes. `close` it in any case.

    Attributes:
        file_s: a hosts file that takes longer to be read is told of.
    """

    file_s = FILE_S

    def __init__(
        self, watched: Watched, *, ticket: Ticket, job: Job, logs: Path, name: str = "ssh", ssh: Sequence[str] = SSH,
        python: str = "python3",
    ) -> None:  # fmt: skip
        self.name = name
        self._watched, self._there = watched, There(ssh=tuple(ssh), python=python)
        self._ahead = 0 if job.setup or job.prepare else job.threads  # else what it would load may be installed yet
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
            await within(END_S, self._disconnected())
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
        """The file is looked at aside: its disk may not answer. Until it does, the hosts are those that were there."""
        looking, since, told, before = aside(self._watched.again), self._loop.time(), False, self._watched.lines
        while True:
            now = self._loop.time()
            if looking.done():
                if wrong := looking.result():
                    self._see("", "hosts file", wrong)
                elif told:
                    self._see("", "hosts file", "it can be read again")
                looking, since, told = aside(self._watched.again), now, False
            elif now - since > self.file_s and not told:
                told = True
                self._see(
                    "", "hosts file", f"it has not been read within {self.file_s:g} s; the hosts that were there stay"
                )
            lines = self._watched.lines
            for name, change in hosts_file.changes(before, lines):
                self._see(name, "changed", change)  # also so that whoever looks at `list` does so now
            before = lines
            new, gone = self._reach.update(lines, now)
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
        words = ["agent", "-", "--pool", self.name, "--host", line.name]
        words += ["--interface", line.interface] if line.interface else []
        words += ["--threads", str(self._ahead)] if self._ahead else []
        reason, said = await ask(self._there.farandole(line, *words), self._ticket)
        if self._reach.tried(line.name, self._loop.time(), reason):
            self._see(line.name, "idle", f"{reason}; it is tried again")
        for told in said.splitlines():
            if told.startswith(NOTE):
                self._see(line.name, "shared", told.removeprefix(NOTE))
