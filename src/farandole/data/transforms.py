"""From a picture to the tensor that a model is trained on, by way of as few pixels as that takes.

    farandole.ShardedImages(url, transform=farandole.RandomResizedCrop(224, flip=True))      # to train
    farandole.ShardedImages(url, transform=farandole.Resize(256, crop=224))                  # to evaluate
    normalize = farandole.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))   # a batch, on its device

`RandomResizedCrop` and `Resize` say, by a picture's size and by what they draw, which part of it is wanted and how
large (`Cut`). `ShardedImages` gives them the file's bytes, of which no more is decoded than that (`transforms.py`); of
anybody else they take PIL images. They give uint8, shape (3, height, width), which is collated and handed over in a
quarter of float32's bytes; `Normalize` makes float32 of a whole batch, where the model is.

Invariant: what comes out is a function of the picture and of Python's global generator, which a loader seeds for each
sample; so the same on any worker and in any process. Resizing is bilinear with the low-pass filter that makes things
smaller without moire, in integers. Left out: other augmentations; a dataset around this one may do them.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import interpolate

from farandole.data.decoding import check_pixels, open_image
from farandole.errors import UsageError
from farandole.protocol.numeric_facts import DECODING

if TYPE_CHECKING:
    import PIL.Image


# --- pictures ---------------------------------------------------------------------------------------------------------
#
# A picture on its way from a file's bytes to the pixels that a model is given: its size first, and then a part of it.
#
# Who knows which part is wanted, and how large, has less decoded: a JPEG is made of blocks of 8 x 8, of which a
# decoder can make 4 x 4, 2 x 2 or 1 pixel by a smaller transform. That is done where half the size, or less, is still
# as large as what is wanted; never where pixels would have to be made up. Other fractions save nothing: only these
# have fast code.
#
#     bytes of a JPEG    simplejpeg (libjpeg-turbo), where it is installed: the fast way
#     other bytes        Pillow: what simplejpeg refuses as well, so that it decides nowhere what is a bad sample
#     an image           Pillow's, decoded already
#
# What comes out is a function of the bytes, the box and the libraries, which `facts` names. Memory is taken only once
# the head has said how many pixels there are, and no more than `transforms.py` allows.

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


# --- transforms -------------------------------------------------------------------------------------------------------

_TRIES = 10  # to find a part of the drawn area and shape within a picture, as torchvision


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The part of a picture that is wanted, what it is resized to, and the window of that which is kept."""

    box: Box
    resized: tuple[int, int]  # (height, width)
    window: Box
    flipped: bool = False


class Fit(ABC):
    """A transform that says what it wants of a picture before the picture is decoded."""

    @abstractmethod
    def cut(self, height: int, width: int) -> Cut:
        """What is wanted of a picture of that size; random numbers are drawn here and nowhere else."""

    def __call__(self, image: Any) -> torch.Tensor:
        """Of a PIL image of any mode, or a `Picture`: uint8 of shape (3, height, width), in RGB."""
        picture: Picture = image if isinstance(image, Picture) else of_image(image)
        cut = self.cut(*picture.size)
        pixels = picture.part(cut.box, *cut.resized)
        top, left, height, width = cut.window
        kept = pixels[top : top + height, left : left + width]
        if cut.flipped:
            kept = kept[:, ::-1]
        return torch.from_numpy(np.ascontiguousarray(kept.transpose(2, 0, 1)))

    def facts(self) -> Iterator[tuple[str, str]]:
        """What resizing comes to here, as a digest: versions of torch in which it is the same may be mixed."""
        yield f"{DECODING}to a size", digest_of_resizing()


@dataclass(frozen=True)
class RandomResizedCrop(Fit):
    """A part of random area, shape and place, resized to `size`; mirrored every other time if `flip`.

    As torchvision's of the same name: an area uniform in `scale` (of the picture's), a ratio of width to height whose
    logarithm is uniform in `ratio`'s; where ten draws do not fit into the picture, the largest part in the middle that
    has an allowed ratio. From: Szegedy et al., Going deeper with convolutions, 2015.
    """

    size: int | tuple[int, int]  # pixels: of both sides, or (height, width)
    _: KW_ONLY
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = False

    def __post_init__(self) -> None:
        """Raises `UsageError` for a size below 1, or bounds that are none."""
        _sides(self, self.size)
        for name, (low, high), most in (("scale", self.scale, 1.0), ("ratio", self.ratio, math.inf)):
            if not 0 < low <= high <= most:
                raise UsageError(f"{self}: {name} is (least, most), above 0{' and at most 1' if most == 1 else ''}")

    def cut(self, height: int, width: int) -> Cut:
        box = self._drawn(height, width)
        flipped = self.flip and random.random() < 0.5
        sides = _sides(self, self.size)
        return Cut(box=box, resized=sides, window=Box(0, 0, *sides), flipped=flipped)

    def _drawn(self, height: int, width: int) -> Box:
        low, high = map(math.log, self.ratio)
        for _ in range(_TRIES):
            area = height * width * random.uniform(*self.scale)
            ratio = math.exp(random.uniform(low, high))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                return Box(random.randint(0, height - h), random.randint(0, width - w), h, w)
        w = min(width, max(round(height * self.ratio[1]), 1))
        h = min(height, max(round(width / self.ratio[0]), 1))
        return _middle(height, width, h, w)


@dataclass(frozen=True)
class Resize(Fit):
    """The shorter side resized to `size`, or both to `(height, width)`; then, with `crop`, the middle of that.

    Without `crop`, and with one number for `size`, pictures of other shapes give tensors of other shapes, which
    torch's `default_collate` does not take.
    """

    size: int | tuple[int, int]  # pixels
    _: KW_ONLY
    crop: int | tuple[int, int] | None = None  # pixels: of both sides, or (height, width); none: all of it

    def __post_init__(self) -> None:
        """Raises `UsageError` for a size below 1, or a crop that is larger than what it is cut from."""
        sides = _sides(self, self.size)
        if self.crop is not None and any(c > s for c, s in zip(_sides(self, self.crop), sides, strict=True)):
            raise UsageError(f"{self}: crop is at most as large as size")

    def cut(self, height: int, width: int) -> Cut:
        if isinstance(self.size, int):
            short = min(height, width)
            # rounded down, as torchvision does
            resized = self.size * height // short, self.size * width // short
        else:
            resized = self.size
        window = Box(0, 0, *resized) if self.crop is None else _middle(*resized, *_sides(self, self.crop))
        return Cut(box=Box(0, 0, height, width), resized=resized, window=window)


class Normalize:
    """`(images / 255 - mean) / std`, a channel at a time: float32 of uint8 of shape (n, channels, height, width).

    It is computed where the images are, number by number: a row's bits depend on the row alone.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        """One number a channel each, of values from 0 to 1. Raises `UsageError` for others, or a `std` not above 0."""
        if len(mean) != len(std) or not mean or not all(s > 0 for s in std):
            raise UsageError(f"Normalize({mean}, {std}): one number a channel each, and std above 0")
        self.mean, self.std = tuple(mean), tuple(std)
        self._on: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Raises `UsageError` for another dtype or another number of channels."""
        if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[1] != len(self.mean):
            raise UsageError(
                f"Normalize takes uint8 of shape (n, {len(self.mean)}, height, width), as farandole's transforms give "
                f"it, not {str(images.dtype).removeprefix('torch.')} of shape {tuple(images.shape)}"
            )
        shift, factor = self._constants(images.device)
        if not images.is_cpu:
            return images.to(torch.float32).sub_(shift).mul_(factor)
        made = torch.empty(images.shape, dtype=torch.float32)
        for row, values in zip(images, made, strict=True):  # each stays in the cache for all three
            values.copy_(row).sub_(shift).mul_(factor)
        return made

    def __repr__(self) -> str:
        return f"Normalize({self.mean}, {self.std})"

    def __reduce__(self) -> Any:
        return Normalize, (self.mean, self.std)

    def _constants(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        if device not in self._on:
            shift = torch.tensor([255 * m for m in self.mean], dtype=torch.float32, device=device)
            factor = torch.tensor([1 / (255 * s) for s in self.std], dtype=torch.float32, device=device)
            self._on[device] = shift.view(-1, 1, 1), factor.view(-1, 1, 1)
        return self._on[device]


def _sides(of: Any, size: Any) -> tuple[int, int]:
    """(height, width)."""
    sides = size if isinstance(size, tuple) else (size, size)
    if len(sides) != 2 or not all(isinstance(side, int) and side >= 1 for side in sides):
        raise UsageError(f"{of}: a size is a whole number of pixels from 1 on, or (height, width)")
    return sides


def _middle(height: int, width: int, h: int, w: int) -> Box:
    return Box(round((height - h) / 2), round((width - w) / 2), h, w)
