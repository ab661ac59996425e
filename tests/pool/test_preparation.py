"""`--prepare`: before any worker of a host, once, seen, and in the way of nobody else when it fails."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from farandole.pool import local
from tests.support.harness import ENVIRON, Elastic

JOB = Path(__file__).parents[1] / "jobs" / "small.py"
PREPARE = "import sys\nfrom farandole.pool.local import prepare as p\np(sys.argv[1], run=sys.argv[2], host=sys.argv[3])"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host's, whose interpreters find nothing by way of the environment of these tests."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setitem(ENVIRON, "HOME", str(folder))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return folder


def start(command: str, *, run: str = "run", host: str = "host") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PREPARE, command, run, host], env=ENVIRON, stdout=subprocess.PIPE, text=True
    )


def test_once_a_host_and_run_and_again_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = tmp_path / "done"
    count = f"echo $N >> {done}"
    for run, host in [("a", "h"), ("a", "h"), ("b", "h"), ("a", "i"), ("a", "h")]:
        monkeypatch.setenv("N", f"{run}{host}")
        local.prepare(count, run=run, host=host)
    assert Counter(done.read_text().split()) == {"ah": 1, "bh": 1, "ai": 1}
    failing = f"echo failed >> {done}; exit 3"
    for _ in range(2):
        with pytest.raises(local.HostNotPrepared, match=r"--prepare .*exit 3'.*\bh\b.*\b3\b"):
            local.prepare(failing, run="a", host="h")
    assert Counter(done.read_text().split())["failed"] == 2


@pytest.mark.processes
def test_one_runs_it_while_the_others_wait_and_a_killed_one_s_is_waited_for(tmp_path: Path) -> None:
    """The command opens a pipe and ends when it is told to; a second one at the same time would say so."""
    gate, said = tmp_path / "gate", tmp_path / "said"
    os.mkfifo(gate)
    command = f"mkdir {tmp_path}/busy || echo TWICE >> {said}; cat {gate}; echo ran >> {said}; rmdir {tmp_path}/busy"
    first = start(command)
    assert first.stdout is not None
    prepares = first.stdout.readline()
    assert re.match(r"farandole: .*\bhost\b", prepares)
    second = start(command)
    assert second.stdout is not None
    waits = second.stdout.readline()
    assert re.match(r"farandole: .*\bhost\b", waits)
    assert waits != prepares
    first.send_signal(signal.SIGKILL)
    first.wait()
    gate.write_text("")  # the killed one's command ends; nobody has seen that it succeeded, so the second runs it
    assert second.stdout.readline() == prepares
    third = start(command)
    assert third.stdout is not None
    assert "waiting" in third.stdout.readline()
    gate.write_text("")
    assert (second.wait(), third.wait()) == (0, 0)
    assert said.read_text().split() == ["ran", "ran"]
    first.stdout.close()
    second.stdout.close()
    third.stdout.close()


@pytest.mark.long
@pytest.mark.processes
def test_a_run_prepares_its_host_once_and_shows_what_it_says(tmp_path: Path) -> None:
    out, ready = tmp_path / "out", tmp_path / "ready"
    command = f"echo fetching the data; echo x >> {ready}"
    (tmp_path / "run").mkdir(mode=0o755)
    with Elastic(tmp_path / "run", JOB, str(out), workers=2, options=["--prepare", command]) as run:
        run.finish()
        assert "fetching the data" in run.output.read_text()
        assert re.search(r"/run\b.*\b0700\b", " ".join(run.output.read_text().split()))
    assert ready.read_text() == "x\n"
    assert out.exists()


@pytest.mark.long
@pytest.mark.failure(
    "External workers, pools and machines",
    "a host can't be prepared (`--prepare` fails)",
    seen="the output of the command, and an event",
    outcome="its worker does not join; the run continues",
)
@pytest.mark.processes
def test_a_host_that_can_not_be_prepared_does_not_join_and_the_run_goes_on(tmp_path: Path) -> None:
    out, pace = tmp_path / "out", tmp_path / "pace"
    pace.write_text("0.2")  # the external worker may take long to end
    arguments = [str(out), "--pace", str(pace), "--epochs", "40"]
    with Elastic(tmp_path / "run", JOB, *arguments, workers=1, options=[]) as run:
        run.until_step(1)
        command = [sys.executable, "-m", "farandole", "join", "--prepare", "echo no disk; exit 7"]
        refused = subprocess.run(
            [*command, str(tmp_path / "run" / "ticket"), str(JOB), *arguments],
            env=ENVIRON, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert refused.returncode == 1
        assert "no disk" in refused.stdout
        assert re.search(r"--prepare 'echo no disk; exit 7'.*\b7\b", refused.stderr)
        run.until(lambda: bool(run.events("failed")), "the failure as an event")
        assert "exit code 7" in run.events("failed")[0]["traceback"]
        reached = run.step
        run.until_step(reached + 2)
        assert "--prepare 'echo no disk; exit 7'" in " ".join(run.output.read_text().split())
        pace.write_text("0")
        run.finish()
    assert out.exists()


# --- --setup ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def code(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a pack, which a host's agent works in."""
    folder = home / ".cache" / "farandole" / "code" / ("0" * 32)
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


def test_a_setup_runs_once_a_host_and_pack_in_its_folder(code: Path) -> None:
    command = 'echo "$PYTHON" >> done'
    for host in ("h", "h", "i"):
        assert local.set_up(command, code, host=host) is None
    assert (code / "done").read_text().split() == [sys.executable] * 2
    assert local.set_up("", code, host="h") is None


def test_a_setup_that_fails_says_why_and_is_tried_again(code: Path) -> None:
    for _ in range(2):
        with pytest.raises(local.HostNotPrepared, match=r"--setup .*\bh\b.*\b4\b.*\.log\b.*no such package$"):
            local.set_up("echo x >> tries; echo no such package; exit 4", code, host="h")
    assert (code / "tries").read_text() == "x\nx\n"


MAKE = '"$PYTHON" -m venv --without-pip .venv'


@pytest.mark.failure(
    "External workers, pools and machines",
    "the packages of the run can't be installed on a host (`--setup` fails, or its interpreter lacks farandole)",
)
def test_its_environment_is_the_workers_if_farandole_is_there(code: Path) -> None:
    with pytest.raises(local.HostNotPrepared, match=r"/\.venv/bin/python\b.*\bh\b"):
        local.set_up(MAKE, code, host="h")
    [packages] = code.glob(".venv/lib/python*/site-packages")
    (packages / "here.pth").write_text(f"{Path(local.__file__).parents[2]}\n")
    assert local.set_up(MAKE, code, host="h") == code / ".venv" / "bin" / "python"
    (code / ".venv" / "bin" / "python").unlink()
    (code / ".venv" / "bin" / "python").write_text("rubbish")
    with pytest.raises(local.HostNotPrepared, match=r"/\.venv/bin/python\b.*\bh\b"):
        local.set_up(MAKE, code, host="h")
