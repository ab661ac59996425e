"""An intruder with a network's means, as a process: `python intruder.py TICKET HOST FOLDER`.

It sits between one worker and the coordinator, at HOST: it writes FOLDER/ticket, a copy of the ticket with its own
address in it, passes on what goes through and keeps what the worker says. When FOLDER/attack appears it does everything
at once: the kept bytes again, wrong tickets, bytes that are no request, the other kind of HTTP, a thousand connections
that say nothing, and, with the ticket that it has stolen in the end, messages that are none or too large. It ends with
0 when all of its attacks have come to their end; what they have led to, the test sees.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import sys
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import msgspec

from farandole.control.client import dial
from farandole.control.security import TicketProof
from farandole.control.ticket import Ticket, load
from farandole.protocol import messages as m

SILENT = 1000
TIMES = 20
PATIENCE_S = 60.0


class Intruder:
    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        url = urlsplit(ticket.address)
        self.place = (str(url.hostname), url.port or 0)
        self.secure = url.scheme == "https"
        self.kept = b""

    # --- in between ------------------------------------------------------------------------------------------

    async def listen(self, host: str, folder: Path) -> asyncio.Server:
        server = await asyncio.start_server(self._pass_on, host, 0)
        port = server.sockets[0].getsockname()[1]
        address = f"{urlsplit(self.ticket.address).scheme}://{host}:{port}"
        msgspec.structs.replace(self.ticket, address=address).save(folder / "ticket")
        return server

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, downstream = await asyncio.open_connection(*self.place)
        with contextlib.suppress(OSError):
            await asyncio.gather(self._copy(reader, downstream, keep=True), self._copy(upstream, writer, keep=False))

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, keep: bool) -> None:
        while data := await source.read(65536):
            self.kept += data if keep else b""
            sink.write(data)
        sink.close()

    def hello(self) -> bytes:
        """What the worker said up to and with its Hello; over TLS nobody can tell where that ends."""
        if self.secure:
            return self.kept
        opening, head, frames = self.kept.split(b"\r\n\r\n", 2)
        assert b"Authorization: Farandole id=" in opening
        assert b"Authorization: Farandole proof=" in head
        end = b"\r\n\r\n"
        assert frames[:1] == b"\x82"
        length = frames[1] & 0x7F
        size, extra = (length, 0) if length < 126 else (int.from_bytes(frames[2:4], "big"), 2)
        return opening + end + head + end + frames[: 2 + extra + 4 + size]

    # --- attacks ---------------------------------------------------------------------------------------------

    async def attack(self) -> None:
        opening = TicketProof(self.ticket).opening
        heads = (f"Authorization: {each}\r\n\r\n" for each in (opening, f"Farandole proof={'0' * 64}"))
        wrong = "".join(f"GET /control HTTP/1.1\r\nHost: x\r\n{each}" for each in heads)
        await asyncio.gather(
            self.say_nothing(),
            self.repeat(self.hello(), 2, secure=False),
            self.repeat(wrong.encode(), TIMES, secure=self.secure),
            self.repeat(b"GET /api/status HTTP/1.1\r\nHost: x\r\n\r\n", TIMES, secure=self.secure),
            self.repeat(b"GET /api/status HTTP/1.1\r\nHost: x\r\n\r\n", TIMES, secure=False),
            self.repeat(bytes(range(256)) * 8, TIMES, secure=self.secure),
            self.repeat(b"A" * 200_000, TIMES, secure=self.secure),
            self.misspeak(),
        )

    async def repeat(self, data: bytes, times: int, *, secure: bool) -> None:
        """Say it on a connection of its own, and wait for the coordinator to close that."""
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        for _ in range(times):
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                reader, writer = await asyncio.open_connection(*self.place, ssl=context if secure else None)
                writer.write(data)
                await asyncio.wait_for(reader.read(), 6)
                writer.transport.abort()

    async def say_nothing(self) -> None:
        loop = asyncio.get_running_loop()
        silent = [socket.socket() for _ in range(SILENT)]
        for each in silent:
            each.setblocking(False)
            await loop.sock_connect(each, self.place)
        for each in silent:  # until the coordinator has closed the last of them
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(loop.sock_recv(each, 1), PATIENCE_S) == b""
            each.close()

    async def misspeak(self) -> None:
        """The ticket is stolen, and the thief knows no manners."""
        stop = m.encode(m.Stop(stop=1))
        deep = b"\x82\xa4type\xa9Heartbeat\xa5lines" + b"\x91" * 100_000
        for frame in (b"", b"\xc1", stop, deep, b"\x00" * (m.MAX_MESSAGE_BYTES + 1)) * 4:
            while not await self._said(frame):
                pass  # among the thousand it was the oldest, before it had shown its ticket; the thief comes again

    async def _said(self, frame: bytes) -> bool:
        try:
            async with dial(self.ticket) as socket:
                with contextlib.suppress(aiohttp.ClientError, ConnectionError):
                    await socket.send_bytes(frame)
                    while not socket.closed:
                        await socket.receive(timeout=200)
                return True
        except (aiohttp.ClientError, ConnectionError):
            return False


async def main(ticket: Path, host: str, folder: Path) -> None:
    intruder = Intruder(load(str(ticket)))
    server = await intruder.listen(host, folder)
    while not (folder / "attack").exists():
        await asyncio.sleep(0.05)
    await intruder.attack()
    (folder / "done").touch()
    while (folder / "attack").exists():  # the worker behind us needs its connection to the end
        await asyncio.sleep(0.05)
    server.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])))


def unverified() -> ssl.SSLContext:
    """What an intruder uses: it does not care who answers."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
