"""`farandole doctor`: its table, its JSON and its exit code, also where torch is damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from farandole import cli
from farandole.pool.machine_check import CHECKS


@pytest.fixture
def farandole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[object, str, str]]:
    """`farandole ARGUMENTS` in the test's folder, on a terminal of 80 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def call(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["farandole", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, *capsys.readouterr()

    return call


def outcomes(answer: Mapping[str, Any]) -> dict[str, str]:
    for row in answer["checks"]:
        assert set(row) == {"name", "outcome", "found", "remedy"}
        assert all(isinstance(value, str) for value in row.values())
    return {row["name"]: row["outcome"] for row in answer["checks"]}


@pytest.mark.long
@pytest.mark.processes
def test_this_machine_and_a_host(farandole: Callable[..., tuple[object, str, str]]) -> None:
    Path("hosts.txt").write_text("localhost slots=2\n")
    code, out, _ = farandole("doctor", "--json", "--hosts", "hosts.txt")
    found = outcomes(json.loads(out))
    assert [*found] == [*CHECKS, "host localhost"]
    assert (found["torch"], found["host localhost"]) == ("ok", "ok")
    assert code == int("failed" in found.values())


@pytest.mark.long
@pytest.mark.processes
def test_a_damaged_torch_is_a_row_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise AttributeError('of another version')")
    (tmp_path / "hosts.txt").write_text("localhost slots=2\n")
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "farandole", "doctor", "--json", "--hosts", "hosts.txt"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stderr == ""
    found = outcomes(json.loads(done.stdout))
    assert (found["torch"], found["host localhost"], found["address"], found["runs"]) == (
        "failed",
        "failed",
        "ok",
        "ok",
    )


@pytest.mark.long
@pytest.mark.processes
def test_the_table_fits_80_columns_and_has_each_check(farandole: Callable[..., tuple[object, str, str]]) -> None:
    _, out, _ = farandole("doctor", "--listen", "192.0.2.7")
    assert max(map(len, out.splitlines())) <= 80
    assert all(any(line.startswith(name) for line in out.splitlines()) for name in CHECKS)


WITHOUT = """
import sys
class Missing:
    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] == "aiohttp":
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
sys.meta_path.insert(0, Missing())
sys.argv = ["farandole", "doctor"]
from farandole.cli import main
main()
"""


@pytest.mark.processes
def test_a_package_without_which_nothing_can_be_checked_is_named() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "aiohttp" in done.stderr
    assert "pip install" in done.stderr


@pytest.mark.parametrize(
    ("words", "names"),
    [("--listen a:b:c", "--listen a:b:c"), ("--hosts none.txt", "none.txt"), ("--hosts empty.txt", "empty.txt")],
)
def test_what_can_not_be_checked_is_named(
    farandole: Callable[..., tuple[object, str, str]], words: str, names: str
) -> None:
    Path("empty.txt").write_text("# no host\n")
    code, _, err = farandole("doctor", *words.split())
    assert code == 2
    assert names in err
