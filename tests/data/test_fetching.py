"""What reads the store for a worker: ahead of need, within bounds, through what stores do wrong, and never in
silence."""

from __future__ import annotations

import errno
import os
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from torch.utils.data import Subset

from farandole.data import cache_folder
from farandole.data.cache import Copies
from farandole.data.fetcher import RANGES, WHOLE
from farandole.data.images import ShardedImages
from farandole.data.loader import HORIZON, Announced, Key, Loader
from farandole.data.object_store import filesystem
from farandole.data.order import SampleOrder
from farandole.plan.batch import GlobalBatch
from tests.support.file_server import FileServer
from tests.support.image_files import in_order
from tests.support.shards import read_all

EVERYTHING = np.arange(24)


@pytest.fixture
def server(shards: Path) -> Iterator[FileServer]:
    with FileServer(shards) as serving:
        yield serving


def tars(counted: Any) -> int:
    return sum(count for name, count in counted.items() if name.endswith(".tar"))


def fetchers(cache: Path) -> list[psutil.Process]:
    """Those of a cache in that folder that live."""
    children = [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in children if any(part.startswith(str(cache)) for part in child.cmdline())]


# --- ahead of need --------------------------------------------------------------------------------------------------


def test_samples_of_shards_that_are_not_here_come_at_once_and_neighbours_together(
    source: Path, server: FileServer, tmp_path: Path
) -> None:
    table = (tmp_path / "shards" / "samples.bin").stat().st_size
    images = ShardedImages(server.url, cache=tmp_path / "cache", cache_bytes=table)
    images._expecting = True  # there is no room for a shard
    images._tables.row(0, 0)
    images.ahead(EVERYTHING)
    assert [images.read(int(sample)) for sample in EVERYTHING] == in_order(source)
    assert (tars(server.parts), tars(server.gets)) == (len(images._files), 0)


def test_shards_come_in_the_order_in_which_samples_want_them_and_not_twice(
    server: FileServer, source: Path, tmp_path: Path
) -> None:
    images = ShardedImages(server.url, cache=tmp_path / "cache")
    images.expect(EVERYTHING, shuffled=True)
    assert images.settle(60)
    assert tars(server.gets) == len(images._files)
    server.parts.clear()
    assert read_all(images) == in_order(source)
    assert read_all(pickle.loads(pickle.dumps(images))) == in_order(source)
    assert (tars(server.gets), tars(server.parts)) == (len(images._files), 0)


def test_no_more_is_asked_of_the_store_at_once_than_there_are_connections_for(shards: Path, tmp_path: Path) -> None:
    with FileServer(shards, delay_s=0.05) as server:
        images = ShardedImages(server.url, cache=tmp_path / "cache")
        images.expect(EVERYTHING, shuffled=True)
        for sample in EVERYTHING.tolist() * 3:
            images._copies._fetching.request(f"{server.url}/shard-000000.tar", sample, sample + 1)
        images.ahead(EVERYTHING)
        assert images.settle(60)
        read_all(images)
        assert 1 < server.most_at_once <= RANGES + WHOLE


def test_in_the_data_s_own_order_a_small_cache_keeps_what_comes_next(
    source: Path, server: FileServer, tmp_path: Path
) -> None:
    """What was read makes way, once nobody uses it any more."""
    largest = max(path.stat().st_size for path in tmp_path.glob("shards/*.tar"))
    table = (tmp_path / "shards" / "samples.bin").stat().st_size
    images = ShardedImages(server.url, cache=tmp_path / "cache", cache_bytes=2 * largest + table)
    images.expect(np.arange(0, 10), shuffled=False)
    assert images.settle(60)
    images.expect(np.arange(15, 24), shuffled=False)
    for path in (tmp_path / "cache").glob("*.seen"):
        os.utime(path, (0, 0))  # long ago
    images.expect(np.arange(15, 24), shuffled=False)
    assert images.settle(60)
    last = images._files[-1]
    assert (tmp_path / "cache" / last.name).exists()
    assert read_all(images) == in_order(source)


def test_a_loader_says_what_comes_next_through_a_subset_too(server: FileServer, tmp_path: Path) -> None:
    images = ShardedImages(server.url, cache=tmp_path / "cache", transform=lambda image: image.size[0])
    part = Subset(images, [20, 21, 22, 23])
    loader = Loader(part, GlobalBatch(4, micro=4), seed=0, shuffle=False)
    assert loader.fetch(Key(0, 0, 0, 0, 4))[1].tolist() == [2, 2, 2, 2]
    loader.warm(60)
    wanted = {image.url for image in images._files[-2:]}
    assert {name for name in server.gets if name.endswith(".tar")} <= {url.rsplit("/", 1)[-1] for url in wanted}


def test_what_nobody_takes_is_not_kept(server: FileServer, tmp_path: Path) -> None:
    images = ShardedImages(server.url, cache=tmp_path / "cache")
    images._tables.row(0, 0)
    images._expecting = True
    images.ahead(EVERYTHING)
    images.ahead(EVERYTHING[:0])
    assert not images._copies._fetching._pending


@pytest.mark.processes
@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_all_processes_of_a_loader_have_one_fetcher(server: FileServer, tmp_path: Path, start: str) -> None:
    images = ShardedImages(server.url, cache=tmp_path / "cache", transform=_width)
    loader = Loader(images, GlobalBatch(4, micro=2), seed=0, num_workers=2, multiprocessing_context=start)
    keys = [Key(0, number, 0, 2 * number, 2 * number + 2) for number in range(12)]
    loader.expect(keys)
    try:
        assert sum(loader.fetch(key)[0].tolist() == [40, 40] for key in keys) == 12
        assert len(fetchers(tmp_path)) == 1
    finally:
        loader.close()


def _width(image: Any) -> int:
    return image.size[0]


def test_the_order_is_announced_again_when_half_of_it_is_behind() -> None:
    told: list[tuple[int, int, bool]] = []

    class Told:
        def expect(self, samples: Any, *, shuffled: bool) -> None:
            told.append((int(samples[0]), len(samples), shuffled))

    announced = Announced(Told(), SampleOrder(3 * HORIZON, 0, shuffle=False))
    for start in (0, 64, HORIZON // 2 - 1, HORIZON // 2, HORIZON // 2 + 64, 2 * HORIZON + 100):
        announced.reach(0, start)
    announced.reach(1, 0)
    assert told == [
        (0, HORIZON, False), (HORIZON // 2, HORIZON, False), (2 * HORIZON + 100, HORIZON - 100, False),
        (0, HORIZON, False),
    ]  # fmt: skip


@pytest.mark.failure(
    "Data and loader processes",
    "the process that reads from the store is killed",
    seen="nothing",
    outcome="another process repeats the request; after three deaths, `ShardError`",
)
def test_who_reads_for_a_process_may_die_and_another_one_reads_on(
    source: Path, server: FileServer, tmp_path: Path
) -> None:
    images = ShardedImages(server.url, cache=tmp_path / "cache")
    images._tables.row(0, 0)
    images._expecting = True
    [one] = fetchers(tmp_path)
    images.ahead(EVERYTHING)
    one.send_signal(signal.SIGKILL)
    assert [images.read(int(sample)) for sample in EVERYTHING] == in_order(source)
    [other] = fetchers(tmp_path)
    assert other.pid != one.pid
    del images
    assert fetchers(tmp_path) == []


# --- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.failure("Data and loader processes", "the bytes of a sample differ from those that were indexed")
def test_a_copy_that_is_damaged_while_it_is_in_use_is_left_for_the_store(
    source: Path, server: FileServer, tmp_path: Path
) -> None:
    images = ShardedImages(server.url, cache=tmp_path / "cache")
    images.expect(EVERYTHING, shuffled=True)
    assert images.settle(60)
    expected = in_order(source)
    assert images.read(0) == expected[0]
    copy = tmp_path / "cache" / images._files[0].name
    with copy.open("r+b") as file:
        file.seek(700)
        file.write(b"\0\1\2\3")
    assert images.read(0) == expected[0]
    assert not copy.exists() or copy.read_bytes() == (tmp_path / "shards" / "shard-000000.tar").read_bytes()


@pytest.mark.failure(
    "Data and loader processes",
    "the disk of the cache is full",
    seen="one line: samples are read from the store meanwhile",
    outcome="training continues, slower",
)
def test_a_disk_that_is_full_costs_speed_and_nothing_else(
    source: Path, server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    images = ShardedImages(server.url, cache=tmp_path / "cache")
    images._tables.row(0, 0)
    kept = cache_folder.Folder(tmp_path / "cache", 1 << 30)
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        kept.fetch(
            images._files[0], lambda a, b: (tmp_path / "shards/shard-000000.tar").read_bytes()[a:b], (), waits=True
        )
    assert not list((tmp_path / "cache").glob("*.part")), "what was begun is removed"
    monkeypatch.undo()
    assert read_all(images) == in_order(source)


@pytest.mark.parametrize(
    ("url", "another"),
    [("s3://bucket/a", True), ("http://host/a", True), ("memory://a", False), ("nowhere://a", False), ("/a", False)],
)
def test_what_another_process_can_read_it_reads(url: str, another: bool, tmp_path: Path) -> None:
    """Also where this process has loaded the store's client."""
    for _ in range(2):
        assert Copies(tmp_path, 1)._is_fetched(url) == another
        if another:
            filesystem(url)


def test_s3_has_as_many_connections_as_may_be_used_and_a_user_s_own_settings_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import fsspec

    assert filesystem("s3://bucket/a")[0].config_kwargs["max_pool_connections"] >= RANGES + WHOLE
    monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": {"max_pool_connections": 3}})
    assert filesystem("s3://bucket/a")[0].config_kwargs == {"max_pool_connections": 3}
