"""AWS for the tests of this folder: a moto server with the launch template of docs/ec2.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from farandole.pool.ec2 import asked
from tests.support.aws import AWS, ENVIRON, Machines, Moto


@pytest.fixture
def moto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Moto]:
    pytest.importorskip("boto3", reason="EC2 takes boto3")
    pytest.importorskip("moto", reason="AWS is moto's server")
    server = Moto(tmp_path / "moto.log")
    for name, value in {**AWS, "AWS_ENDPOINT_URL": server.url}.items():
        monkeypatch.setitem(ENVIRON, name, value)
        monkeypatch.setenv(name, value)
    asked.ask_again()
    server.make_template()
    yield server
    server.end()


@pytest.fixture
def machines(moto: Moto, tmp_path: Path) -> Iterator[Machines]:
    found = Machines(moto, tmp_path / "machines")
    yield found
    found.close()
