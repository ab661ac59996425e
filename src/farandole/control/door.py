"""The coordinator's port as a stranger meets it: who is a stranger, how many there may be, and for how long.

A stranger is a connection that has not shown the run's ticket: it may still owe its TLS handshake, its request, or the
right secret. Invariant: there are at most `STRANGERS` of them, none for longer than `STRANGER_S`, and one more makes
the oldest go, so that whoever holds the ticket, and shows it within milliseconds, gets in beside a thousand who say
nothing. Connections are accepted one a turn of the event loop, and TLS and HTTP begin with a connection's first byte
(asyncio's TLS takes a quarter of a megabyte): a flood of silent ones does not hold up those who are in.

What strangers do is told to `strange(source, reason)`, with a reason of ours and never their words.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable
from typing import Any

from aiohttp import web

from farandole.control.endpoint import is_loopback
from farandole.errors import UsageError

STRANGERS = 128
STRANGER_S = 5.0
KEEP_ALIVE_S = 10.0  # of a connection that has shown the ticket, between two requests
LINGER_S = 1.0  # for the rest of a body that nobody wants
BACKLOG = 1024
FULL_S = 0.05  # before accepting again when the process is out of file descriptors

NOT_TLS = "no TLS handshake"
NOT_HTTP = "not an HTTP request"
SILENT = f"showed no ticket within {STRANGER_S:g} s"
CROWDED = f"more than {STRANGERS} at once without a ticket: the oldest is closed"


class Door:
    """`open` it with the application's server; `admit` whoever has shown the ticket; `close` it in the end."""

    def __init__(self, server: web.Server, tls: ssl.SSLContext | None, strange: Callable[[str, str], None]) -> None:
        self.server = server
        self.strange = strange
        self._tls = tls
        self._strangers: dict[Stranger, asyncio.TimerHandle] = {}  # the oldest first
        self._accepting: asyncio.Task[None] | None = None
        self._listener: socket.socket | None = None

    def open(self, host: str, port: int) -> int:
        """Listen; returns the port.

        Raises:
            UsageError: that address can't be listened at.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise UsageError(f"--listen {host}:{port}: {error.strerror}; choose another address or port") from None
        bound = self._listener.getsockname()
        if is_loopback(bound[0]) and not is_loopback(host):
            self._listener.close()
            raise UsageError(f"--listen {host}: that is {bound[0]} on this machine, which no other one can reach")
        self._listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(self._listener))
        return bound[1]

    def admit(self, guest: asyncio.BaseProtocol) -> None:
        """It has shown the ticket: it is no stranger any more."""
        assert isinstance(guest, Guest)
        self.forget(guest.stranger)

    def forget(self, stranger: Stranger) -> None:
        if timer := self._strangers.pop(stranger, None):
            timer.cancel()

    def close(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
        if self._listener is not None:
            self._listener.close()
        for stranger in tuple(self._strangers):
            self._send_away(stranger)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                arrived, address = await loop.sock_accept(listener)
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


def dismissal(status: int, text: str) -> web.Response:
    """A stranger's last answer: what serves here, and in which version, is not its business."""
    response = web.Response(status=status, text=f"{text}\n", headers={"Server": "farandole"})
    response.force_close()
    return response


class Guest(web.RequestHandler):
    """One connection's HTTP, from its first byte; aiohttp's own, which also tells the door about its end."""

    def __init__(self, door: Door, stranger: Stranger) -> None:
        super().__init__(
            door.server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # pyright: ignore[reportArgumentType]  aiohttp itself hands in None
            keepalive_timeout=KEEP_ALIVE_S,
            lingering_time=LINGER_S,
            auto_decompress=False,  # nobody sends compressed bodies: no bombs, and no decoder's errors
        )
        self.door = door
        self.stranger = stranger

    def connection_lost(self, exc: BaseException | None) -> None:
        self.door.forget(self.stranger)
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what is no request at all."""
        if status != 400:
            return super().handle_error(request, status, exc, message)
        self.door.strange(self.stranger.source, NOT_HTTP)
        return dismissal(400, "not a request")

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Errors of our own keep their traceback. Those that a stranger can cause get none: it would fill the disk."""
        error = kw.get("exc_info")
        if isinstance(error, web.RequestPayloadError):
            self.door.strange(self.stranger.source, NOT_HTTP)
        elif not isinstance(error, ConnectionError):
            super().log_exception(*args, **kw)
