"""A pool behind the reconciler and a server: what the coordinator hears, also of one that comes and goes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from farandole.control.ticket import Ticket, new_secret
from farandole.coordinator.journal import Journal
from farandole.coordinator.server import Server
from farandole.errors import CoordinatorUnreachable
from farandole.pool.base import Host
from farandole.pool.fake import FakePool
from farandole.pool.reconciler import serve_pool
from farandole.protocol import messages as m
from farandole.protocol.coordinator.state import RunSettings
from farandole.protocol.messages import Roster, RunTerms

pytestmark = pytest.mark.timeout(60)


class Stage:
    """A pool, kept for a run whose coordinator comes and goes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.secret = new_secret()
        self.pool = FakePool()
        self.seen: list[Roster] = []
        self.server: Server
        self.ticket: Ticket
        self.keeping: asyncio.Task[Roster]
        self._port = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        """A coordinator, at the address of the one before."""
        self._journal = Journal(self.folder)
        state = self._journal.state()
        self.server = Server(
            RunSettings(run="r", wanted=2), secret=self.secret, journal=self._journal, restored_state=state
        )
        address = await self.server.start(port=self._port)
        self._port = urlsplit(address).port or 0
        self.ticket = Ticket(address=address, secret=self.secret, run="r")
        self._tasks.append(asyncio.create_task(self.server.serve()))

    async def end(self) -> None:
        """It is gone; it says nothing."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.server.close()
        self._journal.close()

    def gone(self) -> list[str]:
        """Whose exits the coordinator knows of."""
        return sorted(self.server.coordinator.dead)


Scenario = Callable[[Stage], Awaitable[None]]


def play(folder: Path, scenario: Scenario) -> None:
    async def perform() -> None:
        stage = Stage(folder)
        await stage.begin()
        stage.keeping = asyncio.create_task(serve_pool(stage.pool, stage.ticket, stage.seen.append))
        try:
            await scenario(stage)
        finally:
            stage.keeping.cancel()
            await asyncio.gather(stage.keeping, return_exceptions=True)
            await stage.end()

    asyncio.run(perform())


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_keep_follows_the_coordinator_to_the_end(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        server, pool, seen = stage.server, stage.pool, stage.seen
        await until(lambda: pool.started == ["w1", "w2"])
        pool.exit("w1")
        await until(lambda: pool.started == ["w1", "w2", "w3"])
        server.coordinator.hello(m.Hello(kind="worker", worker="w2", pool="fake"), server.now())
        nonsense = m.Welcome(run="", worker="", folder="", terms=RunTerms(), lines=(-1, 0))
        server.coordinator.on_message("w2", nonsense, server.now())
        server.flush()
        await until(lambda: pool.stopped == ["w2"])  # evicted for that
        await until(lambda: pool.started == ["w1", "w2", "w3", "w4"])
        for worker in ("w3", "w4"):
            server.coordinator.hello(m.Hello(kind="worker", worker=worker, pool="fake"), server.now())
        server.coordinator.request_end("enough", 9, server.now())
        server.flush()
        await until(lambda: seen[-1].over == 9)
        for worker in ("w3", "w4"):
            pool.exit(worker)
        roster = await stage.keeping
        assert (roster.over, roster.reason) == (9, "enough")

    play(tmp_path, scenario)


def test_a_dead_coordinator_is_waited_for(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        pool = stage.pool
        await until(lambda: pool.started == ["w1", "w2"])
        pool.exit("w1")
        await until(lambda: stage.gone() == ["w1"])
        await until(lambda: pool.started == ["w1", "w2", "w3"])
        await stage.end()
        pool.exit("w2")
        await stage.begin()
        await until(lambda: stage.gone() == ["w1", "w2"])
        assert stage.server.coordinator.startup_failures == {"": 2}, "w1 was told again, and counts once"
        await until(lambda: pool.started == ["w1", "w2", "w3", "w4"])
        assert pool.stopped == [], "the workers train on meanwhile"

    play(tmp_path, scenario)


def test_one_that_knows_nothing_is_told_all_exits(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        pool = stage.pool
        await until(lambda: pool.started == ["w1", "w2"])
        pool.exit("w1")
        await until(lambda: stage.gone() == ["w1"])
        await stage.end()
        for file in tmp_path.iterdir():
            file.unlink()
        await stage.begin()
        await until(lambda: stage.gone() == ["w1"])

    play(tmp_path, scenario)


def test_a_run_that_is_over_needs_no_coordinator_to_end_its_processes(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        pool = stage.pool
        await until(lambda: pool.started == ["w1", "w2"])
        stage.server.coordinator.hello(m.Hello(kind="worker", worker="w1", pool="fake"), stage.server.now())
        stage.server.coordinator.request_end("enough", 9, stage.server.now())
        stage.server.flush()
        await until(lambda: stage.seen and stage.seen[-1].over == 9)
        await stage.end()
        await until(lambda: pool.stopped == ["w2"])  # it was only starting
        pool.exit("w1")
        assert (await stage.keeping).over == 9

    play(tmp_path, scenario)


def test_a_coordinator_that_was_never_there_is_not_waited_for() -> None:
    nowhere = Ticket(address="http://127.0.0.1:1", secret=new_secret(), run="r")
    with pytest.raises(CoordinatorUnreachable, match=r"\brun r\b.*http://127\.0\.0\.1:1\b"):
        asyncio.run(serve_pool(FakePool(), nowhere))


def test_a_cancelled_keep_ends_the_processes(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        pool, keeping = stage.pool, stage.keeping
        await until(lambda: pool.started == ["w1", "w2"])
        pool.exit("w1")  # told or not told yet: it must not be waited for twice
        keeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await keeping
        assert pool.stopped[-1] == "w2" or pool.stopped == ["w2", "w3"]

    play(tmp_path, scenario)


def test_what_a_pool_says_of_its_hosts_is_told(tmp_path: Path) -> None:
    """Once; notices again to a coordinator that is back, which learns nothing new of them."""

    async def scenario(stage: Stage) -> None:
        pool = stage.pool
        await until(lambda: pool.started == ["w1", "w2"])
        coordinator = stage.server.coordinator
        coordinator.hello(m.Hello(kind="worker", worker="w1", pool="fake"), stage.server.now())
        pool.advise("here")
        pool.notice("here", 90.0)
        await until(lambda: "w1" in coordinator.departed)
        assert re.search(r"\bhere\b.*\b90 s\b", coordinator.departed["w1"].reason)
        assert coordinator.hello(m.Hello(kind="worker", worker="w2", pool="fake"), stage.server.now()) == "w2"
        assert coordinator.workers["w2"].leaving, "it had not come when its host had notice"
        pool.failing["there"] = "no such program"
        pool.hosts = [Host(name="there")]
        await until(lambda: len(pool.started) > 2)
        pool.failing.clear()
        pool.capacity = 0
        pool.exit("w1")
        pool.exit("w2")

        def told() -> list[str]:
            lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
            return [line["event"] for line in lines]

        await until(lambda: "no capacity" in told())
        assert (told().count("advice"), told().count("notice"), told().count("start failed") > 0) == (1, 2, True)
        assert coordinator.startup_failures == {}, "nobody was lost"
        await stage.end()
        await stage.begin()
        await until(lambda: stage.gone() == ["w1", "w2"])
        pool.capacity = None

    play(tmp_path, scenario)
