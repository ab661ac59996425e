"""Real processes on this machine: what they are told, that they are watched, and that none is ever left behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from farandole.pool.base import WorkerExited
from farandole.pool.local import LocalPool, join_command
from tests.support.fake_worker import gone, until

pytestmark = [pytest.mark.processes]
SLEEP = "import time; time.sleep(600)"
FAMILY = (
    "import subprocess, sys, pathlib, os, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "new = pathlib.Path(sys.argv[1], 'new'); new.write_text(f'{os.getpid()} {child.pid}')\n"
    "new.rename(new.with_name('pids'))\n"
    "time.sleep(float(sys.argv[2]))"
)


def play(folder: Path, command: list[str], scenario: Callable[[LocalPool], Awaitable[None]]) -> None:
    async def perform() -> None:
        pool = LocalPool(command, logs=folder / "logs", threads=3, environ={**os.environ, "MARK": "here"})
        try:
            await scenario(pool)
        finally:
            pool.kill_all()

    asyncio.run(perform())


async def gone_from(pool: LocalPool) -> WorkerExited:
    return (await all_gone_from(pool, 1)).pop()


async def all_gone_from(pool: LocalPool, number: int) -> set[WorkerExited]:
    """So many workers that have gone."""
    found: set[WorkerExited] = set()
    while len(found) < number:
        found |= {event for event in await pool.events() if isinstance(event, WorkerExited)}
    return found


def pids(folder: Path) -> list[int]:
    until((folder / "pids").exists)
    return [int(pid) for pid in (folder / "pids").read_text().split()]


def test_a_worker_is_told_who_it_is_and_its_output_kept(tmp_path: Path) -> None:
    names = ("FARANDOLE_WORKER", "FARANDOLE_POOL", "OMP_NUM_THREADS", "PYTHONUNBUFFERED", "MARK")
    code = (
        f"import os, sys; print(*[os.environ[n] for n in {names}]); print('oops', file=sys.stderr);"
        "print(repr(sys.stdin.read()), os.getsid(0) == os.getpid()); sys.exit(5)"
    )

    async def scenario(pool: LocalPool) -> None:
        pool.start("w1", "here")
        pool.start("w2", "here")
        exits = await all_gone_from(pool, 2)
        assert {(each.worker, *re.findall(r"code \d+", each.reason)) for each in exits} == {
            ("w1", "code 5"),
            ("w2", "code 5"),
        }
        lines = (tmp_path / "logs" / "w2.log").read_text().splitlines()
        assert sorted(lines) == ["'' True", "oops", "w2 local 3 1 here"]

    play(tmp_path, [sys.executable, "-c", code], scenario)


def test_each_worker_has_the_lowest_slot_that_is_free(tmp_path: Path) -> None:
    """Whoever takes a dead one's place takes its GPU."""
    write = "pathlib.Path(os.environ['FARANDOLE_WORKER']).write_text(os.environ['FARANDOLE_SLOT'])"
    code = f"import os, pathlib, time; {write}"
    path = f"import os; os.chdir({str(tmp_path)!r}); {code}; time.sleep(600)"

    def slot(worker: str) -> str:
        until(lambda: (tmp_path / worker).exists() and (tmp_path / worker).read_text() != "")
        return (tmp_path / worker).read_text()

    async def scenario(pool: LocalPool) -> None:
        for worker in ("w1", "w2", "w3"):
            pool.start(worker, "here")
        assert [slot(worker) for worker in ("w1", "w2", "w3")] == ["0", "1", "2"]
        pool.stop("w2")
        await gone_from(pool)
        pool.start("w4", "here")
        pool.start("w5", "here")
        assert [slot(worker) for worker in ("w4", "w5")] == ["1", "3"]

    play(tmp_path, [sys.executable, "-c", path], scenario)


def test_kill_reaches_the_frozen_and_what_they_started(tmp_path: Path) -> None:
    async def scenario(pool: LocalPool) -> None:
        pool.start("w1", "here")
        worker, child = await asyncio.to_thread(pids, tmp_path)
        os.kill(worker, signal.SIGSTOP)
        pool.stop("w1")
        gone_one = await gone_from(pool)
        assert gone_one.worker == "w1"
        assert "signal 9" in gone_one.reason
        await asyncio.to_thread(until, lambda: gone(child))
        pool.stop("w1")  # once more: no error

    play(tmp_path, [sys.executable, "-c", FAMILY, str(tmp_path), "600"], scenario)


def test_what_a_worker_leaves_behind_is_ended_when_it_exits(tmp_path: Path) -> None:
    async def scenario(pool: LocalPool) -> None:
        pool.start("w1", "here")
        gone_one = await gone_from(pool)
        assert gone_one.worker == "w1"
        assert "code 0" in gone_one.reason
        _, child = pids(tmp_path)
        until(lambda: gone(child))

    play(tmp_path, [sys.executable, "-c", FAMILY, str(tmp_path), "0"], scenario)


def test_a_pool_that_ends_leaves_nothing(tmp_path: Path) -> None:
    async def scenario(pool: LocalPool) -> None:
        for number in range(3):
            pool.start(f"w{number}", "here")
        await asyncio.to_thread(pids, tmp_path)

    play(tmp_path, [sys.executable, "-c", FAMILY, str(tmp_path), "600"], scenario)
    left = pids(tmp_path)
    until(lambda: all(gone(pid) for pid in left))  # a signal reaches who has no core a moment later


def test_the_one_door() -> None:
    command = join_command(Path("/r/ticket"), "train.py", ["--lr", "0.1"])
    assert command[1:4] == ["-m", "farandole", "join"]
    assert command[4:] == ["--die-with", str(os.getpid()), "/r/ticket", "train.py", "--lr", "0.1"]


LOADER = """
import pathlib, os, sys, time, torch
from farandole.platform.process import die_with_parent
die_with_parent(int(sys.argv[2]))
class Data(torch.utils.data.Dataset):
    def __len__(self): return 10**9
    def __getitem__(self, i): return i
def slowly(number):
    time.sleep(600 * number)  # the second one is still starting, where torch's own watchdog does not look
loader = torch.utils.data.DataLoader(
    Data(), num_workers=2, persistent_workers=True, sampler=range(10**9), worker_init_fn=slowly
)
iterator = iter(loader); next(iterator)
new = pathlib.Path(sys.argv[1], "new")
new.write_text(" ".join(str(pid) for pid in (os.getpid(), *(w.pid for w in iterator._workers))))
new.rename(new.with_name("pids"))
time.sleep(600)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a loader process that still starts is not ended")
def test_when_the_pools_process_is_killed_workers_and_their_loaders_end(tmp_path: Path) -> None:
    (tmp_path / "loader.py").write_text(LOADER)
    (tmp_path / "pool.py").write_text(
        "import asyncio, os, pathlib, sys\n"
        "from farandole.pool.local import LocalPool\n"
        "async def main():\n"
        "    folder = pathlib.Path(sys.argv[1])\n"
        "    command = [sys.executable, str(folder / 'loader.py'), str(folder), str(os.getpid())]\n"
        "    LocalPool(command, logs=folder / 'logs', threads=1, environ=os.environ).start('w1', 'here')\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    pool = subprocess.Popen([sys.executable, str(tmp_path / "pool.py"), str(tmp_path)])
    try:
        worker, *loaders = pids(tmp_path)
        assert len(loaders) == 2
        assert not any(gone(pid) for pid in (worker, *loaders))
    finally:
        pool.kill()
        pool.wait()
    until(lambda: all(gone(pid) for pid in (worker, *loaders)), timeout_s=30)
