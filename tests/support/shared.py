"""What is made once for all processes that share the tests of a session, and costs too much for each."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from filelock import FileLock

Made = TypeVar("Made")


def folder(factory: pytest.TempPathFactory) -> Path:
    """The session's, which all its processes know."""
    mine = factory.getbasetemp()
    return mine.parent if "PYTEST_XDIST_WORKER" in os.environ else mine


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Made]) -> Made:
    """What `make` gives in an empty folder of that name: the first that asks makes it, the others wait and read it."""
    place = folder(factory) / name
    made = place.with_suffix(".pickle")
    with FileLock(place.with_suffix(".lock")):
        if not made.exists():
            shutil.rmtree(place, ignore_errors=True)  # of who could not make it
            place.mkdir()
            made.write_bytes(pickle.dumps(make(place)))
        return pickle.loads(made.read_bytes())
