"""Another user of the machine wants the coordinator's port, and has its moment: between the death of one and the next.

`farandole run` whole, with fake workers in real processes; where there is root, the thief is somebody else.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from farandole.coordinator.listener import BACKLOG
from tests.support.fake_worker import until
from tests.support.launched import Launched, kill_coordinator

pytestmark = [pytest.mark.processes]
THIEF = """
import os, socket, sys
if os.geteuid() == 0:
    os.setgroups([])
    os.setuid(65534)
port, tries = int(sys.argv[1]), 0
while os.getppid() == int(sys.argv[2]):
    for host in ("127.0.0.1", "0.0.0.0"):
        with socket.socket() as thief:
            thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            tries += 1
            try:
                thief.bind((host, port))
                thief.listen()
            except OSError:
                continue
            print(host, "is mine after", tries, "tries", flush=True)
            sys.exit()
    if tries % 1000 == 0:
        print(tries, flush=True)
"""


@contextmanager
def thief(port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Tries to listen at `port`, all the time; `log` says how often it has, and whether it could."""
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-c", THIEF, str(port), str(os.getpid())], stdout=output)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.long
def test_the_port_is_never_free_while_the_run_lives(tmp_path: Path) -> None:
    """Nor do strangers that fill the queue meanwhile keep the workers out."""
    run, log = Launched(tmp_path, "--workers", "2"), tmp_path / "thief"
    crowd: list[socket.socket] = []
    try:
        until(lambda: sorted(map(str, run.members())) == ["w1", "w2"])
        run.note_processes()
        port = int(json.loads((run.folder / "ticket").read_text())["address"].rpartition(":")[2])
        with thief(port, log) as tries:
            until(lambda: log.stat().st_size > 0)
            for _ in range(3):
                view, tried = run.events("view")[-1]["view"], log.stat().st_size
                kill_coordinator(run)
                while len(crowd) % (BACKLOG + 200) < BACKLOG + 199:
                    crowd.append(socket.socket())
                    crowd[-1].setblocking(False)
                    crowd[-1].connect_ex(("127.0.0.1", port))
                until(lambda view=view: run.events("view")[-1]["view"] != view)
                until(lambda tried=tried: log.stat().st_size > tried)
            assert tries.poll() is None, log.read_text()
            assert "mine" not in log.read_text()
            (run.folder / "finish").touch()
            assert run.ended()[0] == 0
            until(lambda: "mine" in log.read_text())  # so it had been able to
    finally:
        for each in crowd:
            each.close()
        run.process.kill()
        run.process.wait()
    assert sorted(map(str, run.members())) == ["w1", "w2"]
    assert run.events("lost") == []
    [over] = run.events("over")
    back = [event for event in run.events("coordinator back") if event["time"] < over["time"]]
    assert len(back) == 3, "after the end one more may tell it to a pool that the crowd has kept away"
