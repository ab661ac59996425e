"""Disks for tests: one that is soon full, one that stops answering. They take the right to mount them."""

from __future__ import annotations

import contextlib
import shutil
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


class FreezableDisk:
    """A file system. From `freeze` to `thaw` all writes to it block, as on a hard mount without its server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def freeze(self) -> None:
        subprocess.run(["fsfreeze", "--freeze", self.folder], check=True)

    def thaw(self) -> None:
        subprocess.run(["fsfreeze", "--unfreeze", self.folder], check=False, stderr=subprocess.DEVNULL)


@contextmanager
def freezable_disk(folder: Path, size: int = 64 << 20) -> Iterator[FreezableDisk]:
    """One of `size` bytes at `folder`; the test is skipped where nobody may mount one."""
    folder.mkdir()
    image = folder.with_suffix(".image")
    with image.open("wb") as file:
        file.truncate(size)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "check": False}
    commands = (["mkfs.ext4", "-q", image], ["mount", "-o", "loop", image, folder])
    if not all(shutil.which(command[0]) and subprocess.run(command, **quiet).returncode == 0 for command in commands):
        pytest.skip("a disk that can be frozen takes mkfs.ext4 and the right to mount a loop device")
    disk = FreezableDisk(folder)
    try:
        yield disk
    finally:
        disk.thaw()
        subprocess.run(["umount", "--lazy", folder], check=True)
        image.unlink()
