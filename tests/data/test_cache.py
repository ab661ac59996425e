"""Downloaded shards on this host's disk: within their limit, whoever else uses it, and every sample right.

Nothing of a sample depends on whether its shard was downloaded or there already.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import fsspec
import psutil
import pytest
from fsspec.implementations.local import LocalFileSystem

from farandole.data.cache import Copies
from farandole.data.cache_folder import md5sum
from farandole.data.images import ShardedImages
from farandole.errors import UsageError
from tests.support.file_server import FileServer
from tests.support.harness import ENVIRON
from tests.support.image_files import in_order
from tests.support.shards import read_all, shard_sizes


def test_the_cache_keeps_its_limit_and_every_sample_is_right(source: Path, shards: Path, tmp_path: Path) -> None:
    """In a shuffled order what is there stays; of the other shards samples are read one by one."""
    largest = max(path.stat().st_size for path in shards.glob("*.tar"))
    table = (shards / "samples.bin").stat().st_size
    expected = in_order(source)
    with FileServer(shards) as server:
        images = ShardedImages(server.url, cache=tmp_path / "cache", cache_bytes=2 * largest + table)
        order = list(range(24)) * 3
        random.Random(3).shuffle(order)
        for index in order:
            assert images.read(index) == expected[index]
            assert sum(shard_sizes(tmp_path / "cache")) <= 2 * largest + table
        assert images.settle(60)
        fetched = server.gets.total()
        for index in order:
            assert images.read(index) == expected[index]
        assert server.gets.total() == fetched <= 2 + 2 + 1, (
            "two shards, the index and its table, and maybe a third shard"
        )
    removed = [path for path in _open_files() if path.endswith("(deleted)") and "cache" in path]
    assert len(removed) <= 1, "the room of removed copies comes back when the next is opened"


def _open_files() -> Iterator[str]:
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            yield os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue


def test_the_least_recently_opened_goes_first(tmp_path: Path) -> None:
    """Of files that somebody has to have as a whole."""
    folder = tmp_path / "files"
    folder.mkdir()
    for name in "abc":
        (folder / name).write_bytes(name.encode() * 1000)
    with FileServer(folder) as server:
        for name in "ababcab":
            copies = Copies(tmp_path / "cache", 2000)
            assert os.pread(copies.open(f"{server.url}/{name}", 1000, md5sum(folder / name)), 1, 0) == name.encode()
            copies.close()
    # c takes the place of a, a then that of b, b that of c
    assert server.gets == {"a": 2, "b": 2, "c": 1}


def test_a_file_larger_than_the_cache_is_refused_and_a_shard_read_by_its_samples(
    source: Path, shards: Path, tmp_path: Path
) -> None:
    table = (shards / "samples.bin").stat().st_size
    with FileServer(shards) as server:
        images = ShardedImages(server.url, cache=tmp_path / "cache", cache_bytes=table - 1)
        with pytest.raises(UsageError, match=rf"samples\.bin\b.*\b{table}\b.*\b{table - 1}\b"):
            images.read(0)
        images = ShardedImages(server.url, cache=tmp_path / "cache", cache_bytes=table)
        assert read_all(images) == in_order(source)
        assert {name: count for name, count in server.gets.items() if name.endswith("tar")} == {}
        assert server.parts.total() == 24


def _read_all_of(url: str, cache: str) -> list[tuple[bytes, int]]:
    images = ShardedImages(url, cache=cache)
    found = read_all(images)
    assert images.settle(60)
    return found


@pytest.mark.long
@pytest.mark.processes
def test_several_processes_at_once_download_each_shard_once(source: Path, shards: Path, tmp_path: Path) -> None:
    with FileServer(shards) as server, ProcessPoolExecutor(3, mp_context=get_context("spawn")) as pool:
        found = [pool.submit(_read_all_of, server.url, str(tmp_path / "cache")) for _ in range(3)]
        assert all(each.result() == in_order(source) for each in found)
    downloads = {name: count for name, count in server.gets.items() if name.endswith(".tar")}
    assert sorted(tmp_path.glob("cache/*.tar"))
    assert downloads == Counter(path.name for path in shards.glob("*.tar"))


def _read_at_random(url: str, cache: str, limit: int, seed: int) -> tuple[list[tuple[int, bytes]], int]:
    """What was read, and the most that the cache ever held."""
    images = ShardedImages(url, cache=cache, cache_bytes=limit)
    chance, found, most = random.Random(seed), list[tuple[int, bytes]](), 0
    for _ in range(120):
        index = chance.randrange(len(images))
        found.append((index, images.read(index)[0]))
        held = 0
        for name in os.listdir(cache):
            if not name.endswith((".lock", ".seen")):
                try:
                    held += os.stat(os.path.join(cache, name)).st_size
                except FileNotFoundError:
                    continue
        most = max(most, held)
    return found, most


@pytest.mark.long
@pytest.mark.processes
def test_several_processes_keep_the_limit_together(source: Path, shards: Path, tmp_path: Path) -> None:
    limit = 3 * max(path.stat().st_size for path in shards.glob("*.tar"))
    expected = in_order(source)
    with FileServer(shards) as server, ProcessPoolExecutor(3, mp_context=get_context("spawn")) as pool:
        doing = [pool.submit(_read_at_random, server.url, str(tmp_path / "cache"), limit, seed) for seed in range(3)]
        for each in doing:
            found, most = each.result()
            assert all(data == expected[index][0] for index, data in found)
            assert most <= limit


@pytest.mark.processes
def test_who_is_killed_in_the_middle_of_a_download_leaves_it_to_the_next(
    source: Path, shards: Path, tmp_path: Path
) -> None:
    program = "import sys; from farandole.data.cache import Copies; Copies(sys.argv[1], 1 << 30).open(*sys.argv[2:4])"
    program = program.replace("*sys.argv[2:4]", "sys.argv[2], int(sys.argv[3]), sys.argv[4]")
    shard = shards / "shard-000000.tar"
    with FileServer(shards) as server:
        server.halved.add(shard.name)
        file = f"{server.url}/{shard.name}", str(shard.stat().st_size), md5sum(shard)
        with subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "cache"), *file], env=ENVIRON) as one:
            assert server.half_sent.wait(200)
            assert len(list((tmp_path / "cache").glob("*.part"))) == 1
            [fetcher] = psutil.Process(one.pid).children()
            one.send_signal(signal.SIGKILL)
        psutil.wait_procs([fetcher], timeout=200)
        assert not fetcher.is_running(), "who reads the store for it ends with it"
        server.halved.clear()
        server.goes_on.set()
        images = ShardedImages(server.url, cache=tmp_path / "cache")
        assert read_all(images) == in_order(source)
        assert images.settle(60)
        assert not list((tmp_path / "cache").glob("*.part"))
        assert server.gets[shard.name] == 2


class Drawing(LocalFileSystem):
    """A store whose client draws random numbers when it downloads, as those of S3 do when they retry."""

    protocol = "drawing"

    def cat_file(self, path: str, *args: Any, **options: Any) -> Any:
        random.random()
        return super().cat_file(path, *args, **options)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("drawing://")


def test_what_a_sample_draws_does_not_depend_on_whether_it_was_downloaded(shards: Path, tmp_path: Path) -> None:
    fsspec.register_implementation("drawing", Drawing, clobber=True)

    def drawn() -> float:
        images = ShardedImages(f"drawing://{shards}", transform=lambda _: random.random(), cache=tmp_path / "cache")
        random.seed(3)
        return images[0][0]

    random.seed(3)
    expected = random.random()
    assert drawn() == expected
    assert drawn() == expected


FAILS = """
import sys, farandole
try:
    farandole.ShardedImages(sys.argv[1], cache=None)
except TypeError:
    print("refused")
"""
STAYS_OPEN = """
import sys, farandole
images = sys.kept = farandole.ShardedImages(sys.argv[1])  # until after the modules
print(len(images.read(0)[0]) > 0)
"""


@pytest.mark.parametrize(("program", "said"), [(FAILS, "refused"), (STAYS_OPEN, "True")], ids=["failed", "open"])
def test_the_end_of_a_dataset_says_nothing(shards: Path, program: str, said: str) -> None:
    """Neither of one whose constructor has failed, nor of one that is there until the interpreter's end."""
    command = [sys.executable, "-c", program, str(shards)]
    ended = subprocess.run(command, env=ENVIRON, capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == (f"{said}\n", "")


def test_a_dataset_that_lives_to_the_interpreters_end_says_nothing_there(shards: Path) -> None:
    script = (
        f"import farandole; images = farandole.ShardedImages({str(shards)!r}); images.read(0); kept = [images.read]"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=ENVIRON, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stderr == ""
