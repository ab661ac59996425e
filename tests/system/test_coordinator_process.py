"""The coordinator as a real process: what it writes, what it imports, and when it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from farandole.control.api import Api
from farandole.control.client import subscribe
from farandole.control.ticket import Ticket
from farandole.protocol import messages as m
from tests.support.coordinator_process import listening, settings, start
from tests.support.fake_worker import FakeWorker, gone, until
from tests.support.harness import read_lines

pytestmark = [pytest.mark.processes]
FAKE = Path(__file__).parents[1] / "support" / "fake_worker.py"


@pytest.fixture
def coordinator(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Ticket]]:
    """Its parameter: the heartbeat timeout in seconds."""
    settings(tmp_path, heartbeat_s=0.2, heartbeat_timeout_s=getattr(request, "param", 1.0))
    process = start(tmp_path)
    try:
        yield process, listening(tmp_path, process)
    finally:
        process.kill()
        process.wait()


def test_it_tells_where_it_listens_and_keeps_the_ticket_private(
    tmp_path: Path, coordinator: tuple[subprocess.Popen[bytes], Ticket]
) -> None:
    process, ticket = coordinator
    assert json.loads((tmp_path / "coordinator.json").read_text()) == {"pid": process.pid, "address": ticket.address}
    assert stat.S_IMODE((tmp_path / "ticket").stat().st_mode) == 0o600
    assert Api(ticket).status().coordinator.pid == process.pid
    for path in tmp_path.iterdir():
        if path.name != "ticket":
            assert ticket.secret.encode() not in path.read_bytes(), path


@pytest.mark.long
def test_sigint_is_not_for_it_and_it_ends_when_the_run_is_over(
    coordinator: tuple[subprocess.Popen[bytes], Ticket],
) -> None:
    process, ticket = coordinator
    process.send_signal(signal.SIGINT)
    assert Api(ticket).status().state == "starting"
    Api(ticket).stop("enough", 0)
    assert process.wait(200) == 0


@pytest.mark.long
def test_it_does_not_import_torch() -> None:
    code = "import farandole.coordinator.process, sys; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.long
def test_bad_settings_are_one_line(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "farandole.coordinator.process", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 1
    assert process.stderr.startswith("farandole: error:")
    assert "settings.json" in process.stderr
    assert len(process.stderr.splitlines()) == 1


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_it_dies_with_its_parent(tmp_path: Path, signum: signal.Signals) -> None:
    settings(tmp_path)
    code = (
        "import subprocess, sys, os, time\n"
        "subprocess.Popen([sys.executable, '-m', 'farandole.coordinator.process', sys.argv[1], '--die-with',"
        " str(os.getpid())], start_new_session=True)\n"
        "time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    try:
        until(lambda: (tmp_path / "coordinator.json").exists())
        pid = json.loads((tmp_path / "coordinator.json").read_text())["pid"]
        assert not gone(pid)
    finally:
        parent.send_signal(signum)
        parent.wait()
    until(lambda: gone(pid))


def test_it_does_not_begin_when_its_parent_is_gone_already(tmp_path: Path) -> None:
    settings(tmp_path)
    assert start(tmp_path, "--die-with", "1").wait(200) == -signal.SIGKILL


def in_thread(worker: FakeWorker) -> threading.Thread:
    thread = threading.Thread(target=lambda: asyncio.run(worker.run()))
    thread.start()
    return thread


def size(ticket: Ticket) -> int:
    status = Api(ticket).status()
    return status.view.size if status.state == "training" else -1


@pytest.mark.parametrize("coordinator", [500.0], indirect=True)
def test_a_killed_process_stops_the_view_without_a_timeout(
    tmp_path: Path, coordinator: tuple[subprocess.Popen[bytes], Ticket]
) -> None:
    _, ticket = coordinator

    async def kill_one(number: int) -> None:
        environ = {**os.environ, "FARANDOLE_WORKER": f"w{number}", "FARANDOLE_POOL": "local"}
        victim = subprocess.Popen([sys.executable, str(FAKE), str(tmp_path)], env=environ)
        await asyncio.to_thread(until, lambda: size(ticket) == 2)
        async with subscribe(ticket, m.Hello(kind="pool", pool="local", host="here")) as pool:
            victim.kill()
            victim.wait()
            await pool.send(
                m.WorkerProcessExited(worker=f"w{number}", reason="killed by signal 9")
            )  # its pool saw it end
            await asyncio.to_thread(until, lambda: size(ticket) == 1)

    async def scenario() -> None:
        survivor = FakeWorker(ticket, worker="w0")
        running = asyncio.create_task(survivor.run())
        for number in range(1, 6):
            await kill_one(number)
        await asyncio.to_thread(Api(ticket).stop, "enough", 0)
        await running

    asyncio.run(scenario())
    lost = [line for line in read_lines(tmp_path) if line.get("event") == "lost"]
    assert [(line["worker"], line["reason"]) for line in lost] == [(f"w{n}", "killed by signal 9") for n in range(1, 6)]


@pytest.mark.long
def test_a_frozen_process_is_evicted_and_delays_nobody(
    tmp_path: Path, coordinator: tuple[subprocess.Popen[bytes], Ticket]
) -> None:
    process, ticket = coordinator
    survivor = FakeWorker(ticket, worker="w0")
    thread = in_thread(survivor)
    environ = {**os.environ, "FARANDOLE_WORKER": "w1", "FARANDOLE_POOL": ""}
    frozen = subprocess.Popen([sys.executable, str(FAKE), str(tmp_path)], env=environ)
    try:
        until(lambda: size(ticket) == 2)
        frozen.send_signal(signal.SIGSTOP)
        until(lambda: survivor.got(m.Resume))  # long before a close handshake with the frozen one would be given up
        assert size(ticket) == 1
        [stop] = [at for at, message in survivor.received if isinstance(message, m.Stop)]
        [resume] = [at for at, message in survivor.received if isinstance(message, m.Resume)]
        assert resume - stop < 5, "nobody waited for a close handshake"
        Api(ticket).stop("enough", 0)
        assert process.wait(200) == 0, "a frozen peer does not hold the coordinator back"
    finally:
        frozen.kill()
        frozen.wait()
        process.kill()  # or the survivor would stay for ever where something above has failed
        thread.join()
