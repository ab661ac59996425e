"""Which commit a script is of, as a real git says it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from farandole.code.snapshot import DIRTY, commit

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
NAMED = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *NAMED, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def committed(tmp_path: Path) -> Path:
    """A folder in a repository, with a script in it."""
    place = tmp_path / "project" / "src"
    place.mkdir(parents=True)
    (place / "train.py").write_text("first\n")
    git(tmp_path / "project", "init", "-q")
    git(tmp_path / "project", "add", ".")
    git(tmp_path / "project", "commit", "-q", "-m", "first")
    return place


def test_as_it_was_committed_and_with_changes(committed: Path) -> None:
    head = git(committed, "rev-parse", "HEAD")
    assert commit(committed) == head
    (committed / "notes.txt").write_text("of no repository")
    assert commit(committed) == head, "what was never added is no change"
    (committed / "train.py").write_text("second\n")
    assert commit(committed) == head + DIRTY


def test_without_a_repository_and_without_git_there_is_none(
    committed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert commit(tmp_path) == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit(committed) == ""
