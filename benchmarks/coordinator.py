"""How much one coordinator process bears: N simulated workers on a real coordinator, over real sockets.

    python benchmarks/coordinator.py --workers 1000 --seconds 30

The workers are connections of this process that speak the worker's protocol (Hello, Ready, heartbeats every 0.5 s,
Prepared, Switched, Stopped) and hold nothing. What they would agree on in band they agree on in a shared dictionary.
Measured: the coordinator's processor time while nothing but heartbeats comes; and from an event to the last worker's
word of it: a join and a leave (to the proposal at everyone, to the view in force everywhere), a loss (to the stop, and
to the recovered view at everyone), and the coordinator killed and started again (to the recovered view at everyone).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from farandole.control.client import dial
from farandole.control.run_folder import RECORD, SETTINGS, TICKET
from farandole.control.ticket import Ticket, load
from farandole.protocol import messages as m
from farandole.protocol.coordinator.state import RunSettings
from farandole.protocol.view import View

CLOCK = os.sysconf("SC_CLK_TCK")
SIGNATURE = m.Signature(facts=tuple((f"parameter layer{i}.weight", "[512, 512] float32") for i in range(50)))


class Cluster:
    """All simulated workers, and what they agree on among themselves."""

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.round = 0
        self._prepared: dict[int, set[str]] = {}
        self._switched: set[int] = set()
        self._reached: dict[tuple[str, int], set[str]] = {}
        self._awaited: dict[tuple[str, int], asyncio.Event] = {}

    def prepared(self, view: View, worker: Worker) -> None:
        """R2: when everyone who is concerned has prepared a view, everyone switches to it."""
        ready = self._prepared.setdefault(view.number, set())
        ready.add(worker.name)
        if len(ready) < view.size or view.number in self._switched:
            return
        concerned = {w.name for w in self.workers.values() if w.view is not None} | set(view.members)
        if concerned <= ready:
            self._switched.add(view.number)
            self.round += 1
            for name in concerned:
                self.workers[name].switch(view)

    def reach(self, what: str, view: View | int, worker: str) -> None:
        """`worker` has got so far; whoever waits for everyone is woken by the last."""
        number = view if isinstance(view, int) else view.number
        key = (what, number)
        reached = self._reached.setdefault(key, set())
        reached.add(worker)
        if len(reached) >= len(self.workers):
            self._awaited.setdefault(key, asyncio.Event()).set()

    async def everyone(self, what: str, after: int) -> float:
        """Wait until everyone has reached `what` for the first number above `after`; the time then."""
        while True:
            for (kind, number), event in self._awaited.items():
                if kind == what and number > after and event.is_set():
                    return time.monotonic()
            await asyncio.sleep(0.002)


class Worker:
    """One connection."""

    def __init__(self, cluster: Cluster, name: str, ticket: Ticket) -> None:
        self.cluster, self.name = cluster, name
        self.view: View | None = None
        self.synced = False
        self.socket: aiohttp.ClientWebSocketResponse[bool] | None = None
        self.attempt = 0
        self._ticket = ticket
        self._number = 0
        self._sending: set[asyncio.Future[None]] = set()
        self._task = asyncio.create_task(self._live())
        self.gone = False

    def send(self, message: m.Message) -> None:
        socket = self.socket
        if socket is not None and not socket.closed:
            task = asyncio.ensure_future(_quietly(socket.send_bytes(m.encode(message))))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    def switch(self, view: View) -> None:
        self.view, self.synced = view, True
        self.send(m.Switched(view=view.number, round=self.cluster.round, step=self.cluster.round))
        if self.name in view.joining:
            self.send(m.Synced(view=view.number))
        self.cluster.reach("switched", view, self.name)

    async def die(self) -> None:
        self.gone = True
        socket, self.socket = self.socket, None
        del self.cluster.workers[self.name]
        if socket is not None:
            await socket.close()
        self._task.cancel()

    async def _live(self) -> None:
        while not self.gone:
            with contextlib.suppress(aiohttp.ClientError, OSError):
                await self._connection()
            self.socket = None
            await asyncio.sleep(0.1 + 0.4 * (hash(self.name) % 100) / 100)

    async def _connection(self) -> None:
        self.attempt += 1
        async with dial(self._ticket) as socket:
            await self._converse(socket)

    async def _converse(self, socket: aiohttp.ClientWebSocketResponse[bool]) -> None:
        self.socket = socket
        self.send(
            m.Hello(
                kind="worker", worker=self.name, host="here", pid=1, pool="simulated", session=self.name,
                attempt=self.attempt, synced=self.synced,
            )
        )  # fmt: skip
        self.send(m.Ready(signature=SIGNATURE))
        beating = asyncio.create_task(self._beat())
        try:
            async for frame in socket:
                if frame.type is not aiohttp.WSMsgType.BINARY:
                    return
                self._hear(m.decode_from_coordinator(frame.data))
        finally:
            beating.cancel()

    async def _beat(self) -> None:
        await asyncio.sleep(0.5 * (hash(self.name) % 1000) / 1000)
        while True:
            self._number += 1
            self.send(m.Heartbeat(number=self._number, view=self.view.number if self.view else 0))
            await asyncio.sleep(0.5)

    def _hear(self, message: m.Message) -> None:
        match message:
            case m.Propose(view=view):
                self.send(m.Prepared(view=view.number))
                self.cluster.reach("proposed", view, self.name)
                self.cluster.prepared(view, self)
            case m.Stop(stop=number):
                self.cluster.reach("stopped", number, self.name)
                lineage = (self.view.members,) if self.view else ()
                self.send(
                    m.Stopped(
                        stop=number, view=self.view, round=self.cluster.round, step=self.cluster.round,
                        has_result=False, synced=self.synced and self.view is not None, lineage=lineage,
                    )
                )  # fmt: skip
            case m.Resume(view=view):
                self.view = view
                self.cluster.reach("resumed", view, self.name)
            case m.ViewWithdrawn():
                self.view, self.synced = None, False
            case m.Goodbye():
                self.gone = True
                self.cluster.workers.pop(self.name, None)
                self.socket = None
            case _:
                pass


async def _quietly(sending: Any) -> None:
    try:
        await sending
    except (ConnectionError, RuntimeError):
        return


class Coordinator:
    """The real process."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.folder = folder
        settings = RunSettings(
            run="load", folder=str(folder), wanted=workers, minimum=workers, heartbeat_timeout_s=20.0
        )
        (folder / SETTINGS).write_bytes(msgspec.json.encode(settings))
        self.process = self._start()

    def _start(self, *again: str) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            "farandole.coordinator.process",
            str(self.folder),
            "--die-with",
            str(os.getpid()),
        ]
        return subprocess.Popen([*command, *again])

    async def ticket(self) -> Ticket:
        record = self.folder / RECORD
        while not (record.exists() and json.loads(record.read_bytes())["pid"] == self.process.pid):
            await asyncio.sleep(0.01)
        return load(str(self.folder / TICKET))

    async def restart(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process = self._start("--again")
        await self.ticket()

    def processor_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / CLOCK


async def measure(count: int, seconds: float, folder: Path) -> list[tuple[str, float, str]]:
    coordinator = Coordinator(folder, count)
    rows: list[tuple[str, float, str]] = []
    try:
        ticket = await coordinator.ticket()
        cluster = Cluster()

        def new(name: str) -> Worker:
            worker = cluster.workers[name] = Worker(cluster, name, ticket)
            return worker

        began = time.monotonic()
        for i in range(count):
            new(f"w{i}")
        rows.append(
            (
                "start: all connected, first view in force everywhere",
                await cluster.everyone("switched", 0) - began,
                "s",
            )
        )
        before, since = coordinator.processor_s(), time.monotonic()
        await asyncio.sleep(seconds)
        used = (coordinator.processor_s() - before) / (time.monotonic() - since)
        rows.append((f"heartbeats of {count} workers: processor", used, "cores"))
        number = max(w.view.number for w in cluster.workers.values() if w.view)
        joiner = new("joiner")
        while joiner.socket is None:
            await asyncio.sleep(0.001)
        began = time.monotonic()
        rows.append(("join: proposal at everyone", await cluster.everyone("proposed", number) - began, "s"))
        rows.append(("join: view in force everywhere", await cluster.everyone("switched", number) - began, "s"))
        number += 1
        began = time.monotonic()
        cluster.workers["w7"].send(m.LeaveRequest(reason="SIGTERM"))
        rows.append(("leave: proposal at everyone", await cluster.everyone("proposed", number) - began, "s"))
        rows.append(("leave: view in force everywhere", await cluster.everyone("switched", number) - began, "s"))
        number += 1
        await asyncio.sleep(1.0)
        began = time.monotonic()
        cluster.workers["w1"].send(m.Suspect(view=number, peer="w8", reason="connection reset"))
        await cluster.workers["w8"].die()
        rows.append(("loss: stopped everywhere", await cluster.everyone("stopped", 0) - began, "s"))
        rows.append(("loss: recovered view at everyone", await cluster.everyone("resumed", number) - began, "s"))
        number += 1
        await asyncio.sleep(1.0)
        began = time.monotonic()
        await coordinator.restart()
        back = time.monotonic()
        rows.append(("coordinator killed: it listens again after", back - began, "s"))
        rows.append(
            (
                "coordinator killed: recovered view at everyone",
                await cluster.everyone("resumed", number) - began,
                "s",
            )
        )
        for worker in list(cluster.workers.values()):
            await worker.die()
    finally:
        coordinator.process.kill()
        coordinator.process.wait()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=30.0, help="of nothing but heartbeats")
    options = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else max(soft, 8192), hard))
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(measure(options.workers, options.seconds, Path(folder)))
    print(f"| {options.workers} workers on one coordinator | |\n| --- | ---: |")
    for what, value, unit in rows:
        print(f"| {what} | {value:.3f} {unit} |")


if __name__ == "__main__":
    main()
