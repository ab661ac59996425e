"""A TCP proxy on loopback whose connections can be cut, or struck dumb in one direction, without either end's help."""

from __future__ import annotations

import asyncio
import socket
import struct

UP, DOWN = "up", "down"  # to the server, to the client


class Proxy:
    """`await start(address)`; what is done to its connections is not done to those that come later."""

    def __init__(self) -> None:
        self._dumb: set[tuple[asyncio.StreamWriter, str]] = set()
        self._tasks: set[asyncio.Task[None] | None] = set()
        self._open: dict[asyncio.StreamWriter, asyncio.StreamWriter] = {}  # of the client, of the server
        self._server: asyncio.Server
        self._target: tuple[str, int]

    async def start(self, address: str) -> str:
        host, port = address.removeprefix("http://").split(":")
        self._target = (host, int(port))
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def reset(self) -> None:
        """RST, to both ends."""
        for pair in tuple(self._open.items()):
            for writer in pair:
                end = writer.get_extra_info("socket")
                if end.fileno() >= 0:  # not closed yet
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()

    def silence(self, direction: str) -> None:
        """What comes is swallowed; neither end is told anything."""
        self._dumb |= {(client, direction) for client in self._open}

    async def close(self) -> None:
        self._server.close()
        self.reset()
        await asyncio.gather(*(task for task in self._tasks if task))
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(asyncio.current_task())
        try:
            up_reader, up_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        self._open[writer] = up_writer
        pumps = [self._pump(reader, up_writer, (writer, UP)), self._pump(up_reader, writer, (writer, DOWN))]
        await asyncio.gather(*pumps)
        del self._open[writer]
        for end in (writer, up_writer):
            end.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: tuple[asyncio.StreamWriter, str]
    ) -> None:
        try:
            while data := await reader.read(65536):
                if way not in self._dumb:
                    writer.write(data)
        except ConnectionError:
            pass
        if way not in self._dumb:
            writer.close()
