"""Transforms that make a model's input tensor from an image file, and decode as few pixels as possible for it.

    farandole.ShardedImages(url, transform=farandole.RandomResizedCrop(224, flip=True))      # to train
    farandole.ShardedImages(url, transform=farandole.Resize(256, crop=224))                  # to evaluate
    normalize = farandole.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))   # a batch, on its device

`RandomResizedCrop` and `Resize` choose, from a picture's size and random numbers, a part of it and the size of the
result (`Cut`). `ShardedImages` gives them the file's bytes, and only that part is decoded (section "pictures"); from
other datasets they take PIL images. They return uint8, shape (3, height, width), which is collated and transferred in a
quarter of float32's bytes; `Normalize` converts a whole batch to float32, on the model's device.

Invariant: the result is a function of the picture and of Python's global generator, which a loader seeds for each
sample; so it is the same on any worker and in any process. Resizing is bilinear, in integers, with a low-pass filter
that avoids moire when it reduces the size. Left out: other augmentations; a dataset around this one may do them.
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
# `Picture` decodes an image in two steps: first its size, then the pixels of a part of it.
#
# If the part and its final size are known, less has to be decoded: a JPEG consists of blocks of 8 x 8 pixels, from
# which a decoder can make 4 x 4, 2 x 2 or 1 pixel by a smaller transform. This is done if half the size, or less, is
# still as large as the result; never if pixels would have to be interpolated. Other fractions save nothing: only these
# have fast code.
#
#     bytes of a JPEG    simplejpeg (libjpeg-turbo), if it is installed: the fast path
#     other bytes        Pillow; also bytes that simplejpeg refuses, so that Pillow alone decides what is a bad sample
#     an image           a PIL image, already decoded
#
# The result is a function of the bytes, the box and the libraries, which `facts` names. Memory is allocated only after
# the header has given the number of pixels, and no more than `decoding.check_pixels` allows.

Pixels = npt.NDArray[np.uint8]  # (height, width, 3)
_JPEG = b"\xff\xd8\xff"  # Pillow, too, identifies a JPEG by these bytes
_BLOCK = 8  # pixels of a JPEG's block, in each direction
_WITHOUT_INK = ("YCbCr", "RGB", "Gray")  # without CMYK, whose conversion is left to Pillow


class Box(NamedTuple):
    """A rectangle in a picture, in pixels."""

    top: int
    left: int
    height: int
    width: int


class Picture(ABC):
    """A picture whose size is known and whose pixels are not decoded yet. `size` is (height, width)."""

    size: tuple[int, int]

    @abstractmethod
    def part(self, box: Box, height: int, width: int) -> Pixels:
        """Returns the box, resized, shape (height, width, 3). Call it once. Raises the decoder's errors."""


def picture_of(data: bytes) -> Picture:
    """Returns the picture in a file's bytes. Raises Pillow's errors if it is no image, or has too many pixels."""
    if data.startswith(_JPEG) and (simplejpeg := _simplejpeg()) is not None:
        with contextlib.suppress(ValueError, KeyError):  # KeyError: it has no name for some colour spaces
            height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
            check_pixels(height, width, data)
            # for pictures smaller than a block simplejpeg takes other fractions for as large as the whole
            if colours in _WITHOUT_INK and min(height, width) >= _BLOCK:
                return _Jpeg(data, height, width)
    return _Opened(open_image(data))


def facts(*, fast: bool) -> Iterator[tuple[str, str]]:
    """Yields the libraries that decode, by name and version. `fast`: those of `picture_of`; otherwise Pillow alone."""
    from PIL import Image, features

    pillow = f"Pillow {Image.__version__}"
    jpeg = f"{pillow} with libjpeg-turbo {features.version_feature('libjpeg_turbo') or 'none'}"
    simplejpeg = _simplejpeg() if fast else None
    if simplejpeg is not None:
        jpeg = f"simplejpeg {simplejpeg.__version__}, or {jpeg}"
    yield f"{DECODING}of JPEG", jpeg
    yield f"{DECODING}of other images", f"{pillow} with libwebp {features.version_module('webp') or 'none'}"


class _Jpeg(Picture):
    """A JPEG whose header simplejpeg has read; if it can't decode it, Pillow decodes it."""

    def __init__(self, data: bytes, height: int, width: int) -> None:
        self._data = data
        self.size = height, width

    def part(self, box: Box, height: int, width: int) -> Pixels:
        simplejpeg: Any = _simplejpeg()
        eighths = _eighths(box, height, width)
        least = [-(-extent * eighths // _BLOCK) for extent in self.size]  # it takes the smallest that is as large
        try:
            pixels: Pixels = simplejpeg.decode_jpeg(self._data, min_height=least[0], min_width=least[1])
        except ValueError:
            return _Opened(open_image(self._data)).part(box, height, width)
        return _resized(pixels, _scaled(box, eighths), height, width)


class _Opened(Picture):
    """An image file whose header Pillow has read."""

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
    """A PIL image."""

    def __init__(self, image: PIL.Image.Image) -> None:
        self._image = image
        self.size = image.height, image.width

    def part(self, box: Box, height: int, width: int) -> Pixels:
        top, left, h, w = box
        image = self._image if self._image.mode == "RGB" else self._image.convert("RGB")
        pixels = np.array(image.crop((left, top, left + w, top + h)))  # a copy, which torch may write to
        return _resized(pixels, Box(0, 0, h, w), height, width)


def of_image(image: PIL.Image.Image) -> Picture:
    return _Image(image)


def _eighths(box: Box, height: int, width: int) -> int:
    """Returns how many pixels of a block to decode in each direction: the least of 1, 2, 4 and 8 that is enough."""
    return next((n for n in (1, 2, 4) if box.height * n >= _BLOCK * height and box.width * n >= _BLOCK * width), _BLOCK)


def _scaled(box: Box, eighths: int) -> Box:
    """Returns the box in a picture that is decoded at `eighths` / 8 of its size, rounded to the nearest pixels."""
    if eighths == _BLOCK:
        return box
    edges = (box.top, box.left, box.top + box.height, box.left + box.width)
    top, left, bottom, right = ((edge * eighths + _BLOCK // 2) // _BLOCK for edge in edges)
    return Box(top, left, bottom - top, right - left)


def _resized(pixels: Pixels, box: Box, height: int, width: int) -> Pixels:
    """Resizes the box with torch, in integers: 3 to 5 times as fast as Pillow, with the same filter."""
    part = torch.from_numpy(pixels[box.top : box.top + box.height, box.left : box.left + box.width])
    # the layout of a picture in memory: for other strides torch would first make planes, which doubles the time
    batch = part.permute(2, 0, 1).unsqueeze(0).contiguous(memory_format=torch.channels_last)
    resized = interpolate(batch, (height, width), mode="bilinear", antialias=True)
    return resized[0].permute(1, 2, 0).numpy()


@cache
def _simplejpeg() -> Any:
    """Returns the module; None if it is not installed."""
    return importlib.import_module("simplejpeg") if find_spec("simplejpeg") else None


def digest_of_resizing() -> str:
    """Returns a digest of a fixed picture that is reduced and enlarged, as 16 hexadecimal digits."""
    pixels = (np.arange(61 * 83 * 3, dtype=np.uint64) * 2654435761 >> 13).astype(np.uint8).reshape(61, 83, 3)
    box, digest = Box(1, 2, 58, 79), hashlib.sha256()
    for height, width in ((17, 40), (90, 101)):
        digest.update(_resized(pixels, box, height, width).tobytes())
    return digest.hexdigest()[:16]


# --- transforms -------------------------------------------------------------------------------------------------------

_TRIES = 10  # draws of an area and a shape until they fit into the picture, as in torchvision


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The part of a picture to decode (`box`), its size after resizing, and the `window` of that to return."""

    box: Box
    resized: tuple[int, int]  # (height, width)
    window: Box
    flipped: bool = False


class Fit(ABC):
    """A transform that chooses a part of a picture before the picture is decoded."""

    @abstractmethod
    def cut(self, height: int, width: int) -> Cut:
        """Returns the part of a picture of that size. Draws random numbers here and nowhere else."""

    def __call__(self, image: Any) -> torch.Tensor:
        """Transforms a PIL image of any mode, or a `Picture`, to uint8 of shape (3, height, width), in RGB."""
        picture: Picture = image if isinstance(image, Picture) else of_image(image)
        cut = self.cut(*picture.size)
        pixels = picture.part(cut.box, *cut.resized)
        top, left, height, width = cut.window
        selected = pixels[top : top + height, left : left + width]
        if cut.flipped:
            selected = selected[:, ::-1]
        return torch.from_numpy(np.ascontiguousarray(selected.transpose(2, 0, 1)))

    def facts(self) -> Iterator[tuple[str, str]]:
        """Yields a digest of a resized picture: versions of torch with the same digest may be mixed in one run."""
        yield f"{DECODING}to a size", digest_of_resizing()


@dataclass(frozen=True)
class RandomResizedCrop(Fit):
    """A crop of random area, shape and place, resized to `size`; mirrored with probability 1/2 if `flip`.

    Like torchvision's transform of the same name: the area is uniform in `scale` (a fraction of the picture's), the
    logarithm of width / height is uniform between those of `ratio`. If ten draws do not fit into the picture, it takes
    the largest centre crop of an allowed ratio. From: Szegedy et al., Going deeper with convolutions, 2015.
    """

    size: int | tuple[int, int]  # pixels: both sides, or (height, width)
    _: KW_ONLY
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = False

    def __post_init__(self) -> None:
        """Raises `UsageError` for a size below 1, or invalid bounds."""
        _sides(self, self.size)
        for name, (low, high), most in (("scale", self.scale, 1.0), ("ratio", self.ratio, math.inf)):
            if not 0 < low <= high <= most:
                raise UsageError(
                    f"{self}: {name} must be (least, most), above 0{' and at most 1' if most == 1 else ''}"
                )

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
    """Resizes the shorter side to `size`, or both to `(height, width)`; then, with `crop`, takes the centre crop.

    Without `crop`, and with one number for `size`, pictures of different shapes give tensors of different shapes, which
    torch's `default_collate` does not accept.
    """

    size: int | tuple[int, int]  # pixels
    _: KW_ONLY
    crop: int | tuple[int, int] | None = None  # pixels: both sides, or (height, width); None: no crop

    def __post_init__(self) -> None:
        """Raises `UsageError` for a size below 1, or a crop that is larger than what it is cut from."""
        sides = _sides(self, self.size)
        if self.crop is not None and any(c > s for c, s in zip(_sides(self, self.crop), sides, strict=True)):
            raise UsageError(f"{self}: crop must not be larger than size")

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
    """Computes `(images / 255 - mean) / std` per channel: uint8 of shape (n, channels, height, width) to float32.

    It runs on the images' device, element by element: the bits of a row depend on that row alone.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        """`mean` and `std`: one number per channel, for values from 0 to 1. Raises `UsageError` for invalid ones."""
        if len(mean) != len(std) or not mean or not all(s > 0 for s in std):
            raise UsageError(f"Normalize({mean}, {std}): give one number per channel for each, and std above 0")
        self.mean, self.std = tuple(mean), tuple(std)
        self._on: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Returns the normalised images. Raises `UsageError` for another dtype or another number of channels."""
        if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[1] != len(self.mean):
            raise UsageError(
                f"Normalize takes uint8 of shape (n, {len(self.mean)}, height, width), as farandole's transforms give "
                f"it, not {str(images.dtype).removeprefix('torch.')} of shape {tuple(images.shape)}"
            )
        shift, factor = self._constants(images.device)
        if not images.is_cpu:
            return images.to(torch.float32).sub_(shift).mul_(factor)
        normalised = torch.empty(images.shape, dtype=torch.float32)
        for row, values in zip(
            images, normalised, strict=True
        ):  # a row stays in the CPU cache for all three operations
            values.copy_(row).sub_(shift).mul_(factor)
        return normalised

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


def _sides(transform: Any, size: Any) -> tuple[int, int]:
    """Returns `size` as (height, width)."""
    sides = size if isinstance(size, tuple) else (size, size)
    if len(sides) != 2 or not all(isinstance(side, int) and side >= 1 for side in sides):
        raise UsageError(f"{transform}: a size must be an integer of at least 1 pixel, or (height, width)")
    return sides


def _middle(height: int, width: int, h: int, w: int) -> Box:
    return Box(round((height - h) / 2), round((width - w) / 2), h, w)
