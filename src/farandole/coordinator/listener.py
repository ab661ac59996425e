"""The coordinator's port for unauthenticated peers: which connections count as such, how many are kept, and how long.

An unauthenticated peer is a connection that has not shown the run's ticket: it may still owe its TLS handshake, its
request, or its proof. Invariant: there are at most `MAX_PEERS` of them, none for longer than `PEER_S`, and one more
closes the oldest. So a peer that holds the ticket, and shows it within milliseconds, is admitted beside a thousand
silent ones. Nothing that an unauthenticated peer sends reaches the HTTP library. It must prove that it has the ticket
(`control/security.py`); from that request on aiohttp serves its connection. Else it gets the same dismissal, whatever
it has sent. A peer that shows the scrape token gets one page, and stays unauthenticated (`prometheus.py`).

One connection is accepted in each turn of the event loop, and TLS and HTTP begin with a connection's first byte
(asyncio's TLS takes a quarter of a megabyte): a flood of silent connections does not delay the admitted ones. Events of
unauthenticated peers go to `on_rejected(source, reason)`, with a reason of ours and never the peer's text.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import re
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from farandole.control import security
from farandole.control.run_folder import TICKET
from farandole.control.security import Certificate, Examination
from farandole.control.ticket import load, new_secret
from farandole.errors import UsageError
from farandole.platform.files import opener
from farandole.protocol import events

# --- endpoint ---------------------------------------------------------------------------------------------------------
#
# The address, secret and certificate of a run.
#
# All of them survive the coordinator's process: a successor reads its own ticket, so that every issued ticket stays
# valid. Off loopback there is always a certificate; no option switches it off.


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """The address to bind and the run's secret. `port`: 0 for any; `certificate`: None on loopback."""

    host: str
    port: int
    secret: str
    certificate: security.Certificate | None

    @property
    def fingerprint(self) -> str:
        return self.certificate.fingerprint if self.certificate else ""


def endpoint(folder: Path, listen: str, *, is_restart: bool = False) -> Endpoint:
    """The endpoint of the run in `folder`, for `listen` as HOST[:PORT].

    With `is_restart`, a restarted coordinator takes secret and port from its own FOLDER/ticket; without, they are new.

    Raises:
        UsageError: `listen` is invalid, the ticket is missing or belongs to another user, or a certificate can't be
        made.
    """
    host, port = parse(listen)
    secret = new_secret()
    if is_restart:
        secret, port = load(str(folder / TICKET), opener).secret, port or port_of(folder)
    certificate = None if is_loopback(host) else security.certificate(folder)
    return Endpoint(host=host, port=port, secret=secret, certificate=certificate)


def port_of(folder: Path) -> int:
    """The port at which the run in `folder` was last served, 0 for none. Raises UsageError: its ticket is missing."""
    return urlsplit(load(str(folder / TICKET), opener).address).port or 0


def parse(listen: str) -> tuple[str, int]:
    """HOST[:PORT] as (host, port). An IPv6 address with a port is in brackets.

    Raises:
        UsageError: the text is neither.
    """
    try:
        return str(ipaddress.ip_address(listen)), 0
    except ValueError:
        pass
    try:
        url = urlsplit(f"//{listen}")
        if not url.hostname or url.netloc != listen or "@" in listen:
            raise ValueError("no host")
        return url.hostname, url.port or 0
    except ValueError as error:
        raise UsageError(
            f"--listen {listen}: {error}; give HOST or HOST:PORT, as 10.0.0.5, node1:4000 or [fd00::5]:4000"
        ) from None


def is_loopback(host: str) -> bool:
    """Returns True for a loopback address or "localhost". Other names are not: their address may change."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def advertised(host: str) -> str:
    """The address for tickets: for "every interface", the address of this machine's default route."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.is_unspecified:
        address = ipaddress.ip_address(_default_route_address(address.version))
    return f"[{address}]" if address.version == 6 else str(address)


def _default_route_address(version: int) -> str:
    """The own address of a connected datagram socket; nothing is sent. The targets are documentation addresses."""
    family, target = (socket.AF_INET, "192.0.2.1") if version == 4 else (socket.AF_INET6, "2001:db8::1")
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError as error:
            raise UsageError(
                f"--listen: this machine has no default route ({error.strerror}), so which of its addresses others can "
                f"reach is unknown; name one"
            ) from None
        return probe.getsockname()[0]


# --- binding ----------------------------------------------------------------------------------------------------------
#
# The listening socket of a run: `farandole run` binds it once, and one coordinator after another inherits it.
#
# Invariant: while `farandole run` lives and its run is not over, the port is never free, so no other program can answer
# at the address in the tickets. While no coordinator lives, connections wait in the kernel's queue, and the next one
# answers them. Unauthenticated peers that fill the queue are handled as soon as there is a coordinator; a peer that
# finds the queue full tries again. A coordinator that is started by hand binds for itself.

BACKLOG = 1024


def bind(host: str, port: int) -> socket.socket:
    """Listen at the address, at any free port if `port` is 0.

    Raises:
        UsageError: it is not possible to listen at that address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise UsageError(f"--listen {host}:{port}: {error.strerror}; choose another address or port") from None
    bound = listener.getsockname()[0]
    if is_loopback(bound) and not is_loopback(host):
        listener.close()
        raise UsageError(f"--listen {host}: that is {bound} on this machine, which no other machine can reach")
    return listener


# --- request head -----------------------------------------------------------------------------------------------------
#
# The allowed bytes of an unauthenticated peer: the head of one HTTP/1.1 request, of which one header is read.
#
# The HTTP library does not parse unauthenticated peers: until a connection is admitted, its bytes come here, and the
# answer is always one of two (`CHALLENGE`, `DISMISSAL`). So no header, method, encoding or upgrade causes another
# answer, and nothing reveals which server this is.

LONGEST = 8 * 1024  # bytes of a head
LINE = re.compile(rb"[A-Z]{1,16} [!-~]+ HTTP/1\.1")
HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n\0]*?)[ \t]*")
END = b"\r\n\r\n"
CHALLENGE = "HTTP/1.1 401 Unauthorized\r\nWWW-Authenticate: {}\r\nContent-Length: 0\r\n\r\n"
DISMISSAL = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def read_target(data: bytes) -> str:
    """The method and path of the request in `data`, as "GET /metrics". `read_authorization` must have accepted it."""
    return data.partition(b" HTTP/")[0].decode("latin-1")


def read_authorization(data: bytes) -> str | None:
    """The Authorization header of the request head in `data`, "" without one; None while the head is incomplete.

    Raises:
        ValueError: `data` is not the head of a request.
    """
    if not b"A" <= data[:1] <= b"Z":
        raise ValueError("not the start of a request")
    head, end, _ = data.partition(END)
    if len(head) > LONGEST:
        raise ValueError(f"a head of more than {LONGEST} bytes")
    if not end:
        return None
    line, *headers = head.split(b"\r\n")
    if not LINE.fullmatch(line):
        raise ValueError("not a request line")
    values: list[bytes] = []
    for header in headers:
        match = HEADER.fullmatch(header)
        if match is None:
            raise ValueError("not a header")
        if match[1].lower() == b"authorization":
            values.append(match[2])
    return b", ".join(values).decode("latin-1")


# --- listener ---------------------------------------------------------------------------------------------------------

MAX_PEERS = 128
PEER_S = 5.0
KEEP_ALIVE_S = 10.0  # idle time of an authenticated connection between two requests
LINGER_S = 1.0  # time for the rest of an unread body, and for the last messages at the end
PAGE_S = 10.0  # time to receive a page
FULL_S = 0.05  # delay before accepting again when the process is out of file descriptors
NO_TICKET = "no ticket"
WRONG_TICKET = "a wrong ticket"
NOT_TLS = "no TLS handshake"
NOT_HTTP = "not an HTTP request"
SILENT = f"showed no ticket within {PEER_S:g} s"
CROWDED = f"more than {MAX_PEERS} at once without a ticket: the oldest is closed"


def no_page(authorization: str, target: str) -> bytes:
    """The page for unauthenticated peers: none."""
    del authorization, target
    return b""


class Listener:
    """Accepts connections. Call `open`; at the end `close`, then `clean_up`.

    `known`: the secrets by the ids of their tickets. `page`: the answer to an Authorization and a request of an
    unauthenticated peer, b"" for the dismissal. `on_rejected`: called with the source and the reason.
    """

    def __init__(
        self,
        app: web.Application,
        certificate: Certificate | None,
        strange: Callable[[str, str], None],
        secrets_by_id: Mapping[str, str],
        page: Callable[[str, str], bytes] = no_page,
    ) -> None:
        self.on_rejected = strange
        self.secrets_by_id = secrets_by_id
        self.page = page
        self.server: web.Server
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=LINGER_S)
        self._tls = certificate.context if certificate else None
        self._peers: dict[UnauthenticatedPeer, asyncio.TimerHandle] = {}  # the oldest first
        self._accepting: asyncio.Task[None] | None = None
        self._socket: socket.socket | None = None

    async def open(self, host: str, port: int, bound: socket.socket | None = None) -> str:
        """Serve at `bound`, or listen. Returns "http://host:port", or "https:" with a certificate.

        Raises:
            UsageError: `host` is not a loopback address and there is no certificate, or it can't be listened at.
        """
        if self._tls is None and not is_loopback(host):
            raise UsageError(f"coordinator on {host}: off loopback the control traffic needs TLS, and so a certificate")
        await self._runner.setup()
        assert self._runner.server is not None
        self.server = self._runner.server
        self._socket = bound = bound or bind(host, port)
        bound.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(bound))
        return f"{'https' if self._tls else 'http'}://{advertised(host)}:{bound.getsockname()[1]}"

    def forget(self, peer: UnauthenticatedPeer) -> None:
        if timer := self._peers.pop(peer, None):
            timer.cancel()

    def close(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
        if self._socket is not None:
            self._socket.close()
        for peer in tuple(self._peers):
            self._send_away(peer)

    async def clean_up(self) -> None:
        """Close the authenticated connections."""
        await self._runner.cleanup()

    async def _accept(self, bound: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(bound)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._make_room(0)
                    await asyncio.sleep(FULL_S)
                continue
            self._make_room(MAX_PEERS - 1)
            peer = UnauthenticatedPeer(str(address[0]), accepted)
            self._peers[peer] = loop.call_later(PEER_S, self._expire, peer)
            peer.connecting = asyncio.create_task(self._connect(peer))
            await asyncio.sleep(0)  # sock_accept comes back without waiting while connections are pending

    async def _connect(self, peer: UnauthenticatedPeer) -> None:
        loop = asyncio.get_running_loop()
        limit = PEER_S if self._tls else None
        try:
            await _first_byte(peer.socket)
            connection = peer.connection = HttpConnection(self, peer)
            await loop.connect_accepted_socket(
                lambda: connection, peer.socket, ssl=self._tls, ssl_handshake_timeout=limit
            )
        except (OSError, asyncio.TimeoutError):
            if peer in self._peers:  # else its time was up, and that was reported
                self.forget(peer)
                self.on_rejected(peer.source, NOT_TLS)
            peer.socket.close()
        except asyncio.CancelledError:
            peer.socket.close()
            raise

    def _make_room(self, limit: int) -> None:
        while len(self._peers) > limit:
            oldest = next(iter(self._peers))
            self.on_rejected(oldest.source, CROWDED)
            self._send_away(oldest)

    def _expire(self, peer: UnauthenticatedPeer) -> None:
        self.on_rejected(peer.source, SILENT)
        self._send_away(peer)

    def _send_away(self, peer: UnauthenticatedPeer) -> None:
        self.forget(peer)
        if peer.connecting is not None:
            peer.connecting.cancel()  # before its first byte, or in the middle of its handshake
        if peer.connection is not None and peer.connection.transport is not None:
            peer.connection.transport.abort()


async def _first_byte(arrived: socket.socket) -> None:
    """Return once there is something to read, possibly the end."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(arrived, lambda: readable.done() or readable.set_result(None))
    try:
        await readable
    finally:
        loop.remove_reader(arrived)


class UnauthenticatedPeer:
    """A connection that has not shown the ticket. `connection`: its HTTP connection, from its first byte."""

    def __init__(self, source: str, arrived: socket.socket) -> None:
        self.source = source
        self.socket = arrived
        self.connecting: asyncio.Task[None] | None = None
        self.connection: HttpConnection | None = None


def shown(request: web.Request) -> str:
    """The id of the ticket that this request's connection has shown."""
    connection = request.protocol
    assert isinstance(connection, HttpConnection)
    return connection.ticket


class HttpConnection(web.RequestHandler):
    """The HTTP side of one connection, from its first byte: aiohttp's handler, which also reports its end."""

    def __init__(self, listener: Listener, peer: UnauthenticatedPeer) -> None:
        super().__init__(
            listener.server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # pyright: ignore[reportArgumentType]  aiohttp itself hands in None
            keepalive_timeout=KEEP_ALIVE_S,
            lingering_time=LINGER_S,
            auto_decompress=False,  # no client sends compressed bodies: no bombs, and no errors of a decoder
        )
        self.listener = listener
        self.peer = peer
        self.ticket = ""  # the id of the ticket that it has shown
        self._received = b""
        self._gives_up: asyncio.TimerHandle | None = None  # on one that does not take its page
        self._examination = Examination(listener.secrets_by_id)

    def data_received(self, data: bytes) -> None:
        if not self.ticket:
            data = self._examine(data)
        if data:
            super().data_received(data)

    def _examine(self, data: bytes) -> bytes:
        """Process bytes of an unauthenticated peer. Returns the bytes for the HTTP library: none until it is
        admitted.
        """
        self._received += data
        try:
            authorization = read_authorization(self._received)
        except ValueError:
            return self._dismiss(NOT_HTTP)
        if authorization is None:
            return b""
        if page := self.listener.page(authorization, read_target(self._received)):
            return self._show(page)
        if challenge := self._examination.challenge(authorization):
            self._received = self._received.partition(END)[2]
            self._write(CHALLENGE.format(challenge).encode())
            return self._examine(b"") if self._received else b""
        self.ticket = self._examination.passed(authorization)
        if not self.ticket:
            return self._dismiss(WRONG_TICKET if authorization else NO_TICKET)
        self.listener.forget(self.peer)
        received, self._received = self._received, b""
        return received

    def _dismiss(self, reason: str) -> bytes:
        """Send the same answer to every peer: what serves here is not revealed."""
        self.listener.on_rejected(self.peer.source, reason)
        self._received = b""
        self._write(DISMISSAL)
        self.force_close()
        return b""

    def _show(self, page: bytes) -> bytes:
        """Send a page to a peer that may see it and no more, and close the connection within `PAGE_S`."""
        self.listener.forget(self.peer)
        self._received = b""
        self._write(page)
        if self.transport is not None:
            self._gives_up = asyncio.get_running_loop().call_later(PAGE_S, self.transport.abort)
        self.force_close()
        return b""

    def _write(self, data: bytes) -> None:
        if self.transport is not None:
            self.transport.write(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.listener.forget(self.peer)
        if self._gives_up is not None:
            self._gives_up.cancel()
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to invalid HTTP of an authenticated peer."""
        if status != 400:
            return super().handle_error(request, status, exc, message)
        self.listener.on_rejected(self.peer.source, NOT_HTTP)
        response = web.Response(status=400, text="not a request\n")
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Errors of our own are logged with their traceback. Errors that others can cause are not: that fills the
        disk.
        """
        error = kw.get("exc_info")
        if isinstance(error, web.RequestPayloadError):
            self.listener.on_rejected(self.peer.source, NOT_HTTP)
        elif not isinstance(error, ConnectionError):
            super().log_exception(*args, **kw)


# --- limits -----------------------------------------------------------------------------------------------------------
#
# Limits on what a peer may send, and on how many events are recorded: arithmetic on times, without a clock.
#
# `TokenBucket` slows a connection down and never closes it, so no limit can cost an honest worker its connection.
# `EventLimiter` keeps unauthenticated peers from filling the disk: of each kind of event the first few of a minute are
# recorded, the rest are counted. Invariant: the admitted events plus the returned counts are all events.

LINES = 5  # of one kind in one window
WINDOW_S = 60.0


class TokenBucket:
    """A token bucket: `burst` units at once, `rate` units a second.

    For comparison: a worker sends two heartbeats a second, and connecting a group of n takes n keys from each member,
    all at once.
    """

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._level = burst
        self._at: float | None = None

    def take(self, cost: float, now: float) -> float:
        """Take `cost` units. Returns the seconds to wait before going on, 0.0 for none."""
        elapsed = now - self._at if self._at is not None else 0.0
        self._at = now
        self._level = min(self._burst, self._level + elapsed * self._rate) - cost
        return max(0.0, -self._level / self._rate)


class EventLimiter:
    """Admits at most `LINES` events of a kind in each window of `WINDOW_S`. Kinds are ours, never a peer's text."""

    def __init__(self) -> None:
        self._began = 0.0
        self._counts: Counter[str] = Counter()

    def admit(self, kind: str) -> bool:
        """Count an event. Returns True if it must be recorded."""
        self._counts[kind] += 1
        return self._counts[kind] <= LINES

    def take_unrecorded(self, now: float) -> dict[str, int]:
        """At a window's end, the number of events of each kind that were not recorded; else empty."""
        if now - self._began < WINDOW_S:
            return {}
        more = {kind: count - LINES for kind, count in self._counts.items() if count > LINES}
        self._began = now
        self._counts.clear()
        return more


# --- unauthenticated peers --------------------------------------------------------------------------------------------
#
# Records the events of unauthenticated peers and broken workers, and answers that failed: of each kind a few events a
# minute, then their number.

REASON = 200  # characters of the reason: it may quote the peer's message


class UnauthenticatedPeers:
    """`record` writes an event to the journal."""

    def __init__(self, record: Callable[[events.Event], None]) -> None:
        self._record = record
        self._limiter = EventLimiter()

    def on_rejected(self, source: str, reason: str) -> None:
        """A peer at `source` was rejected; `reason` is one of a few of ours."""
        if self._limiter.admit(reason):
            self._record(events.StrangerEvent(source=source, reason=reason))

    def malformed(self, source: str, reason: str) -> None:
        """A message of `source` breaks the protocol."""
        if self._limiter.admit("malformed"):
            self._record(events.MalformedEvent(source=source, reason=reason[:REASON]))

    def report_error(self, sentence: str) -> bool:
        """A request could not be answered. Returns True if this was recorded."""
        recorded = self._limiter.admit(sentence)
        if recorded:
            self._record(events.NotToldEvent(reason=sentence))
        return recorded

    def count(self, now: float) -> None:
        """Record the number of further events at a window's end; at once if `now` is infinite."""
        for reason, more in self._limiter.take_unrecorded(now).items():
            self._record(events.StrangersEvent(reason=reason, more=more))
