"""What `data prepare` looks at: heads and ends of all images, every pixel where that is asked for."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import PIL.Image
import pytest

from farandole.data.decoding import ends_as_it_should
from farandole.data.index import INDEX, Index
from farandole.data.prepare import images as image_folder
from farandole.data.prepare.images import ImageShardRecord
from farandole.data.prepare.shards import ShardResult
from farandole.errors import BadSample
from tests.support.image_files import make_folder


@pytest.fixture(params=[".jpg", ".png", ".gif", ".webp", ".bmp"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_folder(tmp_path / "source", each=3, suffix=request.param)


def prepared(
    source: Path, check: bool, heard: Callable[[ShardResult[ImageShardRecord]], None] = lambda _: None
) -> Index | int:
    return image_folder.prepare(
        image_folder.list_folder(source), str(source.parent / "shards"), shard_bytes=9000, short_side=0, processes=1,
        begin=os.getpgid, on_result=heard, check=check,
    )  # fmt: skip


def images(source: Path) -> list[Path]:
    return sorted(path for path in source.rglob("*") if path.is_file())


@pytest.mark.parametrize("check", [False, True])
def test_an_image_that_was_cut_off_is_named_in_any_case(source: Path, check: bool) -> None:
    cut = images(source)[4]
    cut.write_bytes(cut.read_bytes()[:-40])
    with pytest.raises(BadSample, match=rf"\b1\b.*\b9\b(.|\n)*{cut.name}"):
        prepared(source, check)
    assert not (source.parent / "shards" / INDEX).exists()


def spoil(path: Path) -> None:
    """Pixels that can't be decoded, between a head and an end that are as they should be."""
    data = bytearray(path.read_bytes())
    begin, end = data.index(b"IDAT") + 8, len(data) - 20
    data[begin:end] = bytes(end - begin)
    path.write_bytes(data)


@pytest.mark.failure(
    "Data and loader processes",
    "`data prepare` reads an image that is damaged between an intact head and an intact end",
    seen="nothing without `--check`; a bad sample when it is read",
    outcome="with `--check` the image is named, and no index is written",
)
def test_what_only_decoding_shows_is_named_if_it_is_asked_for(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "source", each=3, suffix=".png")
    bad = images(source)[2]
    spoil(bad)
    assert isinstance(prepared(source, check=False), Index)
    with pytest.raises(BadSample, match=rf"{bad.name}"):
        prepared(source, check=True)


def test_shards_that_were_not_checked_are_made_anew_and_checked_ones_are_kept(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "source", each=3)
    first = prepared(source, check=False)
    for check, kept in ((False, True), (True, False), (True, True), (False, True)):
        heard: list[ShardResult[ImageShardRecord]] = []
        assert prepared(source, check, heard.append) == first, "the same bytes"
        assert Counter(made.is_reused for made in heard).keys() == {kept}


def test_the_end_of_each_format_is_known(source: Path) -> None:
    for path in images(source):
        data = path.read_bytes()
        with PIL.Image.open(path) as image:
            assert ends_as_it_should(data, image.format) == (image.format != "BMP")
            assert not ends_as_it_should(data[:-3], image.format)
