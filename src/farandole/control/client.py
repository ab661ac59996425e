"""The client side of the control connection: WebSocket connections and subscriptions, and fetching the run's code.

Both sides first prove that they know the ticket's secret (see `security.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp

from farandole.code.pack import provide
from farandole.control import security
from farandole.control.api import Api
from farandole.control.security import TicketProof
from farandole.control.ticket import Ticket
from farandole.platform.process import within
from farandole.protocol import messages as m
from farandole.protocol.messages import MAX_MESSAGE_BYTES

# --- dial -------------------------------------------------------------------------------------------------------------
#
# The only way in which workers, pools and observers reach the coordinator: a WebSocket to the ticket's address.
#
# Nothing of the ticket is sent before the server has shown the ticket's certificate, if there is one; and its secret is
# never sent. The server must prove that it knows the secret, and the second request, on the same connection, proves
# that this side does (see `security.py`). So each connection has an aiohttp session of its own. While a coordinator is
# replaced, connections wait for the next one, no longer than the caller's timeout.

CLOSE_S = 0.5  # a broken connection does not answer a close
ANSWER_S = 20.0  # time for a coordinator to answer: it may be restarting, or frozen for a while


@asynccontextmanager
async def dial(
    ticket: Ticket, timeout_s: float = ANSWER_S
) -> AsyncGenerator[aiohttp.ClientWebSocketResponse[bool], None]:
    """An open connection.

    Raises:
        NotTheCoordinator: another server answers.
        aiohttp.ClientError, OSError, asyncio.TimeoutError: nothing answers.
    """
    opened: list[aiohttp.ClientWebSocketResponse[bool]] = []  # also by a task that is cancelled in the same moment
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:
        try:
            await within(timeout_s, _dial(session, ticket, opened))
            yield opened[0]
        except aiohttp.ServerFingerprintMismatch:
            raise security.stranger(ticket) from None
        finally:
            for socket in opened:
                with contextlib.suppress(asyncio.TimeoutError):  # if nothing can be sent any more
                    await within(2 * CLOSE_S, socket.close())


async def _dial(
    session: aiohttp.ClientSession, ticket: Ticket, opened: list[aiohttp.ClientWebSocketResponse[bool]]
) -> None:
    url, proof, pin = f"{ticket.address}/control", TicketProof(ticket), security.pin(ticket)
    async with session.get(url, headers={"Authorization": proof.opening}, ssl=pin, allow_redirects=False) as response:
        answer = proof.answer(response.headers.get("WWW-Authenticate"))
    opened.append(
        await session.ws_connect(
            url,
            headers={"Authorization": answer},
            max_msg_size=MAX_MESSAGE_BYTES,
            timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_S),  # pyright: ignore[reportCallIssue]
            ssl=pin,
        )
    )


# --- subscription -----------------------------------------------------------------------------------------------------
#
# A pool's or an observer's connection to the coordinator, for a process with its own event loop.
#
# Messages come in the coordinator's order. The end of the stream means that the coordinator has closed it or is gone.
# It does not reconnect.


class Subscription:
    """A connection to the coordinator. Create it with `async with subscribe(ticket, hello) as subscription`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse[bool]) -> None:
        self._socket = socket

    async def receive(self) -> m.Message | None:
        """The next message, None at the end of the stream."""
        message = await self._socket.receive()
        return m.decode_from_coordinator(message.data) if message.type is aiohttp.WSMsgType.BINARY else None

    async def send(self, message: m.Message) -> None:
        """Send one message. It is dropped if the coordinator is gone, which `receive` reports.

        Raises:
            UsageError: the coordinator would refuse it.
        """
        try:
            await self._socket.send_bytes(m.encode(m.sendable(message)))
        except ConnectionError:
            return


@asynccontextmanager
async def subscribe(ticket: Ticket, hello: m.Hello, timeout_s: float = ANSWER_S) -> AsyncGenerator[Subscription, None]:
    """Connect within `timeout_s` and send `hello`.

    Raises:
        CoordinatorUnreachable: nothing answers at the ticket's address, or another server does.
    """
    async with AsyncExitStack() as stack:
        try:
            socket = await stack.enter_async_context(dial(ticket, timeout_s))
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            reason = str(error) or type(error).__name__
            raise ticket.no_answer(reason) from None
        subscription = Subscription(socket)
        await subscription.send(hello)
        yield subscription


# --- fetch ------------------------------------------------------------------------------------------------------------
#
# The run's code on a host without it: requested from the coordinator, and unpacked once for all its runs.

PATIENCE_S = 60.0


def unpacked(ticket: Ticket, pack: str) -> Path:
    """The folder that contains the unpacked `pack`.

    Raises:
        CoordinatorUnreachable: nothing answers.
        FarandoleError: the pack is damaged, or there is no room for it.
        UsageError: the run has no such pack.
    """
    return provide(pack, Api(ticket, timeout_s=PATIENCE_S).code)
