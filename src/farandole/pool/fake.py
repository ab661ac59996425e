"""A pool without processes, for tests: it notes what it was asked for, and its workers exit when the test says so."""

from __future__ import annotations

import asyncio

from farandole.pool.base import Exit


class FakePool:
    """`started` and `killed` are ids in order. A killed worker exits by itself, as a process does."""

    def __init__(self, name: str = "fake") -> None:
        self.name = name
        self.started: list[str] = []
        self.killed: list[str] = []
        self._running: set[str] = set()
        self._exits: asyncio.Queue[Exit] = asyncio.Queue()

    def start(self, worker: str) -> None:
        self.started.append(worker)
        self._running.add(worker)

    def kill(self, worker: str) -> None:
        if worker in self._running:
            self.killed.append(worker)
            self.exit(worker, "killed by signal 9")

    def exit(self, worker: str, reason: str = "exited with code 0") -> None:
        """Let a running worker's process end."""
        self._running.remove(worker)
        self._exits.put_nowait(Exit(worker, reason))

    async def exited(self) -> Exit:
        return await self._exits.get()
