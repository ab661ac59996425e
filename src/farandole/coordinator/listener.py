"""The coordinator's port as a stranger meets it: who is a stranger, how many there may be, and for how long.

A stranger is a connection that has not shown the run's ticket: it may still owe its TLS handshake, its request, or its
proof. Invariant: there are at most `STRANGERS` of them, none for longer than `STRANGER_S`, and one more makes the
oldest go, so that whoever holds the ticket, and shows it within milliseconds, gets in beside a thousand who say
nothing. Nothing that a stranger sends reaches the HTTP library: it is asked to prove itself (`control/security.py`)
and, once it has, its connection is aiohttp's from that request on; else it gets the one dismissal, whatever it has
sent. Who shows the scrape token gets one page, and stays a stranger (`prometheus.py`).

Connections are accepted one a turn of the event loop, and TLS and HTTP begin with a connection's first byte (asyncio's
TLS takes a quarter of a megabyte): a flood of silent ones does not hold up those who are in. What strangers do is told
to `strange(source, reason)`, with a reason of ours and never their words.
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
# Where a run is reached and what it is known by: address, secret, certificate.
#
# All of it survives the coordinator's process: who comes back reads its own ticket, so that every ticket handed out
# stays good. Off loopback there is always a certificate; nothing switches it off.


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """`host` and `port` to bind, 0 for any port; `certificate` is None on loopback."""

    host: str
    port: int
    secret: str
    certificate: security.Certificate | None

    @property
    def fingerprint(self) -> str:
        return self.certificate.fingerprint if self.certificate else ""


def endpoint(folder: Path, listen: str, *, again: bool = False) -> Endpoint:
    """Of the run in `folder`, told to `listen` at HOST[:PORT]. Who comes `again` takes secret and port from its own
    FOLDER/ticket; who begins replaces whatever is there.

    Raises:
        UsageError: `listen` can't be read, the ticket is not there or another's, or there is no certificate to be had.
    """
    host, port = parse(listen)
    secret = new_secret()
    if again:
        secret, port = load(str(folder / TICKET), opener).secret, port or port_of(folder)
    certificate = None if is_loopback(host) else security.certificate(folder)
    return Endpoint(host=host, port=port, secret=secret, certificate=certificate)


def port_of(folder: Path) -> int:
    """At which the run in `folder` was served last, 0 for none. Raises UsageError: its ticket is not there."""
    return urlsplit(load(str(folder / TICKET), opener).address).port or 0


def parse(listen: str) -> tuple[str, int]:
    """HOST[:PORT] as (host, port); an IPv6 address with a port stands in brackets.

    Raises:
        UsageError: it is none.
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
    """Names other than localhost count as not: they may mean anything tomorrow."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def advertised(host: str) -> str:
    """What others are told: for "every interface", the address that this machine's way out has."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.is_unspecified:
        address = ipaddress.ip_address(_way_out(address.version))
    return f"[{address}]" if address.version == 6 else str(address)


def _way_out(version: int) -> str:
    """A connected datagram socket has chosen its route; nothing is sent. The targets are documentation addresses."""
    family, target = (socket.AF_INET, "192.0.2.1") if version == 4 else (socket.AF_INET6, "2001:db8::1")
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError as error:
            raise UsageError(
                f"--listen: this machine has no way out ({error.strerror}), so which of its addresses others can "
                f"reach is unknown; name one"
            ) from None
        return probe.getsockname()[0]


# --- binding ----------------------------------------------------------------------------------------------------------
#
# The socket at which a run listens: bound once, by `farandole run`, and inherited by one coordinator after the other.
#
# Invariant: while `farandole run` lives and its run is not over, the port is never free, so nobody else can answer at
# the address that is in the tickets. While no coordinator lives, who connects waits in the kernel's queue, and is
# answered by the next one. Strangers that fill the queue are dealt with like any others as soon as there is one
# (`listener.py`); who finds it full tries again. A coordinator that somebody starts by hand binds for itself.

BACKLOG = 1024


def bind(host: str, port: int) -> socket.socket:
    """Listen there, at any port if that is 0.

    Raises:
        UsageError: that address can't be listened at.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise UsageError(f"--listen {host}:{port}: {error.strerror}; choose another address or port") from None
    bound = listener.getsockname()[0]
    if is_loopback(bound) and not is_loopback(host):
        listener.close()
        raise UsageError(f"--listen {host}: that is {bound} on this machine, which no other one can reach")
    return listener


# --- request head -----------------------------------------------------------------------------------------------------
#
# What a stranger's bytes may be: the head of one HTTP/1.1 request, of which one header is looked at.
#
# Strangers are not parsed by the HTTP library: until a connection is admitted its bytes come here, and whatever they
# are, the answer is one of two (`CHALLENGE`, `DISMISSAL`). So no header, method, encoding or upgrade makes anybody
# else answer, and nothing says what serves here.

LONGEST = 8 * 1024  # bytes of a head
LINE = re.compile(rb"[A-Z]{1,16} [!-~]+ HTTP/1\.1")
HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n\0]*?)[ \t]*")
END = b"\r\n\r\n"
CHALLENGE = "HTTP/1.1 401 Unauthorized\r\nWWW-Authenticate: {}\r\nContent-Length: 0\r\n\r\n"
DISMISSAL = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def read_target(data: bytes) -> str:
    """The method and the path that `data` asks for, "GET /metrics", where it is a head that `authorization` takes."""
    return data.partition(b" HTTP/")[0].decode("latin-1")


def read_authorization(data: bytes) -> str | None:
    """The Authorization header of the head that `data` begins with, "" without one; None while it is not all there.

    Raises:
        ValueError: it is not the head of a request.
    """
    if not b"A" <= data[:1] <= b"Z":
        raise ValueError("no request begins like this")
    head, end, _ = data.partition(END)
    if len(head) > LONGEST:
        raise ValueError(f"a head of more than {LONGEST} bytes")
    if not end:
        return None
    line, *headers = head.split(b"\r\n")
    if not LINE.fullmatch(line):
        raise ValueError("not a request line")
    found: list[bytes] = []
    for header in headers:
        match = HEADER.fullmatch(header)
        if match is None:
            raise ValueError("not a header")
        if match[1].lower() == b"authorization":
            found.append(match[2])
    return b", ".join(found).decode("latin-1")


# --- listener ---------------------------------------------------------------------------------------------------------

STRANGERS = 128
STRANGER_S = 5.0
KEEP_ALIVE_S = 10.0  # of a connection that has shown the ticket, between two requests
LINGER_S = 1.0  # for the rest of a body that nobody wants, and for goodbyes in the end
PAGE_S = 10.0  # for a page to be taken
FULL_S = 0.05  # before accepting again when the process is out of file descriptors
NO_TICKET = "no ticket"
WRONG_TICKET = "a wrong ticket"
NOT_TLS = "no TLS handshake"
NOT_HTTP = "not an HTTP request"
SILENT = f"showed no ticket within {STRANGER_S:g} s"
CROWDED = f"more than {STRANGERS} at once without a ticket: the oldest is closed"


def no_page(authorization: str, target: str) -> bytes:
    """What strangers may see."""
    del authorization, target
    return b""


class Listener:
    """`open` it; `close` it in the end, and then `clean_up`. `known` has the secrets by their tickets' ids. `page` is
    the answer to a stranger's Authorization and request, where it gets another one than the dismissal.
    """

    def __init__(
        self,
        app: web.Application,
        certificate: Certificate | None,
        strange: Callable[[str, str], None],
        known: Mapping[str, str],
        page: Callable[[str, str], bytes] = no_page,
    ) -> None:
        self.strange = strange
        self.known = known
        self.page = page
        self.server: web.Server
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=LINGER_S)
        self._tls = certificate.context if certificate else None
        self._strangers: dict[UnauthenticatedPeer, asyncio.TimerHandle] = {}  # the oldest first
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

    def forget(self, stranger: UnauthenticatedPeer) -> None:
        if timer := self._strangers.pop(stranger, None):
            timer.cancel()

    def close(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
        if self._socket is not None:
            self._socket.close()
        for stranger in tuple(self._strangers):
            self._send_away(stranger)

    async def clean_up(self) -> None:
        """The connections of those who had shown a ticket."""
        await self._runner.cleanup()

    async def _accept(self, bound: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                arrived, address = await loop.sock_accept(bound)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._make_room(0)
                    await asyncio.sleep(FULL_S)
                continue
            self._make_room(STRANGERS - 1)
            stranger = UnauthenticatedPeer(str(address[0]), arrived)
            self._strangers[stranger] = loop.call_later(STRANGER_S, self._expire, stranger)
            stranger.connecting = asyncio.create_task(self._connect(stranger))
            await asyncio.sleep(0)  # sock_accept comes back without waiting while connections are pending

    async def _connect(self, stranger: UnauthenticatedPeer) -> None:
        loop = asyncio.get_running_loop()
        limit = STRANGER_S if self._tls else None
        try:
            await _first_byte(stranger.socket)
            guest = stranger.guest = Guest(self, stranger)
            await loop.connect_accepted_socket(
                lambda: guest, stranger.socket, ssl=self._tls, ssl_handshake_timeout=limit
            )
        except (OSError, asyncio.TimeoutError):
            if stranger in self._strangers:  # else its time was up, and that is told
                self.forget(stranger)
                self.strange(stranger.source, NOT_TLS)
            stranger.socket.close()
        except asyncio.CancelledError:
            stranger.socket.close()
            raise

    def _make_room(self, limit: int) -> None:
        while len(self._strangers) > limit:
            oldest = next(iter(self._strangers))
            self.strange(oldest.source, CROWDED)
            self._send_away(oldest)

    def _expire(self, stranger: UnauthenticatedPeer) -> None:
        self.strange(stranger.source, SILENT)
        self._send_away(stranger)

    def _send_away(self, stranger: UnauthenticatedPeer) -> None:
        self.forget(stranger)
        if stranger.connecting is not None:
            stranger.connecting.cancel()  # before its first byte, or in the middle of its handshake
        if stranger.guest is not None and stranger.guest.transport is not None:
            stranger.guest.transport.abort()


async def _first_byte(arrived: socket.socket) -> None:
    """Return once there is something to read, be it the end."""
    loop = asyncio.get_running_loop()
    there: asyncio.Future[None] = loop.create_future()
    loop.add_reader(arrived, lambda: there.done() or there.set_result(None))
    try:
        await there
    finally:
        loop.remove_reader(arrived)


class UnauthenticatedPeer:
    """A connection that has not shown the ticket. `guest` is its HTTP, once it has said anything."""

    def __init__(self, source: str, arrived: socket.socket) -> None:
        self.source = source
        self.socket = arrived
        self.connecting: asyncio.Task[None] | None = None
        self.guest: Guest | None = None


def shown(request: web.Request) -> str:
    """The id of the ticket that this request's connection has shown."""
    guest = request.protocol
    assert isinstance(guest, Guest)
    return guest.ticket


class Guest(web.RequestHandler):
    """One connection's HTTP, from its first byte; aiohttp's own, which also tells the listener about its end."""

    def __init__(self, listener: Listener, stranger: UnauthenticatedPeer) -> None:
        super().__init__(
            listener.server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # pyright: ignore[reportArgumentType]  aiohttp itself hands in None
            keepalive_timeout=KEEP_ALIVE_S,
            lingering_time=LINGER_S,
            auto_decompress=False,  # nobody sends compressed bodies: no bombs, and no decoder's errors
        )
        self.listener = listener
        self.stranger = stranger
        self.ticket = ""  # the id of the one that it has shown
        self._heard = b""
        self._examination = Examination(listener.known)

    def data_received(self, data: bytes) -> None:
        if not self.ticket:
            data = self._examine(data)
        if data:
            super().data_received(data)

    def _examine(self, data: bytes) -> bytes:
        """What a stranger sends. Returns what the HTTP library is to have: nothing until the connection is admitted."""
        self._heard += data
        try:
            given = read_authorization(self._heard)
        except ValueError:
            return self._dismiss(NOT_HTTP)
        if given is None:
            return b""
        if page := self.listener.page(given, read_target(self._heard)):
            return self._show(page)
        if challenge := self._examination.challenge(given):
            self._heard = self._heard.partition(END)[2]
            self._write(CHALLENGE.format(challenge).encode())
            return self._examine(b"") if self._heard else b""
        self.ticket = self._examination.passed(given)
        if not self.ticket:
            return self._dismiss(WRONG_TICKET if given else NO_TICKET)
        self.listener.forget(self.stranger)
        heard, self._heard = self._heard, b""
        return heard

    def _dismiss(self, reason: str) -> bytes:
        """The same answer to everyone: what serves here is not a stranger's business."""
        self.listener.strange(self.stranger.source, reason)
        self._heard = b""
        self._write(DISMISSAL)
        self.force_close()
        return b""

    def _show(self, page: bytes) -> bytes:
        """To who may see that and no more; for as long as it takes, within limits."""
        self.listener.forget(self.stranger)
        self._heard = b""
        self._write(page)
        if self.transport is not None:
            asyncio.get_running_loop().call_later(PAGE_S, self.transport.abort)
        self.force_close()
        return b""

    def _write(self, data: bytes) -> None:
        if self.transport is not None:
            self.transport.write(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.listener.forget(self.stranger)
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what is no request at all, by somebody who has shown the ticket."""
        if status != 400:
            return super().handle_error(request, status, exc, message)
        self.listener.strange(self.stranger.source, NOT_HTTP)
        response = web.Response(status=400, text="not a request\n")
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Errors of our own keep their traceback. Those that others can cause get none: it would fill the disk."""
        error = kw.get("exc_info")
        if isinstance(error, web.RequestPayloadError):
            self.listener.strange(self.stranger.source, NOT_HTTP)
        elif not isinstance(error, ConnectionError):
            super().log_exception(*args, **kw)


# --- limits -----------------------------------------------------------------------------------------------------------
#
# How much anyone may send, and how much of it is written down: arithmetic on times, no clock of its own.
#
# `Bucket` slows a connection down; it never closes one, so no limit can cost an honest worker its place. `Sparing`
# keeps strangers from filling the disk: of each kind of event the first few of a minute are written, the rest are
# counted. Invariant: the lines that it lets through, plus the counts that it hands out, are all that happened.

LINES = 5  # of one kind in one window
WINDOW_S = 60.0


class TokenBucket:
    """A token bucket: `burst` at once, `rate` a second for ever.

    A worker sends two heartbeats a second; a group of n is connected by n keys from each member, all at once.
    """

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._level = burst
        self._at: float | None = None

    def take(self, cost: float, now: float) -> float:
        """Seconds to wait before going on, 0.0 for none."""
        elapsed = now - self._at if self._at is not None else 0.0
        self._at = now
        self._level = min(self._burst, self._level + elapsed * self._rate) - cost
        return max(0.0, -self._level / self._rate)


class Sparing:
    """At most `LINES` events of a kind in each window of `WINDOW_S`. Kinds are ours, never a stranger's words."""

    def __init__(self) -> None:
        self._began = 0.0
        self._seen: Counter[str] = Counter()

    def admit(self, kind: str) -> bool:
        """Whether this event is to be written down."""
        self._seen[kind] += 1
        return self._seen[kind] <= LINES

    def due(self, now: float) -> dict[str, int]:
        """At a window's end, how many of each kind were not written down; else nothing."""
        if now - self._began < WINDOW_S:
            return {}
        more = {kind: count - LINES for kind, count in self._seen.items() if count > LINES}
        self._began = now
        self._seen.clear()
        return more


# --- strangers --------------------------------------------------------------------------------------------------------
#
# What strangers and broken workers do, and what we can't tell, recorded sparingly: of each kind a few events a minute,
# then their number.

REASON = 200  # characters of what is wrong with a message: it may quote the message


class UnauthenticatedPeers:
    """`record` writes an event down."""

    def __init__(self, record: Callable[[events.Event], None]) -> None:
        self._record = record
        self._sparing = Sparing()

    def strange(self, source: str, reason: str) -> None:
        """Somebody at `source` is not let in, or not heard; `reason` is one of a few of ours."""
        if self._sparing.admit(reason):
            self._record(events.StrangerEvent(source=source, reason=reason))

    def malformed(self, source: str, reason: str) -> None:
        """What `source` has sent breaks the protocol."""
        if self._sparing.admit("malformed"):
            self._record(events.MalformedEvent(source=source, reason=reason[:REASON]))

    def untold(self, sentence: str) -> bool:
        """Somebody asked for what could not be told. Returns whether it was recorded."""
        recorded = self._sparing.admit(sentence)
        if recorded:
            self._record(events.NotToldEvent(reason=sentence))
        return recorded

    def count(self, now: float) -> None:
        """At a window's end, and with `now` infinite at once: how many more there were."""
        for reason, more in self._sparing.due(now).items():
            self._record(events.StrangersEvent(reason=reason, more=more))
