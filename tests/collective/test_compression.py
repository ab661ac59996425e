"""Compressed links: every value arrives as it was sent, and a bad frame is a lost peer."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.collective.compression import (
    LEAST,
    LEAST_ACKNOWLEDGED,
    PROBE,
    Compressed,
    Payoff,
    compress,
    decompress,
    frame_bytes,
    is_plain,
    plain_frame,
)
from farandole.collective.fake import FakeNetwork
from farandole.collective.link_meter import LinkMeter, Transfer
from farandole.collective.transport import PeerLost, ReceiveBuffer
from farandole.protocol.view import View
from tests.support.linking import in_memory, measured

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
    frame[:8] = torch.tensor([255] * 7 + [127], dtype=torch.uint8)
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
    links = Compressed(measured(ours), torch.bfloat16)
    borrowing = links.borrow(ReceiveBuffer.of(torch.empty(LEAST, dtype=torch.bfloat16)), "b", 5)
    theirs.send(spoil(compress(gradients(LEAST, torch.bfloat16))), "a", 5)
    with pytest.raises(PeerLost) as lost:
        borrowing.wait()
    assert lost.value.peer == "b"


def test_other_dtypes_and_small_tensors_pass_through() -> None:
    view = View(number=1, members=("a", "b"), group=1)
    ours, theirs = in_memory(FakeNetwork(), view)
    links = Compressed(measured(ours), torch.bfloat16)
    for tag, tensor in enumerate([torch.randn(LEAST), torch.ones(LEAST - 1, dtype=torch.bfloat16)]):
        pending = theirs.receive(received := torch.empty_like(tensor), "a", tag)
        links.lend(tensor, "b", tag).wait()
        pending.wait()
        assert same(received, tensor)


def test_sends_that_were_started_are_sent_though_the_links_are_closed() -> None:
    view = View(number=1, members=("a", "b"), group=1)
    ours, theirs = in_memory(FakeNetwork(), view)
    links, others = (Compressed(measured(each), torch.bfloat16) for each in (ours, theirs))
    tensors = [gradients(1 << 20, torch.bfloat16) + number for number in range(4)]
    rooms = [others.borrow(ReceiveBuffer.of(torch.empty_like(tensor)), "a", tag) for tag, tensor in enumerate(tensors)]
    for tag, tensor in enumerate(tensors):
        links.lend(tensor, "b", tag)
    links.close()
    links.close()
    assert all(same(room.wait(), tensor) for room, tensor in zip(rooms, tensors, strict=True))


# --- where it pays ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_plain_frame_has_the_numbers_as_they_are(dtype: torch.dtype) -> None:
    numbers = gradients(5000, dtype)
    frame = plain_frame(numbers)
    assert (len(frame), is_plain(frame), is_plain(compress(numbers))) == (frame_bytes(5000, dtype), True, False)
    into = torch.zeros_like(numbers)
    decompress(torch.cat([frame, torch.ones(9, dtype=torch.uint8)]), into)
    assert same(into, numbers)


def at(bytes_per_s: float, megabytes: int = 100) -> Transfer:
    """The kernel's figures after so many bytes at this rate."""
    sent = megabytes * 1_000_000
    return Transfer(acknowledged_bytes=sent, sending_us=round(sent / bytes_per_s * 1e6))


def payoff(saved: float = 0.3, encode_ns: float = 3.0, decode_ns: float = 2.0) -> Payoff:
    """With the times for a byte."""
    made = Payoff()
    made.on_encoded(10**6, round(10**6 * (1 - saved)), encode_ns / 1000)
    made.on_decoded(10**6, decode_ns / 1000)
    return made


@pytest.mark.parametrize(
    ("made", "bytes_per_s", "pays"),
    [
        (payoff(), 50e6, True),  # the link needs 6 ns for the saved part of a byte, and coding 5 ns
        (payoff(), 70e6, False),
        (payoff(saved=0.5), 70e6, True),
        (payoff(encode_ns=6.0), 50e6, False),
        (payoff(decode_ns=6.0), 50e6, False),
        (payoff(saved=0.0), 1e3, False),
        (payoff(saved=-1e-5), 1e3, False),
    ],
)
def test_it_pays_if_the_link_would_need_longer_than_the_codec(made: Payoff, bytes_per_s: float, *, pays: bool) -> None:
    assert made.pays("b", at(bytes_per_s)) is pays


def test_a_message_is_compressed_while_a_figure_is_unknown() -> None:
    fast = at(1e12)
    assert Payoff().pays("b", fast), "no message was compressed yet"
    assert payoff().pays("b", Transfer()), "a system without these figures"
    assert payoff().pays("b", Transfer(acknowledged_bytes=LEAST_ACKNOWLEDGED - 1, sending_us=1))
    made = Payoff()
    made.on_encoded(10**6, 700_000, 0.003)
    assert not made.pays("b", fast), "decompression takes as long as compression until it was measured"
    assert made.pays("b", at(40e6, megabytes=200))


def test_each_link_has_a_rate_of_its_own_and_the_newest_one() -> None:
    made = payoff()
    assert (made.pays("b", at(1e9)), made.pays("c", at(1e6))) == (False, True)
    slower = Transfer(*(a + b for a, b in zip(at(1e9), at(1e6), strict=True)))
    assert (made.pays("b", slower), made.pays("c", at(1e6))) == (True, True)
    faster = Transfer(*(a + b for a, b in zip(at(1e6), at(1e9), strict=True)))
    assert not made.pays("c", faster)
    assert made.pays("b", Transfer()), "a new group: its connections begin with 0"
    assert not made.pays("b", at(1e9))


def test_some_messages_are_compressed_anyway_for_new_figures() -> None:
    made = payoff()
    assert sum(made.pays("b", at(1e9)) for _ in range(3 * PROBE)) == 3


def test_the_newest_messages_decide() -> None:
    made = payoff(saved=0.0)
    assert not made.pays("b", at(50e6))
    for _ in range(20):
        made.on_encoded(10**6, 600_000, 0.003)
    assert made.pays("b", at(50e6))


@pytest.mark.parametrize("pays", [True, False])
def test_what_its_sender_has_chosen_arrives_at_a_receiver_that_compresses_all(
    *, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what it has saved is counted."""
    monkeypatch.setattr(Payoff, "pays", lambda *_: pays)
    ours, theirs = in_memory(FakeNetwork(), View(number=1, members=("a", "b"), group=1))
    meter = LinkMeter()
    links = Compressed(meter.metered(ours, {"b": "other"}, lambda _: ()), torch.float32, made := Payoff())
    numbers = gradients(1 << 20, torch.float32)
    borrowing = Compressed(measured(theirs), torch.float32).borrow(ReceiveBuffer.of(torch.empty_like(numbers)), "a", 5)
    links.lend(numbers, "b", 5).wait()
    assert same(borrowing.wait(), numbers)
    (use,) = meter.said({})
    assert use.exchange_bytes + use.saved_bytes in (numbers.nbytes, numbers.nbytes + 8)
    assert (use.saved_bytes > 0.1 * numbers.nbytes) is pays
    assert (made._saved.value is not None) is pays
