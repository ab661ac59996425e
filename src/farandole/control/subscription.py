"""A pool's or an observer's connection to the coordinator, for a process with an event loop of its own.

Messages come in the coordinator's order; the end of the stream means that the coordinator has closed or is gone.
There is no reconnecting here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp

from farandole.control.dial import dial
from farandole.control.ticket import Ticket
from farandole.errors import CoordinatorUnreachable
from farandole.membership import messages as m


class Subscription:
    """Build it with `async with subscribe(ticket, hello) as subscription`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse[bool]) -> None:
        self._socket = socket

    async def receive(self) -> m.Message | None:
        """The next message, None at the end of the stream."""
        message = await self._socket.receive()
        return m.decode_from_coordinator(message.data) if message.type is aiohttp.WSMsgType.BINARY else None

    async def send(self, message: m.Message) -> None:
        """Send one message; it is dropped when the coordinator is gone, which `receive` tells.

        Raises:
            UsageError: the coordinator would refuse it.
        """
        try:
            await self._socket.send_bytes(m.encode(m.sendable(message)))
        except ConnectionError:
            return


@asynccontextmanager
async def subscribe(ticket: Ticket, hello: m.Hello) -> AsyncGenerator[Subscription, None]:
    """Connect and say `hello`.

    Raises:
        CoordinatorUnreachable: nobody answers at the ticket's address, or somebody else.
    """
    async with AsyncExitStack() as stack:
        try:
            socket = await stack.enter_async_context(dial(ticket))
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            why = str(error) or type(error).__name__
            raise CoordinatorUnreachable(f"run {ticket.run}: no answer at {ticket.address} ({why})") from None
        subscription = Subscription(socket)
        await subscription.send(hello)
        yield subscription
