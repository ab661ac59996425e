"""Images in shards: the samples that were put in, from a folder, HTTP and S3, through a cache that keeps its limit."""

from __future__ import annotations

import hashlib
import os
import pickle
import random
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import pytest
import torch

from farandole.data.images import ShardedImages
from farandole.data.index import rows_of, to_bytes
from farandole.data.loader import Key, Loader
from farandole.errors import ShardError
from farandole.plan.batch import GlobalBatch
from tests.support.file_server import FileServer
from tests.support.image_files import CLASSES, in_order, make_folder
from tests.support.s3_server import S3
from tests.support.shards import prepared, read_all

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
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    """One bit of the first image."""
    data = bytearray(path.read_bytes())
    data[600] ^= 1
    path.write_bytes(data)


@pytest.mark.failure(
    "Data and loader processes",
    "a shard of the data is missing, damaged or not reachable",
    seen="`ShardError` with the shard; `w2 on node1 HAS NO ACCESS TO THE DATA` for each worker that meets it",
    outcome=(
        "each such worker leaves with exit code 6; if all do, the run ends with exit code 1, and the state is saved"
    ),
)
@pytest.mark.parametrize(
    ("do", "said"),
    [(Path.unlink, ""), (truncate, r"\d+ bytes"), (flip, "")],
)
def test_a_shard_of_this_machine_that_is_not_what_it_should_be_is_named(shards: Path, do: Any, said: str) -> None:
    do(shards / "shard-000001.tar")
    with pytest.raises(ShardError, match=rf"{shards}/shard-000001\.tar\b.*{said}.*farandole data prepare"):
        read_all(ShardedImages(shards))


@pytest.mark.failure("Data and loader processes", "a shard of the data is missing, damaged or not reachable")
@pytest.mark.parametrize(
    ("do", "kind", "said"),
    [
        (Path.unlink, ShardError, r"'' .*shard-000001\.tar\b"),
        (
            truncate,
            ShardError,
            r"'\d+\.jpg' .*shard-000001\.tar\b.*OSError: .*\d+ bytes .*\d+",
        ),
        (flip, ValueError, r"'000000005\.jpg' .*shard-000001\.tar\b"),
    ],
)
def test_a_shard_elsewhere_that_is_not_what_it_should_be_is_named(
    shards: Path, tmp_path: Path, do: Any, kind: type[Exception], said: str
) -> None:
    do(shards / "shard-000001.tar")
    with FileServer(shards) as server:
        images = ShardedImages(server.url, cache=tmp_path / "cache", deadline_s=2)
        with pytest.raises(kind, match=rf"\b\d+\b.*{server.url}.*{said}"):
            read_all(images)
        images.settle(60)
    assert not list((tmp_path / "cache").glob("*shard-000001.tar"))
    assert not list((tmp_path / "cache").glob("*.part"))


@pytest.mark.failure(
    "Data and loader processes",
    "the bytes of a sample differ from those that were indexed",
    seen=(
        "nothing if the store has the right bytes; a bad sample if it returns wrong bytes twice; `ShardError` for a "
        "local shard"
    ),
    outcome="a wrong copy is removed and the sample is read again; no wrong pixels are trained on",
)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_byte_that_was_flipped_in_each_of_201_images_is_found_in_each(tmp_path: Path, elsewhere: bool) -> None:
    """JPEGs decode to other pixels then, without an error."""
    shards = tmp_path / "shards"
    index = prepared(make_folder(tmp_path / "source", each=67), str(shards))
    rows = rows_of((shards / "samples.bin").read_bytes(), 201)
    at = 0
    for shard in index.shardlist:
        data = bytearray((shards / shard.url).read_bytes())
        for offset, size, _, _ in rows[at : at + shard.nsamples].tolist():
            data[offset + random.Random(offset).randrange(size)] ^= 0x10
        (shards / shard.url).write_bytes(data)
        at += shard.nsamples
    with FileServer(shards) as server:
        images = ShardedImages(server.url if elsewhere else shards, cache=tmp_path / "cache")
        for number in range(201):
            with pytest.raises(ValueError if elsewhere else ShardError, match=f"sample {number} of "):
                images.read(number)


def test_a_shard_with_other_samples_than_the_index_says_is_named(shards: Path) -> None:
    index = msgspec.json.decode((shards / "index.json").read_bytes())
    index["shardlist"][2]["nsamples"] += 1
    (shards / "index.json").write_bytes(msgspec.json.encode(index))
    with pytest.raises(ShardError, match=r"samples\.bin\b.*\b768 bytes.*\b800\b"):
        read_all(ShardedImages(shards))
    del index["samples"]
    (shards / "index.json").write_bytes(msgspec.json.encode(index))
    with pytest.raises(ShardError, match=r"/shard-000002\.tar\b.*\b\d+ samples"):
        read_all(ShardedImages(shards))


@pytest.mark.failure(
    "Data and loader processes",
    "the sample table of an index points outside its shards",
    seen="`ShardError` with the first such sample",
    outcome="nothing is read there",
)
@pytest.mark.parametrize(("column", "value"), [(0, -1), (0, 1 << 40), (1, 1 << 40), (1, -5), (2, -1)])
def test_a_table_that_leads_out_of_its_shard_is_refused(shards: Path, column: int, value: int) -> None:
    rows = rows_of((shards / "samples.bin").read_bytes(), 24).copy()
    rows[7, column] = value
    (shards / "samples.bin").write_bytes(to_bytes(rows))
    index = msgspec.json.decode((shards / "index.json").read_bytes())
    with pytest.raises(ShardError, match=r"samples\.bin\b.*\bMD5\b"):
        ShardedImages(shards).read(0)
    index["samples"]["md5sum"] = hashlib.md5(to_bytes(rows), usedforsecurity=False).hexdigest()
    (shards / "index.json").write_bytes(msgspec.json.encode(index))
    with pytest.raises(ShardError, match=rf"shard-000001\.tar\b.*samples\.bin\b.*{value}"):
        ShardedImages(shards).read(0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "`farandole data prepare`"),
        ("{", ""),
        ('{"shardlist": []}', ""),
        ('{"shardlist": [{"url": "a.tar", "nsamples": 3}]}', "filesize"),
    ],
)
def test_a_bad_index_is_named(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "index.json").write_text(text)
    with pytest.raises(ShardError, match=rf"{tmp_path}/index\.json\b.*{said}"):
        ShardedImages(tmp_path)


@pytest.mark.failure("Data and loader processes", "a shard of the data is missing, damaged or not reachable")
def test_a_store_that_does_not_answer_is_named(shards: Path, tmp_path: Path) -> None:
    with FileServer(shards) as server:
        images = ShardedImages(server.url, cache=tmp_path / "cache", cache_bytes=5000, deadline_s=3)
        images.read(0)
    with pytest.raises(ShardError, match=r"http://.*/shard-\d+\.tar\b.*Connect"):
        read_all(images)


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
    assert remote.settle(60)
    s3.end()
    assert read_all(pickle.loads(pickle.dumps(remote))) == in_order(source)  # all of it is here now
