"""A server on loopback with fake workers in the same event loop, for tests. Every wait is for a condition."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

from farandole.control.api import Api
from farandole.control.security import Certificate
from farandole.control.ticket import Ticket, new_secret
from farandole.coordinator.journal import Journal
from farandole.coordinator.server import Server
from farandole.protocol.coordinator.state import RunSettings
from tests.support.fake_worker import FakeWorker

Scenario = Callable[["Stage"], Awaitable[None]]


class Stage:
    """A server, its ticket, and the fake workers that a test lets in."""

    def __init__(self, server: Server, ticket: Ticket, journal: Journal) -> None:
        self.server = server
        self.journal = journal
        self.ticket = ticket
        self.folder = journal.folder
        self.serving = asyncio.create_task(server.serve())
        self.workers: dict[str, FakeWorker] = {}
        self.tasks: dict[str, asyncio.Task[int]] = {}
        self.api = Api(ticket)

    def worker(self, name: str, **options: Any) -> FakeWorker:
        worker = FakeWorker(self.ticket, worker=name, **options)
        self.workers[name] = worker
        self.tasks[name] = asyncio.create_task(worker.run())
        return worker

    async def until(self, condition: Callable[[], object], timeout_s: float = 20.0) -> None:
        async def poll() -> None:
            while not condition():
                await asyncio.sleep(0.005)

        await asyncio.wait_for(poll(), timeout_s)

    async def in_view(self, *names: str) -> None:
        coordinator = self.server.coordinator
        await self.until(
            lambda: (
                coordinator.view
                and set(coordinator.view.members) == set(names)
                and not coordinator.proposed
                and not coordinator.stopping
            )
        )

    def events(self, name: str) -> list[dict[str, Any]]:
        self.server._recording.write_lines()
        self.journal._files.run(int)  # the lines have been written
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if line.get("event") == name]


@asynccontextmanager
async def stage(
    folder: Path, /, *, certificate: Certificate | None = None, **settings: Any
) -> AsyncGenerator[Stage, None]:
    secret = new_secret()
    with closing(Journal(folder)) as journal:
        server = Server(RunSettings(run="r", **settings), secret=secret, journal=journal)
        address = await server.start(certificate=certificate)
        pin = certificate.fingerprint if certificate else ""
        ticket = Ticket(address=address, secret=secret, run="r", fingerprint=pin)
        scene = Stage(server, ticket, journal)
        try:
            yield scene
        finally:
            for task in (scene.serving, *scene.tasks.values()):
                task.cancel()
            await asyncio.gather(scene.serving, *scene.tasks.values(), return_exceptions=True)
            await server.close()


def play(folder: Path, scenario: Scenario, /, **settings: Any) -> None:
    async def perform() -> None:
        async with stage(folder, **settings) as scene:
            await scenario(scene)

    asyncio.run(perform())
