"""Whose descriptors a pool's fork server has, and that each is closed once: the server is played by hand."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from farandole.platform.process import Forked, ForkServer, Lifeline, is_cut, keep_spare, receive, send
from farandole.pool.base import WorkerStartFailed
from farandole.pool.local import Forks, LocalPool, Start

pytestmark = pytest.mark.timeout(60)


class Played:
    """A pool's `forks`, and the other end of its server's `channel`."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.began: list[str] = []
        self.afresh: list[str] = []
        ours, self.channel = socket.socketpair()
        server = ForkServer(subprocess.Popen(["sleep", "60"]), ours, Lifeline())
        keep_spare(server, {})
        self.forks = Forks(
            ["-m", "x"], (), {}, began=self._began, afresh=lambda start: self.afresh.append(start.worker),
            tell=self.told.append,
        )  # fmt: skip

    def _began(self, start: Start, process: Forked, lifeline: Lifeline) -> None:
        assert process.pid
        lifeline.abandon()
        start.log.close()
        self.began.append(start.worker)


@asynccontextmanager
async def asked(tmp_path: Path, *workers: str) -> AsyncGenerator[tuple[Played, list[Start]]]:
    """The first of `workers` is asked for, the others wait for their turn."""
    it = Played()
    with it.channel:
        send(it.channel, {"unfit": ""})
        starts = [Start(worker=each, environ={}, log=(tmp_path / each).open("wb")) for each in workers]
        for start in starts:
            it.forks.start(start)
        while not it.forks.is_waiting:
            await asyncio.sleep(0)
        yield it, starts
        it.forks.close()


def others() -> list[int]:
    """Descriptors of somebody else, which take the lowest numbers that are free."""
    return [os.open(os.devnull, os.O_RDONLY) for _ in range(32)]


def close_all(descriptors: list[int]) -> None:
    """Raises OSError: somebody has closed one of them."""
    for each in descriptors:
        os.close(each)


@pytest.mark.failure(
    "Processes, signals and crash loops",
    "a signal, or the end of the run, comes while a worker is forked",
    seen="nothing",
    outcome="the kernel ends the forked process; the exit code is that of the run",
)
def test_a_run_that_ends_while_a_fork_is_asked_for_closes_what_is_its_own_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with asked(tmp_path, "w1", "w2") as (it, starts):
            _, received = receive(it.channel)
            *streams, read_end = received
            assert not is_cut(read_end)
            it.forks.close()
            assert is_cut(read_end), "what was forked, and nobody has named, ends"
            close_all([*streams, read_end])
            theirs = others()
            it.forks.close()
            close_all(theirs)
            assert not it.forks.is_waiting
            assert [start.log.closed for start in starts] == [True, True]
            assert it.began == it.afresh == []

    asyncio.run(main())


def test_a_server_that_ends_while_it_is_asked_has_nothing_closed_twice(tmp_path: Path) -> None:
    async def main() -> None:
        async with asked(tmp_path, "w1") as (it, starts):
            close_all(receive(it.channel)[1])
            it.channel.close()
            while not it.afresh:
                await asyncio.sleep(0)
            theirs = others()
            it.forks.close()
            close_all(theirs)
            assert it.afresh == ["w1"], "nothing has ever been forked"
            assert not starts[0].log.closed, "it is of use to who begins afresh"
            starts[0].log.close()

    asyncio.run(main())


def test_a_lifeline_closes_each_of_its_ends_once() -> None:
    lifeline = Lifeline()
    read_end = os.dup(lifeline.read_end)
    lifeline.handed_over()
    theirs = others()
    lifeline.handed_over()
    assert not is_cut(read_end)
    lifeline.cut()
    assert is_cut(read_end)
    theirs += others()
    lifeline.cut()
    lifeline.abandon()
    close_all([*theirs, read_end])


def test_nothing_starts_in_a_pool_that_is_closed(tmp_path: Path) -> None:
    async def main() -> None:
        pool = LocalPool(["true"], logs=tmp_path / "logs", threads=1, environ={})
        pool.kill_all()
        pool.start("w1", "here")
        assert [(type(each), each.worker) for each in await pool.events() if isinstance(each, WorkerStartFailed)] == [
            (WorkerStartFailed, "w1")
        ]
        pool.kill_all()
        assert not (tmp_path / "logs").exists()

    asyncio.run(main())
