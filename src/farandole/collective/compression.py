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

**Sizes.** A frame is never longer than its numbers and the length. The receiver's buffer has that size: Gloo delivers a
message that is shorter than its buffer, so no message has to announce a size, and the tags stay as they are.

**Threads.** One thread per group compresses and then starts the send, in the order of `lend`. So the training thread
only puts a tensor into a queue. The view's thread decompresses in `wait`, where the numbers are added next. The tensor
is read later than without compression: as late as a send may read it (`transport`), so the callers' rules suffice. A
send to a lost peer fails in the thread, and nobody is told there. A worker always receives from a peer to which it
sends in a round (the sums of a slice go one way, or its result the other way), so its wait finds the loss.

**Bad input.** The peers of a group have authenticated. A frame that can't be decompressed to exactly the expected
number of bytes counts as a lost peer: the round is repeated without it. The memory for the result has a fixed size.
"""

from __future__ import annotations

import struct
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from farandole.collective.transport import Borrowing, Links, PeerLost, Pending, Room

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEAST = 4096  # numbers; fewer are sent as they are
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


def decompress(frame: torch.Tensor, into: torch.Tensor) -> None:
    """Write the numbers of a frame to `into`, a flat tensor. The frame may be followed by other bytes.

    Raises:
        ValueError: the frame is not one of `into.numel()` numbers.
    """
    import zstandard

    numbers, received = _unsigned(into), frame.numpy()
    rest = _LENGTH.size + numbers.nbytes - len(numbers)
    (length,) = _LENGTH.unpack(received[: _LENGTH.size].tobytes())
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


class Compressed:
    """Links that compress what `lend` sends in `dtype`. `links` share no memory with any peer."""

    def __init__(self, links: Links, dtype: torch.dtype) -> None:
        self._links = links
        self._dtype = dtype
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
            return _Compressing(self._thread.submit(lambda: links.send(compress(tensor), peer, tag)))
        except RuntimeError as error:  # closed by another thread meanwhile
            raise PeerLost(peer, str(error)) from None

    def borrow(self, room: Room, peer: str, tag: int) -> Borrowing:
        links = self._open(peer)
        if not self._serves(room.dtype, room.numel):
            return links.borrow(room, peer, tag)
        size = frame_bytes(room.numel, room.dtype)
        free = self._frames.setdefault(size, [])
        frame = free.pop() if free else torch.empty(size, dtype=torch.uint8)
        return _Decompressing(links.receive(frame, peer, tag), peer, frame, room, free)

    def shares(self, peer: str) -> bool:
        return self._links.shares(peer)

    def keep_alive(self, memory: object) -> None:
        self._links.keep_alive(memory)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._thread.submit(self._links.close)  # after the sends that `lend` has started
            self._thread.shutdown(wait=False)

    def _open(self, peer: str) -> Links:
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
        self, receiving: Pending, peer: str, frame: torch.Tensor, room: Room, free: list[torch.Tensor]
    ) -> None:
        self._receiving = receiving
        self._peer = peer
        self._frame = frame
        self._room = room
        self._free = free

    def wait(self) -> torch.Tensor:
        self._receiving.wait()
        try:
            decompress(self._frame, self._room.memory)
        except ValueError as error:
            raise PeerLost(self._peer, f"its message can't be decompressed: {error}") from None
        self._free.append(self._frame)
        return self._room.memory
