"""Shards made to do harm: no program is called, no file elsewhere is read, no memory taken that the shard has not."""

from __future__ import annotations

import os
import tracemalloc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import PIL.Image
import pytest
from PIL import EpsImagePlugin

from attack import files
from farandole.data.images import ShardedImages
from farandole.data.loader import Key, Loader
from farandole.data.prepare import images as image_folder
from farandole.errors import BadSample, ShardError
from farandole.plan.batch import GlobalBatch

LIMIT = 4 << 20  # bytes; each of these shards has a few thousand


# --- what Pillow is asked ----------------------------------------------------------------------------------------


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """There once a program called `gs` has been started."""
    program, mark = tmp_path / "bin" / "gs", tmp_path / "called"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {mark}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # it looks once
    return mark


def test_postscript_is_no_image_whatever_its_name(called: Path, tmp_path: Path) -> None:
    shards = files.images(tmp_path / "shards", [files.picture(), files.postscript()])
    images = ShardedImages(shards)
    assert images[0][0].size == (8, 8)
    with pytest.raises(PIL.UnidentifiedImageError):
        images[1]
    source = tmp_path / "source" / "ant"
    source.mkdir(parents=True)
    (source / "x.jpg").write_bytes(files.postscript())
    with pytest.raises(BadSample, match=r"\b1\b(.|\n)*x\.jpg"):
        image_folder.prepare(
            image_folder.list_folder(source.parent), str(tmp_path / "made"), shard_bytes=1 << 20, short_side=0,
            processes=1, begin=os.getpgid, on_result=lambda _: None,
        )  # fmt: skip
    assert not called.exists()
    with PIL.Image.open(source / "x.jpg") as image, pytest.raises(OSError, match="cannot identify"):  # the bait is one
        image.load()
    assert called.exists()


@pytest.mark.parametrize("side", [10_000, files.WIDE])
def test_pixels_beyond_the_limit_are_never_decoded(tmp_path: Path, side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow only warns of the smaller one, and takes 400 MB for it."""
    images = ShardedImages(files.images(tmp_path, [files.picture(), files.bomb(side)]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(PIL.Image.DecompressionBombError):
            images[1]
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(PIL.Image.DecompressionBombError, match=r"8 x 8 pixels.*MAX_IMAGE_PIXELS"):
            images[0]
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", None)
    assert images[0][0].size == (8, 8)


BAD = {"postscript": files.postscript, "pixels": files.bomb, "nothing": bytes}


@pytest.mark.failure(
    "Data and loader processes",
    "an image has an unsupported format, more pixels than Pillow's limit, or a declared size beyond its shard",
    seen="a bad sample, with the reason",
    outcome="as for `on_bad_sample`; the image is never decoded",
)
@pytest.mark.parametrize("make", BAD.values(), ids=BAD)
def test_a_bad_image_is_a_bad_sample(tmp_path: Path, make: Any) -> None:
    images = ShardedImages(files.images(tmp_path, [files.picture(), make()]), transform=lambda image: image.size[0])
    batch, key = GlobalBatch(2, micro=2), Key(0, 0, 0, 0, 2)
    with pytest.raises(BadSample, match=r"\b1\b.*\bShardedImages\b.*on_bad_sample="):
        Loader(images, batch, seed=0, shuffle=False).fetch(key)
    loader = Loader(images, batch, seed=0, shuffle=False, on_bad_sample="skip")
    assert loader.fetch(key)[0].tolist() == [8]
    assert loader.skipped == (1,)


# --- what a tar claims -------------------------------------------------------------------------------------------


@pytest.fixture
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    yield
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < LIMIT, f"{most} bytes"


@pytest.mark.failure(
    "Data and loader processes",
    "an image has an unsupported format, more pixels than Pillow's limit, or a declared size beyond its shard",
)
@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("behind", [0, 2])
def test_an_image_of_more_than_the_shard_is_a_bad_sample_and_so_are_those_behind_it(
    tmp_path: Path, behind: int
) -> None:
    images = ShardedImages(files.claimed_image(tmp_path, 2, behind), transform=lambda image: image.size[0])
    assert [images[0], images[1]] == [(8, 0), (8, 0)]
    for index in range(2, 3 + behind):
        with pytest.raises(ValueError, match=r"/shard\.tar\b"):
            images[index]
    loader = Loader(images, GlobalBatch(8, micro=8), seed=0, shuffle=False, on_bad_sample="skip")
    assert loader.fetch(Key(0, 0, 0, 0, 3 + behind))[1].tolist() == [0, 0]
    assert loader.skipped == tuple(range(2, 3 + behind))


@pytest.mark.usefixtures("little_memory")
def test_a_label_of_more_than_the_shard_is_one_too(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"/shard\.tar\b"):
        ShardedImages(files.claimed_label(tmp_path))[0]


@pytest.mark.parametrize(
    ("label", "said"),
    [(b"9" * 19, r"\bb'9+'.*2\^63"), (b"1" + b" " * 40, r"\bb'1 +'")],
)
def test_a_label_that_is_none_is_named(tmp_path: Path, label: bytes, said: str) -> None:
    shards = files.shard(tmp_path, [files.entry("a.jpg", files.picture()), files.entry("a.cls", label)], 1)
    with pytest.raises(ShardError, match=rf"{tmp_path}/shard\.tar\b.*{said}"):
        ShardedImages(shards)[0]


@pytest.mark.timeout(20)
def test_an_entry_that_leads_back_is_not_followed(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=r"'b\.jpg'"):
        ShardedImages(files.leading_back(tmp_path))[0]


@pytest.mark.timeout(20)
def test_a_shard_that_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    shards = files.images(tmp_path, [files.picture()])
    (shards / "shard.tar").unlink()
    os.mkfifo(shards / "shard.tar")
    with pytest.raises(ShardError, match=r"shard\.tar\b.*\b0 bytes"):
        ShardedImages(shards)[0]


# --- what an index claims ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "message"),
    [
        *(
            ({"url": url}, r"url .*`\$.shardlist\[0\]`")
            for url in (
                "../a.tar",
                "/etc/passwd",
                "a/b.tar",
                "",
                "..",
                ".a",
                "http://x/a.tar",
                "a\0b",
                "a\nb",
                "x" * 201,
            )
        ),
        *(({"md5sum": digest}, r"md5sum .*shard\.tar\b.*\b32\b") for digest in ("", "0" * 31, "../" + "0" * 29)),
        ({"nsamples": -1}, r"nsamples -1\b.*shard\.tar\b"),
        ({"filesize": -1}, r"filesize -1\b.*shard\.tar\b"),
        ({"filesize": 1 << 60}, r"filesize \d+\b.*shard\.tar\b"),
    ],
)
def test_an_index_that_claims_what_can_not_be_is_refused(tmp_path: Path, said: dict[str, Any], message: str) -> None:
    shards = files.images(tmp_path / "shards", [files.picture()], **said)
    with pytest.raises(ShardError, match=rf"{shards}/index\.json\b.*{message}"):
        ShardedImages(shards)


def test_an_index_that_leads_out_of_its_folder_reads_nothing_there(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"of the reader" * 100)
    with pytest.raises(ShardError, match=r"'\.\./secret'"):
        ShardedImages(files.outside(tmp_path / "shards", secret))


def test_an_entry_named_twice_is_refused(tmp_path: Path) -> None:
    shards = files.images(tmp_path, [files.picture()])
    index = msgspec.json.decode((shards / "index.json").read_bytes())
    index["shardlist"] *= 2
    (shards / "index.json").write_bytes(msgspec.json.encode(index))
    with pytest.raises(ShardError, match=r"'shard\.tar'.*shardlist\[1\]"):
        ShardedImages(shards)


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"shardlist":' + b"[" * 100_000, b"\xff\xfe", b""])
def test_an_index_that_is_none_is_said_to_be_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "index.json").write_bytes(content)
    with pytest.raises(ShardError, match=str(tmp_path / "index.json")):
        ShardedImages(tmp_path)
