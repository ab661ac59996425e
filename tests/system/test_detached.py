"""A run that goes on without its terminal, and is watched from another one."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from farandole.control.run_folder import RECORD
from tests.support.fake_worker import until
from tests.support.forked import ENVIRON, popen, run
from tests.support.harness import FARANDOLE, alone
from tests.support.lines import naming

pytestmark = [pytest.mark.processes]
JOB = Path(__file__).parents[1] / "jobs" / "digits.py"


@pytest.mark.long
@pytest.mark.parametrize("in_file", [pytest.param(False, marks=pytest.mark.long), True])
def test_it_returns_at_once_and_attach_watches_to_the_end(tmp_path: Path, in_file: bool) -> None:
    """Its options are on the command line or in a file, which the detached process reads again."""
    folder, pace, out = tmp_path / "run", tmp_path / "pace", tmp_path / "out"
    pace.touch()
    command = [*FARANDOLE, "run", "--detach", "--folder", str(folder), str(JOB), str(out), "--pace", str(pace)]
    if in_file:
        words = json.dumps([str(out), "--pace", str(pace)])  # TOML writes these texts as JSON does
        file = tmp_path / "run.toml"
        file.write_text(f'script = "{JOB}"\narguments = {words}\ndetach = true\nfolder = "{folder}"\nseed = 0\n')
        command = [*FARANDOLE, "run", "--config", str(file)]
    begun = run(command, env=ENVIRON, timeout=90)
    assert begun.returncode == 0, begun.stdout + begun.stderr
    assert "farandole attach" in begun.stdout
    assert (folder / RECORD).exists()
    with (tmp_path / "shown").open("wb") as shown:
        watching = popen([*FARANDOLE, "attach", "--run", str(folder)], env=ENVIRON, stdout=shown, stderr=shown)
    until(lambda: "step" in (tmp_path / "shown").read_text())
    watching.send_signal(signal.SIGINT)
    watching.wait()
    assert "over: " not in (tmp_path / "shown").read_text()
    pace.unlink()
    watched = run([*FARANDOLE, "attach", "--run", str(folder)], env=ENVIRON, timeout=90)
    assert watched.returncode == 0, watched.stdout + watched.stderr
    assert "over: " in watched.stdout
    alone(tmp_path / "alone", JOB, str(tmp_path / "alone.out"))
    assert out.read_text() == (tmp_path / "alone.out").read_text()


def test_what_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    command = [*FARANDOLE, "run", "--detach", "--folder", str(tmp_path / "run"), "--min", "9", str(JOB), "out"]
    begun = run(command, env=ENVIRON, timeout=200)
    assert begun.returncode == 1
    assert naming(begun.stdout + begun.stderr, "--workers 2", "--min 9")
