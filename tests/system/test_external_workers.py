"""External workers, which no pool restarts: an evicted one comes back by itself, one that never trains ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from farandole.control.ticket import Ticket
from farandole.protocol import messages as m
from farandole.protocol.coordinator.state import EXIT_BANNED, EXIT_EVICTED
from farandole.worker import process_exit
from tests.support.harness import ENVIRON, FARANDOLE, Elastic
from tests.support.lines import naming
from tests.support.scene import Scene, trained

JOB = Path(__file__).parents[1] / "jobs" / "small.py"
ONLY_JOINS = "import farandole\nrun = farandole.join()\n"
UNTRAINED = "the script ended without going through run.steps(...), so this worker trained nothing"


@pytest.mark.long
@pytest.mark.failure(
    "External workers, pools and machines",
    "the script of an external worker calls `farandole.join()` and ends without `run.steps`",
    seen="an error on that worker, and an event, when it ends",
    outcome="its exit code is 1; the run continues without it, also if it has not begun yet",
)
@pytest.mark.processes
def test_a_script_that_only_joins_ends_the_external_worker_and_not_the_run(tmp_path: Path) -> None:
    pace, script = tmp_path / "pace", tmp_path / "only_joins.py"
    pace.write_text("2")  # so that it outlasts two external workers
    script.write_text(ONLY_JOINS)
    with Elastic(tmp_path / "run", JOB, str(tmp_path / "out"), "--pace", str(pace), workers=1, options=[]) as run:
        run.until_step(1)
        ticket = shutil.copy(run.folder / "ticket", tmp_path / "ticket")
        for text, mode in ((ONLY_JOINS, 0o600), (ONLY_JOINS + "raise SystemExit(0)\n", 0o644)):
            script.write_text(text)
            ticket.chmod(mode)
            command = [*FARANDOLE, "join", str(ticket), str(script)]
            done = subprocess.run(command, env=ENVIRON, capture_output=True, text=True, timeout=200, check=False)
            assert done.returncode == 1, done.stdout + done.stderr
            assert f"farandole: error: {UNTRAINED}" in done.stderr
            assert bool(naming(done.stderr, ticket, "mode 0644")) == (mode == 0o644)
        pace.unlink()
        run.finish()
        assert [event["worker"] for event in run.events("failed")] == ["guest-1", "guest-2"]


@pytest.mark.failure(
    "The training loop",
    "the script calls `farandole.join()` and ends without `run.steps`",
    seen="an error when the first worker reaches its end",
    outcome="exit code 1",
)
@pytest.mark.processes
def test_a_run_whose_script_only_joins_ends_with_an_error(tmp_path: Path) -> None:
    (tmp_path / "only_joins.py").write_text(ONLY_JOINS)
    with Elastic(tmp_path / "run", tmp_path / "only_joins.py", workers=2, options=[]) as run:
        run.until(lambda: run.process.poll() is not None, "the end")
        assert run.process.returncode == 1
        assert UNTRAINED in run.output.read_text()


UNREACHED = """
import sys
from farandole.worker import connection
from farandole.script import run_script

connection.FIRST_S = 0.5
run_script(sys.argv[1], sys.argv[2], [])
"""


@pytest.mark.long
def test_an_external_worker_of_a_run_that_is_over_tries_once(tmp_path: Path) -> None:
    Ticket(address="http://127.0.0.1:9", secret="0" * 64, run="over").save(tmp_path / "ticket")
    (tmp_path / "only_joins.py").write_text(ONLY_JOINS)
    command = [sys.executable, "-c", UNREACHED, str(tmp_path / "ticket"), str(tmp_path / "only_joins.py")]
    done = subprocess.run(command, env=ENVIRON, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1
    assert done.stderr.count("http://127.0.0.1:9") == 1, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def test_an_external_worker_that_fails_before_there_is_a_view_is_let_go_and_the_run_begins() -> None:
    scene = Scene()
    scene.hello("guest", pool="")
    scene.say("guest", m.ScriptFailed(traceback="UsageError"))
    assert scene.last("guest", m.Goodbye).code == 1
    assert scene.coordinator.ending is None
    scene.ready("a")
    assert "proposed" in scene.events


# --- coming back -------------------------------------------------------------------------------------------------

WORKER = """
import os, socket, sys
from farandole.control import ticket
from farandole.platform import output
from farandole.settings import Settings
from farandole.worker import process_exit

def peek():  # what an honest worker's own code would hold
    return sys.argv[1:], os.getcwd(), os.getpid(), os.environ.get("CHANGED"), sorted(map(int, os.listdir("/dev/fd")))

output.show(0)
returns = Settings.read().returns
print(repr((returns, ticket.read_stdin(), *peek())), flush=True)
process_exit.come_back("-", returns)
leaked = socket.socket()
os.set_inheritable(leaked.fileno(), True)
os.chdir("/")
os.environ["CHANGED"] = "yes"
process_exit.leave(int(sys.argv[1]) if returns < 2 else 0)
"""


@pytest.mark.failure(
    "External workers, pools and machines",
    "an external worker is evicted because its host or network stood still",
    seen="its log says that it joins again, and when",
    outcome="the same process joins again after 1, 2, 4, ... at most 60 s; SIGTERM and SIGINT end it meanwhile",
)
def test_an_evicted_external_worker_begins_anew_in_its_own_place(tmp_path: Path) -> None:
    """Same process, command, folder, variables and standard input; nothing that was open is."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    done = subprocess.run(
        [sys.executable, script, str(EXIT_EVICTED), "an argument"], env=ENVIRON, cwd=tmp_path, input=b"ticket",
        capture_output=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, *others = [line.partition(", ") for line in done.stdout.decode().splitlines()]
    assert [first[0], *(line[0] for line in others)] == ["(0", "(1", "(2"]
    assert {line[2] for line in others} == {first[2]}
    assert "b'ticket', ['3', 'an argument']" in first[2]
    one, other = done.stderr.decode().splitlines()
    assert naming(one, "farandole: ", "1 s")
    assert naming(other, "farandole: ", "2 s")


@pytest.mark.failure(
    "External workers, pools and machines", "an external worker breaks the protocol, is refused, or the run is over"
)
@pytest.mark.parametrize("code", [0, 1, 4, EXIT_BANNED])
def test_who_ends_for_another_reason_does_not(code: int, tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    command = [sys.executable, tmp_path / "worker.py", str(code)]
    done = subprocess.run(command, env=ENVIRON, input=b"", capture_output=True, timeout=200, check=False)
    assert (done.returncode, done.stdout.count(b"\n"), done.stderr) == (code, 1, b"")


@pytest.mark.failure(
    "External workers, pools and machines", "an external worker is evicted because its host or network stood still"
)
def test_it_waits_longer_each_time_up_to_a_minute() -> None:
    assert [process_exit._pause_s(n) for n in (1, 2, 3, 7, 10_000)] == [1.0, 2.0, 4.0, 60.0, 60.0]


@pytest.mark.failure(
    "External workers, pools and machines", "an external worker is evicted because its host or network stood still"
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_notice_while_it_waits_ends_it(number: signal.Signals, tmp_path: Path) -> None:
    command = [*FARANDOLE, "join", str(tmp_path / "no ticket"), str(JOB)]
    with subprocess.Popen(command, env={**ENVIRON, "FARANDOLE_RETURNS": "7"}, stderr=subprocess.PIPE) as process:
        status = Path(f"/proc/{process.pid}/status")
        deadline = time.monotonic() + 60
        while not _catches(status, number):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(process.pid, number)
        assert process.wait(200) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""


def _catches(status: Path, number: int) -> bool:
    """Whether both notices have handlers; Python has one for SIGINT from the start."""
    [mask] = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("SigCgt")]
    return all(int(mask, 16) >> (each - 1) & 1 for each in (signal.SIGTERM, number))


@pytest.mark.failure(
    "External workers, pools and machines",
    "an external worker breaks the protocol, is refused, or the run is over",
    seen="the reason, at once",
    outcome="it ends and does not join again: exit code 5, 1, or that of the run",
)
def test_who_broke_the_protocol_is_told_to_stay_out() -> None:
    scene = trained("a", "b")
    scene.say("b", m.WorkerProcessExited(worker="b", reason="nonsense"))
    assert scene.last("b", m.Goodbye).code == EXIT_BANNED
    assert scene.restarted().coordinator.eviction_code("b") == EXIT_BANNED
    scene.report("a", 0)
    assert scene.coordinator.roster().evicted == ("b",)
    assert scene.coordinator.departed["b"].code == EXIT_BANNED
    assert scene.coordinator.eviction_code("a") == EXIT_EVICTED
