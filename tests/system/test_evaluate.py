"""`farandole evaluate`: the checkpoints of a real run, by the script's own evaluations."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import phases
from tests.support import forked
from tests.support.examples import EXAMPLES
from tests.support.harness import ENVIRON, FARANDOLE, read_lines
from tests.support.mentioned import mentions

JOB = EXAMPLES / "digits.py"
SCRIPT = (JOB, "--epochs", "3", "--width", "4")


def command(*arguments: str | Path, code: int = 0) -> str:
    done = forked.run([*FARANDOLE, *map(str, arguments)], env=ENVIRON, timeout=120)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def rows_of(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text())


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="the harness needs /proc")
def test_all_checkpoints_of_a_run_and_one(tmp_path: Path) -> None:
    folder, out = tmp_path / "run", tmp_path / "out.json"
    options = ("--workers", "2", "--folder", folder, "--checkpoint-every", "5steps", "--keep", "99")
    command("run", *options, *SCRIPT)
    logged = {line["step"]: line["accuracy"] for line in read_lines(folder) if "accuracy" in line}
    assert len(logged) == 3
    before = sorted(path.name for path in folder.rglob("*"))
    told = command("evaluate", folder, "--json", out)
    assert mentions(told, "accuracy")
    rows = rows_of(out)
    found = {row["step"]: row["accuracy"] for row in rows}
    assert found.keys() >= {max(logged)}
    assert [found[step] for step in logged if step in found] == [logged[step] for step in logged if step in found]
    assert [row["step"] for row in rows] == sorted(found)
    assert sorted(path.name for path in folder.rglob("*")) == before
    newest = max((folder / "checkpoints").glob("step-*.pt"), key=lambda path: path.name)
    for arguments in ((newest,), (newest, *SCRIPT), (folder / "checkpoints", *SCRIPT)):
        command("evaluate", "--json", out, *arguments)
        assert rows_of(out)[-1]["accuracy"] == logged[max(logged)]
    assert len(rows_of(out)) == len(rows)
    other = tmp_path / "elsewhere"
    other.mkdir()
    for suffix in (".pt", ".json"):
        newest.with_suffix(suffix).rename(other / newest.with_suffix(suffix).name)
    assert mentions(command("evaluate", other, code=2), other)
    command("evaluate", "--json", out, other / newest.name, *SCRIPT)
    assert [row["step"] for row in rows_of(out)] == [max(logged)]
    assert mentions(command("evaluate", other / newest.name, JOB, "--width", "8", code=2), newest.name)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="the harness needs /proc")
def test_checkpoints_of_several_loops(tmp_path: Path) -> None:
    """Each is evaluated in the loop in which it was written; what the script computes before a loop is the same."""
    folder, out = tmp_path / "run", tmp_path / "out.json"
    options = ("--workers", "1", "--folder", folder, "--checkpoint-every", "60steps", "--keep", "99")
    command("run", *options, Path(phases.__file__), tmp_path / "printed")
    (scale,) = {line["scale"] for line in read_lines(folder) if "scale" in line}
    command("evaluate", folder, "--json", out)
    rows = rows_of(out)
    first, second, _ = phases.STEPS
    steps = [row["step"] for row in rows]
    assert steps == [59, 119, 179, 239, sum(phases.STEPS) - 1]
    assert [row["loop_step"] for row in rows] == steps
    within = [step for step in steps if first <= step + 1 < first + second]  # it has the state before `step + 1`
    assert [row["step"] for row in rows if "scale" in row] == within == [119, 179]
    assert {row["scale"] for row in rows if "scale" in row} == {scale}
