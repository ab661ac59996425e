"""What stores do wrong, and what comes of it: asked again, told of, given up; and no wrong byte is a sample."""

from __future__ import annotations

import errno
import logging
import pickle
import re
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farandole.data import fetcher, object_store
from farandole.data.images import ShardedImages
from farandole.data.object_store import ObjectStore
from farandole.errors import ShardError
from tests.support.file_server import FileServer
from tests.support.image_files import in_order
from tests.support.shards import read_all

EVERYTHING = np.arange(24)


def tars(counted: Any) -> int:
    return sum(count for name, count in counted.items() if name.endswith(".tar"))


@pytest.mark.failure(
    "Data and loader processes",
    "the store answers 503, with an HTML page, or with fewer bytes than requested",
    seen=(
        "nothing, if it recovers within `deadline_s` (120 s); else `ShardError` with the last answer and the number "
        "of attempts"
    ),
    outcome="after the deadline, the same as for a shard that is not reachable",
)
def test_a_store_that_is_overloaded_is_asked_again(shards: Path, source: Path, tmp_path: Path) -> None:
    with FileServer(shards) as server:
        images = ShardedImages(server.url, cache=tmp_path / "cache")
        server.refusals = 7
        assert read_all(images) == in_order(source)
        assert server.refusals == 0


@pytest.mark.failure(
    "Data and loader processes", "the store answers 503, with an HTML page, or with fewer bytes than requested"
)
def test_a_page_in_the_place_of_a_range_is_no_sample(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "ATTEMPTS", 2)
    (shards / "page").write_bytes(b"<html>")
    with FileServer(shards) as server, pytest.raises(ShardError, match=r"OSError: .*\b6 bytes\b.*\b100\b"):
        ObjectStore().read(f"{server.url}/page", 0, 100)


def test_an_attempt_that_the_deadline_ends_hides_no_earlier_cause(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a busy machine: the first attempt has its answer, and the second one's comes too late."""
    once = ObjectStore._once

    def later(self: ObjectStore, url: str, start: int, stop: int, at_most_s: float) -> bytes:
        try:
            return once(self, url, start, stop, at_most_s)
        finally:
            server.delay_s = 2.0

    monkeypatch.setattr(ObjectStore, "_once", later)
    (shards / "page").write_bytes(b"<html>")
    with FileServer(shards) as server:
        with pytest.raises(ShardError, match=r"OSError: .*\b6 bytes\b.*\b100\b"):
            ObjectStore(deadline_s=1.0).read(f"{server.url}/page", 0, 100)
        server.delay_s = 2.0
        with pytest.raises(ShardError, match="FSTimeoutError"):
            ObjectStore(deadline_s=0.2).read(f"{server.url}/page", 0, 100)


def test_other_bytes_once_are_read_again_and_are_no_bad_sample(shards: Path, source: Path, tmp_path: Path) -> None:
    with FileServer(shards) as server:
        images = ShardedImages(
            server.url, cache=tmp_path / "cache", cache_bytes=(shards / "samples.bin").stat().st_size
        )
        images._tables.row(0, 0)
        for ahead in (True, False):
            server.spoilt = 1
            images.ahead(EVERYTHING[:1] if ahead else EVERYTHING[:0])
            assert images.read(0) == in_order(source)[0]
            assert server.spoilt == 0


def test_other_bytes_that_are_others_each_time_are_no_bad_sample(shards: Path, tmp_path: Path) -> None:
    """The way to the store spoils them; another host may have them right."""
    with FileServer(shards) as server:
        images = ShardedImages(
            server.url, cache=tmp_path / "cache", cache_bytes=(shards / "samples.bin").stat().st_size
        )
        images._tables.row(0, 0)
        server.spoilt = 2
        with pytest.raises(ShardError, match=r"\bsample 0\b"):
            images.read(0)


def test_where_no_process_can_be_started_that_is_no_bad_sample(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with FileServer(shards) as server, pytest.raises(ShardError, match=re.escape(str(tmp_path / "nowhere"))):
        ShardedImages(server.url, cache=tmp_path / "cache").read(0)


def test_a_server_that_knows_no_ranges_is_read_as_far_as_needed(shards: Path, source: Path, tmp_path: Path) -> None:
    with FileServer(shards, ranges=False) as server:
        images = ShardedImages(server.url, cache=tmp_path / "cache")
        images.ahead(EVERYTHING)
        assert read_all(images) == in_order(source)
        assert images.settle(60)
        server.gets.clear()
        assert read_all(pickle.loads(pickle.dumps(images))) == in_order(source)
        assert tars(server.gets) == 0


def test_who_may_not_read_is_told_at_once() -> None:
    class Closed:
        def cat_file(self, path: str, *, start: int, end: int) -> bytes:
            del start, end
            raise PermissionError(errno.EACCES, "Forbidden", path)

    real = object_store.filesystem
    object_store.filesystem = lambda url: (Closed(), url)  # type: ignore[assignment]
    try:
        with pytest.raises(ShardError, match=r"x://a\b.*PermissionError: .*Forbidden"):
            ObjectStore().read("x://a", 0, 1)
    finally:
        object_store.filesystem = real


@pytest.mark.failure(
    "Data and loader processes",
    "the store does not answer",
    seen="after 10 s a line in the worker's log: the request, its duration, and the last answer",
    outcome="after the deadline, the same as for a shard that is not reachable",
)
def test_a_fetch_that_stands_still_is_told_and_given_up(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fetcher, "WARN_AFTER_S", 0.2)
    monkeypatch.setattr(fetcher, "MARGIN_S", 0.5)
    with FileServer(shards) as server:
        images = ShardedImages(server.url, cache=tmp_path / "cache", deadline_s=1)
        images._tables.row(0, 0)
        images._expecting = True
        server.delay_s = 4.0  # with a parameter of the server, since no condition tells that nothing comes
        with caplog.at_level(logging.WARNING), pytest.raises(ShardError, match=r"shard-000000\.tar"):
            images.read(0)
        server.delay_s = 0.0
    said = [record.getMessage() for record in caplog.records]
    assert any(f"{server.url}/shard-000000.tar" in line for line in said), said


def test_threads_share_a_store(shards: Path) -> None:
    content = (shards / "shard-000000.tar").read_bytes()
    found: dict[int, bytes] = {}
    with FileServer(shards) as server:
        reads = ObjectStore()

        def read(at: int) -> None:
            found[at] = reads.read(f"{server.url}/shard-000000.tar", at, at + 100)

        threads = [threading.Thread(target=read, args=(at,)) for at in range(0, 2000, 100)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {at: content[at : at + 100] for at in range(0, 2000, 100)}
