"""A picture on its way from a file's bytes to the pixels that a model is given: its size first, and then a part of it.

Who knows which part is wanted, and how large, has less decoded: a JPEG is made of blocks of 8 x 8, of which a decoder
can make 4 x 4, 2 x 2 or 1 pixel by a smaller transform. That is done where half the size, or less, is still as large as
what is wanted; never where pixels would have to be made up. Other fractions save nothing: only these have fast code.

    bytes of a JPEG    simplejpeg (libjpeg-turbo), where it is installed: the fast way
    other bytes        Pillow: what simplejpeg refuses as well, so that it decides nowhere what is a bad sample
    an image           Pillow's, decoded already

What comes out is a function of the bytes, the box and the libraries, which `facts` names. Memory is taken only once the
head has said how many pixels there are, and no more than `decoding.py` allows.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import interpolate

from farandole.data.decoding import check_pixels, open_image
from farandole.membership.likeness import DECODING

if TYPE_CHECKING:
    import PIL.Image

Pixels = npt.NDArray[np.uint8]  # (height, width, 3)

_JPEG = b"\xff\xd8\xff"  # what Pillow, too, takes for one
_BLOCK = 8  # pixels of a JPEG's block, each way
_WITHOUT_INK = ("YCbCr", "RGB", "Gray")  # what of inks (CMYK) is white is for Pillow to know


class Box(NamedTuple):
    """A part of a picture, in its pixels."""

    top: int
    left: int
    height: int
    width: int


class Picture(ABC):
    """`size` is (height, width), of which each box is a part."""

    size: tuple[int, int]

    @abstractmethod
    def part(self, box: Box, height: int, width: int) -> Pixels:
        """The box, resized, shape (height, width, 3). Called once. Raises what the decoder raises of a bad image."""


def picture_of(data: bytes) -> Picture:
    """Raises Pillow's errors for what is no image, or has too many pixels."""
    if data.startswith(_JPEG) and (simplejpeg := _simplejpeg()) is not None:
        with contextlib.suppress(ValueError, KeyError):  # it knows no name for some kinds
            height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
            check_pixels(height, width, data)
            # of pictures smaller than a block it takes other fractions for as large as the whole
            if colours in _WITHOUT_INK and min(height, width) >= _BLOCK:
                return _Jpeg(data, height, width)
    return _Opened(open_image(data))


def facts(*, fast: bool) -> Iterator[tuple[str, str]]:
    """Which libraries decode, by name and version. `fast`: by way of `picture_of`, else Pillow alone."""
    from PIL import Image, features

    pillow = f"Pillow {Image.__version__}"
    jpeg = f"{pillow} with libjpeg-turbo {features.version_feature('libjpeg_turbo') or 'none'}"
    simplejpeg = _simplejpeg() if fast else None
    if simplejpeg is not None:
        jpeg = f"simplejpeg {simplejpeg.__version__}, or {jpeg}"
    yield f"{DECODING}of JPEG", jpeg
    yield f"{DECODING}of other images", f"{pillow} with libwebp {features.version_module('webp') or 'none'}"


class _Jpeg(Picture):
    """A JPEG that simplejpeg has looked at; what it refuses after all, Pillow decides."""

    def __init__(self, data: bytes, height: int, width: int) -> None:
        self._data = data
        self.size = height, width

    def part(self, box: Box, height: int, width: int) -> Pixels:
        simplejpeg: Any = _simplejpeg()
        eighths = _eighths(box, height, width)
        least = [-(-extent * eighths // _BLOCK) for extent in self.size]  # it takes the smallest that is as large
        try:
            found: Pixels = simplejpeg.decode_jpeg(self._data, min_height=least[0], min_width=least[1])
        except ValueError:
            return _Opened(open_image(self._data)).part(box, height, width)
        return _resized(found, _scaled(box, eighths), height, width)


class _Opened(Picture):
    """A file that Pillow has looked at."""

    def __init__(self, image: PIL.Image.Image) -> None:
        self._image = image
        self.size = image.height, image.width

    def part(self, box: Box, height: int, width: int) -> Pixels:
        with self._image as image:
            if image.format == "JPEG" and (eighths := _eighths(box, height, width)) < _BLOCK:
                image.draft("RGB", (image.width * eighths // _BLOCK, image.height * eighths // _BLOCK))
                box = _scaled(box, eighths)
            return _Image(image).part(box, height, width)


class _Image(Picture):
    """An image of Pillow's."""

    def __init__(self, image: PIL.Image.Image) -> None:
        self._image = image
        self.size = image.height, image.width

    def part(self, box: Box, height: int, width: int) -> Pixels:
        top, left, h, w = box
        image = self._image if self._image.mode == "RGB" else self._image.convert("RGB")
        found = np.array(image.crop((left, top, left + w, top + h)))  # a copy, that torch may write
        return _resized(found, Box(0, 0, h, w), height, width)


def of_image(image: PIL.Image.Image) -> Picture:
    return _Image(image)


def _eighths(box: Box, height: int, width: int) -> int:
    """How many of the 8 x 8 pixels of a block are wanted each way: 1, 2, 4 or all; the box has no fewer than wanted."""
    return next((n for n in (1, 2, 4) if box.height * n >= _BLOCK * height and box.width * n >= _BLOCK * width), _BLOCK)


def _scaled(box: Box, eighths: int) -> Box:
    """The box in a picture that is decoded so much smaller, to the nearest pixels."""
    if eighths == _BLOCK:
        return box
    edges = (box.top, box.left, box.top + box.height, box.left + box.width)
    top, left, bottom, right = ((edge * eighths + _BLOCK // 2) // _BLOCK for edge in edges)
    return Box(top, left, bottom - top, right - left)


def _resized(pixels: Pixels, box: Box, height: int, width: int) -> Pixels:
    """By torch, in integers: 3 to 5 times as fast as by Pillow, with the same filter."""
    part = torch.from_numpy(pixels[box.top : box.top + box.height, box.left : box.left + box.width])
    # as a picture lies in memory anyway: of other strides torch would first make planes, which takes as long again
    batch = part.permute(2, 0, 1).unsqueeze(0).contiguous(memory_format=torch.channels_last)
    made = interpolate(batch, (height, width), mode="bilinear", antialias=True)
    return made[0].permute(1, 2, 0).numpy()


@cache
def _simplejpeg() -> Any:
    """The module; None where it is not installed."""
    return importlib.import_module("simplejpeg") if find_spec("simplejpeg") else None


def digest_of_resizing() -> str:
    """Of a fixed picture made smaller and larger, as 16 hexadecimal digits."""
    pixels = (np.arange(61 * 83 * 3, dtype=np.uint64) * 2654435761 >> 13).astype(np.uint8).reshape(61, 83, 3)
    box, digest = Box(1, 2, 58, 79), hashlib.sha256()
    for height, width in ((17, 40), (90, 101)):
        digest.update(_resized(pixels, box, height, width).tobytes())
    return digest.hexdigest()[:16]
