"""Compressed links: every value arrives as it was sent, and a bad frame is a lost peer."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.collective.compression import LEAST, Compressed, compress, decompress, frame_bytes
from farandole.collective.fake import FakeNetwork
from farandole.collective.transport import PeerLost, Room
from farandole.protocol.view import View
from tests.support.linking import in_memory

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
INTEGERS = {2: torch.int16, 4: torch.int32}


def gradients(numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(numel)
    return (torch.randn(numel, generator=generator) * torch.randn(numel, generator=generator) * 1e-3).to(dtype)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.view(torch.uint8).equal(right.view(torch.uint8))


def through(tensor: torch.Tensor, *, behind: int = 0) -> torch.Tensor:
    frame = compress(tensor)
    assert len(frame) <= frame_bytes(tensor.numel(), tensor.dtype)
    into = torch.full_like(tensor, 7)
    decompress(torch.cat([frame, torch.full((behind,), 255, dtype=torch.uint8)]), into)
    return into


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 7, LEAST, 100_003])
def test_every_number_comes_back(dtype: torch.dtype, numel: int) -> None:
    assert same(through(gradients(numel, dtype), behind=numel), gradients(numel, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_so_do_zeros_infinities_nans_and_all_bit_patterns(dtype: torch.dtype) -> None:
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, -1e-7, 65504.0]).to(dtype)
    assert same(through(special), special)
    zeros = torch.zeros(50_000, dtype=dtype)
    assert same(through(zeros), zeros)
    assert len(compress(zeros)) < 0.8 * zeros.nbytes
    patterns = torch.randint(-(2**15), 2**15, (70_000,), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    if dtype == torch.float32:
        patterns = patterns * 65537
    numbers = patterns.to(INTEGERS[dtype.itemsize]).view(dtype)
    assert same(through(numbers), numbers)
    assert len(compress(numbers)) == frame_bytes(len(numbers), dtype), "what does not get shorter is sent as it is"


@settings(max_examples=50, deadline=None)
@given(st.binary(min_size=4, max_size=400).map(lambda data: data[: len(data) // 4 * 4]))
def test_so_do_any_bytes(data: bytes) -> None:
    for dtype in DTYPES:
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)
        assert same(through(tensor), tensor)


@pytest.mark.parametrize(("dtype", "part"), [(torch.bfloat16, 0.75), (torch.float16, 0.9), (torch.float32, 0.87)])
def test_gradients_get_shorter(dtype: torch.dtype, part: float) -> None:
    tensor = gradients(1 << 20, dtype)
    assert len(compress(tensor)) < part * tensor.nbytes


def cut(frame: torch.Tensor) -> torch.Tensor:
    return torch.cat([frame[:-50], torch.zeros(50, dtype=torch.uint8)])


def longer(frame: torch.Tensor) -> torch.Tensor:
    frame[:8] = 255
    return frame


def no_zstd(frame: torch.Tensor) -> torch.Tensor:
    frame[8 + LEAST : 8 + LEAST + 4] = 0
    return frame


def of_more(frame: torch.Tensor) -> torch.Tensor:
    """By its header it unpacks to a petabyte, for which there is no memory."""
    begun = zstandard.ZstdCompressor().compressobj(size=1 << 50)
    packed = begun.compress(b"0" * 100) + begun.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    frame[:8] = torch.frombuffer(bytearray(len(packed).to_bytes(8, "little")), dtype=torch.uint8)
    frame[8 + LEAST : 8 + LEAST + len(packed)] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    return frame


@pytest.mark.parametrize("spoil", [cut, longer, no_zstd, of_more])
def test_a_frame_that_is_damaged_is_a_lost_peer(spoil: Callable[[torch.Tensor], torch.Tensor]) -> None:
    view = View(number=1, members=("a", "b"), group=1)
    ours, theirs = in_memory(FakeNetwork(), view)
    links = Compressed(ours, torch.bfloat16)
    borrowing = links.borrow(Room.of(torch.empty(LEAST, dtype=torch.bfloat16)), "b", 5)
    theirs.send(spoil(compress(gradients(LEAST, torch.bfloat16))), "a", 5)
    with pytest.raises(PeerLost) as lost:
        borrowing.wait()
    assert lost.value.peer == "b"


def test_other_dtypes_and_small_tensors_pass_through() -> None:
    view = View(number=1, members=("a", "b"), group=1)
    ours, theirs = in_memory(FakeNetwork(), view)
    links = Compressed(ours, torch.bfloat16)
    for tag, tensor in enumerate([torch.randn(LEAST), torch.ones(LEAST - 1, dtype=torch.bfloat16)]):
        pending = theirs.receive(received := torch.empty_like(tensor), "a", tag)
        links.lend(tensor, "b", tag).wait()
        pending.wait()
        assert same(received, tensor)


def test_sends_that_were_started_are_sent_though_the_links_are_closed() -> None:
    view = View(number=1, members=("a", "b"), group=1)
    ours, theirs = in_memory(FakeNetwork(), view)
    links, others = Compressed(ours, torch.bfloat16), Compressed(theirs, torch.bfloat16)
    tensors = [gradients(1 << 20, torch.bfloat16) + number for number in range(4)]
    rooms = [others.borrow(Room.of(torch.empty_like(tensor)), "a", tag) for tag, tensor in enumerate(tensors)]
    for tag, tensor in enumerate(tensors):
        links.lend(tensor, "b", tag)
    links.close()
    links.close()
    assert all(same(room.wait(), tensor) for room, tensor in zip(rooms, tensors, strict=True))
