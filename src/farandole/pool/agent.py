"""The agent of a host: starts the host's workers as its pool orders, and reports what becomes of them.

It connects to the run as its workers do, with the run's ticket, so no connection to the host is needed. It outlives
connections, coordinators and the pool's process: its workers train on meanwhile. It ends when its pool orders it to,
when its ticket is no longer valid, or when it has been without a coordinator and without workers for longer than the
orphan limit. No worker outlives the agent (see `local.py`). `AgentReconciler` decides which actions are due.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from farandole.code.pack import Origin
from farandole.control.client import ANSWER_S, Subscription, subscribe, unpacked
from farandole.control.ticket import Ticket, load, newest
from farandole.errors import CoordinatorUnreachable, FarandoleError, HostNotPrepared, UsageError
from farandole.platform import cpu, files
from farandole.platform.files import make, open_regular, opener, write_atomically
from farandole.platform.process import up_to
from farandole.pool.base import Event, Started, WorkerExited, WorkerStartFailed
from farandole.pool.local import LocalPool, join_command, prepare, set_up
from farandole.pool.preemption import watch
from farandole.protocol import messages
from farandole.protocol.messages import AgentOrder, HostPreemption, Report
from farandole.settings import Settings, agent_of

# --- identity ---------------------------------------------------------------------------------------------------------
#
# The identity of an agent, and its files on the host. A host has one agent for each run and pool, ensured by `lock`.

FOLDER = Path("~/.cache/farandole/agents")
DIGITS = 16
UNFIT = 4  # the exit code of an agent that was ordered to end and whose host could not be prepared
NOTE = "note: "  # prefix of additional lines for the program that starts an agent
LOGS, TICKET, LOCK, LOG = "logs", "ticket", "lock", "agent.log"


def mark(ticket: Ticket, pool: str, host: str) -> str:
    """The name of an agent's folder and processes: the run's part and its own part. It reveals nothing of the
    secret.
    """
    return _digest(ticket.secret) + _digest(ticket.secret, pool, host)


def run_mark(name: str) -> str:
    """The part of a mark that names the run."""
    return name[:DIGITS]


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:DIGITS]


def agent_folder(ticket: Ticket, pool: str, host: str) -> Path:
    """The agent's folder, which belongs to the user. Creates it."""
    folder = FOLDER.expanduser() / mark(ticket, pool, host)
    make(folder)
    make(folder / LOGS)
    return folder


def leave_ticket(folder: Path, ticket: Ticket) -> None:
    """Write the ticket where the agent and its workers read it, also if an agent runs, unless it has a later one."""
    write_atomically(folder / TICKET, msgspec.json.encode(newest(ticket, str(folder / TICKET))))


def lock(folder: Path) -> int | None:
    """Take the lock of the folder, held while the returned descriptor is open. None: another process holds it."""
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
class AgentIdentity:
    """The agent's folder, pool and host, and the settings that it needs from the start.

    `interface`: the address that its workers' data plane binds to, "" for the one that leads to the coordinator.
    `notices`: the cloud that is asked for preemption notices of this host, see `watch` in `preemption.py`. `threads`:
    the number of threads of its workers; 0: nothing is preloaded for them before the run's order arrives. `grace_s`:
    SIGTERM is a preemption notice with this deadline; 0: SIGTERM ends the agent. `source`: a file in which the run
    keeps its current ticket, "" for none. `zone`: the zone of the host, "" if unknown: then that of the agent's own
    FARANDOLE_ZONE.
    """

    folder: Path
    pool: str
    host: str
    interface: str = ""
    notices: str = ""
    threads: int = 0
    grace_s: float = 0.0
    source: str = ""
    zone: str = ""

    def command(self, ticket: Path) -> list[str]:
        """The arguments of the interpreter that runs this agent."""
        arguments = ["-m", "farandole", "agent", str(ticket), "--pool", self.pool, "--host", self.host]
        arguments += ["--interface", self.interface, "--notices", self.notices]
        arguments += ["--grace", f"{self.grace_s:g}"] if self.grace_s else []
        arguments += ["--zone", self.zone] if self.zone else []
        return [*arguments, "--threads", str(self.threads)]


def environ(ticket: Ticket) -> Mapping[str, str]:
    """The environment of the workers, with the variables that torch reads only when it is loaded."""
    return {**os.environ, **cpu.environment_of(ticket.bits)}


# --- reconciler -------------------------------------------------------------------------------------------------------
#
# The actions of an agent: a pure function of its pool's orders and its workers' events.
#
# Invariant: a worker is started at most once, and only by an order that names it and was made for this process. So an
# order that is old, is repeated, or was made for an earlier agent of the host starts no worker again. A worker that no
# order names any more is stopped.


@dataclass(frozen=True, kw_only=True)
class AgentActions:
    """First `stop` these workers, then `start` these."""

    stop: tuple[str, ...] = ()
    start: tuple[str, ...] = ()


class AgentReconciler:
    """The reconciler of one agent. The agent sets `state` and `reason`; `state` is preparing, ready or failed.

    Attributes:
        order: the newest order, None before the first.
        notified: the preemption notice of the host, None if there is none.
    """

    def __init__(self, instance: str) -> None:
        self.order: AgentOrder | None = None
        self.state, self.reason = "preparing", ""
        self.notified: HostPreemption | None = None
        self._instance = instance
        self._requested: set[str] = set()  # all workers that were ever started or requested
        self._running: dict[str, bool] = {}  # True: its process has started
        self._stopped: set[str] = set()
        self._ended: dict[str, str] = {}
        self._failed: dict[str, str] = {}

    @property
    def running(self) -> bool:
        """A worker runs or is requested."""
        return bool(self._running)

    def accept(self, order: AgentOrder) -> bool:
        """Take the order. Returns False if it was made for another process."""
        if order.instance != self._instance:
            return False
        self.order = order
        for worker in order.acknowledged:
            self._ended.pop(worker, None)
            self._failed.pop(worker, None)
        return True

    def take_actions(self) -> AgentActions:
        """The actions that are due now, recorded as done."""
        ordered = set(self.order.workers) if self.order and not self.order.end else set[str]()
        stop = tuple(w for w in self._running if w not in ordered and w not in self._stopped)
        self._stopped.update(stop)
        start = tuple(sorted(ordered - self._requested)) if self.state == "ready" else ()
        self._requested.update(start)
        self._running.update(dict.fromkeys(start, False))
        if self.state == "failed":
            for worker in sorted(ordered - self._requested):
                self._requested.add(worker)
                self._failed[worker] = self.reason
        return AgentActions(stop=stop, start=start)

    def on_event(self, event: Event) -> None:
        """Process an event of the pool that holds this host's processes."""
        match event:
            case Started(worker, _):
                self._running[worker] = True
            case WorkerStartFailed(worker, reason):
                del self._running[worker]
                self._failed[worker] = reason
            case WorkerExited(worker, reason):
                del self._running[worker]
                self._ended[worker] = reason
            case _:
                pass

    def report(self) -> Report:
        return Report(
            instance=self._instance,
            state=self.state,
            reason=self.reason,
            session=self.order.session if self.order else "",
            serial=self.order.serial if self.order else 0,
            running=tuple(worker for worker, started in self._running.items() if started),
            ended=dict(self._ended),
            failed=dict(self._failed),
            notified=self.notified,
        )


# --- agent ------------------------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)
AGAIN_S, LONGEST_S = 0.2, 2.0  # delay between two attempts to reach the coordinator: first, longest
FIRST_S = 10.0  # an agent without a coordinator and without any order so far ends after this time
BEAT_S = 1.0  # heartbeat interval; the coordinator answers each
SILENT_S = 10.0  # without an answer the connection is closed: the coordinator's machine may be gone
FOLLOW_S = 0.1  # how often the workers' logs are read


class Agent:
    """Runs one agent: `await serve()` in the main thread. `tell`: called once, when the coordinator is first
    reached.
    """

    def __init__(self, identity: AgentIdentity, tell: Callable[[str], None]) -> None:
        self._identity, self._tell = identity, tell
        self._folder, self._host = identity.folder, identity.host
        self._ticket: Ticket | None = None
        self._reconciler = AgentReconciler(secrets.token_hex(8))
        self._workers: LocalPool | None = None
        self._receiving_events: asyncio.Task[None] | None = None
        self._preparing: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._offsets: dict[str, int] = {}  # bytes sent of each log
        self._answered = 0.0  # time of the coordinator's last message
        self._over = False
        self._terminated = False  # SIGTERM has come, as a notice

    async def serve(self) -> str:
        """Serve until the agent ends; then none of its processes is left. Returns why the host could not be prepared.

        The result is "" if the host was prepared.

        Raises:
            CoordinatorUnreachable: no coordinator was reachable at the start.
            UsageError: the ticket is invalid.
        """
        loop, pause_s = asyncio.get_running_loop(), AGAIN_S
        reached = loop.time()
        if self._identity.grace_s:
            loop.add_signal_handler(signal.SIGTERM, self._on_sigterm)
        watching = asyncio.ensure_future(watch(self._identity.notices, Settings.read().metadata, self._on_preemption))
        try:
            while not self._over:
                try:
                    await self._run_session()
                    reached, pause_s = loop.time(), AGAIN_S
                except CoordinatorUnreachable:
                    if self._reconciler.order is None and self._reconciler.state == "preparing" and pause_s == AGAIN_S:
                        raise
                orphan_s = self._reconciler.order.job.orphan_s if self._reconciler.order else FIRST_S
                if not self._reconciler.running and loop.time() - reached > orphan_s:
                    _log.warning("no coordinator for %g s: the agent ends", orphan_s)
                    break
                if not self._reconciler.running and self._terminated:
                    break
                if not self._over:
                    self._changed.clear()  # the next report tells it; set, it would end each pause at once
                    await up_to(pause_s, self._changed)
                    pause_s = min(2 * pause_s, LONGEST_S)
        finally:
            (self._folder / TICKET).unlink(missing_ok=True)  # no process here needs it any more
            for task in (self._preparing, self._receiving_events, watching):
                if task:
                    task.cancel()
            if self._workers:
                self._workers.kill_all()
        return self._reconciler.reason if self._reconciler.state == "failed" else ""

    async def _run_session(self) -> None:
        """Run one connection until it ends."""
        path = str(self._folder / TICKET)
        ticket = self._ticket = newest(self._ticket, path) if self._ticket else load(path, opener)
        if (current := newest(ticket, self._identity.source)) != ticket:
            leave_ticket(self._folder, current)  # the workers read it too
            ticket = self._ticket = current
        hello = messages.Hello(
            kind="host_agent", host=self._host, pid=os.getpid(), pool=self._identity.pool, session=secrets.token_hex(8)
        )
        loop = asyncio.get_running_loop()
        # Later the coordinator may have another address by now, so the ticket is read again soon.
        async with subscribe(ticket, hello, SILENT_S if self._reconciler.order else ANSWER_S) as subscription:
            self._answered = loop.time()
            exchanging = asyncio.ensure_future(self._exchange(subscription, ticket))
            try:
                while not exchanging.done() and loop.time() - self._answered < SILENT_S:
                    await asyncio.wait({exchanging}, timeout=BEAT_S)
                if exchanging.done():
                    exchanging.result()
            finally:
                exchanging.cancel()

    async def _exchange(self, subscription: Subscription, ticket: Ticket) -> None:
        await subscription.send(self._reconciler.report())
        self._tell("joined")
        loop, sent_at = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        receiving = asyncio.ensure_future(subscription.receive())
        try:
            while not self._over:
                changed = asyncio.ensure_future(self._changed.wait())
                await asyncio.wait({receiving, changed}, timeout=FOLLOW_S, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                await self._follow(subscription)
                if receiving.done():
                    message = receiving.result()
                    if message is None:
                        return
                    self._answered = loop.time()
                    self._on_message(message, ticket)
                    receiving = asyncio.ensure_future(subscription.receive())
                if self._changed.is_set() or loop.time() - sent_at > BEAT_S:
                    self._changed.clear()
                    self._act()
                    await subscription.send(self._reconciler.report())
                    sent_at = loop.time()
        finally:
            receiving.cancel()

    def _on_message(self, message: messages.Message, ticket: Ticket) -> None:
        match message:
            case messages.AgentOrder() if self._reconciler.accept(message):
                self._offsets.update(message.logs)
                self._over = message.end
                if self._preparing is None:
                    self._preparing = asyncio.ensure_future(self._prepare(message.job, ticket))
                self._changed.set()
            case messages.JoinRefused(reason=reason):
                _log.warning("the agent ends: %s", reason)
                self._over = True
            case _:
                pass

    # --- preparation and workers ---------------------------------------------------------------------------

    async def _prepare(self, job: messages.Job, ticket: Ticket) -> None:
        """Once: fetch the code, set up, and create the pool of this host. Waits for a coordinator that is away."""
        command, pause_s = None, AGAIN_S
        while command is None:
            try:
                command = await asyncio.to_thread(self._prepare_host, job, load(str(self._folder / TICKET), opener))
            except CoordinatorUnreachable:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_S)
            except (FarandoleError, OSError) as error:
                self._reconciler.state, self._reconciler.reason = "failed", str(error)
                self._changed.set()
                return
        self._workers = self._local_pool(job, ticket, command)
        self._receiving_events = asyncio.ensure_future(self._receive_events(self._workers))
        self._reconciler.state = "ready"
        self._changed.set()

    def _prepare_host(self, job: messages.Job, ticket: Ticket) -> list[str]:
        """Prepare the host and return the workers' command. Changes the working folder to the job's folder."""
        folder = unpacked(ticket, job.pack) if job.pack else Path(job.folder)
        try:
            os.chdir(folder)
        except OSError as error:
            raise UsageError(f"the run's folder {folder} is not on {self._host} ({error.strerror})") from None
        if job.pack and (python := set_up(job.setup, folder, host=self._host)):
            self._restart_with(python)
        if not Path(Origin.from_script(job.script).script).is_file():
            raise UsageError(f"the script {job.script} is not in {folder} on {self._host}")
        if job.prepare:
            try:
                prepare(job.prepare, run=ticket.secret, host=self._host)
            except HostNotPrepared as error:
                raise UsageError(str(error)) from None
        return join_command(self._folder / TICKET, job.script, job.arguments)

    def _restart_with(self, python: Path) -> None:
        """Restart this process with `python`: workers are forked from its interpreter, and need what the setup
        installed.
        """
        arguments = self._identity.command(Path(self._identity.source or self._folder / TICKET))
        os.execv(python, [str(python), *arguments, "--wait"])

    def _local_pool(self, job: messages.Job, ticket: Ticket, command: list[str]) -> LocalPool:
        environment = {**environ(ticket), **job.environ, "FARANDOLE_HOST": self._host, "FARANDOLE_PACK": job.pack}
        if self._identity.interface:
            environment["FARANDOLE_INTERFACE"] = self._identity.interface
        if self._identity.zone:
            environment["FARANDOLE_ZONE"] = self._identity.zone
        return LocalPool(
            command,
            logs=self._folder / LOGS,
            threads=job.threads,
            environ=environment,
            name=self._identity.pool,
            tell=_log.warning,
        )

    def _on_preemption(self, notified: messages.HostPreemption | None) -> None:
        """The pool receives it in the report, and decides what happens to the workers."""
        self._reconciler.notified = notified
        self._changed.set()

    def _on_sigterm(self) -> None:
        """The scheduler takes this host back. It may send the signal again, which changes nothing."""
        if not self._terminated:
            self._terminated = True
            reason = "its scheduler takes it back (SIGTERM)"
            self._on_preemption(HostPreemption(at=time.time() + self._identity.grace_s, reason=reason))

    async def _receive_events(self, workers: LocalPool) -> None:
        while True:
            for event in await workers.events():
                self._reconciler.on_event(event)
            self._changed.set()

    def _act(self) -> None:
        actions = self._reconciler.take_actions()
        for worker in actions.stop:
            assert self._workers is not None
            self._workers.stop(worker)
        for worker in actions.start:
            assert self._workers is not None
            self._workers.start(worker, self._host)

    async def _follow(self, subscription: Subscription) -> None:
        """Send what the workers have printed since the last call."""
        for worker, offset in tuple(self._offsets.items()):
            with contextlib.suppress(OSError), open_regular(self._folder / LOGS / f"{worker}.log") as log:
                log.seek(offset)
                while content := log.read(messages.CHUNK_BYTES):
                    await subscription.send(messages.Output(worker=worker, offset=offset, content=content))
                    offset += len(content)
                self._offsets[worker] = offset


# --- marked processes -------------------------------------------------------------------------------------------------
#
# The processes of a host's agents, identified by the mark in their environment: `farandole hosts clean` kills them.
#
# Invariant: nothing else is killed. A process is held by a pidfd before its environment is read, so that its number
# can't belong to another process when the signal is sent. Processes of other users are not examined. A process that has
# cleared its environment is not found. Linux only, since it reads /proc.

END_S = 10.0  # time until all of them must be gone
MARKED_AGAIN_S = 0.02
SHOWN = 120  # characters of a command line


def kill_agents(agents: Collection[str]) -> dict[int, str]:
    """Send SIGKILL to these agents and all that they started, until none is left. Returns command lines by process
    id.
    """
    ended: dict[int, str] = {}
    deadline = time.monotonic() + END_S
    while killed := _kill(agents):
        ended.update(killed)
        if time.monotonic() > deadline:
            break
        time.sleep(MARKED_AGAIN_S)
    return ended


def other_runs(agent: str, environs: Iterable[bytes]) -> int:
    """The number of runs, other than this agent's, that have agents, by the environments of processes."""
    marks = {run_mark(name) for environ in environs if (name := agent_of(environ))}
    return len(marks - {run_mark(agent)})


def environs() -> Iterator[bytes]:
    """The environments of this user's processes."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.stat().st_uid == os.geteuid():
                yield (process / "environ").read_bytes()


def belongs_to(environ: bytes, agents: Collection[str]) -> bool:
    """Returns True if a process with this environment belongs to one of these agents. One without a mark never does."""
    name = agent_of(environ)
    return bool(name) and name in agents


def _kill(agents: Collection[str]) -> dict[int, str]:
    commands: dict[int, str] = {}
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and int(process.name) != os.getpid():
            with contextlib.suppress(OSError):
                if process.stat().st_uid == os.geteuid() and (command := _kill_one(process, agents)):
                    commands[int(process.name)] = command
    return commands


def _kill_one(process: Path, agents: Collection[str]) -> str:
    """Kill one process of these agents. Returns its command line, "" if it is not theirs. Raises OSError: it is
    gone.
    """
    pidfd = os.pidfd_open(int(process.name))
    try:
        if not belongs_to((process / "environ").read_bytes(), agents):
            return ""
        command = (process / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        return command[:SHOWN] or "?"
    finally:
        os.close(pidfd)
