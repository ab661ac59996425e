"""Hosts that have nothing of a run get its code from it, as it was when the run started."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import forked
from tests.support.forked import ENVIRON, popen
from tests.support.harness import FARANDOLE, Elastic, alone

pytestmark = [pytest.mark.processes]
JOB = Path(__file__).parents[1] / "jobs" / "digits.py"
WIDE = "from width import WIDTH\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The digits, whose net is as wide as a module beside the script says."""
    folder = tmp_path / "project"
    folder.mkdir()
    text = JOB.read_text().replace("net(8)", "net(WIDTH)").replace("from digits import", f"{WIDE}from digits import")
    (folder / "train.py").write_text(text.replace("Path(__file__).parents[2]", f"Path({str(JOB.parents[2])!r})"))
    (folder / "width.py").write_text("WIDTH = 8\n")
    (folder / ".env").write_text("PASSWORD=secret")
    return folder


@pytest.mark.long
@pytest.mark.failure(
    "External workers, pools and machines",
    "the code is edited while the run is on, here or in the copy of a host",
    seen="nothing; for the copy of a host, a line in the log of its agent",
    outcome="all workers continue with the code that was packed",
)
def test_who_comes_after_an_edit_executes_what_was_packed(project: Path, tmp_path: Path) -> None:
    """A host of a file, and an external worker that brings nothing but the ticket."""
    hosts, pace, out = tmp_path / "hosts", tmp_path / "pace", tmp_path / "out"
    hosts.write_text("localhost slots=1\n")
    pace.touch()
    options = ["--pool", "local,size=1", "--pool", f"ssh,hosts={hosts}", "--setup", "touch installed"]
    job = (Path("train.py"), str(out), "--pace", str(pace))
    home = {**ENVIRON, "HOME": str(tmp_path / "home")}
    (tmp_path / "home").mkdir()
    at = ["env", f"--chdir={project}", f"HOME={home['HOME']}"]
    with Elastic(tmp_path / "run", *job, workers=2, options=options, on=at) as run:
        run.until_members(2)
        assert ".env" in run.output.read_text()
        (project / "width.py").write_text("WIDTH = 9\n")
        with (tmp_path / "guest.out").open("wb") as output:
            command = [*FARANDOLE, "join", os.path.relpath(run.folder / "ticket", tmp_path)]
            external_worker = popen(command, env=home, cwd=tmp_path, stdout=output, stderr=output)
        run.until_members(3)
        [code] = [place for place in (tmp_path / "home/.cache/farandole/code").iterdir() if place.is_dir()]
        assert {path.name for path in code.iterdir()} == {"train.py", "width.py", "installed"}
        pace.unlink()
        run.finish()
        assert external_worker.wait() == 0, (tmp_path / "guest.out").read_text()
        assert not run.events("refused"), run.report()
    shutil.copy(project / "train.py", tmp_path / "train.py")
    (tmp_path / "width.py").write_text("WIDTH = 8\n")
    alone(tmp_path / "alone", tmp_path / "train.py", str(tmp_path / "alone.out"))
    assert out.read_text() == (tmp_path / "alone.out").read_text()


@pytest.mark.long
def test_a_run_of_this_machine_alone_has_nothing_to_fetch(tmp_path: Path) -> None:
    pace = tmp_path / "pace"
    pace.touch()
    with Elastic(tmp_path / "run", JOB, str(tmp_path / "out"), "--pace", str(pace), workers=1, options=[]) as run:
        run.until_members(1)
        with (tmp_path / "guest.out").open("wb") as output:
            external_worker = popen(
                [*FARANDOLE, "join", str(run.folder / "ticket")], env=ENVIRON, stdout=output, stderr=output
            )
        assert external_worker.wait() == 2
        assert "script" in (tmp_path / "guest.out").read_text()
        run.command("stop")
        run.until(lambda: run.process.poll() is not None, "the end")


MAKE = (
    '"$PYTHON" -m venv --without-pip .venv && "$PYTHON" -c "import sys; print(*filter(None, sys.path), sep=chr(10))" '
    "> $(echo .venv/lib/python*/site-packages)/here.pth"
)


@pytest.mark.long
def test_workers_have_the_interpreter_that_the_setup_has_made(project: Path, tmp_path: Path) -> None:
    """The code of a host, and of an external worker with its ticket on standard input; the script is a link, named from
    the root.
    """
    hosts, pace, out, home = (tmp_path / name for name in ("hosts", "pace", "out", "home"))
    hosts.write_text("localhost slots=1\n")
    pace.touch()
    home.mkdir()
    (project / "jobs").mkdir()
    for name in ("train.py", "width.py"):
        (project / name).rename(project / "jobs" / name)
    (project / "start.py").symlink_to("jobs/train.py")
    with (project / "jobs" / "width.py").open("a") as file:
        file.write(f"import os, sys\nopen({str(tmp_path)!r} + f'/by-{{os.getpid()}}', 'w').write(sys.executable)\n")
    options = ["--pool", f"ssh,hosts={hosts}", "--setup", MAKE, "--prepare", "echo x >> prepared"]
    at = ["env", f"--chdir={project}", f"HOME={home}"]
    job = (project / "start.py", str(out), "--pace", str(pace))
    with Elastic(tmp_path / "run", *job, workers=1, options=options, on=at) as run:
        run.until_members(1)
        with (tmp_path / "guest.out").open("wb") as output, (run.folder / "ticket").open("rb") as ticket:
            environ = {**ENVIRON, "HOME": str(home)}
            external_worker = subprocess.Popen(
                [*FARANDOLE, "join", "-"], env=environ, cwd=tmp_path, stdin=ticket, stdout=output, stderr=output
            )
        run.until_members(2)
        pace.unlink()
        run.finish()
        assert external_worker.wait(200) == 0, (tmp_path / "guest.out").read_text()
    [code] = [place for place in (home / ".cache/farandole/code").iterdir() if place.is_dir()]
    assert {path.read_text() for path in tmp_path.glob("by-*")} == {str(code / ".venv/bin/python")}
    assert (code / "prepared").read_text().split() in (["x"], ["x", "x"]), "once for each name of the host"
    assert out.exists()


@pytest.mark.long
@pytest.mark.failure(
    "External workers, pools and machines",
    "the packages of the run can't be installed on a host (`--setup` fails, or its interpreter lacks farandole)",
    seen="`not prepared`, with the last line of the command and the place of the rest",
    outcome="that host does not join; the others continue",
)
def test_a_setup_that_fails_is_told_with_its_last_words_and_the_others_go_on(project: Path, tmp_path: Path) -> None:
    hosts, pace, home = tmp_path / "hosts", tmp_path / "pace", tmp_path / "home"
    hosts.write_text("localhost slots=1\n")
    pace.touch()
    home.mkdir()
    options = ["--pool", "local,size=1", "--pool", f"ssh,hosts={hosts}", "--setup", "echo no such package; exit 3"]
    at = ["env", f"--chdir={project}", f"HOME={home}"]
    job = (Path("train.py"), str(tmp_path / "out"), "--pace", str(pace))
    with Elastic(tmp_path / "run", *job, workers=2, options=options, on=at) as run:
        run.until(lambda: "not prepared" in [event["state"] for event in run.events("host")], "the host's failure")
        [reason] = [event["reason"] for event in run.events("host") if event["state"] == "not prepared"]
        assert all(value in reason for value in ("--setup 'echo no such package; exit 3'", "localhost", "exit code 3"))
        assert re.search(r"\.log\b.*: no such package; ", reason)
        pace.unlink()
        run.finish()


@pytest.mark.failure(
    "External workers, pools and machines",
    "the working folder can't be copied to hosts: too large, a script outside it, an empty list, a git error",
    seen="an error names it and the remedy",
    outcome="the run does not start; nothing is created",
)
@pytest.mark.parametrize(
    ("script", "options", "why"),
    [
        ("../outside.py", [], "outside.py is not in the working folder"),
        ("train.py", ["--files", "none"], "--files none: No such file"),
        ("train.py", ["--files", "list"], "list, line 1: missing: there is no such file"),
    ],
)
def test_what_can_not_travel_is_said_before_anything_is_made(
    script: str, options: list[str], why: str, project: Path, tmp_path: Path
) -> None:
    (tmp_path / "outside.py").touch()
    (tmp_path / "hosts").write_text("localhost\n")
    (project / "list").write_text("missing\n")
    command = [*FARANDOLE, "run", "--pool", f"ssh,hosts={tmp_path}/hosts", "--folder", str(tmp_path / "run"), *options]
    done = forked.run([*command, script], env=ENVIRON, cwd=project, timeout=200)
    assert (done.returncode, why in done.stderr) == (2, True), done.stderr
    assert not (tmp_path / "run").exists()
