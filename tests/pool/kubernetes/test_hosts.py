"""Pools of pods with real agents: two in one namespace, and what keeps a pod from running (no torch is needed)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from farandole.pool.base import Event, HostPreempted, HostState, Started
from farandole.pool.cluster import ClusterPool
from farandole.protocol.messages import Job
from tests.support.kubernetes import IMAGE, Cluster, kubernetes, names
from tests.support.stage import Stage, stage
from tests.support.units import pool_of_pods

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with kubernetes(tmp_path) as found:
        yield found


class Hosts:
    """A pool, and what it has reported."""

    def __init__(self, pool: ClusterPool, scene: Stage) -> None:
        self.pool, self.scene, self.reported = pool, scene, list[Event]()
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        while True:
            self.reported += await self.pool.events()

    async def close(self) -> None:
        await self.pool.close()
        self._reading.cancel()

    async def until(self, condition: Callable[[], object]) -> None:
        await self.scene.until(condition, 60.0)

    async def count(self, number: int) -> None:
        await self.until(lambda: len(self.pool.list()) == number)

    def reasons(self, state: str) -> list[str]:
        return [event.reason for event in self.reported if isinstance(event, HostState) and event.state == state]

    async def start(self, worker: str) -> str:
        """Start a worker on the first host. Returns the host."""
        host = self.pool.list()[0].name
        self.pool.start(worker, host)
        await self.until(lambda: Started(worker, host) in self.reported)
        return host


@asynccontextmanager
async def opened(folder: Path, *names: str) -> AsyncGenerator[list[Hosts]]:
    """Pools of one run, one worker to a pod. They are closed at the end."""
    (folder / "sleeps.py").write_text("import time\ntime.sleep(1000)\n")
    (folder / "run").mkdir()
    job = Job(script="sleeps.py", folder=str(folder))
    async with stage(folder / "run") as scene:
        pools = [Hosts(pool_of_pods(folder / "run", scene.ticket, job, name=name, slots=1), scene) for name in names]
        try:
            yield pools
        finally:
            for pool in pools:
                await pool.close()


@pytest.mark.long
def test_two_pools_in_one_namespace_do_not_touch_each_other(cluster: Cluster, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, "one", "two") as (one, two):
            one.pool.want(1)
            two.pool.want(1)
            await one.count(1)
            await two.count(1)
            await two.start("w1")
            assert len(cluster.secrets()) == 2
            await one.close()
            assert len(names(cluster.pods())) == len(cluster.secrets()) == len(two.pool.list()) == 1
            assert two.reasons("gone") == []
        assert names(cluster.pods()) == set()
        assert cluster.secrets() == {}
        assert cluster.processes() == []

    asyncio.run(scenario())


@pytest.mark.long
def test_a_quota_a_queue_and_an_image_keep_pods_from_running_until_they_do_not(
    cluster: Cluster, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, "pods") as (pods,):
            cluster.quota = 1
            cluster.images.clear()
            pods.pool.want(2)
            await pods.until(lambda: any(IMAGE in reason for reason in pods.reasons("queued")))
            await pods.until(lambda: any("exceeded quota" in reason for reason in pods.reasons("Kubernetes")))
            cluster.images.add(IMAGE)
            await pods.count(1)
            cluster.quota = None
            await pods.count(2)

    asyncio.run(scenario())


@pytest.mark.long
def test_a_pod_that_is_deleted_with_less_grace_has_a_sooner_deadline(cluster: Cluster, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, "pods") as (pods,):
            pods.pool.want(1)
            await pods.count(1)
            host = await pods.start("w1")
            cluster.delete(next(iter(names(cluster.pods()))), grace_s=20)
            await pods.until(lambda: any(isinstance(e, HostPreempted) and e.deadline_s <= 20 for e in pods.reported))
            assert {event.host for event in pods.reported if isinstance(event, HostPreempted)} == {host}
            pods.pool.stop("w1")
            await pods.until(lambda: [each.name for each in pods.pool.list() if each.name != host])

    asyncio.run(scenario())
