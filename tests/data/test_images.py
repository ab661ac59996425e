"""Images in shards: the samples that were put in, from a folder, HTTP and S3, through a cache that keeps its limit."""

from __future__ import annotations

import os
import pickle
import random
import signal
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from farandole.data import prepare
from farandole.data.cache import Copies
from farandole.data.images import ShardedImages
from farandole.data.index import Index
from farandole.data.loader import Key, Loader
from farandole.errors import ShardError, UsageError
from farandole.plan.batch import GlobalBatch
from tests.support.file_server import FileServer
from tests.support.harness import ENVIRON
from tests.support.image_files import CLASSES, in_order, make_folder
from tests.support.s3_server import S3

SHARDS = 6


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("source"))


@pytest.fixture
def shards(source: Path, tmp_path: Path) -> Path:
    return prepared(source, str(tmp_path / "shards")) and tmp_path / "shards"


def prepared(source: Path, url: str) -> Index:
    listed = prepare.listing(source)
    size = sum(file.size for file in listed.files) // SHARDS + 2000
    return prepare.prepare(
        listed, url, shard_bytes=size, short_side=0, processes=1, begin=pickle.dumps, made=lambda _: None
    )


def read_all(images: ShardedImages) -> list[tuple[bytes, int]]:
    return [images.read(index) for index in range(len(images))]


def shard_sizes(folder: Path) -> list[int]:
    return [path.stat().st_size for path in folder.iterdir() if path.suffix not in (".lock", ".seen")]


# --- what is in it --------------------------------------------------------------------------------------------------


def test_the_samples_are_the_image_folder_s(source: Path, shards: Path) -> None:
    images = ShardedImages(shards)
    assert read_all(images) == in_order(source)
    assert images.classes == CLASSES
    image, label = images[-1]
    assert (image.mode, image.size, label) == ("RGB", (40, 30), 2)
    doubled = ShardedImages(shards, transform=lambda image: image.size, target_transform=lambda label: -label)
    assert doubled[23] == ((40, 30), -2)
    for outside in (24, -25):
        with pytest.raises(IndexError, match=f"sample {outside} of 24"):
            images[outside]


def test_the_format_s_own_reader_reads_it(source: Path, shards: Path, tmp_path: Path) -> None:
    import wids

    theirs = wids.ShardListDataset(
        str(shards / "index.json"), cache_dir=str(tmp_path / "wids"), transformations=_unchanged
    )
    found = [(theirs[n][".jpg"].read(), int(theirs[n][".cls"].read())) for n in range(len(theirs))]
    assert found == in_order(source)


def _unchanged(sample: Any) -> Any:
    return sample


def test_what_webdataset_s_own_writer_wrote_is_read(source: Path, tmp_path: Path) -> None:
    import webdataset
    from wids.wids import compute_file_md5sum

    with webdataset.TarWriter(str(tmp_path / "theirs.tar")) as writer:
        for number, (data, label) in enumerate(in_order(source)):
            writer.write({"__key__": f"some/folder.d/{number}", "jpg": data, "cls": label, "json": {"more": 1}})
    shard = {
        "url": "theirs.tar",
        "nsamples": 24,
        "filesize": (tmp_path / "theirs.tar").stat().st_size,
        "md5sum": compute_file_md5sum(str(tmp_path / "theirs.tar")),
    }
    index = {"__kind__": "wids-shard-index-v1", "wids_version": 1, "base": None, "shardlist": [shard]}
    (tmp_path / "index.json").write_bytes(msgspec.json.encode(index))
    assert read_all(ShardedImages(tmp_path)) == in_order(source)


def test_it_travels_to_other_processes_without_what_it_holds_open(shards: Path) -> None:
    images = ShardedImages(shards)
    fresh = len(pickle.dumps(images))
    everything = read_all(images)
    assert len(pickle.dumps(images)) == fresh
    assert read_all(pickle.loads(pickle.dumps(images))) == everything


# --- what is missing or damaged -------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 512)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[600] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("do", "said"), [(Path.unlink, "is missing"), (truncate, "bytes where the index says"), (flip, "MD5")]
)
def test_a_shard_that_is_not_what_it_should_be_is_named(shards: Path, tmp_path: Path, do: Any, said: str) -> None:
    do(shards / "shard-000001.tar")
    with FileServer(shards) as server:
        for url in (server.url, str(shards)):
            images = ShardedImages(url, cache=tmp_path / "cache")
            if do is flip and url == str(shards):
                continue  # local shards are compared by length alone
            with pytest.raises(ShardError, match=rf"shard {url}/shard-000001.tar .*{said}.*farandole data prepare"):
                read_all(images)
    assert not list((tmp_path / "cache").glob("*shard-000001.tar"))
    assert not list((tmp_path / "cache").glob("*.part"))


def test_a_shard_with_other_samples_than_the_index_says_is_named(shards: Path) -> None:
    index = msgspec.json.decode((shards / "index.json").read_bytes())
    index["shardlist"][2]["nsamples"] += 1
    (shards / "index.json").write_bytes(msgspec.json.encode(index))
    with pytest.raises(ShardError, match=r"shard .*/shard-000002.tar is damaged: it has \d+ samples where"):
        read_all(ShardedImages(shards))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "is not there; `farandole data prepare` writes it last"),
        ("{", "is no index"),
        ('{"shardlist": []}', "names no samples"),
        ('{"shardlist": [{"url": "a.tar", "nsamples": 3}]}', "is no index.*filesize"),
    ],
)
def test_a_bad_index_is_named(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "index.json").write_text(text)
    with pytest.raises(ShardError, match=f"{tmp_path}/index.json {said}"):
        ShardedImages(tmp_path)


def test_a_store_that_does_not_answer_is_named(shards: Path, tmp_path: Path) -> None:
    with FileServer(shards) as server:
        images = ShardedImages(server.url, cache=tmp_path / "cache")
        images.read(0)
    with pytest.raises(ShardError, match=r"shard http://.*/shard-\d+.tar can't be read .*Connect"):
        read_all(images)


# --- the cache ------------------------------------------------------------------------------------------------------


def test_the_cache_keeps_its_limit_and_every_sample_is_right(source: Path, shards: Path, tmp_path: Path) -> None:
    largest = max(path.stat().st_size for path in shards.glob("*.tar"))
    expected = in_order(source)
    with FileServer(shards) as server:
        with pytest.warns(UserWarning, match=r"most samples will fetch a whole shard; raise cache_bytes"):
            images = ShardedImages(server.url, cache=tmp_path / "cache", cache_bytes=2 * largest)
        order = list(range(24)) * 3
        random.Random(3).shuffle(order)
        for index in order:
            assert images.read(index) == expected[index]
            assert sum(shard_sizes(tmp_path / "cache")) <= 2 * largest
    removed = [path for path in _open_files() if path.endswith("(deleted)") and "cache" in path]
    assert len(removed) <= 1, "the room of removed copies comes back when the next is opened"
    assert server.gets.total() > 2 * SHARDS


def _open_files() -> Iterator[str]:
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            yield os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue


def test_the_least_recently_opened_goes_first(tmp_path: Path) -> None:
    from farandole.data.cache import md5sum

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


def test_a_shard_larger_than_the_cache_is_refused(shards: Path, tmp_path: Path) -> None:
    with FileServer(shards) as server, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        images = ShardedImages(server.url, cache=tmp_path / "cache", cache_bytes=1000)
        with pytest.raises(UsageError, match=r"shard .* has \d+ bytes and the cache may have 1000; raise cache_bytes"):
            images.read(0)


def _read_all_of(url: str, cache: str) -> list[tuple[bytes, int]]:
    return read_all(ShardedImages(url, cache=cache))


@pytest.mark.processes
def test_several_processes_at_once_download_each_shard_once(source: Path, shards: Path, tmp_path: Path) -> None:
    with FileServer(shards) as server, ProcessPoolExecutor(3, mp_context=get_context("spawn")) as pool:
        found = [pool.submit(_read_all_of, server.url, str(tmp_path / "cache")) for _ in range(3)]
        assert all(each.result() == in_order(source) for each in found)
    downloads = {name: count for name, count in server.gets.items() if name.endswith(".tar")}
    assert downloads == Counter(path.name for path in shards.glob("*.tar"))


def _read_at_random(url: str, cache: str, limit: int, seed: int) -> tuple[list[tuple[int, bytes]], int]:
    """What was read, and the most that the cache ever held."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
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
    program = "import sys, farandole; farandole.ShardedImages(sys.argv[1], cache=sys.argv[2]).read(0)"
    with FileServer(shards) as server:
        server.halved.add("shard-000000.tar")
        with subprocess.Popen([sys.executable, "-c", program, server.url, str(tmp_path / "cache")], env=ENVIRON) as one:
            assert server.half_sent.wait(60)
            assert len(list((tmp_path / "cache").glob("*.part"))) == 1
            one.send_signal(signal.SIGKILL)
        server.halved.clear()
        server.goes_on.set()
        assert read_all(ShardedImages(server.url, cache=tmp_path / "cache")) == in_order(source)
        assert not list((tmp_path / "cache").glob("*.part"))
        assert server.gets["shard-000000.tar"] == 2


class Drawing(LocalFileSystem):
    """A store whose client draws random numbers when it downloads, as those of S3 do when they retry."""

    protocol = "drawing"

    def get_file(self, path: str, *args: Any, **options: Any) -> None:
        random.random()
        super().get_file(path, *args, **options)

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
    assert list((tmp_path / "cache").glob("*.tar"))
    assert drawn() == expected


# --- S3 and loader processes ----------------------------------------------------------------------------------------


def _tensor(image: Any) -> torch.Tensor:
    noisy = bytes(byte ^ random.getrandbits(1) for byte in image.tobytes())
    return torch.frombuffer(bytearray(noisy), dtype=torch.uint8)


@pytest.mark.world
@pytest.mark.processes
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_from_s3_in_loader_processes_the_bits_are_those_of_the_folder(
    s3: S3, source: Path, shards: Path, tmp_path: Path, start: str
) -> None:
    for path in shards.iterdir():
        fsspec.filesystem("s3").put_file(str(path), f"bucket/images/{path.name}")
    batch = GlobalBatch(8, micro=4)
    keys = [Key(epoch=1, step=n // 2, shard=n % 2, start=4 * n, stop=4 * n + 4) for n in range(6)]
    here = Loader(ShardedImages(shards, transform=_tensor), batch, seed=5)
    expected = [here.fetch(key) for key in keys]
    remote = ShardedImages("s3://bucket/images", transform=_tensor, cache=tmp_path / "cache")
    remote.read(3)  # the client has its thread in this process when the others are started
    loader = Loader(remote, batch, seed=5, num_workers=2, multiprocessing_context=start)
    try:
        loader.expect(keys)
        for key, (images, labels) in zip(keys, expected, strict=True):
            found, found_labels = loader.fetch(key)
            assert torch.equal(found, images)
            assert torch.equal(found_labels, labels)
    finally:
        loader.close()
    s3.end()
    assert read_all(pickle.loads(pickle.dumps(remote))) == in_order(source)  # all of it is here now
