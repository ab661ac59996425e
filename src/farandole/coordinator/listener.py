"""The coordinator's port as a stranger meets it: who is a stranger, how many there may be, and for how long.

A stranger is a connection that has not shown the run's ticket: it may still owe its TLS handshake, its request, or its
proof. Invariant: there are at most `STRANGERS` of them, none for longer than `STRANGER_S`, and one more makes the
oldest go, so that whoever holds the ticket, and shows it within milliseconds, gets in beside a thousand who say
nothing. Nothing that a stranger sends reaches the HTTP library: it is asked to prove itself (`challenge.py`) and, once
it has, its connection is aiohttp's from that request on; else it gets the one dismissal, whatever it has sent. Who
shows the scrape token gets one page, and stays a stranger (`scraping.py`).

Connections are accepted one a turn of the event loop, and TLS and HTTP begin with a connection's first byte (asyncio's
TLS takes a quarter of a megabyte): a flood of silent ones does not hold up those who are in. What strangers do is told
to `strange(source, reason)`, with a reason of ours and never their words.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

from farandole.control.security import Certificate, Examination
from farandole.coordinator import request_head
from farandole.coordinator.binding import bind
from farandole.coordinator.endpoint import advertised, is_loopback
from farandole.errors import UsageError

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
        self._strangers: dict[Stranger, asyncio.TimerHandle] = {}  # the oldest first
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

    def forget(self, stranger: Stranger) -> None:
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
            stranger = Stranger(str(address[0]), arrived)
            self._strangers[stranger] = loop.call_later(STRANGER_S, self._expire, stranger)
            stranger.connecting = asyncio.create_task(self._connect(stranger))
            await asyncio.sleep(0)  # sock_accept comes back without waiting while connections are pending

    async def _connect(self, stranger: Stranger) -> None:
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

    def _expire(self, stranger: Stranger) -> None:
        self.strange(stranger.source, SILENT)
        self._send_away(stranger)

    def _send_away(self, stranger: Stranger) -> None:
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


class Stranger:
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

    def __init__(self, listener: Listener, stranger: Stranger) -> None:
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
            given = request_head.authorization(self._heard)
        except ValueError:
            return self._dismiss(NOT_HTTP)
        if given is None:
            return b""
        if page := self.listener.page(given, request_head.target(self._heard)):
            return self._show(page)
        if challenge := self._examination.challenge(given):
            self._heard = self._heard.partition(request_head.END)[2]
            self._write(request_head.CHALLENGE.format(challenge).encode())
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
        self._write(request_head.DISMISSAL)
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
