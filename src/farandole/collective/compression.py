"""Lossless compression of the gradients that go between hosts.

`Compressed` wraps the links that share no memory. It compresses what `lend` sends and `borrow` receives in one dtype,
that of the sums; all else (commit messages, lanes, the state for joiners) passes through. Values do not change, so the
bits of a run do not depend on the compression, nor on the version of its library.

**Format.** In a floating-point number the exponent is the part that repeats: in a bucket of gradients it has about
three bits of entropy. So each number is rotated left by one bit. Then its highest byte is the exponent (in float16 with
three bits of the significand), and the other bytes are the significand and the sign, which are random. A frame is

    length    8 bytes, little endian: of the compressed highest bytes; 0 if they are not compressed
    rest      the other bytes of each number, in order
    highest   the highest byte of each number, compressed by zstd, or as they are if that is not shorter

With the length `PLAIN` the numbers follow as they are.

**Sizes.** A frame is never longer than its numbers and the length. The receiver's buffer has that size: Gloo delivers a
message that is shorter than its buffer, so no message has to announce a size, and the tags stay as they are.

**Threads.** One thread per group compresses and then starts the send, in the order of `lend`. So the training thread
only puts a tensor into a queue. The view's thread decompresses in `wait`, where the numbers are added next. The tensor
is read later than without compression: as late as a send may read it (`transport`), so the callers' rules suffice. A
send to a lost peer fails in the thread, and nobody is told there. A worker always receives from a peer to which it
sends in a round (the sums of a slice go one way, or its result the other way), so its wait finds the loss.

**Where it pays.** With `Payoff` the sender compresses a message if the link would need longer for the bytes that this
saves than compression and decompression take. It measures all three: the saved part and the times of the newest
messages that were compressed, and the rate of each link by the kernel's figures (`link_meter`). The times are those of
a clock, so they grow where the CPUs have other work. The peer's decompression is assumed to take as long as the one
here. Every `PROBE`th message is compressed anyway, for new figures. The frame says what its sender has chosen, so both
ends need not agree.

**Bad input.** The peers of a group have authenticated. A frame that can't be decompressed to exactly the expected
number of bytes counts as a lost peer: the round is repeated without it. The memory for the result has a fixed size.
"""

from __future__ import annotations

import struct
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from farandole.collective.link_meter import Transfer
from farandole.collective.transport import Borrowing, Links, PeerLost, Pending, ReceiveBuffer

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEAST = 4096  # numbers; fewer are sent as they are
PLAIN = 1 << 63
PROBE = 64  # messages to a peer
LEAST_ACKNOWLEDGED = 1 << 20  # bytes between two figures of a link; fewer say little about its rate
NEWEST = 0.2  # weight of the newest message in the means
_LENGTH = struct.Struct("<Q")
# Matches are rare in exponents, so a small table finds what there is; the gain is in the entropy coding.
_PARAMETERS = {"hash_log": 6, "min_match": 7}
_UNSIGNED = {2: np.uint16, 4: np.uint32}


def frame_bytes(numel: int, dtype: torch.dtype) -> int:
    """Return the largest size of a frame of `numel` numbers."""
    return _LENGTH.size + numel * dtype.itemsize


def compress(tensor: torch.Tensor) -> torch.Tensor:
    """Return the frame, uint8, of a flat tensor of floating-point numbers of 2 or 4 bytes."""
    import zstandard

    numbers = _unsigned(tensor)
    top = 8 * numbers.itemsize - 1
    planes = ((numbers << 1) | (numbers >> top)).view(np.uint8).reshape(len(numbers), numbers.itemsize)
    frame = np.empty(frame_bytes(tensor.numel(), tensor.dtype), np.uint8)
    rest = _LENGTH.size + planes.size - len(planes)
    frame[_LENGTH.size : rest].reshape(len(numbers), numbers.itemsize - 1)[:] = planes[:, :-1]
    highest = planes[:, -1].tobytes()
    parameters = zstandard.ZstdCompressionParameters.from_level(1, **_PARAMETERS)
    packed = zstandard.ZstdCompressor(compression_params=parameters).compress(highest)
    short = len(packed) < len(highest)
    frame[: _LENGTH.size] = np.frombuffer(_LENGTH.pack(len(packed) if short else 0), np.uint8)
    content = np.frombuffer(packed if short else highest, np.uint8)
    frame[rest : rest + len(content)] = content
    return torch.from_numpy(frame[: rest + len(content)])


def plain_frame(tensor: torch.Tensor) -> torch.Tensor:
    """Return the frame, uint8, that has the numbers of a flat tensor as they are."""
    frame = torch.empty(frame_bytes(tensor.numel(), tensor.dtype), dtype=torch.uint8)
    frame[: _LENGTH.size] = torch.frombuffer(bytearray(_LENGTH.pack(PLAIN)), dtype=torch.uint8)
    frame[_LENGTH.size :] = tensor.view(torch.uint8)
    return frame


def is_plain(frame: torch.Tensor) -> bool:
    """Return True if the numbers of the frame are not compressed."""
    return _LENGTH.unpack(frame[: _LENGTH.size].numpy().tobytes()) == (PLAIN,)


def decompress(frame: torch.Tensor, into: torch.Tensor) -> None:
    """Write the numbers of a frame to `into`, a flat tensor. The frame may be followed by other bytes.

    Raises:
        ValueError: the frame is not one of `into.numel()` numbers.
    """
    import zstandard

    numbers, received = _unsigned(into), frame.numpy()
    rest = _LENGTH.size + numbers.nbytes - len(numbers)
    (length,) = _LENGTH.unpack(received[: _LENGTH.size].tobytes())
    if length == PLAIN:
        into.view(torch.uint8).copy_(frame[_LENGTH.size : _LENGTH.size + numbers.nbytes])
        return
    if length > len(numbers):
        raise ValueError(f"{length} compressed bytes for {len(numbers)} numbers")
    content = received[rest : rest + (length or len(numbers))]
    if length:
        packed = content.tobytes()
        try:
            size = zstandard.frame_content_size(packed)
            if size != len(numbers):
                raise ValueError(f"{size} bytes for {len(numbers)} numbers")
            content = np.frombuffer(zstandard.ZstdDecompressor().decompress(packed), np.uint8)
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from None
    planes = np.empty((len(numbers), numbers.itemsize), np.uint8)
    planes[:, :-1] = received[_LENGTH.size : rest].reshape(len(numbers), numbers.itemsize - 1)
    planes[:, -1] = content
    rotated = planes.view(numbers.dtype).reshape(-1)
    np.right_shift(rotated, 1, out=numbers)
    numbers |= rotated << (8 * numbers.itemsize - 1)


def _unsigned(tensor: torch.Tensor) -> NDArray[Any]:
    """Return the numbers of a flat tensor as unsigned integers, in the same memory."""
    return tensor.view(torch.uint8).numpy().view(_UNSIGNED[tensor.dtype.itemsize])


class Payoff:
    """The costs and the gain of compression at one worker, and the rates of its links, over all of its groups.

    The thread that compresses calls `on_encoded` and `pays`, the one that decompresses `on_decoded`.
    """

    def __init__(self) -> None:
        self._saved = _Mean()  # part of the bytes of a message
        self._encode_s, self._decode_s = _Mean(), _Mean()  # for a byte of a message before compression
        self._links: dict[str, _Link] = {}

    def on_encoded(self, size: int, packed: int, seconds: float) -> None:
        """Record that a message of `size` bytes was compressed to `packed` bytes."""
        self._saved.add(1.0 - packed / size)
        self._encode_s.add(seconds / size)

    def on_decoded(self, size: int, seconds: float) -> None:
        """Record that a message was decompressed to `size` bytes."""
        self._decode_s.add(seconds / size)

    def pays(self, peer: str, transfer: Transfer) -> bool:
        """Return True if the next message to `peer` is to be compressed. `transfer`: the figures of its connections.

        It is compressed as long as a figure is unknown.
        """
        link = self._links.setdefault(peer, _Link())
        link.update(transfer)
        link.messages += 1
        encode_s = self._encode_s.value
        if link.seconds_a_byte is None or encode_s is None or self._saved.value is None or not link.messages % PROBE:
            return True
        decode_s = encode_s if self._decode_s.value is None else self._decode_s.value
        return self._saved.value * link.seconds_a_byte > encode_s + decode_s


class _Mean:
    """A mean in which newer values weigh more; None before the first one."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, value: float) -> None:
        self.value = value if self.value is None else self.value + NEWEST * (value - self.value)


class _Link:
    """The rate of the connections to one peer, from the kernel's figures."""

    def __init__(self) -> None:
        self.messages = 0
        self.seconds_a_byte: float | None = None
        self._last = Transfer()

    def update(self, newest: Transfer) -> None:
        acknowledged = newest.acknowledged_bytes - self._last.acknowledged_bytes
        sending_us = newest.sending_us - self._last.sending_us
        if acknowledged < 0 or sending_us < 0:  # a new group has new connections
            self._last = Transfer()
        elif acknowledged >= LEAST_ACKNOWLEDGED and sending_us > 0:
            self.seconds_a_byte, self._last = sending_us / 1e6 / acknowledged, newest


class MeteredLinks(Links, Protocol):
    """Links whose use is measured (`link_meter.Metered`)."""

    def transfer_to(self, peer: str) -> Transfer: ...
    def count_saved(self, peer: str, size: int) -> None: ...


class Compressed:
    """Links that compress what `lend` sends in `dtype`. `links` share no memory with any peer.

    `payoff`: what decides on each message; None to compress all.
    """

    def __init__(self, links: MeteredLinks, dtype: torch.dtype, payoff: Payoff | None = None) -> None:
        self._links = links
        self._dtype = dtype
        self._payoff = payoff
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compression")
        self._closed = False
        self._frames: dict[int, list[torch.Tensor]] = {}  # receive buffers whose message has arrived, by size

    def send(self, tensor: torch.Tensor, peer: str, tag: int) -> Pending:
        return self._open(peer).send(tensor, peer, tag)

    def receive(self, tensor: torch.Tensor, peer: str, tag: int) -> Pending:
        return self._open(peer).receive(tensor, peer, tag)

    def lend(self, tensor: torch.Tensor, peer: str, tag: int) -> Pending:
        links = self._open(peer)
        if not self._serves(tensor.dtype, tensor.numel()):
            return links.lend(tensor, peer, tag)
        try:
            return _Compressing(self._thread.submit(lambda: links.send(self._frame(links, tensor, peer), peer, tag)))
        except RuntimeError as error:  # closed by another thread meanwhile
            raise PeerLost(peer, str(error)) from None

    def borrow(self, buffer: ReceiveBuffer, peer: str, tag: int) -> Borrowing:
        links = self._open(peer)
        if not self._serves(buffer.dtype, buffer.numel):
            return links.borrow(buffer, peer, tag)
        size = frame_bytes(buffer.numel, buffer.dtype)
        free = self._frames.setdefault(size, [])
        frame = free.pop() if free else torch.empty(size, dtype=torch.uint8)
        return _Decompressing(links.receive(frame, peer, tag), peer, frame, buffer, free, self._payoff)

    def shares(self, peer: str) -> bool:
        return self._links.shares(peer)

    def keep_alive(self, memory: object) -> None:
        self._links.keep_alive(memory)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._thread.submit(self._links.close)  # after the sends that `lend` has started
            self._thread.shutdown(wait=False)

    def _frame(self, links: MeteredLinks, tensor: torch.Tensor, peer: str) -> torch.Tensor:
        """Return the frame of a message to `peer`."""
        if self._payoff and not self._payoff.pays(peer, links.transfer_to(peer)):
            return plain_frame(tensor)
        began = time.perf_counter()
        frame = compress(tensor)
        if self._payoff:
            self._payoff.on_encoded(tensor.nbytes, len(frame), time.perf_counter() - began)
        links.count_saved(peer, max(0, tensor.nbytes - len(frame)))
        return frame

    def _open(self, peer: str) -> MeteredLinks:
        """Return the links below, unless these are closed."""
        if self._closed:
            raise PeerLost(peer, "the links are closed")
        return self._links

    def _serves(self, dtype: torch.dtype, numel: int) -> bool:
        return dtype == self._dtype and numel >= LEAST


class _Compressing:
    """A pending send whose tensor is compressed first."""

    def __init__(self, sending: Future[Pending]) -> None:
        self._sending = sending

    def wait(self) -> object:
        return self._sending.result().wait()


class _Decompressing:
    """A pending receive of a frame. `free`: where the frame's memory goes when it is no longer used."""

    def __init__(
        self, receiving: Pending, peer: str, frame: torch.Tensor, buffer: ReceiveBuffer, free: list[torch.Tensor],
        payoff: Payoff | None,
    ) -> None:  # fmt: skip
        self._receiving = receiving
        self._peer = peer
        self._frame = frame
        self._buffer = buffer
        self._free = free
        self._payoff = payoff

    def wait(self) -> torch.Tensor:
        self._receiving.wait()
        began = time.perf_counter()
        try:
            decompress(self._frame, self._buffer.memory)
        except ValueError as error:
            raise PeerLost(self._peer, f"its message can't be decompressed: {error}") from None
        if self._payoff and not is_plain(self._frame):
            self._payoff.on_decoded(self._buffer.memory.nbytes, time.perf_counter() - began)
        self._free.append(self._frame)
        return self._buffer.memory
