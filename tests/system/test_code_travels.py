"""Hosts that have nothing of a run get its code from it, as it was when the run started."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

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


def test_who_comes_after_an_edit_executes_what_was_packed(project: Path, tmp_path: Path) -> None:
    """A host of a file, and a guest that brings nothing but the ticket."""
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
            guest = popen(command, env=home, cwd=tmp_path, stdout=output, stderr=output)
        run.until_members(3)
        [code] = [place for place in (tmp_path / "home/.cache/farandole/code").iterdir() if place.is_dir()]
        assert {path.name for path in code.iterdir()} == {"train.py", "width.py", "installed"}
        pace.unlink()
        run.finish()
        assert guest.wait() == 0, (tmp_path / "guest.out").read_text()
        assert not run.events("refused"), run.report()
    shutil.copy(project / "train.py", tmp_path / "train.py")
    (tmp_path / "width.py").write_text("WIDTH = 8\n")
    alone(tmp_path / "alone", tmp_path / "train.py", str(tmp_path / "alone.out"))
    assert out.read_text() == (tmp_path / "alone.out").read_text()


def test_a_run_of_this_machine_alone_has_nothing_to_fetch(tmp_path: Path) -> None:
    pace = tmp_path / "pace"
    pace.touch()
    with Elastic(tmp_path / "run", JOB, str(tmp_path / "out"), "--pace", str(pace), workers=1, options=[]) as run:
        run.until_members(1)
        with (tmp_path / "guest.out").open("wb") as output:
            guest = popen([*FARANDOLE, "join", str(run.folder / "ticket")], env=ENVIRON, stdout=output, stderr=output)
        assert guest.wait() == 2
        assert "name a script of your own" in (tmp_path / "guest.out").read_text()
        run.command("stop")
        run.until(lambda: run.process.poll() is not None, "the end")
