"""The exchange of buckets that lie on a GPU: over pinned host memory, with the bits of the same buckets on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from farandole.collective.arena import Arena, Ordinary
from farandole.collective.buckets import Staging
from farandole.collective.codec import CODECS, NONE, Codec
from tests.support.exchanging import Worker, assert_same, decoded, expected, on_all, workers
from tests.support.gpu import GPU, NEEDS_GPU, ON_EACH


@ON_EACH
@pytest.mark.parametrize("hosts", ["", "aaa", "aba"], ids=["network", "one host", "two hosts"])
@pytest.mark.parametrize(("count", "shards"), [(1, 5), (2, 1), (2, 8), (3, 7)])
def test_every_rank_has_the_bits_of_the_reference_in_every_round(
    count: int, shards: int, hosts: str, device: torch.device
) -> None:
    with workers(count, device=device, hosts=hosts[:count]) as everyone:
        lineage = (tuple(worker.name for worker in everyone),)
        reference = Worker("on the host", None).layout
        for step in range(5):
            for buckets in on_all(everyone, lambda w, step=step: w.step(step, shards, lineage)):
                assert_same(buckets, expected(reference, step, shards))  # type: ignore[arg-type]


@ON_EACH
@pytest.mark.parametrize("codec", [codec for codec in CODECS.values() if codec != NONE], ids=lambda codec: codec.name)
@pytest.mark.parametrize("count", [1, 3])
def test_with_a_codec_too(count: int, codec: Codec, device: torch.device) -> None:
    reference = Worker("on the host", None, codec=codec).layout
    with workers(count, device=device, codec=codec) as everyone:
        lineage = (tuple(worker.name for worker in everyone),)
        for step in range(2):
            wanted = one_nan(decoded(reference, expected(reference, step, 7)))
            for buckets in on_all(everyone, lambda w, step=step: w.step(step, 7, lineage)):
                assert_same(one_nan(decoded(reference, buckets)), wanted)  # type: ignore[arg-type]


def one_nan(buckets: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """With the same bits for each NaN: a GPU and a CPU give the difference of two infinities another sign."""
    return [torch.where(bucket.isnan(), torch.nan, bucket) for bucket in buckets]


@NEEDS_GPU
def test_a_bucket_has_one_mirror_in_pinned_memory() -> None:
    layout = Worker("w0", None, device=GPU).layout
    bucket, staging = layout.buckets[0], Staging(Ordinary())
    flat = torch.arange(bucket.numel, dtype=bucket.dtype, device=GPU)
    mirror = staging.out(flat, bucket)
    assert mirror.is_pinned()
    assert mirror.equal(flat.cpu())
    assert staging.host(flat, bucket) is mirror
    mirror.neg_()
    staging.back(flat, bucket)
    assert flat.cpu().equal(mirror)


@NEEDS_GPU
def test_a_mirror_in_an_arena_is_pinned_and_found_there() -> None:
    layout, arena = Worker("w0", None, device=GPU).layout, Arena()
    bucket, staging = layout.buckets[0], Staging(arena)
    mirror = staging.out(torch.arange(bucket.numel, dtype=bucket.dtype, device=GPU), bucket)
    assert mirror.is_pinned()
    assert mirror.equal(torch.arange(bucket.numel, dtype=bucket.dtype))
    assert arena.find(mirror) is not None


@NEEDS_GPU
def test_lanes_stay_in_host_memory() -> None:
    layout = Worker("w0", None, device=GPU).layout
    lanes = torch.zeros(layout.buckets[-1].numel, dtype=torch.float64)
    assert Staging(Ordinary()).host(lanes, layout.buckets[-1]) is lanes
