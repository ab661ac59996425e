"""A cluster's pool with real agents, and an engine whose units are processes and that fails."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from farandole.pool import cluster
from farandole.pool.base import Event, HostPreempted, HostState, RunningWorker, Started, WorkerExited
from farandole.pool.cluster import ClusterPool
from farandole.protocol.messages import Job
from tests.support.stage import Stage, stage
from tests.support.units import Processes, pool_of_processes

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


class Rig:
    """A pool of this machine's processes, and what it has reported."""

    def __init__(self, folder: Path, scene: Stage) -> None:
        self.folder, self.scene, self.reported = folder, scene, list[Event]()
        (folder / "sleeps.py").write_text("import time\ntime.sleep(1000)\n")
        self.job = Job(script="sleeps.py", folder=str(folder))
        self.pool, self.engine = self.open()

    def open(self) -> tuple[ClusterPool, Processes]:
        return pool_of_processes(self.folder / "run", self.scene.ticket, self.job, slots=1)

    async def until(self, found: Callable[[Event], bool]) -> Event:
        while True:
            for event in self.reported:
                if found(event):
                    self.reported.remove(event)
                    return event
            self.reported += await asyncio.wait_for(self.pool.events(), 50)

    async def seen(self, state: str) -> HostState:
        event = await self.until(lambda event: isinstance(event, HostState) and event.state == state)
        assert isinstance(event, HostState)
        return event


@asynccontextmanager
async def rig(folder: Path) -> AsyncGenerator[Rig]:
    (folder / "run").mkdir()
    async with stage(folder / "run") as scene:
        found = Rig(folder, scene)
        try:
            yield found
            await found.pool.close()
            assert found.engine.running() == [], "nothing is left"
        finally:
            found.engine.close()


@pytest.mark.parametrize(
    ("wanted", "size", "claims"), [(None, 2, True), (None, None, False), (4, 2, False), (4, None, False)]
)
def test_a_pool_claims_its_size_unless_the_user_asked_for_a_number_of_workers(
    tmp_path: Path, wanted: int | None, size: int | None, *, claims: bool
) -> None:
    async def play() -> None:
        async with rig(tmp_path) as its:
            context = replace(its.engine.context, wanted=wanted)
            pool = ClusterPool(its.engine, context, size=size, look_s=0.01)
            assert (pool.name, pool.claims_size) == (context.name, claims)
            await pool.close()

    asyncio.run(play())


@pytest.mark.long
def test_units_follow_what_is_wanted(tmp_path: Path) -> None:
    async def play() -> None:
        async with rig(tmp_path) as its:
            its.pool.want(2)
            hosts = {(await its.seen("joined")).host, (await its.seen("joined")).host}
            assert set(its.engine.running()) == hosts
            [first, second] = [host.name for host in its.pool.list()]
            its.pool.start("w1", second)
            await its.until(lambda event: event == Started("w1", second))
            its.pool.want(1)
            assert (await its.seen("gone")).host == first, "it has no worker"
            assert [host.name for host in its.pool.list()] == [second]
            its.engine.notice(second)
            notice = await its.until(lambda event: isinstance(event, HostPreempted))
            assert isinstance(notice, HostPreempted)
            assert notice.host == second
            third = (await its.seen("joined")).host
            assert third not in hosts, "in its place"
            assert second in its.engine.running(), "until its worker has left"
            its.pool.stop("w1")
            await its.until(lambda event: isinstance(event, WorkerExited))
            assert (await its.seen("gone")).host == second

    asyncio.run(play())


@pytest.mark.long
def test_an_engine_that_does_not_answer_is_reported_once_and_costs_no_host(tmp_path: Path) -> None:
    async def play() -> None:
        async with rig(tmp_path) as its:
            its.pool.want(1)
            host = (await its.seen("joined")).host
            its.engine.away = True
            state = its.engine.label
            assert (await its.seen(state)).host == ""
            its.pool.start("w1", host)
            await its.until(lambda event: event == Started("w1", host))
            its.engine.away = False
            await its.seen(state)
            assert not [event for event in its.reported if isinstance(event, HostState) and event.state == state]
            assert its.engine.submitted == [host]

    asyncio.run(play())


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that is closed waits for as long as it takes."""
    monkeypatch.setattr(cluster, "CLOSE_S", math.inf)


@pytest.mark.usefixtures("_patient")
def test_a_pool_whose_engine_is_away_is_closed_as_soon_as_its_agents_have_ended(tmp_path: Path) -> None:
    async def play() -> None:
        async with rig(tmp_path) as its:
            its.pool.want(1)
            host = (await its.seen("joined")).host
            its.engine.away = True
            its.pool.over()
            await its.pool.close()
            assert its.engine.submitted == [host]
            await its.engine.ended(host)

    asyncio.run(play())


@pytest.mark.long
@pytest.mark.usefixtures("_patient")
def test_a_pool_whose_engine_is_away_waits_for_what_has_not_started(tmp_path: Path) -> None:
    async def play() -> None:
        async with rig(tmp_path) as its:
            its.engine.full = True
            its.pool.want(1)
            await its.seen("queued")
            its.engine.away = True
            closing = asyncio.create_task(its.pool.close())
            while its.engine.unanswered < 5 and not closing.done():
                await asyncio.sleep(0.01)
            assert not closing.done()
            its.engine.away = False
            await closing
            assert its.engine.waiting == set()

    asyncio.run(play())


@pytest.mark.long
def test_another_process_of_the_pool_goes_on_with_its_units(tmp_path: Path) -> None:
    async def play() -> None:
        async with rig(tmp_path) as its:
            its.pool.want(1)
            host = (await its.seen("joined")).host
            its.pool.start("w1", host)
            await its.until(lambda event: event == Started("w1", host))
            first, engine = its.pool, its.engine
            for task in first._tasks:  # as when its process is killed
                task.cancel()
            its.pool, _ = its.open()
            its.pool._engine = engine
            its.pool.remember("w1", host)
            its.pool.want(1)
            await its.until(lambda event: event == RunningWorker("w1", host))
            await its.seen("joined")
            assert engine.submitted == [host]

    asyncio.run(play())
