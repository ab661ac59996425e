"""The coordinator's server: connections and clock around `protocol.coordinator.Coordinator`, on one port.

    /control   WebSocket, binary frames of msgpack, for workers, pools and observers
    /api/*     REST, for the command line (see `rest.py`)
    /metrics   for Prometheus, by a token of its own (see `prometheus.py`)

The first two are for connections that have shown the run's ticket; bytes of other connections do not come here
(`listener.py`). Invariant: each message goes into the coordinator as one call, followed by one `flush`, which carries
out all that the coordinator decided: first the journal, then the messages, then the lines of metrics.jsonl. Messages go
to per-connection queues, so a slow or frozen peer delays no other; for the journal, `flush` waits at most as long as
`recording.py` says. From the input that makes the coordinator stop a view (a peer's accusation, or the end of a process
together with its closed connection) to Stop on the others' sockets it takes one or two turns of the event loop.

An invalid message closes its connection and becomes an event; the run goes on. At most a few such events of each kind
are recorded a minute, then their number. `listener.py` bounds unauthenticated peers. Off loopback TLS is always on. An
error of our own ends the process if it occurs in code that decides, because a coordinator in doubt must not go on; in
code that only reports, it costs that answer.
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
from farandole.coordinator.rest import READING, RestHandlers, RunCost, internal_error, refusal
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
# The key of each group of connections, derived from the run's secret; `collective/gloo.py` explains its use.
#
# It is added to a proposal when that is sent, and is stored nowhere: not in the state, the journal or a log.


def group_key(secret: str, run: str, group: int) -> bytes:
    """HMAC-SHA256 of the run and the group's number under the run's secret. The key reveals nothing of the secret."""
    return hmac.new(secret.encode(), f"farandole group\n{run}\n{group}".encode(), hashlib.sha256).digest()


def with_group_key(message: messages.Message, secret: str, run: str) -> messages.Message:
    """The message to send for `message`: the same, but a proposal contains its group's key."""
    if not isinstance(message, messages.Propose):
        return message
    return msgspec.structs.replace(message, key=group_key(secret, run, message.view.group))


# --- ticket checks ----------------------------------------------------------------------------------------------------
#
# Applies the state of the tickets (`control/security.py`) to connections: rejects some and closes others.
#
# A worker that the run knows is accepted whatever the state of its ticket: the coordinator tells it what happens to it,
# and the others learn that it is gone. Any other Hello is rejected if its ticket is revoked or expired.


def hello_refusal(tickets: Tickets, coordinator: Coordinator, ticket: str, hello: messages.Hello) -> str:
    """The reason for rejecting the Hello of a connection that has shown `ticket`, "" to accept it."""
    if hello.kind in ("pool", "host_agent", "agent_pool") and not tickets.owners(ticket):
        return "a pool and its hosts need the owner's ticket, FOLDER/ticket"
    return "" if hello.kind == "worker" and coordinator.knows(hello) else tickets.over(ticket)


def reread(tickets: Tickets, record: Callable[[events.Event], None]) -> None:
    """Read the tickets again and `record` the changes. A damaged file is an event, and changes nothing."""
    try:
        for event in tickets.reread():
            record(event)
    except UsageError as error:
        record(events.TicketsDamagedEvent(reason=str(error)))


def close_revoked(
    tickets: Tickets,
    coordinator: Coordinator,
    workers: Mapping[str, Connection],
    others: Iterable[Connection],
    now: float,
) -> None:
    """Close the connections whose tickets are revoked, and ban their workers. The caller flushes."""
    for worker, connection in tuple(workers.items()):
        if reason := tickets.revoked(connection.ticket):
            coordinator.ban_and_remove(worker, reason, now)
    for connection in tuple(others):
        if tickets.revoked(connection.ticket):
            connection.close()


# --- agents -----------------------------------------------------------------------------------------------------------
#
# Forwards the messages between pools and the agents of their hosts. The coordinator does not process them.
#
# A pool has at most one connection for this, and each of its hosts at most one agent. A second connection replaces the
# older one. A new connection gets the complete state: a pool the newest report of each connected host, an agent the
# newest order that was made for it. Each report is answered, so that an agent notices when nobody is connected any
# more: the coordinator's machine may be lost. An agent that is silent for `SILENT_S` counts as gone: its host may have
# lost its power, or its network.

SILENT_S = 5.0  # an agent sends a report each second
HEARTBEAT_ANSWER = messages.encode(messages.HeartbeatAnswer())


class _Pool:
    """The connections of one pool and its agents. `orders` and `reports` are the newest, by host."""

    def __init__(self) -> None:
        self.link: Connection | None = None
        self.agents: dict[str, Connection] = {}
        self.orders: dict[str, bytes] = {}
        self.reports: dict[str, bytes] = {}


class Agents:
    """All pools and agents. `serve_agent` and `serve_pool` serve one connection until its end."""

    def __init__(self) -> None:
        self._pools: dict[str, _Pool] = {}

    @property
    def any_connected(self) -> bool:
        """An agent is connected."""
        return any(pool.agents for pool in self._pools.values())

    def _pool_of(self, hello: messages.Hello) -> _Pool:
        if not hello.pool:
            raise ValueError(f"{hello.kind} without the name of its pool")
        return self._pools.setdefault(hello.pool, _Pool())

    async def serve_agent(self, connection: Connection, hello: messages.Hello) -> None:
        """Serve an agent's connection. Raises ValueError: it sends a message that agents do not send."""
        pool, host = self._pool_of(hello), hello.host
        if not host:
            raise ValueError("an agent without the name of its host")
        if previous := pool.agents.get(host):
            previous.abort()
        pool.agents[host] = connection
        if order := pool.orders.get(host):
            connection.send(order)
        try:
            while (data := await _receive(connection)) is not None:
                message = messages.decode_from_worker(data)
                if not isinstance(message, messages.Report | messages.Output):
                    raise ValueError(f"unexpected message {type(message).__name__} from an agent")
                if pool.agents.get(host) is not connection:
                    continue
                forwarded = messages.encode(messages.FromHost(host=host, message=message))
                if isinstance(message, messages.Report):
                    connection.send(HEARTBEAT_ANSWER)
                    if pool.reports.get(host) == forwarded:
                        continue
                    pool.reports[host] = forwarded
                if pool.link:
                    pool.link.send(forwarded)
        finally:
            if pool.agents.get(host) is connection:
                del pool.agents[host]
                pool.reports.pop(host, None)
                if pool.link:
                    pool.link.send(messages.encode(messages.FromHost(host=host)))

    async def serve_pool(self, connection: Connection, hello: messages.Hello) -> None:
        """Serve a pool's connection. Raises ValueError: it sends a message that pools do not send here."""
        pool = self._pool_of(hello)
        if pool.link:
            pool.link.abort()
        pool.link = connection
        pool.orders.clear()  # a restarted pool makes new orders once it has the host's report
        for report in pool.reports.values():
            connection.send(report)
        try:
            while (data := await connection.receive()) is not None:
                message = messages.decode_from_worker(data)
                if not isinstance(message, messages.ToHost):
                    raise ValueError(f"unexpected message {type(message).__name__} from a pool")
                if pool.link is not connection:
                    continue
                order = pool.orders[message.host] = messages.encode(message.order)
                if agent := pool.agents.get(message.host):
                    agent.send(order)
        finally:
            if pool.link is connection:
                pool.link = None


async def _receive(agent: Connection) -> bytes | None:
    """The agent's next message; None: the connection is lost or silent."""
    with contextlib.suppress(asyncio.TimeoutError):
        return await agent.receive(SILENT_S)
    agent.abort()
    return None


# --- pools ------------------------------------------------------------------------------------------------------------
#
# The connections of the pools: each gets its roster, whenever that changes, and reports what happens to its workers.
#
# A report that a pool repeats after a broken connection changes nothing in the coordinator.

UNKNOWN_S = 0.5  # time for the Hello of an exited process to arrive


class PoolConnections:
    """`flush` carries out the coordinator's decisions, `now` is its clock, `record` writes an event to the journal."""

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
        self._connected: dict[Connection, messages.Hello] = {}
        self._sent_rosters: dict[Connection, messages.Roster] = {}

    @property
    def names(self) -> list[str]:
        """The names of the connected pools."""
        return [hello.pool for hello in self._connected.values()]

    def send_rosters(self) -> None:
        """Send each pool its roster if it differs from the last one sent."""
        for connection, hello in self._connected.items():
            roster = self._coordinator.roster(hello.pool)
            if roster != self._sent_rosters.get(connection):
                self._sent_rosters[connection] = roster
                connection.send(messages.encode(roster))

    async def serve(self, connection: Connection, hello: messages.Hello) -> None:
        """Serve a pool's connection until its end.

        Raises:
            ValueError: it sends a message that pools do not send.
        """
        if reason := scaling.pool_refusal(self._coordinator, hello, self._connected.values()):
            self._record(events.RefusedEvent(worker=f"pool {hello.pool}", host=hello.host, reason=reason))
            connection.send(messages.encode(messages.JoinRefused(reason=reason)))
            connection.close()
            return
        self._connected[connection] = hello
        try:
            self.send_rosters()
            while (data := await connection.receive()) is not None:
                self._on_message(hello, messages.decode_from_worker(data))
        finally:
            del self._connected[connection]
            self._sent_rosters.pop(connection, None)

    def _on_message(self, pool: messages.Hello, message: messages.Message) -> None:
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
AGENTS_S = 15.0  # after the end of the run: time for hosts to report the ends of their workers, and to be released
LINGER_S = 1.0  # after the end of the run: time for the last messages and lines to arrive
REST_BYTES = 64 * 1024
NO_PROMISE = (
    messages.Welcome,
    messages.HeartbeatAnswer,
    messages.Published,
)  # may be sent before the journal is written
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """The server of one run: `await start()`, then `await serve()` until the run is over; `await close()` in any
    case.
    """

    def __init__(
        self, settings: RunSettings, *, secret: str, journal: Journal, restored_state: Durable | None = None
    ) -> None:
        self.coordinator = Coordinator(settings, restored_state, self.now())
        self.address = ""
        self.tickets = Tickets(secret, journal.folder / TICKETS)
        self._key_source = (secret, settings.run)
        self._workers: dict[str, Connection] = {}
        self._connections: set[Connection] = set()
        self._pools = PoolConnections(self.coordinator, flush=self.flush, now=self.now, record=self._event)
        self._agents = Agents()
        recent = journal.recent if restored_state else []  # if not, those lines belong to the run's earlier session
        newest = journal.last_line()
        self.coordinator.last_step_line = newest[0]
        if restored_state:
            self.coordinator.last_line = newest
        self._over = asyncio.Event()
        self._broken: BaseException | None = None
        self._listener: Listener | None = None
        self._peers = UnauthenticatedPeers(self._event)
        self._observers = Observers(recent, self._peers)
        self._recording = Recording(journal, recent, self._observers, settings)
        self._cost = RunCost(settings, journal.folder)
        if restored_state is None:
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
        """Start to listen, see `Listener.open`. Returns the address for tickets."""
        app = web.Application(middlewares=[self._handle_errors], client_max_size=REST_BYTES)
        app.add_routes([web.get("/control", self._control), *RestHandlers(self).routes()])
        page = metrics_page(self.coordinator.settings, self.status, self._observers, self._peers)
        self._listener = Listener(app, certificate, self._peers.on_rejected, self.tickets.secrets_by_id, page)
        self.address = await self._listener.open(host, port, listener)
        self.reread_tickets()
        self.flush()
        return self.address

    async def serve(self) -> None:
        """Update until the run is over and all connections have ended, at most `LINGER_S` later; unreachable workers
        have longer.

        Raises any error of our own in a connection's handler: a coordinator in doubt must not go on.
        """
        while not self._over.is_set():
            self.coordinator.tick(self.now())
            self.flush()
            self._peers.count(self.now())
            self._write_journal()
            self._send_rosters()
            self._cost.look_soon(self.now())
            await up_to(TICK_S, self._over)
        if self._broken is not None:
            raise self._broken
        began = self.now()
        while self._connections or self._absent() or accounting.trace_pending(self.coordinator, self.now()):
            limit = max(LINGER_S, self.coordinator.settings.heartbeat_timeout_s) if self._absent() else LINGER_S
            limit = max(limit, AGENTS_S) if self._agents.any_connected else limit
            if self.now() - began > limit:
                return
            await asyncio.sleep(TICK_S / 2)

    def _absent(self) -> bool:
        return any(not worker.connected for worker in self.coordinator.workers.values())

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self._peers.count(math.inf)
        self._write_journal()
        self._recording.write_lines()
        await asyncio.to_thread(self._recording.close)
        self._cost.close()
        for connection in tuple(self._connections):
            connection.close()
        if self._listener is not None:
            await self._listener.clean_up()

    def now(self) -> float:
        return time.monotonic()

    def status(self) -> Status:
        return describe(
            self.coordinator, pid=os.getpid(), address=self.address, steps=tuple(self._recording.steps),
            now=self.now(), time=time.time(), account=self._cost.account,
        )  # fmt: skip

    # --- actions of the coordinator ------------------------------------------------------------------------

    def flush(self) -> None:
        """Carry out the coordinator's decisions: the journal first, then messages, then files. Waits for no peer."""
        actions = self.coordinator.drain()
        if not actions:
            return  # the case of most messages of most workers
        for action in actions:
            if isinstance(action, Record):
                _log.info("%s: %s", events.name_of(action.event), events.fields_of(action.event))
                self._event(action.event)
        if any(isinstance(action, Send) and not isinstance(action.message, NO_PROMISE) for action in actions):
            self._write_journal()
        message, data = None, b""
        for action in actions:
            match action:
                case Send():
                    _log.debug("to %s: %s", action.worker, type(action.message).__name__)
                    if connection := self._workers.get(action.worker):
                        if action.message is not message:  # often all workers get the same message
                            message, data = (
                                action.message,
                                messages.encode(with_group_key(action.message, *self._key_source)),
                            )
                        connection.send(data)
                case Close(worker):
                    if connection := self._workers.pop(worker, None):
                        connection.close()
                case Record():
                    pass
                case Log(line):
                    self._recording.note(metrics_line(line))
        if any(isinstance(action, Record) for action in actions):
            self._send_rosters()

    def _send_rosters(self) -> None:
        """Send changed rosters. Nearly all changes of a roster are events; the rest can wait for the next update."""
        self._pools.send_rosters()
        if self.coordinator.over:
            self._write_journal()
            self._over.set()

    def _write_journal(self) -> None:
        self._recording.write_journal(self.coordinator)

    def _event(self, event: events.Event) -> None:
        self._recording.event(event)

    # --- connections ---------------------------------------------------------------------------------------

    @web.middleware
    async def _handle_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if reason := self.tickets.forbids(shown(request), request.path):
            return refusal(reason, 403)
        try:
            return await handler(request)
        except UsageError as error:
            return refusal(str(error))
        except web.RequestPayloadError as error:  # a body that does not match its headers
            self._peers.malformed(f"{request.method} {request.path}", str(error))
            raise web.HTTPBadRequest from None
        except (web.HTTPException, ConnectionError, asyncio.CancelledError):
            raise
        except BaseException as error:
            if request.path in READING and isinstance(error, Exception):
                return internal_error(f"{request.method} {request.path}", error, self._peers)
            self._broken = error
            self._over.set()
            raise

    async def _control(self, request: web.Request) -> web.StreamResponse:
        source = request.remote or ""
        connection = await open_connection(
            request, lambda: self._peers.on_rejected(source, "sends too much: slowed down")
        )
        self._connections.add(connection)
        try:
            await self._run_session(connection, source)
        finally:
            await connection.finish()
            self._connections.discard(connection)
        return connection.response

    async def _run_session(self, connection: Connection, source: str) -> None:
        """Serve a connection from Hello to its end. A protocol error is recorded and closes the connection."""
        peer = "a connection without Hello"
        try:
            data = await connection.receive(HELLO_S)
            hello = messages.decode_from_worker(data) if data is not None else None
            if not isinstance(hello, messages.Hello):
                raise ValueError(f"the first message must be Hello, not {type(hello).__name__}")
            peer = f"{hello.kind} {hello.worker or hello.pool}".strip()
            if reason := hello_refusal(self.tickets, self.coordinator, connection.ticket, hello):
                self._peers.on_rejected(source, reason)
                connection.send(messages.encode(messages.JoinRefused(reason=reason)))
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
                raise ValueError(
                    f"unknown kind {hello.kind!r}; it must be worker, pool, observer, host_agent or agent_pool"
                )
        except (ValueError, msgspec.MsgspecError, ProtocolError, asyncio.TimeoutError) as error:
            self._peers.malformed(peer, str(error) or f"nothing within {HELLO_S:g} s")
            connection.close()

    def reread_tickets(self) -> None:
        reread(self.tickets, self._event)
        self._write_journal()  # before the request is answered
        others = self._connections - set(self._workers.values())
        close_revoked(self.tickets, self.coordinator, self._workers, others, self.now())
        self.flush()

    async def _worker(self, connection: Connection, hello: messages.Hello) -> None:
        worker = self.coordinator.hello(hello, self.now())
        if previous := self._workers.get(worker):  # it reconnected before its old connection was seen to break
            previous.abort()
        self._workers[worker] = connection
        close_revoked(self.tickets, self.coordinator, {worker: connection}, (), self.now())
        self.flush()
        try:
            while (data := await connection.receive()) is not None:
                if self._workers.get(worker) is not connection:
                    continue  # it was removed, or has reconnected on another connection
                message = messages.decode_from_worker(data)
                self.coordinator.on_message(worker, message, self.now())
                self.flush()
        finally:
            if self._workers.get(worker) is connection:
                del self._workers[worker]
                self.coordinator.on_disconnect(worker, self.now())
                self.flush()
