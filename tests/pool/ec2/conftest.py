"""AWS for the tests of this folder: a moto server with the launch template of docs/ec2.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.aws import Machines, Moto, account


@pytest.fixture
def moto(tmp_path: Path) -> Iterator[Moto]:
    with account(tmp_path) as server:
        yield server


@pytest.fixture
def machines(moto: Moto, tmp_path: Path) -> Iterator[Machines]:
    found = Machines(moto, tmp_path / "machines")
    yield found
    found.close()
