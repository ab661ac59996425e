"""Crops, flips and sizes: where they lie, what they give, and that they depend on the picture and the draws alone."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import farandole
from farandole.data.loader import Key, Loader
from farandole.data.transforms import Cut, Fit
from farandole.errors import UsageError
from farandole.plan.batch import GlobalBatch
from tests.support.drawing import same
from tests.support.photos import photo

SIDES = st.integers(1, 700)


# --- which part ------------------------------------------------------------------------------------------------


@given(SIDES, SIDES, st.integers(0, 10**6), st.floats(0.05, 1.0), st.floats(1.0, 3.0))
def test_a_random_part_lies_within_the_picture_and_has_the_area_and_shape_that_were_asked_for(
    height: int, width: int, seed: int, least: float, longest: float
) -> None:
    transform = farandole.RandomResizedCrop(32, scale=(least, 1.0), ratio=(1 / longest, longest))
    random.seed(seed)
    cut = transform.cut(height, width)
    random.seed(seed)
    assert transform.cut(height, width) == cut
    top, left, h, w = cut.box
    assert min(top, left) >= 0
    assert min(h, w) >= 1
    assert top + h <= height
    assert left + w <= width
    rounded = 0.5 * (h + w) + 0.25
    narrow = max(height / width, width / height) > longest  # then the largest part that is allowed may be smaller
    assert h * w >= least * height * width - rounded or narrow
    assert w <= longest * (h + 0.5) + 0.5
    assert h <= longest * (w + 0.5) + 0.5
    assert cut.resized == (32, 32)


def test_areas_are_uniform_and_shapes_by_their_logarithm() -> None:
    """Of a picture so large that every draw fits, and as torchvision draws them."""
    random.seed(1)
    cuts = [farandole.RandomResizedCrop(8, scale=(0.1, 0.3)).cut(2000, 2000).box for _ in range(4000)]
    areas = Counter(int((box.height * box.width / 2000**2 - 0.1) / 0.05) for box in cuts)
    assert all(900 < areas[quarter] < 1100 for quarter in range(4))
    wide = sum(box.width > box.height for box in cuts)
    assert 1880 < wide < 2120
    very = sum(box.width > math.sqrt(4 / 3) * box.height for box in cuts)
    assert 900 < very < 1100


def test_every_other_picture_is_mirrored_where_it_is_asked_for() -> None:
    random.seed(2)
    flips = [farandole.RandomResizedCrop(8, flip=True).cut(20, 30).flipped for _ in range(1000)]
    assert 430 < sum(flips) < 570
    assert not any(farandole.RandomResizedCrop(8).cut(20, 30).flipped for _ in range(50))


@pytest.mark.parametrize(
    ("transform", "size", "resized", "window"),
    [
        (farandole.Resize(256, crop=224), (480, 640), (256, 341), (16, 58, 224, 224)),
        (farandole.Resize(256, crop=224), (640, 480), (341, 256), (58, 16, 224, 224)),
        (farandole.Resize(100), (50, 75), (100, 150), (0, 0, 100, 150)),
        (farandole.Resize((30, 40)), (50, 75), (30, 40), (0, 0, 30, 40)),
        (farandole.Resize((30, 40), crop=(20, 39)), (50, 75), (30, 40), (5, 0, 20, 39)),
        (farandole.Resize(7), (7, 7000), (7, 7000), (0, 0, 7, 7000)),
    ],
)
def test_a_size_is_of_the_shorter_side_and_the_middle_is_kept(
    transform: Fit, size: Any, resized: Any, window: Any
) -> None:
    cut = transform.cut(*size)
    assert (cut.box, cut.resized, cut.window) == ((0, 0, *size), resized, window)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: farandole.RandomResizedCrop(0), r"RandomResizedCrop\(size=0\b"),
        (lambda: farandole.RandomResizedCrop((3, 2.5)), r"2\.5.*\b1\b"),  # type: ignore[arg-type]
        (lambda: farandole.RandomResizedCrop((3, 4, 5)), "height, width"),  # type: ignore[arg-type]
        (lambda: farandole.RandomResizedCrop(8, scale=(0.0, 1.0)), r"\bscale\b.*\b0\b.*\b1\b"),
        (lambda: farandole.RandomResizedCrop(8, scale=(0.5, 1.5)), r"\bscale\b.*\b1\b"),
        (lambda: farandole.RandomResizedCrop(8, ratio=(2.0, 1.0)), r"\bratio\b.*\b0$"),
        (lambda: farandole.Resize(8, crop=9), r"Resize\(size=8, crop=9\)"),
        (lambda: farandole.Normalize((0.5,), (0.5, 0.5)), r"Normalize\(\(0\.5,\), \(0\.5, 0\.5\)\)"),
        (lambda: farandole.Normalize((0.5,), (0.0,)), r"Normalize\(\(0\.5,\), \(0\.0,\)\)"),
    ],
)
def test_what_makes_no_sense_is_said_when_it_is_made(make: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make()


# --- what comes out --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(300, 500), (60, 90)], ids=["smaller", "larger"])
def test_pillow_s_own_resizing_and_the_middle_of_it_give_almost_the_same(size: tuple[int, int]) -> None:
    image = photo(*size)
    found = farandole.Resize(128, crop=112)(image)
    width = 128 * size[1] // size[0]
    expected = np.asarray(image.resize((width, 128), PIL.Image.Resampling.BILINEAR)).astype(int)
    left = round((width - 112) / 2)
    difference = found.permute(1, 2, 0).numpy().astype(int) - expected[8:120, left : left + 112]
    assert np.abs(difference).max() <= 1
    assert (found.dtype, found.shape, found.is_contiguous()) == (torch.uint8, (3, 112, 112), True)


def test_a_mirrored_part_is_the_part_mirrored() -> None:
    class Mirrored(Fit):
        def __init__(self, flipped: bool) -> None:
            self.flipped = flipped

        def cut(self, height: int, width: int) -> Cut:
            whole = farandole.Resize((40, 50)).cut(height, width)
            return Cut(box=whole.box, resized=whole.resized, window=whole.window, flipped=self.flipped)

    image = photo(80, 70)
    plain, mirrored = Mirrored(False)(image), Mirrored(True)(image)
    assert torch.equal(mirrored, plain.flip(2))
    assert not torch.equal(mirrored, plain)
    assert mirrored.is_contiguous()


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1"])
def test_images_of_any_mode_come_out_in_three_channels(mode: str) -> None:
    image = photo(30, 40).convert(mode)
    found = farandole.Resize((30, 40))(image)
    assert np.array_equal(found.permute(1, 2, 0).numpy(), np.asarray(image.convert("RGB")))


def test_normalised_they_are_what_they_should_be_and_a_row_does_not_depend_on_the_others() -> None:
    images = torch.randint(0, 256, (37, 3, 19, 23), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    normalize = farandole.Normalize(mean, std)
    found = normalize(images)
    wide = [torch.tensor(each, dtype=torch.float64).view(3, 1, 1) for each in (mean, std)]
    expected = (images.double() / 255 - wide[0]) / wide[1]
    assert found.dtype == torch.float32
    assert float((found - expected).abs().max()) < 1e-6
    for rows in (1, 2, 5, 36):
        assert torch.equal(normalize(images[:rows]), found[:rows])
        assert torch.equal(normalize(images[-rows:].clone()), found[-rows:])
    for wrong in (images.float(), images[:, :2]):
        with pytest.raises(UsageError, match=r"\buint8\b.*\(n, 3, height, width\)"):
            normalize(wrong)


# --- in shards -------------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_micro_batch_has_the_same_bits_whoever_makes_it(shards: Path, make: Any) -> None:
    images = farandole.ShardedImages(shards, transform=farandole.RandomResizedCrop(16, flip=True))
    batch, keys = GlobalBatch(8, micro=4), [Key(1, n // 2, n % 2, 4 * n, 4 * n + 4) for n in range(6)]
    alone, helped = make(images, batch, num_workers=0), make(images, batch)
    helped.expect(keys)
    made = [alone.fetch(key) for key in keys]
    assert all(same(helped.fetch(key), batch) for key, batch in zip(keys, made, strict=True))
    assert made[0][0].shape == (4, 3, 16, 16)
    assert made[0][0].dtype == torch.uint8
    again = Loader(images, batch, seed=3)
    torch.rand(1)
    random.random()
    assert all(same(again.fetch(key), batch) for key, batch in zip(keys[::-1], made[::-1], strict=True))
    other = Loader(images, batch, seed=3).fetch(keys[0]._replace(epoch=2))
    assert not torch.equal(other[0], made[0][0])


def test_a_transform_of_the_user_s_own_is_given_an_image_of_pillow_s(shards: Path) -> None:
    def of_mine(image: Any) -> Any:
        return type(image), image.mode

    assert farandole.ShardedImages(shards, transform=of_mine)[3][0] == (PIL.Image.Image, "RGB")
