"""Buckets depend on the model alone."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from farandole.collective.buckets import (
    ALIGNMENT,
    BUCKET_BYTES,
    CUT_BYTES,
    FIRST_BUCKET_BYTES,
    LARGE_BYTES,
    PIECE_BYTES,
    Bucket,
    Layout,
)
from farandole.collective.quantization import GROUP_BYTES, Quantization
from farandole.collective.schedule import MOST_PIECES
from tests.support.exchanging import parameters_of


def mixed() -> list[nn.Parameter]:
    """Three dtypes, odd sizes, a scalar, one frozen, one empty, one larger than a bucket."""
    parameters = [
        *parameters_of((3, 5), (), (7,)),
        *parameters_of((11, 3), dtype=torch.bfloat16),
        *parameters_of((700, 700), (BUCKET_BYTES // 4 + 10,), (600, 600)),
        *parameters_of((2, 2), dtype=torch.float64),
        *parameters_of((0, 4)),
    ]
    parameters[2].requires_grad_(False)
    return parameters


def test_every_active_parameter_has_one_aligned_place_and_frozen_ones_have_none() -> None:
    parameters = mixed()
    layout = Layout(parameters, lanes=3)
    placed = [index for bucket in layout.buckets for index in bucket.params]
    assert sorted(placed) == [0, 1, 3, 4, 5, 6, 7, 8]
    for bucket in layout.buckets:
        assert (bucket.numel * bucket.dtype.itemsize) % ALIGNMENT == 0
        for offset in bucket.offsets:
            assert (offset * bucket.dtype.itemsize) % ALIGNMENT == 0
        for index in bucket.params:
            assert parameters[index].dtype is bucket.dtype
            assert layout.where[index] == bucket.index
        ends = [o + parameters[i].numel() for i, o in zip(bucket.params, bucket.offsets, strict=True)]
        assert all(end <= start for end, start in zip(ends, bucket.offsets[1:], strict=False)), "places overlap"
        assert not ends or ends[-1] <= bucket.numel


def test_buckets_follow_the_backward_pass_and_the_first_is_small() -> None:
    parameters = parameters_of(*[(512, 512)] * 40)  # 1 MiB each
    layout = Layout(parameters, lanes=0)
    assert [index for bucket in layout.buckets for index in bucket.params] == list(reversed(range(40)))
    sizes = [bucket.numel * 4 for bucket in layout.buckets]
    assert sizes[0] == FIRST_BUCKET_BYTES
    assert sizes[1] == BUCKET_BYTES
    assert sum(sizes) == 40 << 20


def test_the_layout_is_a_function_of_the_model_alone() -> None:
    """Two workers that build the same model have the same buckets; nothing else goes in."""
    one, other = Layout(mixed(), lanes=5), Layout(mixed(), lanes=5)
    assert one.buckets == other.buckets
    assert one.where == other.where


def test_lanes_are_the_last_bucket_in_float64_on_the_host() -> None:
    layout = Layout(parameters_of((4,)), lanes=9)
    assert layout.buckets[-1] == Bucket(
        index=1, dtype=torch.float64, device=torch.device("cpu"), params=(), offsets=(), numel=16
    )
    assert [b.dtype for b in Layout([], lanes=1).buckets] == [torch.float64]
    assert Layout([], lanes=0).buckets == []


@given(st.integers(0, 20_000), st.integers(1, 40), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_slices_tile_a_bucket_at_aligned_cuts(units: int, ranks: int, dtype: torch.dtype) -> None:
    aligned = ALIGNMENT // dtype.itemsize
    bucket = Bucket(index=0, dtype=dtype, device=torch.device("cpu"), params=(), offsets=(), numel=units * aligned)
    assert bucket.large == (units * ALIGNMENT >= LARGE_BYTES)
    unit = CUT_BYTES // dtype.itemsize if bucket.large else aligned
    cuts = [bucket.slice(rank, ranks) for rank in range(ranks)]
    assert cuts[0][0] == 0
    assert cuts[-1][1] == bucket.numel
    assert all(a[1] == b[0] for a, b in itertools.pairwise(cuts))
    assert all(start % unit == 0 for start, _ in cuts)
    sizes = [stop - start for start, stop in cuts]
    assert max(sizes) - min(sizes) < 2 * unit, "an owner sums one unit more than another, the last also what is over"


@given(
    st.integers(0, 40_000), st.integers(1, 5), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    st.sampled_from([None, Quantization(bits=4), Quantization(bits=8)]),
)  # fmt: skip
def test_pieces_tile_a_slice_and_begin_where_slices_may(
    units: int, ranks: int, dtype: torch.dtype, quantization: Quantization | None
) -> None:
    dtype = torch.uint8 if quantization else dtype
    smallest = (GROUP_BYTES if quantization else ALIGNMENT) // dtype.itemsize
    numel, where = units * smallest, torch.device("cpu")
    bucket = Bucket(
        index=0, dtype=dtype, device=where, params=(), offsets=(), numel=numel, quantization=quantization
    )  # fmt: skip
    unit = CUT_BYTES // dtype.itemsize if bucket.large else smallest
    for cut in (bucket.slice(rank, ranks) for rank in range(ranks)):
        pieces = bucket.pieces(*cut)
        assert 1 <= len(pieces) <= MOST_PIECES
        assert (pieces[0][0], pieces[-1][1]) == cut
        assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
        assert all(start % unit == 0 for start, _ in pieces)
        size = (cut[1] - cut[0]) * dtype.itemsize
        assert len(pieces) == max(min(size // PIECE_BYTES, MOST_PIECES), 1)
        if len(pieces) > 1:
            assert min(stop - start for start, stop in pieces) * dtype.itemsize > PIECE_BYTES - CUT_BYTES


def test_views_have_the_parameters_shape_and_memory_format() -> None:
    parameters = parameters_of((8, 3, 5, 5), (6, 4), ())
    parameters[0].data = parameters[0].data.contiguous(memory_format=torch.channels_last)
    layout = Layout(parameters, lanes=0)
    (bucket,) = layout.buckets
    flat = torch.arange(float(bucket.numel))
    views = layout.views(bucket, flat)
    assert {index: view.shape for index, view in views.items()} == {i: p.shape for i, p in enumerate(parameters)}
    assert views[0].is_contiguous(memory_format=torch.channels_last)
    assert views[1].is_contiguous()
    for view in views.values():
        assert view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        assert view.data_ptr() % ALIGNMENT == 0
