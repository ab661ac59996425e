"""Records how far apart heartbeats arrive on a machine whose cores are all busy, for `protocol/test_silence.py`.

    python -m tests.support.record_silences tests/protocol/silences.json --minutes 10

Some processes send a byte every heartbeat over TCP, from an event loop in a thread of its own, as workers do, while
their main thread computes, now in Python and now in C. One process receives them and ticks, as the coordinator does. A
busy loop runs on every core beside them. The file holds, in ms, the gaps between each process's arrivals, and between
ticks where they are long: the machine's real pauses, to be judged at any time afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import threading
import time
from pathlib import Path

import msgspec

HEARTBEAT_S, TICK_S = 0.5, 0.1
LONG_TICK_MS = 2 * 1000 * TICK_S
WORKERS = 6


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """`gaps`: of each worker, the first since the recording began. `long_ticks`: when each began, and its length."""

    cores: int
    heartbeat_ms: int
    tick_ms: int
    gaps: list[list[int]]
    long_ticks: list[tuple[int, int]]

    @staticmethod
    def load(path: Path) -> Recorded:
        return msgspec.json.decode(path.read_bytes(), type=Recorded)


class _Arrivals(asyncio.Protocol):
    """Of one process's heartbeats."""

    def __init__(self, gaps: list[list[int]], began: float) -> None:
        self._before = began
        self._mine: list[int] = []
        gaps.append(self._mine)

    def data_received(self, data: bytes) -> None:
        del data
        now = time.monotonic()
        self._mine.append(round(1000 * (now - self._before)))
        self._before = now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--minutes", type=float, default=10.0)
    options = parser.parse_args()
    recorded = asyncio.run(_record(60 * options.minutes))
    options.file.write_bytes(_in_lines(recorded))
    late = max(max(gaps[1:]) for gaps in recorded.gaps) - recorded.heartbeat_ms
    print(f"{sum(map(len, recorded.gaps))} gaps, the latest {late} ms late; {len(recorded.long_ticks)} long ticks")


def _in_lines(recorded: Recorded) -> bytes:
    """JSON that can be read in an editor: one worker a line."""
    return msgspec.json.encode(recorded).replace(b"],[", b"],\n[") + b"\n"


async def _record(seconds: float) -> Recorded:
    gaps: list[list[int]] = []
    long_ticks: list[tuple[int, int]] = []
    began = before = time.monotonic()
    server = await asyncio.get_running_loop().create_server(lambda: _Arrivals(gaps, began), "127.0.0.1", 0)
    context = multiprocessing.get_context("spawn")
    cores = os.cpu_count() or 1
    others = [context.Process(target=_busy, daemon=True) for _ in range(cores)]
    port = server.sockets[0].getsockname()[1]
    others += [context.Process(target=_work, args=(port,), daemon=True) for _ in range(WORKERS)]
    for process in others:
        process.start()
    while (now := time.monotonic()) < began + seconds:
        if 1000 * (now - before) > LONG_TICK_MS:
            long_ticks.append((round(1000 * (before - began)), round(1000 * (now - before))))
        before = now
        await asyncio.sleep(TICK_S)
    server.close()
    for process in others:
        process.kill()
        process.join()
    return Recorded(
        cores=cores, heartbeat_ms=round(1000 * HEARTBEAT_S), tick_ms=round(1000 * TICK_S),
        gaps=gaps, long_ticks=long_ticks,
    )  # fmt: skip


def _busy() -> None:
    while True:
        pass


def _work(port: int) -> None:
    threading.Thread(target=lambda: asyncio.run(_beat(port)), daemon=True).start()
    words = {str(number): number for number in range(20_000)}
    while True:
        msgspec.json.decode(msgspec.json.encode(words))  # a call that holds the interpreter's lock
        sum(number * number for number in range(100_000))


async def _beat(port: int) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    while True:
        writer.write(b"b")
        await writer.drain()
        await asyncio.sleep(HEARTBEAT_S)


if __name__ == "__main__":
    main()
