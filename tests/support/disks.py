"""A disk that is soon full, for a test. Needs the right to mount one."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=False).returncode:
        pytest.skip("a small disk takes the right to mount one")
    try:
        yield folder
    finally:
        # Lazily: where the test has failed, a file may be open there yet, or a process still at it.
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(disk: Path) -> Path:
    """A file that takes all that is left."""
    full = disk / "full"
    with contextlib.suppress(OSError), full.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return full
