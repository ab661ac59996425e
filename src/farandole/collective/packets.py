"""What goes over the connection of a pair: the heads of its packets, and what they stand for."""

from __future__ import annotations

import struct

import torch

INLINE_BYTES = 16 << 10  # of a message that goes in one packet with its head
LENT_BYTES = 256  # of a message that is worth lending
CHUNK_BYTES = 64 << 10  # of a longer one, packet by packet after its head
MOST_BYTES = 1 << 40  # of one message: what is more is none
CLOSED = "connection closed by peer"
HEAD = struct.Struct("<BBIIQQ")  # kind, dtype, tag, segment, offset, bytes
INLINE, LONG, LENT, SEGMENT = range(4)
DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip


def head(kind: int, tensor: torch.Tensor, tag: int, segment: int = 0, offset: int = 0) -> bytes:
    """Of a message. For a `LENT` one, where in which segment it lies."""
    return HEAD.pack(kind, DTYPES.index(tensor.dtype), tag, segment, offset, tensor.nbytes)


def raw(flat: torch.Tensor) -> memoryview:
    """A flat tensor's bytes."""
    return flat.view(torch.uint8).numpy().data
