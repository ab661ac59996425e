"""Which commit the script is of, and whether its files are as they were committed: as git says it."""

from __future__ import annotations

import subprocess
from pathlib import Path

LIMIT_S = 5.0
DIRTY = ", with changes that are not committed"


def commit(folder: Path) -> str:
    """Of the repository that `folder` lies in; "" where it is in none, or git can't tell."""
    head = _git(folder, "rev-parse", "HEAD")
    if not head:
        return ""
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return (
        head if changed == "" else f"{head}{DIRTY}" if changed else f"{head}, and git can't tell whether with changes"
    )


def _git(folder: Path, *words: str) -> str | None:
    """What it prints; None where it fails."""
    command = ["git", "-C", str(folder), "-c", "core.fsmonitor=false", *words]
    try:
        done = subprocess.run(command, capture_output=True, timeout=LIMIT_S, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip()
