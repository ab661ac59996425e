"""A pool of the hosts in a hosts file, reached by the system's `ssh` with the user's configuration, agent and jump
hosts.

SSH only starts a host's agent (`agent.py`), which then connects to the run by itself; it gets the ticket on standard
input. The file is watched: the host of a new line joins, and the workers of a host whose line was removed leave
gracefully, for any line. A host with a line `localhost` needs no SSH.

A host is in `list` when its agent is connected and the host is prepared. `Reach` decides what is tried when.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from farandole.control.ticket import Ticket
from farandole.coordinator import listener
from farandole.errors import UsageError
from farandole.platform.files import open_regular
from farandole.platform.output import LONGEST_NAME, is_name
from farandole.platform.process import on_new_thread, within
from farandole.pool.agent import NOTE
from farandole.pool.base import Event, Events, Host, HostPreempted, HostState, PoolContext
from farandole.pool.remote import AgentLink
from farandole.protocol.messages import Job
from farandole.protocol.settings import PoolTerms

# --- hosts file -------------------------------------------------------------------------------------------------------
#
# The hosts file of an SSH pool: one line for each host, read again whenever it changes.
#
#     # comment
#     node1 slots=8
#     ann@node2.lab:2222 slots=4 interface=10.0.0.2 python=/opt/ml/bin/python zone=east
#     localhost slots=2
#
# The whole first word is the host's name: one address with two ports is two hosts. `slots`: the number of workers that
# fit, default 1. `interface`: the host's address for the data plane, if it is not the one that leads to the
# coordinator. `python`: the interpreter there that has farandole. `zone`: the host's zone, such as a data center.
# `localhost` is this machine, without SSH.

LOCAL = "localhost"
MOST_SLOTS = 1000
_HOST = re.compile(r"(?:(?P<user>[^@:\s]+)@)?(?P<address>\[[0-9a-fA-F:.]+\]|[^@:\s\[\]]+)(?::(?P<port>\d+))?")


@dataclass(frozen=True, kw_only=True)
class HostLine:
    """One line. `name` is the first word; `address` may contain a user; `port` 0: SSH selects it."""

    name: str
    address: str
    port: int = 0
    slots: int = 1
    interface: str = ""
    python: str = ""
    zone: str = ""

    @property
    def host(self) -> Host:
        return Host(name=self.name, slots=self.slots)

    @property
    def local(self) -> bool:
        return self.address == LOCAL and not self.port


def read(path: Path) -> dict[str, HostLine]:
    """Read the hosts of the file, by name, in the file's order.

    Raises:
        UsageError: the file can't be read or is not a regular file, or a line is invalid; the message names it. Then no
            line counts.
    """
    try:
        with open_regular(path) as file:
            text = file.read().decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text"
        raise UsageError(f"hosts file {path}: {why}") from None
    return parse(text, str(path))


def parse(text: str, where: str = "hosts file") -> dict[str, HostLine]:
    """Parse the text of a hosts file. See `read`."""
    hosts: dict[str, HostLine] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            host = _line(words)
        except ValueError as error:
            raise UsageError(f"{where}, line {number}: {error}") from None
        if host.name in hosts:
            raise UsageError(
                f"{where}, line {number}: {host.name} is listed twice; give it one line with all its slots"
            )
        hosts[host.name] = host
    return hosts


def _line(words: list[str]) -> HostLine:
    name, options = words[0], _options(words[1:])
    match = _HOST.fullmatch(name)
    if not match or name.startswith("-") or match["address"].startswith("-") or not is_name(name):
        raise ValueError(f"{name[:LONGEST_NAME]!r} is not a host; write HOST, USER@HOST or USER@HOST:PORT")
    port = int(match["port"] or 0)
    if port > 65535:
        raise ValueError(f"{name}: port {port} is above 65535")
    if not is_name(zone := options.get("zone", "")):
        raise ValueError(f"zone={zone[:LONGEST_NAME]!r} is not a name of at most {LONGEST_NAME} characters")
    user, address = match["user"], match["address"].strip("[]")
    return HostLine(
        name=name,
        address=f"{user}@{address}" if user else address,
        port=port,
        slots=_slots(options.get("slots", "1")),
        interface=options.get("interface", ""),
        python=options.get("python", ""),
        zone=zone,
    )


def _options(words: list[str]) -> Mapping[str, str]:
    options: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if key not in ("slots", "interface", "python", "zone") or not equals or not value:
            raise ValueError(f"{word!r} is none of slots=NUMBER, interface=ADDRESS, python=PATH, zone=NAME")
        if key in options:
            raise ValueError(f"{key} is given twice")
        options[key] = value
    return options


def _slots(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST_SLOTS:
        raise ValueError(f"slots={text}: must be a whole number from 1 to {MOST_SLOTS}")
    return int(text)


def changes(before: Mapping[str, HostLine], now: Mapping[str, HostLine]) -> Iterator[tuple[str, str]]:
    """The changes of hosts that are in both, as pairs of name and text."""
    for name, line in now.items():
        old = before.get(name, line)
        if line.slots != old.slots:
            yield name, f"{line.slots} slots, it had {old.slots}"
        for option in ("interface", "python", "zone"):
            value = getattr(line, option)
            if value != getattr(old, option):
                yield name, f"{option}={value or 'none'} counts when its agent restarts: delete the line for a while"


class HostsFile:
    """A hosts file as it was read last. An invalid file changes nothing, and each mistake is reported once.

    Attributes:
        lines: the hosts of the file.
    """

    def __init__(self, path: Path) -> None:
        """Raises UsageError: see `read`; or the file has no host."""
        self._path = path
        self.lines = read(path)
        if not self.lines:
            raise UsageError(f"hosts file {path}: it has no host; write a line HOST slots=NUMBER for each")
        self._last_stamp = self._settled = self._stamp()
        self._reported = ""

    def poll(self) -> str | None:
        """Check the file. Returns what is wrong with it, "" if it has changed, None if nothing is new.

        A change counts when the file is the same in two checks, because an editor may still be writing it.
        """
        stamp = self._stamp()
        if stamp != self._last_stamp:
            self._last_stamp = stamp
            return None
        if stamp == self._settled:
            return None
        self._settled = stamp
        try:
            lines = read(self._path)
            if not lines:
                raise UsageError(
                    f"hosts file {self._path}: it has no host any more; this counts as a mistake, and no worker "
                    f"leaves. `farandole stop` ends the run"
                )
        except UsageError as error:
            previous, self._reported = self._reported, str(error)
            return None if previous == self._reported else f"{error}; the previous hosts stay"
        self._reported = ""
        changed = lines != self.lines
        self.lines = lines
        return "" if changed else None

    def _stamp(self) -> tuple[int, ...]:
        try:
            stat = self._path.stat()
        except OSError:
            return ()
        return stat.st_ino, stat.st_mtime_ns, stat.st_size, stat.st_mode


# --- remote commands --------------------------------------------------------------------------------------------------
#
# A command on a host of a hosts file: by the system's `ssh`, or on this machine if the line is `localhost`.
#
# The user's configuration, agent and jump hosts count. There is no prompt: a command that would need a password or a
# confirmation fails. A failure is reported in one line, with the remedy if the output shows the cause.

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
TRY_S = 60.0  # time until ssh must end
LAST_WORDS = 300  # characters of a line of its output
OTHER_PYTHON = "name the right one with python=PATH"
REMEDIES = {
    "Host key verification failed": "its key differs from the known one; check that it is the right host, then "
    "`ssh-keygen -R` it and connect to it by hand once",
    "Permission denied": "it does not accept this user's key; copy it there with ssh-copy-id, or name USER@HOST",
    "Could not resolve hostname": "no such name; write the host as ssh knows it",
    "No module named farandole": f"its Python has no farandole; install it there, or {OTHER_PYTHON}",
    "No such option": f"its farandole is another version; install the same there, or {OTHER_PYTHON}",
    "No such command": f"its farandole is another version; install the same there, or {OTHER_PYTHON}",
    "No such file or directory": f"the interpreter does not exist there; {OTHER_PYTHON}",
    "not found": f"the interpreter does not exist there; {OTHER_PYTHON}",
}


@dataclass(frozen=True, kw_only=True)
class RemoteCommand:
    """Builds commands for hosts: `ssh` with its options, and the interpreter of hosts whose line names none."""

    ssh: tuple[str, ...] = SSH
    python: str = "python3"

    def farandole(self, line: HostLine, *words: str) -> list[str]:
        """The command that runs `farandole WORDS` on the host."""
        python = line.python or (sys.executable if line.local else self.python)
        words = (python, "-m", "farandole", *words)
        return list(words) if line.local else self._over_ssh(line, shlex.join(words))

    def shell(self, line: HostLine, text: str) -> list[str]:
        """The command that runs `text` in a shell on the host."""
        return ["sh", "-c", text] if line.local else self._over_ssh(line, text)

    def _over_ssh(self, line: HostLine, text: str) -> list[str]:
        port = ("-p", str(line.port)) if line.port else ()
        return [*self.ssh, *port, line.address, "--", text]


async def run_command(command: Sequence[str], stdin: bytes = b"") -> tuple[str, str]:
    """Run the command with `stdin` as its input. Returns why it failed, in one line ("": success), and its output."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
    except OSError as error:
        return f"{command[0]}: {error.strerror}", ""
    try:
        output, _ = await within(TRY_S, process.communicate(stdin))
    except asyncio.TimeoutError:
        return f"no answer within {TRY_S:g} s", ""
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()  # so that its pipes are closed before the loop is
    text = output.decode(errors="replace")
    return ("" if process.returncode == 0 else failure_reason(text, process.returncode or 0)), text


def failure_reason(output: str, code: int) -> str:
    """The cause of a failure and its remedy, from the output of ssh and the host."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for pattern, remedy in REMEDIES.items():
        if any(pattern in line for line in lines):
            message = next(line for line in lines if pattern in line)
            return f"{message[:LAST_WORDS]}: {remedy}"
    return lines[-1][-LAST_WORDS:] if lines else f"the command ended with code {code}"


# --- reach ------------------------------------------------------------------------------------------------------------
#
# Decides when a host of a hosts file is contacted to start its agent. Pure; times are the caller's, in seconds.
#
#     absent     its agent is not connected: it is tried, at once and then at longer and longer intervals
#     trying     an attempt is in progress
#     there      its agent is connected; `joined` once the host is prepared
#     leaving    its line was removed: its workers leave, then its agent ends
#
# A host whose agent is lost is tried at once, because the agent may have ended; the attempt does nothing if the agent
# still runs. If all are lost, with the coordinator, they come back by themselves: so they have `ITSELF_S` before they
# are tried. A host that can't be reached, or can't be prepared, is idle until it can: this ends nothing, and each
# reason is reported once.

ITSELF_S = 3.0
FIRST_S, LONGEST_S = 1.0, 60.0


@dataclass(kw_only=True)
class HostReach:
    """One host. `at`: not tried before. `connected`: its agent is. `reported`: the problem that was reported last."""

    state: str = "absent"
    at: float = 0.0
    connected: bool = False
    joined: bool = False
    failures: int = 0
    reported: str = ""


class Reach:
    """The reach of all hosts, by name."""

    def __init__(self) -> None:
        self.hosts: dict[str, HostReach] = {}

    def update(self, names: Collection[str], now: float) -> tuple[list[str], list[str]]:
        """Set the hosts of the file. Returns the new ones, and those whose line was removed."""
        new = [name for name in names if name not in self.hosts or self.hosts[name].state == "leaving"]
        for name in new:
            connected = name in self.hosts and self.hosts[name].connected
            state = "there" if connected else "absent"
            self.hosts[name] = HostReach(state=state, at=now, connected=connected)
        removed = [name for name, host in self.hosts.items() if name not in names and host.state != "leaving"]
        for name in removed:
            self.hosts[name].state = "leaving"
        return new, removed

    def take_hosts_to_try(self, now: float) -> list[str]:
        """The hosts to try now, recorded as being tried."""
        names = [name for name, host in self.hosts.items() if host.state == "absent" and now >= host.at]
        for name in names:
            self.hosts[name].state = "trying"
        return names

    def tried(self, name: str, now: float, reason: str) -> bool:
        """An attempt has ended; `reason` is "" if it succeeded. Returns True if the failure must be reported."""
        host = self.hosts.get(name)
        if host is None or host.state != "trying":
            return False
        host.state, host.at = "absent", now + ITSELF_S  # time for its agent to connect
        return bool(reason) and self._failed(host, now, reason)

    def connected(self, name: str, *, ready: bool) -> bool:
        """The host's agent is connected. Returns True if the host is newly `ready`, which must be reported."""
        host = self.hosts.get(name)
        if host is None:
            return False
        host.connected = True
        if host.state == "leaving":
            return False
        host.state = "there"
        news = ready and not host.joined
        if ready:
            host.joined, host.failures, host.reported = True, 0, ""
        return news

    def unfit(self, name: str, now: float, reason: str) -> bool:
        """The agent could not prepare the host and must end. Returns True if that must be reported."""
        host = self.hosts.get(name)
        if host is None or host.state not in ("there", "trying"):
            return False
        host.state, host.joined = "absent", False
        return self._failed(host, now, reason)

    def mark_disconnected(self, name: str, now: float, *, with_all: bool = False) -> bool:
        """The host's agent is no longer connected. Returns True if that must be reported. It must not if the pool
        itself has no connection (`with_all`), since then no agent's state is known.
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

    def _failed(self, host: HostReach, now: float, reason: str) -> bool:
        host.at = now + min(FIRST_S * 2.0**host.failures, LONGEST_S)
        host.failures += 1
        host.joined = False
        previous, host.reported = host.reported, reason
        return reason != previous


# --- pool -------------------------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)
WATCH_S = 0.05  # how often the file is checked
FILE_S = 10.0  # a read that takes longer is reported
END_S = 10.0  # time for agents to end, when the run is over
LEAVE_S = 3600.0  # time for the workers of a host whose line was removed
UNLISTED = "its line was removed from the hosts file"


class SshPool:
    """A pool of the hosts in a hosts file. Needs a running event loop. Call `close` in any case.

    `logs`: the folder for the workers' output.

    Attributes:
        file_s: if reading the hosts file takes longer, this is reported.
    """

    file_s = FILE_S

    def __init__(
        self, watched: HostsFile, *, ticket: Ticket, job: Job, logs: Path, name: str = "ssh", ssh: Sequence[str] = SSH,
        python: str = "python3",
    ) -> None:  # fmt: skip
        self.name = name
        self._watched, self._remote = watched, RemoteCommand(ssh=tuple(ssh), python=python)
        self._ahead = 0 if job.setup or job.prepare else job.threads  # else the modules may not be installed yet
        self._ticket = msgspec.json.encode(ticket)
        self._events = Events()
        self._link = AgentLink(ticket, name, job, logs, self._events, self._on_change)
        self._reach = Reach()
        self._loop = asyncio.get_running_loop()
        self._tries: set[asyncio.Task[None]] = set()
        self._tasks = [asyncio.create_task(self._link.serve()), asyncio.create_task(self._watch())]
        self._reach.update(watched.lines, self._loop.time())

    # --- the interface of a pool ---------------------------------------------------------------------------

    def list(self) -> Sequence[Host]:
        remote = self._link.far.hosts
        return tuple(line.host for name, line in self._watched.lines.items() if name in remote and remote[name].ready)

    def start(self, worker: str, host: str) -> None:
        self._link.start(worker, host)

    def stop(self, worker: str) -> None:
        self._link.stop(worker)

    async def events(self) -> Sequence[Event]:
        return await self._events.take()

    def remember(self, worker: str, host: str) -> None:
        """Add a worker of an earlier process of this pool."""
        self._link.remember(worker, host)

    def dollars(self) -> float:
        return 0.0

    def over(self) -> None:
        """The run is over."""
        self._link.run_over()

    async def close(self) -> None:
        """End the agents, with all that they have started: the run is over or was given up."""
        for task in (self._tasks[1], *self._tries):
            task.cancel()
        remote = self._link.far.hosts
        for host in tuple(remote):
            self._link.end(host)
        with contextlib.suppress(asyncio.TimeoutError):
            await within(END_S, self._disconnected())
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._tries, return_exceptions=True)

    async def _disconnected(self) -> None:
        while any(remote.connected for remote in self._link.far.hosts.values()):
            await asyncio.sleep(WATCH_S / 2)

    # --- changes of hosts ----------------------------------------------------------------------------------

    def _report_state(self, host: str, state: str, reason: str = "") -> None:
        self._events.put(HostState(host, state, reason))

    async def _watch(self) -> None:
        """Check the file in a thread, because its disk may not answer. Until it does, the hosts stay as they were."""
        reading, since = on_new_thread(self._watched.poll), self._loop.time()
        reported, previous = False, self._watched.lines
        while True:
            now = self._loop.time()
            if reading.done():
                if wrong := reading.result():
                    self._report_state("", "hosts file", wrong)
                elif reported:
                    self._report_state("", "hosts file", "it can be read again")
                reading, since, reported = on_new_thread(self._watched.poll), now, False
            elif now - since > self.file_s and not reported:
                reported = True
                self._report_state(
                    "", "hosts file", f"it has not been read within {self.file_s:g} s; the previous hosts stay"
                )
            lines = self._watched.lines
            for name, change in changes(previous, lines):
                self._report_state(name, "changed", change)  # the event also makes the caller read `list` now
            previous = lines
            new, removed = self._reach.update(lines, now)
            for name in new:
                self._link.allow_restart(name)
            for name in removed:
                self._on_removed(name)
            for name in self._reach.take_hosts_to_try(now) if self._link.connected else ():
                self._try(name)
            await asyncio.sleep(WATCH_S)

    def _on_removed(self, name: str) -> None:
        """Its workers leave, then its agent ends. A host without an agent and workers is gone at once."""
        remote = self._link.far.hosts.get(name)
        if remote and (remote.connected or remote.workers):
            self._report_state(name, "leaving", UNLISTED)
        if remote and remote.workers:
            self._events.put(HostPreempted(name, LEAVE_S, UNLISTED))
        self._on_change(name)

    def _on_change(self, name: str) -> None:
        """The state of its agent, or its line, has changed."""
        remote = self._link.far.hosts.get(name)
        reached = self._reach.hosts.get(name)
        now = self._loop.time()
        if remote and remote.connected:
            if reached is None or reached.state == "leaving":
                self._reach.connected(name, ready=remote.ready)
                if not remote.workers:
                    self._link.end(name)
            elif remote.state == "failed":
                if self._reach.unfit(name, now, remote.reason):
                    self._report_state(name, "not prepared", f"{remote.reason}; trying again")
                self._link.end(name)  # another agent tries again
            elif self._reach.connected(name, ready=remote.ready):
                self._report_state(name, "joined")
            return
        if self._reach.mark_disconnected(name, now, with_all=not self._link.connected):
            self._report_state(name, "out of reach", "the connection to its agent is lost")
        if (reached is None or reached.state == "leaving") and not (remote and remote.workers):
            self._link.far.forget(name)
            self._reach.forget(name)
            if reached:
                self._report_state(name, "gone", UNLISTED)

    def _try(self, name: str) -> None:
        self._link.allow_restart(name)
        task = asyncio.create_task(self._launch(self._watched.lines[name]))
        self._tries.add(task)
        task.add_done_callback(self._tries.discard)

    async def _launch(self, line: HostLine) -> None:
        """Start the host's agent, if none runs there."""
        arguments = ["agent", "-", "--pool", self.name, "--host", line.name]
        arguments += ["--interface", line.interface] if line.interface else []
        arguments += ["--zone", line.zone] if line.zone else []
        arguments += ["--threads", str(self._ahead)] if self._ahead else []
        reason, output = await run_command(self._remote.farandole(line, *arguments), self._ticket)
        if self._reach.tried(line.name, self._loop.time(), reason):
            self._report_state(line.name, "idle", f"{reason}; trying again")
        for output_line in output.splitlines():
            if output_line.startswith(NOTE):
                self._report_state(line.name, "shared", output_line.removeprefix(NOTE))


# --- kind -------------------------------------------------------------------------------------------------------------


class SshKind:
    """The kind of pool that `--pool ssh,hosts=FILE` names. See `spec.PoolKind`."""

    options = ("hosts", "python", "ssh")
    required = ("hosts",)

    def is_sized(self, terms: PoolTerms) -> bool:
        del terms
        return True

    def check(self, terms: PoolTerms, listen: str, show: Callable[[str], None], *, priced: bool) -> None:
        del show, priced
        file = terms.options["hosts"]
        lines = read(Path(file))
        if not lines:
            raise UsageError(f"hosts file {file}: no host is in it; write HOST slots=NUMBER for each")
        far = next((line.name for line in lines.values() if not line.local and not _is_loopback(line)), "")
        if far and listener.is_loopback(listener.parse(listen)[0]):
            raise UsageError(
                f"--pool {terms.name}: {far} can't reach a run that listens at {listen} alone; name an address of "
                f"this machine with --listen, or 0.0.0.0"
            )

    async def open(self, terms: PoolTerms, context: PoolContext) -> SshPool:
        watched = await on_new_thread(lambda: HostsFile(Path(terms.options["hosts"])))  # its disk may not answer
        return SshPool(
            watched,
            ticket=context.ticket,
            job=context.job,
            logs=context.logs,
            name=terms.name,
            ssh=shlex.split(terms.options["ssh"]) if "ssh" in terms.options else SSH,
            python=terms.options.get("python", "python3"),
        )


def _is_loopback(line: HostLine) -> bool:
    try:
        return ipaddress.ip_address(line.address.rpartition("@")[2]).is_loopback
    except ValueError:
        return False
