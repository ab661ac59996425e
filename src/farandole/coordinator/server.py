"""The coordinator's server: connections and clock around `protocol.coordinator.Coordinator`, on one port.

    /control   WebSocket, binary frames of msgpack, for workers, pools and observers
    /api/*     REST, for the command line (see `rest.py`)
    /metrics   for Prometheus, by a token of its own (see `prometheus.py`)

The first two are for connections that have shown the run's ticket, and nobody else's bytes come here (`listener.py`).
Invariant: whatever arrives goes into the coordinator as one call, followed by one `flush`, which carries out all that
it decided, in order, without ever waiting: messages go to per-connection queues, journal lines are written after the
messages have left. So a slow or frozen peer delays nobody, and from a worker's closed socket to Stop on the others'
sockets is a turn or two of the event loop.

What a stranger or a broken worker sends closes its connection and becomes an event; the run goes on. Of such events a
minute has at most a few of each kind, and then their number. Strangers are bounded in `listener.py`. Off loopback
there is TLS, always. An error of our own ends the process where anything is decided, for a coordinator in doubt must
not go on; where something is only told, it costs that answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import math
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping

import msgspec
from aiohttp import web

from farandole import __version__
from farandole.control.run_folder import TICKETS
from farandole.control.security import Certificate, Tickets
from farandole.control.status import Status, describe
from farandole.coordinator.connection import Connection, open_connection
from farandole.coordinator.journal import Journal
from farandole.coordinator.listener import Listener, UnauthenticatedPeers, shown
from farandole.coordinator.observers import Observers
from farandole.coordinator.prometheus import metrics_page
from farandole.coordinator.recording import Recording
from farandole.coordinator.rest import READING, Rest, RunCost, refusal, untold
from farandole.errors import ProtocolError, UsageError
from farandole.platform.process import up_to
from farandole.protocol import events, messages
from farandole.protocol.coordinator import accounting, scaling
from farandole.protocol.coordinator.coordinator import Coordinator
from farandole.protocol.coordinator.reconnection import Durable
from farandole.protocol.coordinator.state import Close, Log, Record, RunSettings, Send
from farandole.protocol.metrics import metrics_line

# --- group keys -------------------------------------------------------------------------------------------------------
#
# The key of each group of connections, made from the run's secret; see `collective/gloo.py` for what it is for.
#
# It is put into a proposal as that is sent, and is nowhere else: not in the state, the journal or a log.


def group_key(secret: str, run: str, group: int) -> bytes:
    """HMAC-SHA256 of the run and the group's number under the run's secret. Its holder learns nothing of the secret."""
    return hmac.new(secret.encode(), f"farandole group\n{run}\n{group}".encode(), hashlib.sha256).digest()


def keyed(message: messages.Message, secret: str, run: str) -> messages.Message:
    """What is sent for `message`: a proposal has its group's key in it."""
    if not isinstance(message, messages.Propose):
        return message
    return msgspec.structs.replace(message, key=group_key(secret, run, message.view.group))


# --- invited ----------------------------------------------------------------------------------------------------------
#
# What the tickets say (`control/security.py`), done to connections: who is not heard, and who has to go.
#
# A worker that the run knows is heard whatever its ticket is by now: it is told by the coordinator what becomes of it,
# and the others learn that it is gone. Nobody else's Hello is looked at by the run if its ticket is over.


def why_not(tickets: Tickets, coordinator: Coordinator, ticket: str, hello: messages.Hello) -> str:
    """Why who has shown `ticket` is not heard, "" if it is."""
    if hello.kind in ("pool", "host_agent", "agent_pool") and not tickets.owners(ticket):
        return "a pool and its hosts need the owner's ticket, FOLDER/ticket"
    return "" if hello.kind == "worker" and coordinator.knows(hello) else tickets.over(ticket)


def reread(tickets: Tickets, record: Callable[[events.Event], None]) -> None:
    """`record` what has become of them. A file that is damaged is an event, and changes nothing."""
    try:
        for event in tickets.reread():
            record(event)
    except UsageError as error:
        record(events.TicketsDamagedEvent(reason=str(error)))


def turn_out(
    tickets: Tickets,
    coordinator: Coordinator,
    workers: Mapping[str, Connection],
    others: Iterable[Connection],
    now: float,
) -> None:
    """Those whose tickets have been revoked; to be flushed."""
    for worker, connection in tuple(workers.items()):
        if why := tickets.revoked(connection.ticket):
            coordinator.ban_and_remove(worker, why, now)
    for connection in tuple(others):
        if tickets.revoked(connection.ticket):
            connection.close()


# --- agents -----------------------------------------------------------------------------------------------------------
#
# Passes on what pools and the agents of their hosts say to each other. Nothing of it is the coordinator's business.
#
# A pool has at most one connection for this, and each of its hosts at most one agent: who comes again has lost the
# older connection, and takes its place. Whoever connects gets a whole picture: a pool the newest report of each of
# its hosts that are there, an agent the newest order that was made for it. Each report is answered, so that an agent
# sees when nobody is there any more: the coordinator's machine may be lost. An agent that is silent for `SILENT_S` is
# taken to be gone: its host may have lost its power, or its network.

SILENT_S = 5.0  # an agent says something each second
HEARD = messages.encode(messages.LinesHeard())


class _Pool:
    """`orders` and `reports` are the newest, by host."""

    def __init__(self) -> None:
        self.link: Connection | None = None
        self.agents: dict[str, Connection] = {}
        self.orders: dict[str, bytes] = {}
        self.reports: dict[str, bytes] = {}


class Agents:
    """One connection each: `serve_agent`, `serve_pool`, to its end."""

    def __init__(self) -> None:
        self._pools: dict[str, _Pool] = {}

    @property
    def there(self) -> bool:
        """Some agent is connected."""
        return any(pool.agents for pool in self._pools.values())

    def _of(self, hello: messages.Hello) -> _Pool:
        if not hello.pool:
            raise ValueError(f"{hello.kind} without the name of its pool")
        return self._pools.setdefault(hello.pool, _Pool())

    async def serve_agent(self, connection: Connection, hello: messages.Hello) -> None:
        """Raises ValueError: it says what no agent says."""
        pool, host = self._of(hello), hello.host
        if not host:
            raise ValueError("an agent without the name of its host")
        if before := pool.agents.get(host):
            before.abort()
        pool.agents[host] = connection
        if order := pool.orders.get(host):
            connection.send(order)
        try:
            while (data := await _heard(connection)) is not None:
                said = messages.decode_from_worker(data)
                if not isinstance(said, messages.Report | messages.Output):
                    raise ValueError(f"unexpected message {type(said).__name__} from an agent")
                if pool.agents.get(host) is not connection:
                    continue
                passed = messages.encode(messages.FromHost(host=host, message=said))
                if isinstance(said, messages.Report):
                    connection.send(HEARD)
                    if pool.reports.get(host) == passed:
                        continue
                    pool.reports[host] = passed
                if pool.link:
                    pool.link.send(passed)
        finally:
            if pool.agents.get(host) is connection:
                del pool.agents[host]
                pool.reports.pop(host, None)
                if pool.link:
                    pool.link.send(messages.encode(messages.FromHost(host=host)))

    async def serve_pool(self, connection: Connection, hello: messages.Hello) -> None:
        """Raises ValueError: it says what no pool says here."""
        pool = self._of(hello)
        if pool.link:
            pool.link.abort()
        pool.link = connection
        pool.orders.clear()  # a pool that has begun anew makes others, once it has heard of the host
        for report in pool.reports.values():
            connection.send(report)
        try:
            while (data := await connection.receive()) is not None:
                said = messages.decode_from_worker(data)
                if not isinstance(said, messages.ToHost):
                    raise ValueError(f"unexpected message {type(said).__name__} from a pool")
                if pool.link is not connection:
                    continue
                order = pool.orders[said.host] = messages.encode(said.order)
                if agent := pool.agents.get(said.host):
                    agent.send(order)
        finally:
            if pool.link is connection:
                pool.link = None


async def _heard(agent: Connection) -> bytes | None:
    """What it says next, None where it is gone."""
    with contextlib.suppress(asyncio.TimeoutError):
        return await agent.receive(SILENT_S)
    agent.abort()
    return None


# --- pools ------------------------------------------------------------------------------------------------------------
#
# The pools' connections: each is told its roster, whenever that changes, and says what has become of its workers.
#
# What a pool says again after a break is no news to the coordinator, and does nothing.

UNKNOWN_S = 0.5  # for the Hello of a process that has exited to come in


class PoolConnections:
    """`flush` carries out what the coordinator decides, `now` is its clock, `record` writes an event of ours down."""

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        flush: Callable[[], None],
        now: Callable[[], float],
        record: Callable[[events.Event], None],
    ) -> None:
        self._coordinator = coordinator
        self._flush, self._now, self._record = flush, now, record
        self._there: dict[Connection, messages.Hello] = {}
        self._told: dict[Connection, messages.Roster] = {}

    @property
    def names(self) -> list[str]:
        """Of those that are connected."""
        return [hello.pool for hello in self._there.values()]

    def tell(self) -> None:
        """Rosters that are not what was told last."""
        for connection, hello in self._there.items():
            roster = self._coordinator.roster(hello.pool)
            if roster != self._told.get(connection):
                self._told[connection] = roster
                connection.send(messages.encode(roster))

    async def serve(self, connection: Connection, hello: messages.Hello) -> None:
        """Until the connection ends.

        Raises:
            ValueError: it says what no pool says.
        """
        if reason := scaling.pool_refusal(self._coordinator, hello, self._there.values()):
            self._record(events.RefusedEvent(worker=f"pool {hello.pool}", host=hello.host, reason=reason))
            connection.send(messages.encode(messages.JoinRefused(reason=reason)))
            connection.close()
            return
        self._there[connection] = hello
        try:
            self.tell()
            while (data := await connection.receive()) is not None:
                self._hear(hello, messages.decode_from_worker(data))
        finally:
            del self._there[connection]
            self._told.pop(connection, None)

    def _hear(self, pool: messages.Hello, message: messages.Message) -> None:
        if not isinstance(message, messages.FromPool):
            raise ValueError(f"unexpected message {type(message).__name__} from a pool")
        early = isinstance(message, messages.WorkerProcessExited) and not self._coordinator.has_met(message.worker)
        asyncio.get_running_loop().call_later(UNKNOWN_S if early else 0.0, self._decide, pool, message)

    def _decide(self, pool: messages.Hello, message: messages.FromPool) -> None:
        self._coordinator.on_pool_message(pool.pool, pool.host, message, self._now())
        self._flush()


# --- server -----------------------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)
HELLO_S = 10.0
TICK_S = 0.1
AGENTS_S = 15.0  # after the run is over, for hosts to tell what has become of their workers, and to be let go
LINGER_S = 1.0  # after the run is over, for goodbyes and last lines to arrive
REST_BYTES = 64 * 1024
UNPROMISING = (messages.Welcome, messages.LinesHeard, messages.Published)  # may go out before the journal is written
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """`await start()`, then `await serve()` until the run is over; `await close()` in any case."""

    def __init__(self, settings: RunSettings, *, secret: str, journal: Journal, known: Durable | None = None) -> None:
        self.coordinator = Coordinator(settings, known, self.now())
        self.address = ""
        self.tickets = Tickets(secret, journal.folder / TICKETS)
        self._keying = (secret, settings.run)
        self._workers: dict[str, Connection] = {}
        self._every: set[Connection] = set()
        self._pools = PoolConnections(self.coordinator, flush=self.flush, now=self.now, record=self._event)
        self._agents = Agents()
        recent = journal.recent if known else []  # without, what is there is of the run's earlier session
        newest = journal.last_line()
        self.coordinator.last_step_line = newest[0]
        if known:
            self.coordinator.last_line = newest
        self._over = asyncio.Event()
        self._broken: BaseException | None = None
        self._listener: Listener | None = None
        self._strangers = UnauthenticatedPeers(self._event)
        self._observers = Observers(recent, self._strangers)
        self._recording = Recording(journal, recent, self._observers, settings)
        self._spent = RunCost(settings, journal.folder)
        if known is None:
            self._event(events.RunStartedEvent(version=__version__))
        if journal.damaged:
            self._event(events.MetricsDamagedEvent(lines=journal.damaged))

    async def start(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        certificate: Certificate | None = None,
        listener: socket.socket | None = None,
    ) -> str:
        """Listen, see `Listener.open`. Returns what a ticket says."""
        app = web.Application(middlewares=[self._answer], client_max_size=REST_BYTES)
        app.add_routes([web.get("/control", self._control), *Rest(self).routes()])
        page = metrics_page(self.coordinator.settings, self.status, self._observers, self._strangers)
        self._listener = Listener(app, certificate, self._strangers.strange, self.tickets.known, page)
        self.address = await self._listener.open(host, port, listener)
        self.reread_tickets()
        self.flush()
        return self.address

    async def serve(self) -> None:
        """Tick until the run is over and everyone has gone, at most `LINGER_S` later; who is out of reach has longer.

        An error of our own in any connection's handler comes out here: a coordinator in doubt must not go on.
        """
        while not self._over.is_set():
            self.coordinator.tick(self.now())
            self.flush()
            self._strangers.count(self.now())
            self._keep()
            self._tell_pools()
            self._spent.look_soon(self.now())
            await up_to(TICK_S, self._over)
        if self._broken is not None:
            raise self._broken
        began = self.now()
        while self._every or self._absent() or accounting.trace_pending(self.coordinator, self.now()):
            limit = max(LINGER_S, self.coordinator.settings.heartbeat_timeout_s) if self._absent() else LINGER_S
            limit = max(limit, AGENTS_S) if self._agents.there else limit
            if self.now() - began > limit:
                return
            await asyncio.sleep(TICK_S / 2)

    def _absent(self) -> bool:
        return any(not worker.connected for worker in self.coordinator.workers.values())

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self._strangers.count(math.inf)
        self._keep()
        self._recording.write_lines()
        await asyncio.to_thread(self._recording.close)
        self._spent.close()
        for connection in tuple(self._every):
            connection.close()
        if self._listener is not None:
            await self._listener.clean_up()

    def now(self) -> float:
        return time.monotonic()

    def status(self) -> Status:
        return describe(
            self.coordinator, pid=os.getpid(), address=self.address, steps=tuple(self._recording.steps),
            now=self.now(), time=time.time(), account=self._spent.account,
        )  # fmt: skip

    # --- out of the coordinator ----------------------------------------------------------------------------

    def flush(self) -> None:
        """Carry out what the coordinator has decided: the journal first, then messages, then files. Never waits."""
        actions = self.coordinator.drain()
        if not actions:
            return  # most messages of most workers
        for action in actions:
            if isinstance(action, Record):
                _log.info("%s: %s", events.name_of(action.event), events.fields_of(action.event))
                self._event(action.event)
        if any(isinstance(action, Send) and not isinstance(action.message, UNPROMISING) for action in actions):
            self._keep()
        message, data = None, b""
        for action in actions:
            match action:
                case Send():
                    _log.debug("to %s: %s", action.worker, type(action.message).__name__)
                    if connection := self._workers.get(action.worker):
                        if action.message is not message:  # often the same to everyone
                            message, data = action.message, messages.encode(keyed(action.message, *self._keying))
                        connection.send(data)
                case Close(worker):
                    if connection := self._workers.pop(worker, None):
                        connection.close()
                case Record():
                    pass
                case Log(line):
                    self._recording.note(metrics_line(line))
        if any(isinstance(action, Record) for action in actions):
            self._tell_pools()

    def _tell_pools(self) -> None:
        """Nearly all that changes a roster is an event; the rest can wait for a tick."""
        self._pools.tell()
        if self.coordinator.over:
            self._keep()
            self._over.set()

    def _keep(self) -> None:
        self._recording.keep(self.coordinator)

    def _event(self, event: events.Event) -> None:
        self._recording.event(event)

    # --- connections ---------------------------------------------------------------------------------------

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if why := self.tickets.forbids(shown(request), request.path):
            return refusal(why, 403)
        try:
            return await handler(request)
        except UsageError as error:
            return refusal(str(error))
        except web.RequestPayloadError as error:  # a body that is not what its headers say
            self._strangers.malformed(f"{request.method} {request.path}", str(error))
            raise web.HTTPBadRequest from None
        except (web.HTTPException, ConnectionError, asyncio.CancelledError):
            raise
        except BaseException as error:
            if request.path in READING and isinstance(error, Exception):
                return untold(f"{request.method} {request.path}", error, self._strangers)
            self._broken = error
            self._over.set()
            raise

    async def _control(self, request: web.Request) -> web.StreamResponse:
        source = request.remote or ""
        connection = await open_connection(
            request, lambda: self._strangers.strange(source, "sends too much: slowed down")
        )
        self._every.add(connection)
        try:
            await self._converse(connection, source)
        finally:
            await connection.finish()
            self._every.discard(connection)
        return connection.response

    async def _converse(self, connection: Connection, source: str) -> None:
        """From Hello to the end. What breaks the protocol is recorded and closes the connection."""
        who = "a connection without Hello"
        try:
            data = await connection.receive(HELLO_S)
            hello = messages.decode_from_worker(data) if data is not None else None
            if not isinstance(hello, messages.Hello):
                raise ValueError(f"the first message must be Hello, not {type(hello).__name__}")
            who = f"{hello.kind} {hello.worker or hello.pool}".strip()
            if why := why_not(self.tickets, self.coordinator, connection.ticket, hello):
                self._strangers.strange(source, why)
                connection.send(messages.encode(messages.JoinRefused(reason=why)))
                connection.close()
            elif hello.kind == "worker":
                await self._worker(connection, hello)
            elif hello.kind == "pool":
                await self._pools.serve(connection, hello)
            elif hello.kind == "observer":
                await self._observers.serve(connection)
            elif hello.kind == "host_agent":
                await self._agents.serve_agent(connection, hello)
            elif hello.kind == "agent_pool":
                await self._agents.serve_pool(connection, hello)
            else:
                raise ValueError(f"unknown kind {hello.kind!r}; it must be worker, pool, observer, host_agent or agent_pool")
        except (ValueError, msgspec.MsgspecError, ProtocolError, asyncio.TimeoutError) as error:
            self._strangers.malformed(who, str(error) or f"nothing within {HELLO_S:g} s")
            connection.close()

    def reread_tickets(self) -> None:
        reread(self.tickets, self._event)
        self._keep()  # before it is answered
        others = self._every - set(self._workers.values())
        turn_out(self.tickets, self.coordinator, self._workers, others, self.now())
        self.flush()

    async def _worker(self, connection: Connection, hello: messages.Hello) -> None:
        worker = self.coordinator.hello(hello, self.now())
        if before := self._workers.get(worker):  # it is back before its old connection was seen to break
            before.abort()
        self._workers[worker] = connection
        turn_out(self.tickets, self.coordinator, {worker: connection}, (), self.now())
        self.flush()
        try:
            while (data := await connection.receive()) is not None:
                if self._workers.get(worker) is not connection:
                    continue  # it is out, or has come back on another connection
                message = messages.decode_from_worker(data)
                self.coordinator.on_message(worker, message, self.now())
                self.flush()
        finally:
            if self._workers.get(worker) is connection:
                del self._workers[worker]
                self.coordinator.on_disconnect(worker, self.now())
                self.flush()
