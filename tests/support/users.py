"""Other users of this machine, for a test. Needs root, which may be anybody."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

ALICE, MALLORY = 61001, 61002  # the run's user, and another one; numbers are users enough
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="to be two users takes root")


@contextlib.contextmanager
def being(uid: int) -> Generator[None]:
    """Be that user within, as far as files go."""
    os.setegid(uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@pytest.fixture
def everybodys() -> Iterator[Path]:
    """A folder that everybody can write, as those that a test gets are its user's alone."""
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        place.chmod(0o777)
        yield place
