"""A wheel, in an environment in which nothing else is, outside the checkout: what `pip install farandole` will give.

The index may be anywhere, and torch be gigabytes there; who set up `.venv` by `make` has it in pip's cache.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
CONSTRAINTS = ROOT / "constraints.txt"
ENVIRON = {name: value for name, value in os.environ.items() if not name.startswith(("FARANDOLE_", "PYTHON"))}

pytestmark = [pytest.mark.world, pytest.mark.processes, pytest.mark.timeout(3600)]


class Environment:
    """A virtual environment of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, capture_output=True)

    def call(self, *command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        words = [str(self.bin / command[0]), *command[1:]]
        return subprocess.run(words, cwd=cwd, env=ENVIRON, capture_output=True, text=True, check=False)

    def pip(self, *arguments: str, cwd: Path) -> None:
        done = self.call("python", "-m", "pip", "--disable-pip-version-check", *arguments, cwd=cwd)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.fixture
def empty(tmp_path: Path) -> Environment:
    made = Environment(tmp_path / "environment")
    there = made.call(
        "python", "-m", "pip", "download", "--no-deps", "-d", str(tmp_path / "any"), "wheel", cwd=tmp_path
    )
    if there.returncode != 0:
        pytest.skip(f"pip reaches no index: {there.stderr.strip().splitlines()[-1]}")
    return made


def test_it_holds_the_package_and_trains_the_digits_outside_the_checkout(empty: Environment, tmp_path: Path) -> None:
    checkout, elsewhere = tmp_path / "checkout", tmp_path / "elsewhere"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")  # a list of an earlier build is used by the next
    shutil.copytree(SOURCE, checkout / "src", ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    empty.pip("wheel", "--no-deps", "-w", str(tmp_path), str(checkout), cwd=tmp_path)
    [wheel] = tmp_path.glob("farandole-*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == {
        str(path.relative_to(checkout / "src"))
        for path in (checkout / "src").rglob("*")
        if path.is_file() and not {"__pycache__", "farandole.egg-info"} & {*path.parts}
    }
    assert {"farandole/py.typed", "farandole/observe/page/uPlot.iife.min.js"} <= packed

    [torch] = re.findall(r"^torch==.*$", CONSTRAINTS.read_text(), re.MULTILINE)
    empty.pip("install", "--constraint", str(CONSTRAINTS), torch, "numpy", cwd=tmp_path)
    empty.pip("install", "--constraint", str(CONSTRAINTS), f"{wheel}[demo]", cwd=tmp_path)

    elsewhere.mkdir()
    shutil.copy(ROOT / "examples" / "digits.py", elsewhere)
    shutil.rmtree(checkout)
    where = empty.call("python", "-c", "import farandole; print(farandole.__file__)", cwd=elsewhere).stdout
    assert Path(where.strip()).is_relative_to(empty.bin.parent)
    done = empty.call(
        "farandole", "run", "--workers", "2", "--folder", "run", "digits.py", "--epochs", "2", cwd=elsewhere
    )
    assert done.returncode == 0, done.stdout + done.stderr
    events = [json.loads(line) for line in (elsewhere / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [event["equal"] for event in events if event.get("event") == "finished"] == [True]
    done = empty.call("farandole", "report", "run", cwd=elsewhere)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "uPlot" in (elsewhere / "run" / "report.html").read_text()
