"""From bytes to a part of a picture: by whichever decoder, what Pillow would give, from as few pixels as that takes."""

from __future__ import annotations

import io
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

import farandole
from attack import files
from farandole.data import transforms
from farandole.data.transforms import Box, facts, picture_of
from tests.support.photos import photo, written

FAST = pytest.mark.skipif(find_spec("simplejpeg") is None, reason="simplejpeg is not installed")


@pytest.fixture(params=["Pillow", pytest.param("simplejpeg", marks=FAST)])
def decoder(request: pytest.FixtureRequest, without_simplejpeg: Callable[[], None]) -> str:
    if request.param == "Pillow":
        without_simplejpeg()
    return request.param


@pytest.fixture
def without_simplejpeg(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """As on a machine that has none."""

    def begin() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "path", [])
            patch.delitem(sys.modules, "simplejpeg", raising=False)
            transforms._simplejpeg.cache_clear()
            assert transforms._simplejpeg() is None

    yield begin
    transforms._simplejpeg.cache_clear()


def whole(data: bytes, height: int, width: int) -> Any:
    picture = picture_of(data)
    return picture.part(Box(0, 0, *picture.size), height, width).astype(int)


def difference(found: Any, image: PIL.Image.Image) -> float:
    """The mean over pixels and channels, of 255."""
    return float(np.abs(found - np.asarray(image.convert("RGB")).astype(int)).mean())


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "PPM", "TIFF", "GIF"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_each_format_gives_what_pillow_gives(kind: str, mode: str) -> None:
    data = written(photo(60, 90).convert(mode), kind)
    with PIL.Image.open(io.BytesIO(data)) as image:
        assert difference(whole(data, 60, 90), image) < 0.5
    picture = picture_of(data)
    assert picture.size == (60, 90)
    assert np.abs(picture.part(Box(10, 20, 30, 40), 30, 40) - whole(data, 60, 90)[10:40, 20:60]).max() == 0


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("size", [(400, 600), (403, 611)])
@pytest.mark.parametrize("wanted", [(200, 300), (150, 220), (100, 150), (48, 70), (13, 20), (399, 599), (800, 1200)])
def test_what_is_decoded_smaller_is_what_resizing_gives(size: tuple[int, int], wanted: tuple[int, int]) -> None:
    """Where the box begins and ends with a block; elsewhere it is off by half a pixel of what was decoded."""
    image = photo(*size)
    data = written(image, quality=95)
    for box, most in ((Box(40, 56, 312, 480), 0.9), (Box(37, 51, 311, 477), 3.5), (Box(0, 0, *size), 2.5)):
        top, left, height, width = box
        part = image.resize(wanted[::-1], PIL.Image.Resampling.BILINEAR, box=(left, top, left + width, top + height))
        assert difference(picture_of(data).part(box, *wanted), part) < most, box


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("size", [(1, 1), (5, 5), (7, 7), (8, 8), (5, 40), (9, 9)])
def test_small_pictures_are_what_they_are(size: tuple[int, int]) -> None:
    data = written(photo(*size), quality=95)
    with PIL.Image.open(io.BytesIO(data)) as image:
        assert difference(whole(data, *size), image) == 0


@FAST
def test_no_more_is_decoded_than_is_wanted_and_never_less(monkeypatch: pytest.MonkeyPatch) -> None:
    import simplejpeg

    decoded: list[tuple[int, int]] = []

    def decode(*arguments: Any, **options: Any) -> Any:
        made = real(*arguments, **options)
        decoded.append(made.shape[:2])
        return made

    real = simplejpeg.decode_jpeg
    monkeypatch.setattr(simplejpeg, "decode_jpeg", decode)
    data = written(photo(400, 600))
    for box, wanted in (
        (Box(0, 0, 400, 600), (200, 300)),
        (Box(0, 0, 400, 600), (201, 300)),
        (Box(0, 0, 400, 600), (100, 100)),
        (Box(0, 0, 400, 600), (20, 20)),
        (Box(100, 100, 200, 200), (100, 100)),
        (Box(100, 100, 200, 200), (101, 99)),
        (Box(100, 100, 50, 50), (224, 224)),
    ):
        picture_of(data).part(box, *wanted)
    assert decoded == [(200, 300), (400, 600), (100, 150), (50, 75), (200, 300), (400, 600), (400, 600)]


def test_pillow_too_decodes_no_more_than_is_wanted(without_simplejpeg: Callable[[], None]) -> None:
    without_simplejpeg()
    data = written(photo(4000, 4000))
    tracemalloc.start()
    picture_of(data).part(Box(0, 0, 4000, 4000), 100, 100)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 4 << 20, "an eighth each way is 0.75 MB as an array, the whole 48"


# --- what is no good -------------------------------------------------------------------------------------------


def cut_short() -> bytes:
    data = written(photo(100, 100), quality=95)
    return data[: len(data) // 2]


BAD = {
    "nothing": lambda: b"",
    "no head": lambda: b"\xff\xd8\xff\xe0" + bytes(40),
    "cut short": cut_short,
    "postscript": files.postscript,
    "a bomb": files.bomb,
    "a bomb of a JPEG": files.jpeg_bomb,
}


@pytest.mark.failure(
    "Data and loader processes", "a JPEG for farandole's own transforms has more pixels than Pillow's limit"
)
@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("make", BAD.values(), ids=BAD)
def test_what_pillow_refuses_is_refused(make: Callable[[], bytes]) -> None:
    """By the same kind of error, whoever decodes."""
    kind = PIL.Image.DecompressionBombError if "bomb" in make.__name__ else OSError
    with pytest.raises(kind):
        whole(make(), 8, 8)


@pytest.mark.failure(
    "Data and loader processes",
    "a JPEG for farandole's own transforms has more pixels than Pillow's limit",
    seen="a bad sample, with the reason, whichever library decodes",
    outcome="as for `on_bad_sample`; the image is never decoded",
)
@pytest.mark.usefixtures("decoder")
def test_a_jpeg_of_too_many_pixels_takes_no_memory(tmp_path: Path) -> None:
    transform = farandole.RandomResizedCrop(8)
    images = farandole.ShardedImages(files.images(tmp_path, [files.jpeg_bomb()]), transform=transform)
    tracemalloc.start()
    with pytest.raises(PIL.Image.DecompressionBombError, match=r"65000 x 65000 pixels|4225000000 pixels"):
        images[0]
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 4 << 20


@pytest.mark.usefixtures("decoder")
def test_inks_are_what_pillow_makes_of_them() -> None:
    image = photo(40, 40).convert("CMYK")
    data = written(image, quality=95)
    with PIL.Image.open(io.BytesIO(data)) as opened:
        assert difference(whole(data, 40, 40), opened) == 0


@pytest.mark.failure(
    "Data and loader processes",
    "simplejpeg refuses a JPEG that Pillow can decode",
    seen="nothing: Pillow decodes it",
    outcome="the same sample on every worker",
)
@FAST
def test_what_simplejpeg_refuses_pillow_decides() -> None:
    """Bytes between two markers, of which libjpeg only warns."""
    data = written(photo(64, 64), quality=95)
    head = data.index(b"\xff\xdb")
    odd = data[:head] + b"\x00\x00\x00" + data[head:]
    import simplejpeg

    with pytest.raises(ValueError, match="xtraneous"):
        simplejpeg.decode_jpeg(odd)
    with PIL.Image.open(io.BytesIO(odd)) as image:
        assert difference(whole(odd, 64, 64), image) == 0


# --- who decodes -----------------------------------------------------------------------------------------------


def test_who_decodes_is_said(decoder: str) -> None:
    found = dict(facts(fast=True))
    assert found["decoding of JPEG"].startswith(decoder)
    assert f"Pillow {PIL.Image.__version__}" in found["decoding of JPEG"]
    assert found["decoding of other images"].startswith(f"Pillow {PIL.Image.__version__}")
    assert dict(facts(fast=False))["decoding of JPEG"].startswith("Pillow")
