"""The server's side of one peer's control connection: an ordered outgoing queue that never blocks the sender.

The coordinator queues messages and goes on; a task of the connection writes them. So a slow or frozen peer costs
memory, up to `LIMIT_BYTES`, and then its connection. A frozen peer never answers a close handshake either: the same
task closes the connection, and aborts it after `CLOSE_S`. A peer that sends more than `RATE` allows is read more
slowly, and the kernel makes it wait: none of its messages is dropped, and no other connection is slowed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from aiohttp import WSMsgType, web

from farandole.coordinator.listener import TokenBucket, shown
from farandole.protocol.messages import MAX_MESSAGE_BYTES

LIMIT_BYTES = 16 * 1024 * 1024  # queued here, beside what the kernel and the transport hold
CLOSE_S = 1.0
UNIT_BYTES = 4096  # a message costs one unit, and one more for each so many bytes
RATE = 500.0  # units a second
BURST = 4000.0


class Connection:
    """One connection. Create it with `await open_connection(request)`. `ticket`: the id of the ticket that was
    shown.
    """

    def __init__(
        self,
        socket: web.WebSocketResponse,
        transport: asyncio.Transport | None,
        slowed: Callable[[], None],
        ticket: str,
    ) -> None:
        self.ticket = ticket
        self._socket = socket
        self._bucket = TokenBucket(RATE, BURST)
        self._slowed: Callable[[], None] | None = slowed
        self._transport = transport
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._closing = False
        self._awake = asyncio.Event()
        self._writer = asyncio.create_task(self._write())

    @property
    def response(self) -> web.StreamResponse:
        return self._socket

    def send(self, data: bytes) -> None:
        """Queue one frame. It is dropped after `close`, or if the peer is gone."""
        if self._closing:
            return
        self._queue.append(data)
        self._queued_bytes += len(data)
        if self._queued_bytes > LIMIT_BYTES:
            self.abort()
        self._awake.set()

    def close(self) -> None:
        """Close once everything queued has been written, or after `CLOSE_S`; returns at once."""
        if not self._closing:
            self._closing = True
            self._awake.set()
            asyncio.get_running_loop().call_later(CLOSE_S, self.abort)

    def abort(self) -> None:
        """Close now. The reader sees this as it sees a killed peer."""
        self._closing = True
        self._queue.clear()
        if self._transport is not None:
            self._transport.abort()

    async def receive(self, timeout_s: float | None = None) -> bytes | None:
        """The next binary frame, None when the connection is closed.

        Raises:
            ValueError: a text frame, a frame that is too large, or invalid WebSocket data.
            asyncio.TimeoutError: no frame within `timeout_s`.
        """
        message = await self._socket.receive(timeout_s)
        if message.type is WSMsgType.BINARY:
            data: bytes = message.data
            await self._pace(len(data))
            return data
        if message.type is WSMsgType.TEXT:
            raise ValueError("a text frame; messages are binary")
        if message.type is WSMsgType.ERROR and not isinstance(message.data, ConnectionError):
            raise ValueError(f"not a frame: {message.data}")
        return None

    async def _pace(self, size: int) -> None:
        wait = self._bucket.take(1 + size // UNIT_BYTES, asyncio.get_running_loop().time())
        if not wait:
            return
        if self._slowed is not None:  # reported once for each connection
            self._slowed()
            self._slowed = None
        await asyncio.sleep(wait)

    async def finish(self) -> None:
        """The reader has ended: let a close in progress complete, else end the writer."""
        if not self._closing:
            self._writer.cancel()
        await asyncio.wait([self._writer], timeout=2 * CLOSE_S)

    async def _write(self) -> None:
        try:
            while self._queue or not self._closing:
                if not self._queue:
                    self._awake.clear()
                    await self._awake.wait()
                    continue
                data = self._queue.popleft()
                self._queued_bytes -= len(data)
                await self._socket.send_bytes(data)
            await self._socket.close()
        except ConnectionError:
            self._closing = True  # the reader sees the end too, and reports it to the coordinator


async def open_connection(request: web.Request, slowed: Callable[[], None]) -> Connection:
    """Answer the WebSocket handshake. Nagle's delay is off: aiohttp sets TCP_NODELAY on every connection.

    `slowed` is called once, when the peer first exceeds its rate.
    """
    socket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE_BYTES, compress=False, timeout=CLOSE_S)
    await socket.prepare(request)
    return Connection(socket, request.transport, slowed, shown(request))
