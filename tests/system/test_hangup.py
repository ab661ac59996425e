"""SIGHUP, as when a terminal is closed, is a first SIGTERM; who ignores it from the start (nohup) goes on."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.fake_worker import until
from tests.support.harness import FARANDOLE, Elastic
from tests.support.launched import FAKE, Launched
from tests.support.lines import naming

pytestmark = [pytest.mark.processes]
TELLING = Path(__file__).parents[1] / "jobs" / "telling.py"
SLEEPER = "import time; time.sleep(600)"
PATIENT = (
    "import sys; from farandole.pool import base; base.GRACE_S = 3600.0\n"
    "from farandole.cli import main; sys.argv[0] = 'farandole'; main()"
)


@pytest.fixture(autouse=True)
def hangups_count() -> Iterator[None]:
    """Whoever runs the tests may be ignoring them, which is inherited."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def metrics(folder: Path) -> str:
    path = folder / "metrics.jsonl"
    return path.read_text() if path.exists() else ""


@pytest.mark.long
@pytest.mark.failure(
    "Processes, signals and crash loops",
    "the terminal of `farandole run` is closed (SIGHUP, once or twice)",
    seen="`stopping: farandole run got SIGHUP`, in `metrics.jsonl`",
    outcome="all workers leave after the same step; the state is saved; exit code 129",
)
def test_a_closed_terminal_stops_a_run_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    terminal, ours = os.openpty()
    with subprocess.Popen(
        [*FARANDOLE, "run", "--workers", "1", "--folder", str(folder), str(FAKE), str(folder)],
        stdin=ours, stdout=ours, stderr=ours, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0) and None,
    ) as process:  # fmt: skip
        os.close(ours)
        until(lambda: os.read(terminal, 65536) and '"event":"view"' in metrics(folder))
        os.close(terminal)
        assert process.wait(200) == 128 + signal.SIGHUP
    assert '"event":"saved"' in metrics(folder)
    assert "SIGHUP" in metrics(folder)


@pytest.mark.long
def test_hangups_never_kill_and_nohup_ignores_them(launch: Callable[..., Launched], tmp_path: Path) -> None:
    run = launch("--workers", "1")
    run.wait_for("w1")
    [worker] = [int(str(event["pid"])) for event in run.events("ready")]
    os.kill(worker, signal.SIGSTOP)
    run.process.send_signal(signal.SIGHUP)
    until(lambda: run.events("stopping"))
    run.process.send_signal(signal.SIGHUP)  # the shell's, after the kernel's
    os.kill(worker, signal.SIGCONT)
    code, out, err = run.ended()
    assert (code, err) == (128 + signal.SIGHUP, ""), "a second of another kind would have killed everything"
    assert [event["path"] for event in run.events("saved")] == ["checkpoint"]
    assert naming(out, "checkpoint")

    folder = tmp_path / "nohup"
    command = ["nohup", *FARANDOLE, "run", "--workers", "1", "--folder", str(folder), str(FAKE), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        until(lambda: '"event":"view"' in metrics(folder))
        process.send_signal(signal.SIGHUP)
        (folder / "finish").touch()
        assert process.wait(200) == 0


@pytest.mark.long
@pytest.mark.failure(
    "Processes, signals and crash loops",
    "the terminal of a `farandole join` is closed",
    seen="`guest-1 has a preemption notice: SIGHUP`, at once",
    outcome="the external worker leaves between two steps, exit code 0",
)
def test_an_external_worker_leaves_gracefully(tmp_path: Path) -> None:
    (tmp_path / "pace").write_text("0.05")
    job = [str(TELLING), str(tmp_path / "out"), "--pace", str(tmp_path / "pace")]
    with Elastic(tmp_path / "run", TELLING, *job[1:], workers=1, options=[]) as run:
        run.until_step(1)
        with subprocess.Popen([*FARANDOLE, "join", str(run.folder / "ticket"), *job]) as external_worker:
            run.until_members(2)
            external_worker.send_signal(signal.SIGHUP)
            assert external_worker.wait(200) == 0
        assert [event["reason"] for event in run.events("notice")] == ["SIGHUP"]
        run.until_members(1)
        (tmp_path / "pace").unlink()
        run.finish()
        assert run.events("lost") == []


@pytest.mark.failure(
    "Processes, signals and crash loops",
    "Ctrl-C while the workers still import",
    seen="`over: ...`, at once",
    outcome="the workers are killed, because they have not begun; exit code 130",
)
def test_a_signal_while_workers_are_starting_does_not_wait_for_them(tmp_path: Path) -> None:
    """They would be killed after the pool's grace, which here is an hour."""
    folder, script = tmp_path / "r", tmp_path / "sleeper.py"
    script.write_text(SLEEPER)
    command = [sys.executable, "-c", PATIENT, "run", "--workers", "2", "--folder", str(folder), str(script)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        until(lambda: len(list((folder / "logs").glob("*.log"))) == 2)
        process.send_signal(signal.SIGINT)
        assert process.wait(200) == 128 + signal.SIGINT
