"""The agent of a host: starts the host's workers as its pool orders, and tells what has become of them.

It reaches the run as its workers do, with the run's ticket, so nobody has to reach the host. It outlives connections,
coordinators and the pool's process: its workers train on meanwhile. It ends when its pool says so, when its ticket is
not good any more, or when it has been without a coordinator and without workers for longer than the orphan limit. No
worker outlives it (see `local.py`). What is due is decided in section "duty".
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

from farandole.control.client import Subscription, subscribe, unpacked
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

# --- post -------------------------------------------------------------------------------------------------------------
#
# Whose agent a process is, and what is kept of it on its host. A host has one agent for each run and pool: `lock`.

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
class AgentIdentity:
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


# --- duty -------------------------------------------------------------------------------------------------------------
#
# What an agent is to do: a pure function of its pool's orders and of what has become of its workers.
#
# Invariant: a worker is started at most once, and only by an order that names it and was made for this process. So an
# order that is old, comes twice, or was made for an earlier agent of the host starts nobody again; and a worker that no
# order names any more is stopped.


@dataclass(frozen=True, kw_only=True)
class AgentActions:
    """`stop` these workers, then `start` these."""

    stop: tuple[str, ...] = ()
    start: tuple[str, ...] = ()


class Reconciler:
    """Of one agent. `state` and `reason` are its own to set: preparing, ready, or failed.

    Attributes:
        order: the newest, None before the first.
        notified: what is known of the host's own end.
    """

    def __init__(self, instance: str) -> None:
        self.order: AgentOrder | None = None
        self.state, self.reason = "preparing", ""
        self.notified: HostPreemption | None = None
        self._instance = instance
        self._asked: set[str] = set()  # all that were ever started, or are to be
        self._running: dict[str, bool] = {}  # whether its process is there
        self._stopped: set[str] = set()
        self._ended: dict[str, str] = {}
        self._failed: dict[str, str] = {}

    @property
    def running(self) -> bool:
        """Somebody is there, or about to be."""
        return bool(self._running)

    def ordered(self, order: AgentOrder) -> bool:
        """Whether it is for this process."""
        if order.instance != self._instance:
            return False
        self.order = order
        for worker in order.acknowledged:
            self._ended.pop(worker, None)
            self._failed.pop(worker, None)
        return True

    def due(self) -> AgentActions:
        """What it names is taken to be done."""
        wanted = set(self.order.workers) if self.order and not self.order.end else set[str]()
        stop = tuple(w for w in self._running if w not in wanted and w not in self._stopped)
        self._stopped.update(stop)
        start = tuple(sorted(wanted - self._asked)) if self.state == "ready" else ()
        self._asked.update(start)
        self._running.update(dict.fromkeys(start, False))
        if self.state == "failed":
            for worker in sorted(wanted - self._asked):
                self._asked.add(worker)
                self._failed[worker] = self.reason
        return AgentActions(stop=stop, start=start)

    def heard(self, event: Event) -> None:
        """Of the pool that has this host's processes."""
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
            running=tuple(worker for worker, there in self._running.items() if there),
            ended=dict(self._ended),
            failed=dict(self._failed),
            notified=self.notified,
        )


# --- agent ------------------------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)
AGAIN_S, LONGEST_S = 0.2, 2.0  # between two tries to reach the coordinator
FIRST_S = 10.0  # without one, and without any order so far, an agent ends
BEAT_S = 1.0  # it says that it is there, and is answered
SILENT_S = 10.0  # without an answer the connection is given up: the coordinator's machine may be gone
FOLLOW_S = 0.1  # how often the workers' logs are looked at


class Agent:
    """`await serve()` in the main thread. `tell`: called once, when the coordinator was first reached."""

    def __init__(self, post: AgentIdentity, tell: Callable[[str], None]) -> None:
        self._post, self._tell = post, tell
        self._folder, self._host = post.folder, post.host
        self._ticket: Ticket | None = None
        self._duty = Reconciler(secrets.token_hex(8))
        self._workers: LocalPool | None = None
        self._listening: asyncio.Task[None] | None = None
        self._preparing: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._sent: dict[str, int] = {}  # bytes of each log
        self._answered = 0.0  # when the coordinator last said something
        self._over = False

    async def serve(self) -> str:
        """Until it is over; then nothing of it is left. Returns why the host could not be prepared, "" if it was.

        Raises:
            CoordinatorUnreachable: nobody was there from the start.
            UsageError: the ticket is none.
        """
        loop, pause_s = asyncio.get_running_loop(), AGAIN_S
        reached = loop.time()
        watching = asyncio.ensure_future(watch(self._post.notices, Settings.read().metadata, self._noticed))
        try:
            while not self._over:
                try:
                    await self._converse()
                    reached, pause_s = loop.time(), AGAIN_S
                except CoordinatorUnreachable:
                    if self._duty.order is None and self._duty.state == "preparing" and pause_s == AGAIN_S:
                        raise
                orphan_s = self._duty.order.job.orphan_s if self._duty.order else FIRST_S
                if not self._duty.running and loop.time() - reached > orphan_s:
                    _log.warning("no coordinator for %g s: the agent ends", orphan_s)
                    break
                if not self._over:
                    await up_to(pause_s, self._changed)
                    pause_s = min(2 * pause_s, LONGEST_S)
        finally:
            (self._folder / TICKET).unlink(missing_ok=True)  # nobody here needs it any more
            for task in (self._preparing, self._listening, watching):
                if task:
                    task.cancel()
            if self._workers:
                self._workers.kill_all()
        return self._duty.reason if self._duty.state == "failed" else ""

    async def _converse(self) -> None:
        """One connection, to its end."""
        path = str(self._folder / TICKET)
        ticket = self._ticket = newest(self._ticket, path) if self._ticket else load(path, opener)
        hello = messages.Hello(
            kind="host_agent", host=self._host, pid=os.getpid(), pool=self._post.pool, session=secrets.token_hex(8)
        )
        loop = asyncio.get_running_loop()
        async with subscribe(ticket, hello) as subscription:
            self._answered = loop.time()
            talking = asyncio.ensure_future(self._talk(subscription, ticket))
            try:
                while not talking.done() and loop.time() - self._answered < SILENT_S:
                    await asyncio.wait({talking}, timeout=BEAT_S)
                if talking.done():
                    talking.result()
            finally:
                talking.cancel()

    async def _talk(self, subscription: Subscription, ticket: Ticket) -> None:
        await subscription.send(self._duty.report())
        self._tell("joined")
        loop, said = asyncio.get_running_loop(), asyncio.get_running_loop().time()
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
                    self._heard(message, ticket)
                    receiving = asyncio.ensure_future(subscription.receive())
                if self._changed.is_set() or loop.time() - said > BEAT_S:
                    self._changed.clear()
                    self._act()
                    await subscription.send(self._duty.report())
                    said = loop.time()
        finally:
            receiving.cancel()

    def _heard(self, message: messages.Message, ticket: Ticket) -> None:
        match message:
            case messages.AgentOrder() if self._duty.ordered(message):
                self._sent.update(message.logs)
                self._over = message.end
                if self._preparing is None:
                    self._preparing = asyncio.ensure_future(self._prepare(message.job, ticket))
                self._changed.set()
            case messages.JoinRefused(reason=reason):
                _log.warning("the agent ends: %s", reason)
                self._over = True
            case _:
                pass

    # --- what the host does --------------------------------------------------------------------------------

    async def _prepare(self, job: messages.Job, ticket: Ticket) -> None:
        """Once: fetch, set up, then have a pool of this host. A coordinator that is away meanwhile is waited for."""
        command, pause_s = None, AGAIN_S
        while command is None:
            try:
                command = await asyncio.to_thread(self._prepared, job, load(str(self._folder / TICKET), opener))
            except CoordinatorUnreachable:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_S)
            except (FarandoleError, OSError) as error:
                self._duty.state, self._duty.reason = "failed", str(error)
                self._changed.set()
                return
        self._workers = self._local_pool(job, ticket, command)
        self._listening = asyncio.ensure_future(self._listen(self._workers))
        self._duty.state = "ready"
        self._changed.set()

    def _prepared(self, job: messages.Job, ticket: Ticket) -> list[str]:
        """The workers' command. The process is in the job's folder from then on."""
        folder = unpacked(ticket, job.pack) if job.pack else Path(job.folder)
        try:
            os.chdir(folder)
        except OSError as error:
            raise UsageError(f"the run's folder {folder} is not on {self._host} ({error.strerror})") from None
        if job.pack and (python := set_up(job.setup, folder, host=self._host)):
            self._begin_anew_with(python)
        if not Path(job.script).is_file():
            raise UsageError(f"the script {job.script} is not in {folder} on {self._host}")
        if job.prepare:
            try:
                prepare(job.prepare, run=ticket.secret, host=self._host)
            except HostNotPrepared as error:
                raise UsageError(str(error)) from None
        return join_command(self._folder / TICKET, job.script, job.arguments)

    def _begin_anew_with(self, python: Path) -> None:
        """What the setup has installed is for the workers, who are forked from this process's interpreter."""
        words = self._post.command(self._folder / TICKET)
        os.execv(python, [str(python), *words, "--wait"])

    def _local_pool(self, job: messages.Job, ticket: Ticket, command: list[str]) -> LocalPool:
        environment = {**environ(ticket), "FARANDOLE_HOST": self._host, "FARANDOLE_PACK": job.pack}
        if self._post.interface:
            environment["FARANDOLE_INTERFACE"] = self._post.interface
        return LocalPool(
            command,
            logs=self._folder / LOGS,
            threads=job.threads,
            environ=environment,
            name=self._post.pool,
            tell=_log.warning,
        )

    def _noticed(self, notified: messages.HostPreemption | None) -> None:
        """The pool hears of it, and says what becomes of the workers."""
        self._duty.notified = notified
        self._changed.set()

    async def _listen(self, workers: LocalPool) -> None:
        while True:
            for event in await workers.events():
                self._duty.heard(event)
            self._changed.set()

    def _act(self) -> None:
        due = self._duty.due()
        for worker in due.stop:
            assert self._workers is not None
            self._workers.stop(worker)
        for worker in due.start:
            assert self._workers is not None
            self._workers.start(worker, self._host)

    async def _follow(self, subscription: Subscription) -> None:
        """What the workers have printed since."""
        for worker, sent in tuple(self._sent.items()):
            with contextlib.suppress(OSError), open_regular(self._folder / LOGS / f"{worker}.log") as log:
                log.seek(sent)
                while content := log.read(messages.CHUNK_BYTES):
                    await subscription.send(messages.Output(worker=worker, offset=sent, content=content))
                    sent += len(content)
                self._sent[worker] = sent


# --- marked -----------------------------------------------------------------------------------------------------------
#
# The processes of a host's agents, found by the mark in their environment: `farandole hosts clean` ends them.
#
# Invariant: nothing else is ended. A process is held by a pidfd before its environment is read, so that its number
# can't be another's by the time of the signal; other users' processes are not looked at. What has cleared its
# environment is not found. Linux only, as /proc is.

END_S = 10.0  # for all of them to be gone
MARKED_AGAIN_S = 0.02
SHOWN = 120  # characters of a command line


def end(agents: Collection[str]) -> dict[int, str]:
    """SIGKILL to all that these agents have started, and to them, until nothing of it is left. Returns the command
    lines, by process.
    """
    ended: dict[int, str] = {}
    deadline = time.monotonic() + END_S
    while found := _kill(agents):
        ended.update(found)
        if time.monotonic() > deadline:
            break
        time.sleep(MARKED_AGAIN_S)
    return ended


def other_runs(agent: str, environs: Iterable[bytes]) -> int:
    """How many other runs than this agent's have agents, by the environments of processes."""
    found = {of_run(mark) for environ in environs if (mark := agent_of(environ))}
    return len(found - {of_run(agent)})


def environs() -> Iterator[bytes]:
    """Of this user's processes."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.stat().st_uid == os.geteuid():
                yield (process / "environ").read_bytes()


def is_of(environ: bytes, agents: Collection[str]) -> bool:
    """Whether a process with this environment is one of these agents'. One without a mark is nobody's."""
    found = agent_of(environ)
    return bool(found) and found in agents


def _kill(agents: Collection[str]) -> dict[int, str]:
    found: dict[int, str] = {}
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and int(process.name) != os.getpid():
            with contextlib.suppress(OSError):
                if process.stat().st_uid == os.geteuid() and (command := _kill_one(process, agents)):
                    found[int(process.name)] = command
    return found


def _kill_one(process: Path, agents: Collection[str]) -> str:
    """Its command line, "" where it is not theirs. Raises OSError: it has gone."""
    held = os.pidfd_open(int(process.name))
    try:
        if not is_of((process / "environ").read_bytes(), agents):
            return ""
        command = (process / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()
        signal.pidfd_send_signal(held, signal.SIGKILL)
        return command[:SHOWN] or "?"
    finally:
        os.close(held)
