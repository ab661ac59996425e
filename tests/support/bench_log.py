"""A worker's log, into which the measurements of `farandole bench` go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from farandole.bench import terms
from farandole.control.run_folder import LOGS


@contextmanager
def log_of(folder: Path, worker: str) -> Iterator[Path]:
    """Have this process report into the log of a worker of the run in `folder`, as that worker's process does."""
    path = folder / LOGS / f"{worker}.log"
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as log, patch.object(terms, "STDOUT", log.fileno()):
        yield path
