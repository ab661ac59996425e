"""The one way in which workers, pools and observers reach the coordinator: a WebSocket to the ticket's address.

Nothing of the ticket leaves before the server has shown the ticket's certificate, where there is one.
"""

from __future__ import annotations

import aiohttp

from farandole.control import tls
from farandole.control.ticket import Ticket
from farandole.membership.messages import MAX_MESSAGE_BYTES

CLOSE_S = 0.5  # a connection that carries nothing any more answers no close


async def dial(session: aiohttp.ClientSession, ticket: Ticket) -> aiohttp.ClientWebSocketResponse[bool]:
    """Raises CoordinatorUnreachable where another certificate is shown; else what aiohttp raises."""
    try:
        return await session.ws_connect(
            f"{ticket.address}/control",
            headers={"Authorization": ticket.authorization},
            max_msg_size=MAX_MESSAGE_BYTES,
            timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_S),  # pyright: ignore[reportCallIssue]
            ssl=tls.pin(ticket),
        )
    except aiohttp.ServerFingerprintMismatch:
        raise tls.stranger(ticket) from None
