"""The SSH pool with real agents on this machine: hosts that can't be as they are, and can once that is mended."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from farandole.pool.base import Event, HostPreempted, HostState, Started, WorkerExited
from farandole.pool.ssh import HostsFile, SshPool
from farandole.protocol.messages import Job
from tests.support.gone import ended
from tests.support.stage import stage

pytestmark = pytest.mark.processes


class Rack:
    """A pool of this machine, its file, and what it has said."""

    def __init__(self, pool: SshPool, file: Path) -> None:
        self.pool, self.file, self.said = pool, file, list[Event]()

    async def until(self, found: Callable[[Event], bool]) -> Event:
        while True:
            for event in self.said:
                if found(event):
                    self.said.remove(event)
                    return event
            self.said += await self.pool.events()

    async def seen(self, state: str, host: str = "") -> str:
        """The reason of the next report of this state, of one host or of any."""
        event = await self.until(
            lambda event: isinstance(event, HostState) and event.state == state and host in ("", event.host)
        )
        assert isinstance(event, HostState)
        return event.reason


@asynccontextmanager
async def rack(folder: Path, *lines: str) -> AsyncIterator[Rack]:
    (folder / "hosts").write_text("".join(f"{line}\n" for line in lines))
    (folder / "run").mkdir()
    async with stage(folder / "run") as scene:
        job = Job(script="sleeps.py", folder=str(folder / "work"))
        pool = SshPool(HostsFile(folder / "hosts"), ticket=scene.ticket, job=job, logs=folder / "run")
        try:
            yield Rack(pool, folder / "hosts")
        finally:
            await pool.close()


class Slow(HostsFile):
    """On a disk that does not answer until it is `there`; `asked`: somebody waits for it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.asked, self.there = threading.Event(), threading.Event()

    def poll(self) -> str | None:
        self.asked.set()
        self.there.wait()
        return super().poll()


class Impatient(SshPool):
    file_s = 0.0


@pytest.mark.failure("Processes, signals and crash loops", "the hosts file becomes a pipe, or its disk does not answer")
def test_a_hosts_file_that_can_t_be_read_freezes_nobody(tmp_path: Path) -> None:
    async def play() -> None:
        (tmp_path / "hosts").write_text("other python=/no/python\n")
        async with stage(tmp_path) as scene:
            watched = Slow(tmp_path / "hosts")
            job = Job(script="sleeps.py", folder=str(tmp_path / "work"))
            pool = Impatient(watched, ticket=scene.ticket, job=job, logs=tmp_path)
            rig = Rack(pool, tmp_path / "hosts")
            first = await rig.seen("hosts file")
            assert watched.asked.is_set()
            watched.there.set()
            assert await rig.seen("hosts file") != first, "it is there again"
            watched.there.clear()
            watched.asked.clear()
            while not watched.asked.is_set():
                await asyncio.sleep(0)
            await pool.close()
            watched.there.set()

    asyncio.run(play())


def work(folder: Path) -> None:
    (folder / "work").mkdir()
    (folder / "work" / "sleeps.py").write_text("import time\ntime.sleep(1000)\n")


@pytest.mark.long
def test_a_host_that_could_not_be_prepared_is_used_once_it_can(tmp_path: Path) -> None:
    async def play() -> None:
        async with rack(tmp_path, "localhost") as rig:
            assert re.search(rf"{re.escape(str(tmp_path / 'work'))}\b.*\blocalhost\b", await rig.seen("not prepared"))
            assert not rig.pool.list()
            work(tmp_path)
            await rig.seen("joined")
            assert [host.name for host in rig.pool.list()] == ["localhost"]

    asyncio.run(play())


@pytest.mark.long
def test_a_line_that_is_deleted_and_comes_back_whether_the_host_was_there_or_not(tmp_path: Path) -> None:
    async def play() -> None:
        work(tmp_path)
        async with rack(tmp_path, "localhost python=/no/python", "other python=/no/python") as rig:
            await rig.seen("idle")
            rig.file.write_text("other python=/no/python\n")
            await rig.seen("gone", "localhost")
            rig.file.write_text("localhost\n")
            await rig.seen("joined")
            rig.pool.start("w1", "localhost")
            await rig.until(lambda event: event == Started("w1", "localhost"))
            rig.file.write_text("other python=/no/python\n")
            await rig.until(lambda event: isinstance(event, HostPreempted) and event.host == "localhost")
            assert not rig.pool.list(), "nobody else is started there"
            rig.pool.stop("w1")
            await rig.until(lambda event: isinstance(event, WorkerExited) and ended(event) == ("w1", "signal 9"))
            await rig.seen("gone", "localhost")
            rig.file.write_text("localhost\n")
            await rig.seen("joined")

    asyncio.run(play())


@pytest.mark.long
def test_a_host_that_serves_another_run_says_so_and_serves_both(tmp_path: Path) -> None:
    async def play() -> None:
        for run in ("one", "two"):
            (tmp_path / run).mkdir()
            work(tmp_path / run)
        async with rack(tmp_path / "one", "localhost") as one:
            await one.seen("joined")
            async with rack(tmp_path / "two", "localhost") as two:
                [others] = re.findall(r"\d+", await two.seen("shared"))
                assert int(others) >= 1, "the first run, and whatever else this machine serves"
                await two.seen("joined")
                for rig in (one, two):
                    rig.pool.start("w1", "localhost")
                    await rig.until(lambda event: event == Started("w1", "localhost"))

    asyncio.run(play())
