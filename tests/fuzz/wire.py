"""A server on loopback to which bytes are sent: those of TCP, HTTP or WebSocket."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farandole.control.ticket import Ticket
from farandole.coordinator.journal import Journal
from farandole.coordinator.server import Server
from farandole.protocol import messages as m
from farandole.protocol.coordinator.state import RunSettings
from tests.support.prove import prove

SECRET = "5e" * 32


class Wire:
    """A server on loopback in a loop of its own; each input is one connection's bytes, TCP's, HTTP's or WebSocket's."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(self._unhandled)
        self.failed: list[object] = []
        logs = logging.Handler()
        logs.emit = self.failed.append
        logging.getLogger("aiohttp.server").addHandler(logs)
        self.folder = tempfile.TemporaryDirectory(prefix="farandole-fuzz-")
        self.journal = Journal(Path(self.folder.name))
        self.server = Server(RunSettings(run="r"), secret=SECRET, journal=self.journal)
        address = self.loop.run_until_complete(self.server.start())
        self.place = address.removeprefix("http://").split(":")
        self.ticket = Ticket(address=address, secret=SECRET, run="r")

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        del loop
        self.failed.append(context)

    def stranger(self, data: bytes) -> None:
        """What comes of a connection that has proved nothing."""
        self.loop.run_until_complete(self._send(data, proves=False))

    def request(self, data: bytes) -> None:
        """PROOF in the bytes stands for a header that the connection is admitted with: most of the server is behind."""
        self.loop.run_until_complete(self._send(data))

    def frames(self, data: bytes) -> None:
        """What comes after the handshake."""
        self.loop.run_until_complete(self._send(UPGRADE + data))

    def hello(self, data: bytes) -> None:
        """One frame, as a worker masks it."""
        self.frames(frame(data))

    def converse(self, said: Sequence[tuple[int, m.Message]]) -> None:
        """Three workers say Hello, and then each what it is told to, in this order."""
        self.loop.run_until_complete(self._converse(said))

    async def _converse(self, said: Sequence[tuple[int, m.Message]]) -> None:
        writers: list[asyncio.StreamWriter] = []
        for number in range(3):
            reader, writer = await asyncio.open_connection(*self.place)
            upgrade = UPGRADE.replace(b"PROOF", (await prove(reader, writer, self.ticket)).encode())
            writer.write(upgrade + frame(m.encode(m.Hello(kind="worker", worker=f"w{number + 1}"))))
            writers.append(writer)
        for worker, message in said:
            writers[worker].write(frame(m.encode(message)))
            await self._turns(10)
        for writer in writers:
            writer.transport.abort()
        await self._check()

    async def _turns(self, count: int) -> None:
        """Of the loop, in which the server deals with what it got."""
        for _ in range(count):
            await asyncio.sleep(0)

    async def _send(self, data: bytes, *, proves: bool = True) -> None:
        reader, writer = await asyncio.open_connection(*self.place)
        if proves:
            data = data.replace(b"PROOF", (await prove(reader, writer, self.ticket)).encode())
        head, end, rest = data.partition(b"\r\n\r\n")
        for part in (head + end, rest):  # a body that comes later meets a handler that waits for it
            writer.write(part)
            await self._turns(30)
        writer.transport.abort()
        await self._check()

    async def _check(self) -> None:
        await self._turns(10)
        self.server.coordinator.tick(self.server.now())
        self.server.flush()
        self.server._recording.write_lines()
        assert self.server._broken is None, repr(self.server._broken)
        assert not self.failed, f"a stranger's bytes in a log or an unhandled exception: {self.failed}"
        if self.server.coordinator.over or self.server.coordinator.ending:  # a Stop got through: begin anew
            self.server.coordinator = type(self.server.coordinator)(RunSettings(run="r"))
            self.server._over.clear()

    def close(self) -> None:
        self.loop.run_until_complete(self.server.close())
        self.loop.close()
        self.journal.close()
        self.folder.cleanup()


AUTHORIZED = "Host: x\r\nPROOF"
UPGRADE = (
    f"GET /control HTTP/1.1\r\n{AUTHORIZED}Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
).encode()
POST = f"POST /api/%s HTTP/1.1\r\n{AUTHORIZED}%s\r\n\r\n%s"
REQUESTS = (
    b"GET /api/status HTTP/1.1\r\nHost: x\r\n\r\n",
    f"GET /api/status HTTP/1.1\r\n{AUTHORIZED}\r\n".encode(),
    (POST % ("scale", "Content-Length: 12", '{"wanted":2}')).encode(),
    (POST % ("release", "Content-Length: 13", '{"name":"w1"}')).encode(),
    (POST % ("scale", "Transfer-Encoding: chunked", 'c\r\n{"wanted":2}\r\n0\r\n\r\n')).encode(),
    (POST % ("scale", "Content-Encoding: deflate\r\nContent-Length: 4", "zzzz")).encode(),
    (POST % ("scale", "Content-Encoding: gzip\r\nTransfer-Encoding: chunked", "4\r\nzzzz\r\n0\r\n\r\n")).encode(),
    b"POST / HTTP/1.1\r\nContent-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nzzzz\r\n0\r\n\r\n",
    (POST % ("stop", "Content-Length: 2", "{}")).encode(),
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
)


def frame(payload: bytes) -> bytes:
    """A binary WebSocket frame with a mask of zeros."""
    size = len(payload)
    length = bytes([0x80 | size]) if size < 126 else bytes([0xFE]) + size.to_bytes(2, "big")
    return b"\x82" + length + b"\0\0\0\0" + payload
