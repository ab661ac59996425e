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
import re
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from farandole.control.ticket import Ticket
from farandole.errors import UsageError
from farandole.platform.files import open_regular
from farandole.platform.output import LONGEST_NAME, is_name
from farandole.platform.process import aside, within
from farandole.pool.agent import NOTE
from farandole.pool.base import Event, Events, Host, HostPreempted, HostState
from farandole.pool.remote import AgentLink
from farandole.protocol.messages import Job

# --- hosts file -------------------------------------------------------------------------------------------------------
#
# The hosts file of an SSH pool: a line for each host, read again whenever it changes.
#
#     # comment
#     node1 slots=8
#     ann@node2.lab:2222 slots=4 interface=10.0.0.2 python=/opt/ml/bin/python
#     localhost slots=2
#
# The first word is a host's name, all of it: one address with two ports is two hosts. `slots`: room for so many
# workers, 1 if left out. `interface`: the host's address for the data plane, where that is not the one that leads to
# the coordinator. `python`: the interpreter there that has farandole. `localhost` is this machine, without SSH.

LOCAL = "localhost"
MOST_SLOTS = 1000
_HOST = re.compile(r"(?:(?P<user>[^@:\s]+)@)?(?P<address>\[[0-9a-fA-F:.]+\]|[^@:\s\[\]]+)(?::(?P<port>\d+))?")


@dataclass(frozen=True, kw_only=True)
class HostLine:
    """One host. `name` is what stands in the file; `address` has its user; `port` 0: SSH's own choice."""

    name: str
    address: str
    port: int = 0
    slots: int = 1
    interface: str = ""
    python: str = ""

    @property
    def host(self) -> Host:
        return Host(name=self.name, slots=self.slots)

    @property
    def local(self) -> bool:
        return self.address == LOCAL and not self.port


def read(path: Path) -> dict[str, HostLine]:
    """Its hosts by name, in its order.

    Raises:
        UsageError: it can't be read, is no regular file, or a line is none; names it. Nothing of it counts then.
    """
    try:
        with open_regular(path) as file:
            text = file.read().decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text"
        raise UsageError(f"hosts file {path}: {why}") from None
    return parse(text, str(path))


def parse(text: str, where: str = "hosts file") -> dict[str, HostLine]:
    """See `read`."""
    found: dict[str, HostLine] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            host = _line(words)
        except ValueError as error:
            raise UsageError(f"{where}, line {number}: {error}") from None
        if host.name in found:
            raise UsageError(f"{where}, line {number}: {host.name} is there twice; give it one line with all its slots")
        found[host.name] = host
    return found


def _line(words: list[str]) -> HostLine:
    name, options = words[0], _options(words[1:])
    match = _HOST.fullmatch(name)
    if not match or name.startswith("-") or match["address"].startswith("-") or not is_name(name):
        raise ValueError(f"{name[:LONGEST_NAME]!r} is no host; write HOST, USER@HOST or USER@HOST:PORT")
    port = int(match["port"] or 0)
    if port > 65535:
        raise ValueError(f"{name}: port {port} is beyond 65535")
    user, address = match["user"], match["address"].strip("[]")
    return HostLine(
        name=name,
        address=f"{user}@{address}" if user else address,
        port=port,
        slots=_slots(options.get("slots", "1")),
        interface=options.get("interface", ""),
        python=options.get("python", ""),
    )


def _options(words: list[str]) -> Mapping[str, str]:
    options: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if key not in ("slots", "interface", "python") or not equals or not value:
            raise ValueError(f"{word!r} is none of slots=NUMBER, interface=ADDRESS, python=PATH")
        if key in options:
            raise ValueError(f"{key} is there twice")
        options[key] = value
    return options


def _slots(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST_SLOTS:
        raise ValueError(f"slots={text}: a whole number from 1 to {MOST_SLOTS}")
    return int(text)


def changes(before: Mapping[str, HostLine], now: Mapping[str, HostLine]) -> Iterator[tuple[str, str]]:
    """What has become of the lines of hosts that were there and still are, in words."""
    for name, line in now.items():
        old = before.get(name, line)
        if line.slots != old.slots:
            yield name, f"{line.slots} slots, it had {old.slots}"
        for option in ("interface", "python"):
            value = getattr(line, option)
            if value != getattr(old, option):
                yield name, f"{option}={value or 'none'} counts when its agent begins anew: delete the line for a while"


class Watched:
    """The file as it was read last. What is a mistake changes nothing, and is told once.

    Attributes:
        lines: its hosts.
    """

    def __init__(self, path: Path) -> None:
        """Raises UsageError: see `read`; or there is no host in it."""
        self._path = path
        self.lines = read(path)
        if not self.lines:
            raise UsageError(f"hosts file {path}: no host is in it; write a line HOST slots=NUMBER for each")
        self._seen = self._settled = self._stamp()
        self._told = ""

    def again(self) -> str | None:
        """Look at it; what is wrong with it, "" once it has changed, None where nothing is new.

        An edit counts when the file has been the same for two looks: who writes may not be at the end yet.
        """
        stamp = self._stamp()
        if stamp != self._seen:
            self._seen = stamp
            return None
        if stamp == self._settled:
            return None
        self._settled = stamp
        try:
            lines = read(self._path)
            if not lines:
                raise UsageError(
                    f"hosts file {self._path}: no host is in it any more; that is taken for a mistake, and nobody "
                    f"leaves. `farandole stop` ends the run"
                )
        except UsageError as error:
            told, self._told = self._told, str(error)
            return None if told == self._told else f"{error}; the hosts that were there stay"
        self._told = ""
        changed = lines != self.lines
        self.lines = lines
        return "" if changed else None

    def _stamp(self) -> tuple[int, ...]:
        try:
            stat = self._path.stat()
        except OSError:
            return ()
        return stat.st_ino, stat.st_mtime_ns, stat.st_size, stat.st_mode


# --- there ------------------------------------------------------------------------------------------------------------
#
# A command on a host of a hosts file: by the system's `ssh`, or on this machine where the line says `localhost`.
#
# The user's configuration, agent and jump hosts count. Nobody is asked for anything: where a password or a yes would
# be needed, it has failed. What has gone wrong is told in one line, with the remedy where what was printed tells the
# cause.

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
TRY_S = 60.0  # for ssh to come back
LAST_WORDS = 300  # characters of what it has said
OTHER_PYTHON = "name the right one with python=PATH"
REMEDIES = {
    "Host key verification failed": "its key is not the one that is known; see that it is the right host, then "
    "`ssh-keygen -R` it and connect to it by hand once",
    "Permission denied": "it does not take this user's key; copy it there with ssh-copy-id, or name USER@HOST",
    "Could not resolve hostname": "no such name; write the host as ssh knows it",
    "No module named farandole": f"its Python has no farandole; install it there, or {OTHER_PYTHON}",
    "No such option": f"its farandole is another version; install the same there, or {OTHER_PYTHON}",
    "No such command": f"its farandole is another version; install the same there, or {OTHER_PYTHON}",
    "No such file or directory": f"the interpreter is not there; {OTHER_PYTHON}",
    "not found": f"the interpreter is not there; {OTHER_PYTHON}",
}


@dataclass(frozen=True, kw_only=True)
class RemoteCommand:
    """How hosts are reached: `ssh` with its options, and the interpreter of those whose line names none."""

    ssh: tuple[str, ...] = SSH
    python: str = "python3"

    def farandole(self, line: HostLine, *words: str) -> list[str]:
        """The command that runs `farandole WORDS` there."""
        python = line.python or (sys.executable if line.local else self.python)
        words = (python, "-m", "farandole", *words)
        return list(words) if line.local else self._over(line, shlex.join(words))

    def shell(self, line: HostLine, text: str) -> list[str]:
        """The command that has a shell there do `text`."""
        return ["sh", "-c", text] if line.local else self._over(line, text)

    def _over(self, line: HostLine, text: str) -> list[str]:
        port = ("-p", str(line.port)) if line.port else ()
        return [*self.ssh, *port, line.address, "--", text]


async def ask(command: Sequence[str], given: bytes = b"") -> tuple[str, str]:
    """Run it with that on its standard input. Returns why it failed, in one line ("": it did not), and its output."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
    except OSError as error:
        return f"{command[0]}: {error.strerror}", ""
    try:
        output, _ = await within(TRY_S, process.communicate(given))
    except asyncio.TimeoutError:
        return f"nothing came back within {TRY_S:g} s", ""
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()  # so that its pipes are closed before the loop is
    said = output.decode(errors="replace")
    return ("" if process.returncode == 0 else why(said, process.returncode or 0)), said


def why(said: str, code: int) -> str:
    """What has gone wrong, and what to do, from what ssh and the host have printed."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    for sign, remedy in REMEDIES.items():
        if any(sign in line for line in lines):
            told = next(line for line in lines if sign in line)
            return f"{told[:LAST_WORDS]}: {remedy}"
    return lines[-1][-LAST_WORDS:] if lines else f"ssh ended with code {code}"


# --- reach ------------------------------------------------------------------------------------------------------------
#
# When a host of a hosts file is to be reached, to start its agent there: pure; times are the caller's, in seconds.
#
#     absent     its agent is not connected: it is tried, at once and then later and later
#     trying     somebody is on the way to it
#     there      its agent is connected; `joined` once the host is prepared
#     leaving    its line is gone: its workers leave, then its agent ends
#
# A host whose agent is lost is tried at once, for the agent may have ended; one that is still there is left alone.
# Where all are lost, with the coordinator, they come back by themselves: so they have `ITSELF_S` before they are
# tried. A host that can't be reached, or can't be prepared, is idle until it can: that ends nothing, and each reason
# is told once.

ITSELF_S = 3.0
FIRST_S, LONGEST_S = 1.0, 60.0


@dataclass(kw_only=True)
class Reached:
    """`at`: not tried earlier. `connected`: its agent is. `told`: what was wrong, as was told last."""

    state: str = "absent"
    at: float = 0.0
    connected: bool = False
    joined: bool = False
    failures: int = 0
    told: str = ""


class Reach:
    """Of all hosts, by name."""

    def __init__(self) -> None:
        self.hosts: dict[str, Reached] = {}

    def update(self, names: Collection[str], now: float) -> tuple[list[str], list[str]]:
        """The file's hosts as they are. Returns those that are new, and those whose line is gone."""
        new = [name for name in names if name not in self.hosts or self.hosts[name].state == "leaving"]
        for name in new:
            connected = name in self.hosts and self.hosts[name].connected
            state = "there" if connected else "absent"
            self.hosts[name] = Reached(state=state, at=now, connected=connected)
        gone = [name for name, host in self.hosts.items() if name not in names and host.state != "leaving"]
        for name in gone:
            self.hosts[name].state = "leaving"
        return new, gone

    def due(self, now: float) -> list[str]:
        """Who is to be tried; they are taken to be."""
        found = [name for name, host in self.hosts.items() if host.state == "absent" and now >= host.at]
        for name in found:
            self.hosts[name].state = "trying"
        return found

    def tried(self, name: str, now: float, reason: str) -> bool:
        """Somebody has come back from it, without success where there is a `reason`. Whether that is news."""
        host = self.hosts.get(name)
        if host is None or host.state != "trying":
            return False
        host.state, host.at = "absent", now + ITSELF_S  # for its agent to be heard of
        return bool(reason) and self._failed(host, now, reason)

    def connected(self, name: str, *, ready: bool) -> bool:
        """Its agent is connected, and the host `ready`. Whether that it is, is news."""
        host = self.hosts.get(name)
        if host is None:
            return False
        host.connected = True
        if host.state == "leaving":
            return False
        host.state = "there"
        news = ready and not host.joined
        if ready:
            host.joined, host.failures, host.told = True, 0, ""
        return news

    def unfit(self, name: str, now: float, reason: str) -> bool:
        """Its agent is connected, and could not prepare the host: it is to end. Whether that is news."""
        host = self.hosts.get(name)
        if host is None or host.state not in ("there", "trying"):
            return False
        host.state, host.joined = "absent", False
        return self._failed(host, now, reason)

    def lost(self, name: str, now: float, *, with_all: bool = False) -> bool:
        """Its agent is not connected any more. Whether that is news: not where the pool itself has no connection, and
        nothing is known of any.
        """
        host = self.hosts.get(name)
        if host is None:
            return False
        host.connected = False
        if host.state != "there":
            return False
        host.state, host.at = "absent", now + ITSELF_S * with_all
        news = host.joined and not with_all
        host.joined = host.joined and with_all
        return news

    def forget(self, name: str) -> None:
        self.hosts.pop(name, None)

    def _failed(self, host: Reached, now: float, reason: str) -> bool:
        host.at = now + min(FIRST_S * 2.0**host.failures, LONGEST_S)
        host.failures += 1
        host.joined = False
        before, host.told = host.told, reason
        return reason != before


# --- pool -------------------------------------------------------------------------------------------------------------

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
        self._watched, self._there = watched, RemoteCommand(ssh=tuple(ssh), python=python)
        self._ahead = 0 if job.setup or job.prepare else job.threads  # else what it would load may be installed yet
        self._ticket = msgspec.json.encode(ticket)
        self._events = Events()
        self._link = AgentLink(ticket, name, job, logs, self._events, self._heard)
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
        self._link.run_over()

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
        self._events.put(HostState(host, state, reason))

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
            for name, change in changes(before, lines):
                self._see(name, "changed", change)  # also so that whoever looks at `list` does so now
            before = lines
            new, gone = self._reach.update(lines, now)
            for name in new:
                self._link.allow_restart(name)
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
            self._events.put(HostPreempted(name, LEAVE_S, UNLISTED))
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
        self._link.allow_restart(name)
        task = asyncio.create_task(self._launch(self._watched.lines[name]))
        self._tries.add(task)
        task.add_done_callback(self._tries.discard)

    async def _launch(self, line: HostLine) -> None:
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
