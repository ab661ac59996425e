"""The one way in which workers, pools and observers reach the coordinator: a WebSocket to the ticket's address.

Nothing of the ticket leaves before the server has shown the ticket's certificate, where there is one; and its secret
never does: the server is asked to prove that it knows it, and the second request, on the same connection, proves that
this side does (see `challenge.py`). So each connection has an aiohttp session of its own. While a coordinator is
replaced, connections wait for the next one, no longer than the caller says.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import aiohttp

from farandole.control import tls
from farandole.control.challenge import Claim
from farandole.control.ticket import Ticket
from farandole.membership.messages import MAX_MESSAGE_BYTES
from farandole.platform.waiting import within

CLOSE_S = 0.5  # a connection that carries nothing any more answers no close
ANSWER_S = 20.0  # for a coordinator to answer: it may be on its way back, also from being frozen


@asynccontextmanager
async def dial(
    ticket: Ticket, timeout_s: float = ANSWER_S
) -> AsyncGenerator[aiohttp.ClientWebSocketResponse[bool], None]:
    """An open connection.

    Raises:
        NotTheCoordinator: somebody else answers.
        aiohttp.ClientError, OSError, asyncio.TimeoutError: nobody does.
    """
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:
        try:
            socket = await within(timeout_s, _dial(session, ticket))
        except aiohttp.ServerFingerprintMismatch:
            raise tls.stranger(ticket) from None
        try:
            yield socket
        finally:
            with contextlib.suppress(asyncio.TimeoutError):  # where nothing gets out any more
                await within(2 * CLOSE_S, socket.close())


async def _dial(session: aiohttp.ClientSession, ticket: Ticket) -> aiohttp.ClientWebSocketResponse[bool]:
    url, claim, pin = f"{ticket.address}/control", Claim(ticket), tls.pin(ticket)
    async with session.get(url, headers={"Authorization": claim.opening}, ssl=pin, allow_redirects=False) as asked:
        answer = claim.answer(asked.headers.get("WWW-Authenticate"))
    return await session.ws_connect(
        url,
        headers={"Authorization": answer},
        max_msg_size=MAX_MESSAGE_BYTES,
        timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_S),  # pyright: ignore[reportCallIssue]
        ssl=pin,
    )
