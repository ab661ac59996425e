"""The first line of `farandole run` comes at once: before the imports that take most of its first second."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from farandole.cli.commands import command
from farandole.cli.run import command_alone, starting
from farandole.errors import UsageError
from tests.support.mentioned import mentions

# Imports of what the display, the supervisor or torch need end the process.
UNTIL_IMPORT = """
import sys
class Stop:
    def find_spec(self, name, path=None, target=None):
        if name in ("farandole.cli.commands", "farandole.cli.supervisor", "farandole.observe.live", "aiohttp", "torch"):
            sys.stdout.flush()
            sys.exit("import of " + name)
sys.meta_path.insert(0, Stop())
from farandole.cli import main
sys.argv[0] = "farandole"
main()
"""


@pytest.mark.parametrize(("options", "workers"), [((), 2), (("--workers", "4"), 4)])
def test_it_comes_before_anything_heavy_is_imported(options: tuple[str, ...], workers: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    command = [sys.executable, "-c", UNTIL_IMPORT, "run", "--fresh", *options, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert re.search("import of (?!farandole.cli.commands)", done.stderr), done.stderr
    [line] = done.stdout.splitlines()
    assert mentions(line, workers, "torch")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("value", [("--workers", "0"), ("--min", "3"), ("--audit", "7"), ("--pool", "nowhere")])
def test_a_wrong_option_is_refused_before_it(value: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    command = [sys.executable, "-c", UNTIL_IMPORT, "run", "--fresh", *value, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert mentions(done.stderr, value[0], value[1])


def test_the_command_alone_is_the_one_among_all_others(capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[str] = []
    for each in (command_alone(), command):
        with pytest.raises(SystemExit):
            each(["run", "--help"], prog_name="farandole")
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    with pytest.raises(UsageError, match="--stall"):
        command_alone()(["run", "--stall", "-3", __file__], prog_name="farandole")


def test_it_names_the_workers_and_the_pools() -> None:
    assert mentions(starting(1, []), "1 worker", "torch")
    assert mentions(starting(4, ["ssh", "ec2"]), "4 workers", "ssh", "ec2")
    assert mentions(starting(None, ["slurm"]), "workers", "slurm")
