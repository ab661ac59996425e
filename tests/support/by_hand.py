"""A run without `farandole run`: nobody starts its coordinator again, and no pool kills its workers."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from chaos.launched import FARANDOLE
from farandole.protocol.coordinator.state import RunSettings
from tests.support import forked
from tests.support.fake_worker import until

ERRORS = "errors"  # what the workers say, in the run's folder


@dataclass(frozen=True)
class ByHand:
    """A coordinator that nobody starts again, and workers that no pool kills."""

    folder: Path
    coordinator: subprocess.Popen[bytes]
    workers: list[forked.Process]


@contextlib.contextmanager
def by_hand(folder: Path, workers: int, job: list[str], **settings: Any) -> Generator[ByHand]:
    folder.mkdir()
    terms = RunSettings(run=folder.name, folder=str(folder), **settings)
    (folder / "settings.json").write_bytes(msgspec.json.encode(terms))
    mine = ["--die-with", str(os.getpid())]
    command = [sys.executable, "-m", "farandole.coordinator.process", str(folder), *mine]
    run = ByHand(folder, subprocess.Popen(command, env=forked.ENVIRON), [])
    try:
        until(lambda: (folder / "coordinator.json").exists())
        join = [*FARANDOLE, "join", *mine, str(folder / "ticket"), *job]
        with (folder / ERRORS).open("wb") as errors:
            run.workers.extend(forked.popen(join, env=forked.ENVIRON, stderr=errors) for _ in range(workers))
        yield run
    finally:
        for process in (run.coordinator, *run.workers):
            process.kill()
            process.wait()
