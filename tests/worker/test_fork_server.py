"""A forked worker is what a new interpreter would be; what can't be forked is begun afresh; a server may die."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from farandole.platform.process import SUPPORTED
from farandole.pool.base import Started, WorkerExited, WorkerStartFailed
from farandole.pool.local import LocalPool
from tests.support.fake_worker import gone, until
from tests.support.mentioned import mentions

ROOT = Path(__file__).parents[2]
JOB = [sys.executable, "-m", "tests.jobs.inherited"]
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not SUPPORTED, reason="workers are forked on Linux only"),
]
ENVIRON = {name: value for name, value in os.environ.items() if not name.startswith("FARANDOLE_")}
SLEEPER = "import time\nprint('here')\ntime.sleep(600)\n"
THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"


class Played:
    """A local pool, what it has told, and the processes that it has started."""

    def __init__(self, folder: Path, command: list[str], *, threads: int, fresh: bool, environ: dict[str, str]) -> None:
        self.folder = folder
        self.told: list[str] = []
        self.pool = LocalPool(
            command, logs=folder / "logs", threads=threads, tell=self.told.append, fresh=fresh,
            environ={**ENVIRON, "OUT": str(folder / "out"), **environ},
        )  # fmt: skip

    async def ends(self, worker: str) -> str:
        self.pool.start(worker, "here")
        exited = await self.ended()
        assert exited.worker == worker
        return exited.reason

    async def ended(self) -> WorkerExited | WorkerStartFailed:
        """The next one of which the pool says so. Those that tests start end one by one."""
        while not (ends := [event for event in await self.pool.events() if not isinstance(event, Started)]):
            pass
        [end] = ends
        assert isinstance(end, WorkerExited | WorkerStartFailed)
        return end

    async def pid(self, worker: str) -> int:
        """Once it is running its program."""
        log = self.folder / "logs" / f"{worker}.log"
        await asyncio.to_thread(until, lambda: log.exists() and "here" in log.read_text())
        while worker not in self.pool._processes:  # it may be running before we have been told
            await asyncio.sleep(0.01)
        return self.pool._processes[worker].pid

    async def server(self) -> int:
        await asyncio.to_thread(until, lambda: self.pool._forks and self.pool._forks._server)
        assert self.pool._forks
        assert self.pool._forks._server
        return self.pool._forks._server.pid

    def said(self) -> dict[str, Any]:
        out = self.folder / "out"
        said = json.loads(out.read_text())
        out.unlink()
        return said


def play(
    folder: Path, command: list[str], scenario: Callable[[Played], Awaitable[None]], *, threads: int = 2,
    fresh: bool = False, **environ: str,
) -> list[str]:  # fmt: skip
    """Returns what was told."""

    async def perform() -> list[str]:
        played = Played(folder, command, threads=threads, fresh=fresh, environ=environ)
        try:
            await scenario(played)
        finally:
            played.pool.kill_all()
        assert not played.pool._processes
        return played.told

    return asyncio.run(perform())


@pytest.fixture
def sleeper(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    return {"PYTHONPATH": str(tmp_path)}


@pytest.mark.long
def test_a_forked_process_is_what_a_new_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two threads: NumPy's library starts one at once, and ends it before a fork."""
    monkeypatch.chdir(ROOT)
    forked: list[dict[str, Any]] = []
    fresh: list[dict[str, Any]] = []

    async def once(played: Played) -> None:
        assert mentions(await played.ends("w1"), "code 0"), (tmp_path / "logs" / "w1.log").read_text()
        fresh.append(played.said())

    async def often(played: Played) -> None:
        assert mentions(await played.ends("w1"), "code 0"), (tmp_path / "logs" / "w1.log").read_text()
        forked.append(played.said())
        played.pool._command = played.pool._forks._words = [*JOB[1:], "--load"]  # type: ignore[union-attr]
        assert mentions(await played.ends("w2"), "code 0")
        forked.append(played.said())
        for option, code in {"--exit": "code 7", "--raise": "code 1", "--signal": "signal 15"}.items():
            played.pool._forks._words = [*JOB[1:], option]  # type: ignore[union-attr]
            assert mentions(await played.ends("w3"), code)
        assert "OSError: no disk" in (tmp_path / "logs" / "w3.log").read_text()

    environ = {"ATEN_CPU_CAPABILITY": "default", "MARK": "a\nb", "PYTHONHASHSEED": "1"}
    assert play(tmp_path, JOB, once, fresh=True, **environ) == []
    assert play(tmp_path, JOB, often, **environ) == []
    assert forked[0]["facts"] == fresh[0]["facts"]
    assert fresh[0]["facts"]["instructions"] == "DEFAULT"
    assert fresh[0]["facts"]["torch"][0] == 2
    assert forked[1]["loaded"] == {method: [0, 1, 2, 3] for method in ("fork", "forkserver", "spawn")}
    for drawn in zip(fresh[0]["draws"], forked[0]["draws"], forked[1]["draws"], strict=True):
        assert len({*drawn}) == 3, "the random state and the key are each process's own"


@pytest.mark.long
def test_a_killed_server_takes_nobody_with_it_and_is_replaced(tmp_path: Path, sleeper: dict[str, str]) -> None:
    async def scenario(played: Played) -> None:
        played.pool.start("w1", "here")
        first = await played.pid("w1")
        server = await played.server()
        os.kill(server, signal.SIGSTOP)
        played.pool.start("w2", "here")  # asked, and not answered
        played.pool.start("w3", "here")
        played.pool.stop("w3")
        failed = await played.ended()
        assert isinstance(failed, WorkerStartFailed)
        assert failed.worker == "w3"
        os.kill(server, signal.SIGKILL)
        assert await played.pid("w2") != first
        assert not gone(first)
        assert await played.server() != server
        os.kill(first, signal.SIGKILL)
        lost = await played.ended()
        assert isinstance(lost, WorkerExited)
        assert lost.worker == "w1"
        assert mentions(lost.reason, "signal 9")
        played.pool.stop("w2")
        lost = await played.ended()
        assert isinstance(lost, WorkerExited)
        assert lost.worker == "w2"
        assert mentions(lost.reason, "signal 9")

    told = play(tmp_path, [sys.executable, "-m", "sleeper"], scenario, **sleeper)
    assert len(told) == 1


@pytest.mark.long
def test_what_would_not_survive_a_fork_is_begun_afresh_and_that_is_said_once(
    tmp_path: Path, sleeper: dict[str, str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(THREAD)

    async def scenario(played: Played) -> None:
        played.pool.start("w1", "here")
        played.pool.start("w2", "here")
        for worker in ("w1", "w2"):
            await played.pid(worker)
        assert played.pool._forks
        assert not played.pool._forks._server

    told = play(tmp_path, [sys.executable, "-m", "sleeper"], scenario, threads=1, **sleeper)
    assert len(told) == 1
