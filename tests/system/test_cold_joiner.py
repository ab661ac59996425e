"""A joiner on a host that has nothing of the data yet: it has its shards when the others begin to count on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.file_server import FileServer
from tests.support.harness import Elastic, alone
from tests.support.image_files import make_folder
from tests.support.shards import prepared

JOB = Path(__file__).parents[1] / "jobs" / "loading.py"
pytestmark = pytest.mark.processes


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FileServer]:
    prepared(make_folder(tmp_path / "source"), str(tmp_path / "shards"))
    with FileServer(tmp_path / "shards") as serving:
        yield serving


@pytest.mark.long
def test_a_joiner_has_its_shards_when_it_enters_and_the_bits_are_those_of_a_local_disk(
    server: FileServer, tmp_path: Path
) -> None:
    shards = len(list((tmp_path / "shards").glob("*.tar")))
    out, expected = tmp_path / "out", tmp_path / "expected"
    for folder in (out, expected):
        folder.mkdir()
    alone(tmp_path / "alone", JOB, str(expected), "--shards", str(tmp_path / "shards"), "--epochs", "60")
    (out / "pace").write_text("0.5")
    arguments = [str(out), "--shards", server.url, "--epochs", "60"]
    with Elastic(tmp_path / "run", JOB, *arguments, workers=1, options=["--ledger"]) as run:
        run.until_step(1)
        server.delay_s = 1.5  # a request
        run.command("scale", "2")
        run.until_members(2)
        run.until(lambda: (out / "began-w2").exists(), "the joiner's first step")
        (out / "pace").unlink()
        run.finish()
    assert int((out / "began-w2").read_text()) == shards
    assert (out / "weights").read_text() == (expected / "weights").read_text()
