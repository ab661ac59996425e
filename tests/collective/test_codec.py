"""Exact codecs: leaves and nodes of the tree are rounded to nearest even, by an independent reference."""

from __future__ import annotations

import math
import random
import re

import pytest
import torch
from torch import nn

from farandole.collective.buckets import Layout, Partials
from farandole.collective.codec import CODECS, NONE, Codec
from farandole.errors import UsageError
from farandole.plan.shards import root
from farandole.run_options import RUN_OPTIONS

ROUNDED = [CODECS["bf16"], CODECS["fp16"]]
BITS = {torch.bfloat16: (8, -126), torch.float16: (11, -14)}  # of the significand; smallest normal exponent
LARGEST = {dtype: torch.finfo(dtype).max for dtype in BITS}


def rounded(value: float, dtype: torch.dtype) -> float:
    """`value` to nearest, ties to even, by exact arithmetic."""
    if not math.isfinite(value) or value == 0.0:
        return value
    significand, least = BITS[dtype]
    exponent = max(math.frexp(value)[1] - significand, least - significand + 1)
    result = math.ldexp(float(round(math.ldexp(value, -exponent))), exponent)
    return math.copysign(result if abs(result) <= LARGEST[dtype] else math.inf, value)


def tree(values: list[float], dtype: torch.dtype) -> float:
    while len(values) > 1:
        pairs = [rounded(values[i] + values[i + 1], dtype) for i in range(0, len(values) - 1, 2)]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]


def summed(codec: Codec, values: list[torch.Tensor]) -> torch.Tensor:
    """The sum of one parameter's gradients over shards, as `.grad` gets it."""
    numel = values[0].numel()
    layout = Layout([nn.Parameter(torch.zeros(numel))], lanes=0, codec=codec)
    partials = Partials(layout)
    partials.begin(len(values))
    for shard, value in enumerate(values):
        partials.open(shard)
        partials.add_gradient(0, value.clone())
        partials.close(None)
    into = torch.empty(numel)
    codec.decode(partials.nodes[0][root(len(values))].flat[:numel], into)
    return into


def test_options_and_codecs_have_the_same_names() -> None:
    assert RUN_OPTIONS["codec"].choices == tuple(CODECS)
    assert RUN_OPTIONS["codec"].default == NONE.name


@pytest.mark.parametrize("codec", ROUNDED, ids=lambda codec: codec.name)
@pytest.mark.parametrize("shards", [1, 2, 3, 7, 8])
def test_leaves_and_nodes_are_rounded_to_nearest_even(codec: Codec, shards: int) -> None:
    assert codec.dtype is not None
    draw = random.Random(shards)
    exponents = (-140, 100) if codec.dtype == torch.bfloat16 else (-38, 2)
    values = [
        torch.tensor([draw.gauss(0, 1) * 2.0 ** draw.randint(*exponents) for _ in range(67)]) for _ in range(shards)
    ]
    values[0][:4] = torch.tensor([0.0, -0.0, 1.00390625, 1.01171875])  # two ties of bfloat16
    wanted = [
        tree([rounded(float(value[i]) * codec.scale, codec.dtype) for value in values], codec.dtype) / codec.scale
        for i in range(67)
    ]
    got = summed(codec, values).tolist()
    assert got == wanted
    assert [math.copysign(1, x) for x in got] == [math.copysign(1, x) for x in wanted]


@pytest.mark.parametrize("codec", ROUNDED, ids=lambda codec: codec.name)
def test_infinities_stay_and_every_nan_has_the_same_bits(codec: Codec) -> None:
    """torch's vectorized and scalar loops make different ones: of 67 elements the last are of a scalar loop."""
    values = [torch.full((67,), math.nan), torch.ones(67)]
    values[0][::3], values[0][1::3] = math.inf, -math.inf
    values[1][0] = -math.inf
    got = summed(codec, values)
    assert got[0].isnan()
    assert got[3::3].eq(math.inf).all()
    assert got[1::3].eq(-math.inf).all()
    assert set(got[got.isnan()].view(torch.int32).tolist()) == {torch.tensor(math.nan).view(torch.int32).item()}


def test_a_float16_sum_that_is_too_large_is_infinite_and_a_small_gradient_is_not_lost() -> None:
    codec = CODECS["fp16"]
    got = summed(codec, [torch.tensor([63.0, 40.0, 6e-11]), torch.tensor([0.5, 40.0, 0.0])])
    assert got[0] == 63.5
    assert got[1] == math.inf
    assert got[2] > 0


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
def test_what_is_not_float32_is_summed_in_its_own_dtype(codec: Codec) -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        value = torch.ones(3, dtype=dtype)
        assert codec.wire(dtype) == dtype
        assert codec.encode(value) is value


@pytest.mark.parametrize("codec", ROUNDED, ids=lambda codec: codec.name)
def test_encoding_keeps_the_memory_format_and_the_gradient(codec: Codec) -> None:
    value = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    before = value.clone()
    assert codec.encode(value).stride() == value.stride()
    assert value.equal(before)


@pytest.mark.parametrize("codec", ROUNDED, ids=lambda codec: codec.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_a_dtype_that_the_codec_can_not_hold_is_an_error_with_the_parameter(codec: Codec, dtype: torch.dtype) -> None:
    parameters = {"a": torch.ones(1), "head.weight": torch.ones(1, dtype=dtype)}
    with pytest.raises(UsageError, match=r"head\.weight"):
        codec.check_suits(parameters)
    NONE.check_suits(parameters)


def test_the_other_half_is_an_error_too() -> None:
    with pytest.raises(UsageError, match="float16"):
        CODECS["bf16"].check_suits({"a": torch.ones(1), "b": torch.ones(1, dtype=torch.float16)})


@pytest.mark.parametrize("codec", ROUNDED, ids=lambda codec: codec.name)
def test_a_codec_that_would_change_nothing_is_an_error(codec: Codec) -> None:
    for one in (codec, CODECS[f"{codec.name}+auto"], CODECS["float32+zstd"], CODECS["auto"]):
        with pytest.raises(UsageError, match=re.escape(one.name)):
            one.check_used({"a": torch.ones(1, dtype=codec.dtype)})
        one.check_used({"a": torch.ones(1, dtype=codec.dtype), "b": torch.ones(1)})
    NONE.check_used({"a": torch.ones(1, dtype=codec.dtype)})
