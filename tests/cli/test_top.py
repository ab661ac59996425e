"""`farandole top` on live runs: once into a pipe, and on a terminal until Ctrl-C or the run's end."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from farandole.control.api import Api
from farandole.control.ticket import load
from farandole.platform import files
from tests.support.harness import ENVIRON, FARANDOLE, Elastic
from tests.support.terminal import OnATerminal

pytestmark = [pytest.mark.processes]
JOB = Path(__file__).parents[1] / "jobs" / "small.py"


def once(*arguments: str, folder: Path, code: int = 0) -> str:
    command = [*FARANDOLE, "top", *arguments]
    done = subprocess.run(command, env=ENVIRON, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.long
def test_one_run_several_and_one_of_another_machine(tmp_path: Path) -> None:
    pace, runs = tmp_path / "pace", tmp_path / "runs"
    pace.write_text("0.2")
    runs.mkdir()
    job = (str(tmp_path / "out"), "--pace", str(pace), "--epochs", "1000")
    with Elastic(runs / "one", JOB, *job, workers=1, options=[]) as one:
        one.until(lambda: bool(one.events("time spent")), "an account")
        asked = Api(load(str(runs / "one" / "ticket"), files.opener))
        one.until(lambda: asked.status().account is not None, "the coordinator's account")
        text = once(folder=tmp_path)
        assert "1 of 1" in text
        assert "goodput" in text
        ticket = tmp_path / "ticket"
        ticket.write_bytes((runs / "one" / "ticket").read_bytes())
        ticket.chmod(0o600)
        elsewhere = once("--ticket", str(ticket), folder=tmp_path)
        assert "1 of 1" in elsewhere
        assert "goodput" in elsewhere
        refused = once("--ticket", str(ticket), "--run", str(runs / "one"), folder=tmp_path, code=2)
        assert "--ticket" in refused
        assert "--run" in refused
        with Elastic(runs / "two", JOB, str(tmp_path / "out2"), *job[1:], workers=1, options=[]) as two:
            two.until_step(1)
            lines = once(folder=tmp_path).splitlines()
            assert [line.split()[:2] for line in lines[1:3]] == [["one", "training"], ["two", "training"]]
            terminal = OnATerminal([*FARANDOLE, "top", "--run", str(runs / "two")])
            terminal.until("learning rate")
            two.command("stop")
            assert "over: " in terminal.rest()
            assert terminal.process.wait(200) == 0
        left = OnATerminal([*FARANDOLE, "top", "--run", str(runs / "one")])
        left.until("samples/s")
        left.process.send_signal(signal.SIGINT)
        assert "run one" in left.rest().rpartition("\x1b[?1049l")[2]
        assert left.process.wait(200) == 0
        one.command("stop")
    assert "is over" in once("--run", str(runs / "one"), folder=tmp_path, code=1)
