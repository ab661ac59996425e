"""`farandole --version`, as quick as the other verbs that need no run."""

from __future__ import annotations

import subprocess
import sys

import pytest

import farandole


@pytest.mark.processes
def test_the_version() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "farandole", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"farandole {farandole.__version__}\n"
    assert "torch" not in done.stderr
