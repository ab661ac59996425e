"""An S3 server that is as far away as a real one: moto's, behind a proxy that makes each request wait and each
connection narrow.

`Store` starts both, each a process of its own. The proxy knows no HTTP: what comes from a client after an answer (or
first of all) is a request, and waits `DELAY_S` before it goes on; what comes back passes at `BYTES_S` on each
connection. It counts requests and bytes in a file that both sides have mapped. Left out: that a connection itself takes
a round trip, and that many of them share a network card.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from launch import free_port

DELAY_S = 0.05
BYTES_S = 50e6  # 400 Mbit/s
BUCKET = "bucket"
AWS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
_PIECE = 1 << 16
_COUNTS = struct.Struct("QQ")  # requests, bytes that were sent to clients


class Store:
    """A bucket at `near`, and the same bucket at `far`, which is slow: values for AWS_ENDPOINT_URL."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "store.log"
        counts = folder / "counts"
        counts.write_bytes(bytes(_COUNTS.size))
        with counts.open("r+b") as file:
            self._counts = mmap.mmap(file.fileno(), _COUNTS.size)
        near, far = free_port(), free_port()
        self.near, self.far = f"http://127.0.0.1:{near}", f"http://127.0.0.1:{far}"
        self._processes = [
            self._begin("-m", "moto.server", "-H", "127.0.0.1", "-p", str(near)),
            self._begin(str(Path(__file__).resolve()), str(near), str(far), str(counts)),
        ]
        bucket = f"{self.near}/{BUCKET}"
        self._until(lambda: urllib.request.urlopen(urllib.request.Request(bucket, method="PUT"), timeout=30).close())
        self._until(lambda: urllib.request.urlopen(f"{self.far}/{BUCKET}", timeout=30).close())

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def counts(self) -> tuple[int, int]:
        """Requests to `far` so far, and the bytes of its answers."""
        requests, sent = _COUNTS.unpack_from(self._counts)
        return requests, sent

    def _begin(self, *arguments: str) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            command = [sys.executable, *arguments]
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _until(self, done: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                done()
                return
            except OSError:
                if time.monotonic() > deadline or any(process.poll() is not None for process in self._processes):
                    raise SystemExit(f"the store does not come up:\n{self._log.read_text()[-2000:]}") from None
                time.sleep(0.05)


class Proxy:
    """From `port` to the server at `target`, both on loopback."""

    def __init__(self, target: int, counts: Path) -> None:
        self._target = target
        with counts.open("r+b") as file:
            self._counts = mmap.mmap(file.fileno(), _COUNTS.size)
        self._requests = self._sent = 0

    async def serve(self, port: int) -> None:
        server = await asyncio.start_server(self._accept, "127.0.0.1", port, limit=4 * _PIECE)
        async with server:
            await server.serve_forever()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answers, requests = await asyncio.open_connection("127.0.0.1", self._target, limit=4 * _PIECE)
        except OSError:
            writer.close()
            return
        answered = asyncio.Event()  # since the last request
        answered.set()
        pumps = (self._up(reader, requests, answered), self._down(answers, writer, answered))
        await asyncio.gather(*pumps, return_exceptions=True)

    async def _up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answered: asyncio.Event) -> None:
        try:
            while data := await reader.read(_PIECE):
                if answered.is_set():
                    answered.clear()
                    self._requests += 1
                    await asyncio.sleep(DELAY_S)
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()

    async def _down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answered: asyncio.Event) -> None:
        due = 0.0
        try:
            while data := await reader.read(_PIECE):
                answered.set()
                due = max(due, time.monotonic()) + len(data) / BYTES_S
                await asyncio.sleep(due - time.monotonic())
                self._sent += len(data)
                _COUNTS.pack_into(self._counts, 0, self._requests, self._sent)
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=int)
    parser.add_argument("port", type=int)
    parser.add_argument("counts", type=Path)
    options = parser.parse_args()
    asyncio.run(Proxy(options.target, options.counts).serve(options.port))


if __name__ == "__main__":
    main()
