"""`python -m chaos.forward FROM TO PORT`: hands connections to FROM:PORT on to TO:PORT, until it is killed.

The coordinator serves loopback only. One of these on its host and one on each other host put its port there, so that
control traffic crosses the same links as the data. Prints a line once it listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


async def forward(listen: str, to: str, port: int) -> None:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(to, port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(copy(reader, back), copy(there, writer))

    async with await asyncio.start_server(accept, listen, port) as server:
        print("listening", flush=True)
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(forward(sys.argv[1], sys.argv[2], int(sys.argv[3])))
