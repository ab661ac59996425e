"""A connection of bytes that shows a ticket, for tests that speak HTTP or WebSocket by hand."""

from __future__ import annotations

import asyncio

from farandole.control.security import TicketProof
from farandole.control.ticket import Ticket


async def prove(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ticket: Ticket) -> str:
    """Ask and be asked. Returns the header line that the next request on this connection is admitted with."""
    claim = TicketProof(ticket)
    writer.write(f"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: {claim.opening}\r\n\r\n".encode())
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    [challenge] = [line.partition(": ")[2] for line in head.split("\r\n") if line.startswith("WWW-Authenticate")]
    return f"Authorization: {claim.answer(challenge)}\r\n"
