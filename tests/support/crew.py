"""Real workers' sessions with a real server over loopback, in one process; those behind a proxy can be cut off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from tests.support.proxy import Proxy
from tests.support.stage import Stage, stage
from tests.support.trainer import Board, Trainer

QUICK = {"heartbeat_s": 0.1}


class Crew:
    """Workers of a stage's run, the real ones; those behind the proxy can be cut off."""

    def __init__(self, scene: Stage, proxy: Proxy, address: str) -> None:
        self.scene = scene
        self.proxy = proxy
        self.trainers: dict[str, Trainer] = {}
        self._board = Board()
        self._through = msgspec.structs.replace(scene.ticket, address=address)

    async def join(self, worker: str, *, proxied: bool = False) -> Trainer:
        ticket = self._through if proxied else self.scene.ticket
        trainer = await asyncio.to_thread(Trainer, ticket, self._board, worker)
        self.trainers[worker] = trainer
        return trainer

    async def in_view(self, number: int, *workers: str) -> None:
        """They have all gone on in view `number`, and train there."""
        await self.scene.until(
            lambda: all((view := self.trainers[w].view) is not None and view.number == number for w in workers)
        )
        view = self.trainers[workers[0]].view
        assert view is not None
        assert set(view.members) == set(workers)
        await self.steps(3)

    async def steps(self, count: int) -> None:
        """Everyone trains on."""
        begun = {name: trainer.step for name, trainer in self.trainers.items()}
        await self.scene.until(lambda: all(t.step >= begun[name] + count for name, t in self.trainers.items()))

    def attempt(self, worker: str) -> int:
        return self.scene.server.coordinator.workers[worker].attempt


@asynccontextmanager
async def crew(folder: Path, **settings: Any) -> AsyncGenerator[Crew, None]:
    async with stage(folder, **{**QUICK, **settings}) as scene:
        proxy = Proxy()
        it = Crew(scene, proxy, await proxy.start(scene.ticket.address))
        try:
            yield it
        finally:
            await asyncio.gather(*(asyncio.to_thread(trainer.stop) for trainer in it.trainers.values()))
            await proxy.close()
