"""`farandole runs`: what is listed, and that nothing is removed but runs that are over."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from farandole.cli.commands import app
from farandole.cli.folders import DAY_S, in_words, list_runs
from farandole.control.run_folder import hold

OVER = b'{"event":"over","time":1.0,"code":0,"reason":"the script has run to its end"}\n'


def a_run(place: Path, name: str, *, days: float = 0.0, size: int = 0) -> Path:
    folder = place / name
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text("{}")
    (folder / "metrics.jsonl").write_bytes(OVER)
    (folder / "state.pt").write_bytes(bytes(size))
    then = time.time() - days * DAY_S
    os.utime(folder / "metrics.jsonl", (then, then))
    return folder


def asked(*arguments: str) -> str:
    answer = CliRunner().invoke(app, ["runs", *arguments], catch_exceptions=False)
    assert answer.exit_code == 0, answer.output
    return answer.output


def test_it_lists_runs_with_their_sizes_and_nothing_else(tmp_path: Path) -> None:
    a_run(tmp_path, "small")
    a_run(tmp_path, "large", size=3_000_000)
    (tmp_path / "notes").mkdir()
    output = asked("--in", str(tmp_path))
    assert "3.0 MB" in output
    assert "small" in output
    assert "notes" not in output


def test_nothing_is_removed_without_yes_and_only_what_is_over(tmp_path: Path) -> None:
    for number in range(4):
        a_run(tmp_path, f"run{number}", days=number)
    (tmp_path / "notes").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run3")
    handle = hold(tmp_path / "run2")
    pruning = ("--in", str(tmp_path), "prune", "--keep", "1")
    assert "2 runs" in asked(*pruning)
    assert len(list(list_runs(tmp_path))) == 4
    asked(*pruning, "--yes")
    os.close(handle)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "notes", "run0", "run2"]


def test_by_age(tmp_path: Path) -> None:
    for number in range(4):
        a_run(tmp_path, f"run{number}", days=number + 0.5)
    asked("--in", str(tmp_path), "prune", "--older", "2", "--yes")
    assert [run.folder.name for run in list_runs(tmp_path)] == ["run0", "run1"]


@pytest.mark.parametrize(("size", "words"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (234_000_000, "234 MB")])
def test_in_words(size: int, words: str) -> None:
    assert in_words(size) == words
