"""The coordinator of a test as a process of its own, as `farandole run` starts it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec

from farandole.control.ticket import Ticket, load
from farandole.protocol.coordinator.state import RunSettings
from tests.support.fake_worker import until


def settings(folder: Path, **options: object) -> None:
    options = {"run": "r", "folder": str(folder), **options}
    (folder / "settings.json").write_bytes(msgspec.json.encode(msgspec.convert(options, RunSettings)))


def start(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "farandole.coordinator.process", str(folder), *options])


def listening(folder: Path, process: subprocess.Popen[bytes]) -> Ticket:
    """Its ticket, once it serves."""
    record = folder / "coordinator.json"
    until(lambda: record.exists() and json.loads(record.read_text())["pid"] == process.pid)
    return load(str(folder / "ticket"))
