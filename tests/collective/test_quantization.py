"""Quantized blocks, against a reference number by number, and what a training needs of them."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch

from farandole.collective.quantization import BLOCKS, GROUP_BYTES, Place, Quantization

KINDS = [Quantization(8), Quantization(4)]
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"int{kind.bits}")
MASK_32, MASK_64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
HERE = Place(step=11, bucket=3, start=5 * GROUP_BYTES)


def quantize(kind: Quantization, numbers: torch.Tensor, place: Place) -> torch.Tensor:
    return kind.quantize(numbers, torch.empty(kind.bytes_of(numbers.numel()), dtype=torch.uint8), place)


def values(kind: Quantization, groups: torch.Tensor) -> torch.Tensor:
    into = torch.empty(kind.numbers_before(groups.numel()))
    kind.dequantize(groups, into)
    return into


def random_number(place: Place, number: int, value: float) -> float:
    """Less a half: from the hash of the module's docstring, by integers of Python."""

    mixed = ((place.step << 9) + place.bucket) * 0x9E3779B97F4A7C15 + 1 & MASK_64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & MASK_64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & MASK_64
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    hashed = (bits ^ number * 0x9E3779B1 & MASK_32) * (mixed >> 32 | 1) & MASK_32
    upper = hashed >> 16
    return (upper - 65536 if upper >> 15 else upper) / 65536


def rounded(kind: Quantization, numbers: list[float], place: Place) -> list[float]:
    """The values of finite numbers, which fill whole groups."""
    most, result = (1 << kind.bits - 1) - 1, list(numbers)
    for group in range(0, len(numbers), kind.group):
        for block in range(BLOCKS):
            members = range(group + block, group + kind.group, BLOCKS)
            largest = max(abs(Fraction(numbers[i])) for i in members)
            exponent = -126
            while largest > most * Fraction(2) ** exponent:
                exponent += 1
            scale = Fraction(2) ** exponent
            for i in members:
                draw = random_number(place, kind.numbers_before(place.start) + i, numbers[i])
                shifted = np.float32(most + 1.5) + np.float32(float(Fraction(numbers[i]) / scale))
                result[i] = float((math.floor(shifted + np.float32(draw)) - most - 1) * scale)
    return result


def gradient(numel: int, seed: int) -> torch.Tensor:
    """Over many orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator) * torch.randn(numel, generator=generator).mul(4).exp2() * 1e-3


@kinds
def test_numbers_and_sums_are_rounded_as_the_reference_says(kind: Quantization) -> None:
    left, right = gradient(2 * kind.group, 1), gradient(2 * kind.group, 2)
    left[: kind.group : 3] = 0.0
    left[7 * BLOCKS % kind.group] = 7.0  # the largest integer of a block
    a, b = quantize(kind, left, HERE), quantize(kind, right, HERE)
    x, y = values(kind, a), values(kind, b)
    assert x.tolist() == rounded(kind, left.tolist(), HERE)
    assert y.tolist() == rounded(kind, right.tolist(), HERE)
    total = values(kind, kind.add(a, b, torch.empty_like(a), HERE))
    assert total.tolist() == rounded(kind, (x + y).tolist(), HERE)


@kinds
def test_more_groups_than_are_processed_at_a_time(kind: Quantization) -> None:
    number = gradient(70 * kind.group, 3)
    assert values(kind, quantize(kind, number, HERE)).tolist() == rounded(kind, number.tolist(), HERE)


@kinds
@pytest.mark.parametrize("numel", [0, 1, 63, 64, 65, 1000, 100_003])
def test_any_size_fills_whole_groups(kind: Quantization, numel: int) -> None:
    size = kind.bytes_of(numel)
    assert size % GROUP_BYTES == 0
    assert 0 <= kind.numbers_before(size) - numel < kind.group


@kinds
def test_a_number_in_8_bits_or_4_takes_17_or_15_bits_more_or_less(kind: Quantization) -> None:
    numel = 1_000_000
    assert 4 * numel / kind.bytes_of(numel) == pytest.approx({8: 3.75, 4: 7.5}[kind.bits], rel=0.01)


@kinds
def test_the_parts_of_a_sum_have_the_bits_of_the_whole(kind: Quantization) -> None:
    """Slices of a bucket are summed by several workers."""
    a, b = (quantize(kind, gradient(50 * kind.group, seed), HERE) for seed in (4, 5))
    whole = kind.add(a, b, torch.empty_like(a), HERE)
    for cut in (GROUP_BYTES, 33 * GROUP_BYTES):
        place = Place(HERE.step, HERE.bucket, HERE.start + cut)
        assert kind.add(a[cut:], b[cut:], torch.empty_like(a[cut:]), place).equal(whole[cut:])
    kind.add(a, b, a, HERE)  # in the memory of an operand
    assert a.equal(whole)


@kinds
def test_the_mean_over_steps_is_the_number_itself(kind: Quantization) -> None:
    number = gradient(kind.group, 6)
    steps = 400
    got = torch.stack([values(kind, quantize(kind, number, Place(step, 3))) for step in range(steps)]).double()
    low, high = got.amin(0), got.amax(0)
    part = (number - low) / (high - low)  # how often it must be rounded up
    often = (part > 0.1) & (part < 0.9)
    assert often.sum() > 100
    normal = ((got.mean(0) - number) / (high - low) / (part * (1 - part) / steps).sqrt())[often]
    assert abs(normal.mean()) < 4 / math.sqrt(len(normal))
    assert 0.9 < normal.std() < 1.1


@kinds
def test_a_number_far_below_the_scale_is_not_lost_on_average(kind: Quantization) -> None:
    number = torch.full((kind.group,), 1 / 512)
    number[:BLOCKS] = 1.0
    got = torch.stack([values(kind, quantize(kind, number, Place(step, 0)))[BLOCKS:].mean() for step in range(100)])
    assert got.mean().item() == pytest.approx(1 / 512, rel=0.05)


@kinds
def test_steps_buckets_and_places_round_differently(kind: Quantization) -> None:
    number = gradient(kind.group, 7)
    got = [
        values(kind, quantize(kind, number, place)).tolist()
        for place in (Place(1, 0), Place(2, 0), Place(1, 1), Place(1, 0, GROUP_BYTES))
    ]
    assert len({tuple(each) for each in got}) == 4


@kinds
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_block_with_an_infinity_or_a_nan_is_nan_also_in_sums(kind: Quantization, bad: float) -> None:
    number = gradient(2 * kind.group, 8)
    number[kind.group + 5] = bad
    groups, other = quantize(kind, number, HERE), quantize(kind, gradient(2 * kind.group, 9), HERE)
    total = kind.add(other, groups, torch.empty_like(groups), HERE)
    wanted = list(range(kind.group + 5, 2 * kind.group, BLOCKS))
    for each in (groups, total):
        got = values(kind, each)
        assert got.isnan().nonzero().flatten().tolist() == wanted
        assert set(got[got.isnan()].view(torch.int32).tolist()) == {torch.tensor(math.nan).view(torch.int32).item()}


@kinds
@pytest.mark.parametrize("size", [0.0, -0.0, 1e-45, 1e-38, 1e-30, 1.0, 1e30, 1.5e38])
def test_tiny_and_huge_numbers(kind: Quantization, size: float) -> None:
    number = torch.full((kind.group,), size)
    got = values(kind, quantize(kind, number, HERE))
    most = max(abs(size) / (1 << kind.bits - 2), 2.0**-126)  # the scale
    assert (got - number).abs().max() <= most
    if size == 0.0:
        assert not got.view(torch.int32).any()


@kinds
def test_a_sum_that_overflows_is_nan(kind: Quantization) -> None:
    groups = quantize(kind, torch.full((kind.group,), 2.5e38), HERE)
    assert values(kind, kind.add(groups, groups, groups, HERE)).isnan().all()


@kinds
def test_sums_with_zeros_keep_the_values(kind: Quantization) -> None:
    groups = quantize(kind, gradient(3 * kind.group, 10), HERE)
    zeros = torch.zeros_like(groups)
    assert not values(kind, zeros).any()
    assert values(kind, kind.add(groups, zeros, zeros, HERE)).equal(values(kind, groups))
