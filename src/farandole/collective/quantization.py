"""Blocks of quantized gradients: a common scale and small integers, rounded at random but the same everywhere.

**Format.** A block has 16 bytes: a scale, a power of two as a biased exponent of 8 bits (as in the OCP Microscaling
formats), and 15 bytes of integers, of 8 or 4 bits: 15 or 30 numbers. The value of a number is integer * scale. A
*group* has 64 blocks, and holds one run of consecutive numbers: number i is in block i % 64, so that torch's vectorized
loops go over the blocks. A group is 1024 bytes:

    scales    64 bytes, one for each block
    integers  15 rows of 64 bytes. With 4 bits row k has number k in its low half and number k + 15 in its high half.

Zeros have the value 0. A block with an infinity or a NaN has the exponent 255, and all its numbers are NaN.

**Rounding.** The scale is the smallest power of two with which the block's largest number fits (-127 to 127, or -7 to
7). A number is rounded down or up, with a probability so that the mean is the number itself (stochastic rounding), so
small gradients are not lost on average. The random number is a hash of the step, the bucket, the number's place in it,
and the number's bits. So it is the same wherever the sum is computed, and differs from step to step, from number to
number, and between the shards and nodes of the tree.

**Sums.** A sum of two blocks is computed in float32 and rounded again. Its operands are rounded already, so it has one
right value. All operations are elementwise and exactly defined (IEEE 754, integers modulo 2**32), so a CPU and a GPU
compute the same bits. The bytes of a block may be different for equal values, the hash is that of the values.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

BLOCK_BYTES = 16
BLOCKS = 64  # of a group
GROUP_BYTES = BLOCK_BYTES * BLOCKS
_ROWS = BLOCK_BYTES - 1  # of integers in a group
_CHUNK = {"cpu": 32}  # groups that are processed at a time: a few hundred kB, which stay in a CPU's cache
_DEVICE_CHUNK = 4096
_NOT_FINITE = 255  # exponent
_MANTISSA = (1 << 23) - 1


def _wrap(value: int) -> int:
    """Return `value` modulo 2**32 as a signed number of 32 bits."""
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


# Odd multipliers with well mixed bits, of the hash: for a number's place, a step, a bucket, and two rounds of mixing.
_PLACE, _STEP, _BUCKET = 0x9E3779B1, 0x27D4EB2F, 0x165667B1
_MIX = _wrap(0x85EBCA6B), _wrap(0xC2B2AE35)


@dataclass(frozen=True)
class Place:
    """Where numbers are: in a step's bucket, from byte `start` on, a multiple of `GROUP_BYTES`. Input of the hash."""

    step: int
    bucket: int
    start: int = 0


@dataclass(frozen=True)
class Quantization:
    """The quantization to integers of `bits` bits: 8 or 4."""

    bits: int

    @property
    def group(self) -> int:
        """The numbers in a group."""
        return _ROWS * 8 // self.bits * BLOCKS

    def bytes_of(self, numel: int) -> int:
        """Return the bytes of `numel` numbers: whole groups."""
        return -(-numel // self.group) * GROUP_BYTES

    def numbers_before(self, start: int) -> int:
        """Return how many numbers are in the first `start` bytes, a multiple of `GROUP_BYTES`."""
        return start // GROUP_BYTES * self.group

    def quantize(self, numbers: torch.Tensor, out: torch.Tensor, place: Place) -> torch.Tensor:
        """Write the groups of float32 `numbers`, shape (n,), which fill whole groups, to `out`. Returns `out`.

        `out`: uint8 of shape (bytes_of(n),).
        """
        groups, work = self._groups(out), _work(self, out.device)
        values = numbers.view(len(groups), self.group // BLOCKS, BLOCKS)
        for first in range(0, len(groups), work.groups):
            part = slice(first, first + work.groups)
            self._round(values[part], groups[part], place, first, work)
        return out

    def dequantize(self, groups: torch.Tensor, into: torch.Tensor) -> None:
        """Write the numbers of uint8 `groups` to `into`, float32 of shape (n,), where n fills whole groups."""
        blocks, work = self._groups(groups), _work(self, groups.device)
        values = into.view(len(blocks), self.group // BLOCKS, BLOCKS)
        for first in range(0, len(blocks), work.groups):
            part = slice(first, first + work.groups)
            self._values(blocks[part], values[part], work)

    def add(self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, place: Place) -> torch.Tensor:
        """Write the rounded sum of two tensors of groups to `out`, which may be one of them. Returns `out`."""
        work = _work(self, out.device)
        a, b, total = (self._groups(each) for each in (left, right, out))
        for first in range(0, len(total), work.groups):
            part = slice(first, first + work.groups)
            count = len(total[part])
            sums, others = work.left[:count], work.right[:count]
            self._values(a[part], sums, work)
            self._values(b[part], others, work)
            sums += others
            self._round(sums, total[part], place, first, work)
        return out

    def _groups(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.view(-1, BLOCK_BYTES, BLOCKS)

    def _values(self, groups: torch.Tensor, into: torch.Tensor, work: _Work) -> None:
        exponents = groups[:, :1].to(torch.int32)
        if self.bits == 8:
            into.copy_(groups[:, 1:].view(torch.int8))
        else:
            integers, packed = work.integers[: len(groups)], groups[:, 1:].view(torch.int8)
            low, high = integers[:, :_ROWS], integers[:, _ROWS:]
            torch.bitwise_left_shift(packed, 4, out=low)
            low >>= 4
            torch.bitwise_right_shift(packed, 4, out=high)
            into.copy_(integers)
        into *= (exponents << 23).view(torch.float32)
        if bool((exponents == _NOT_FINITE).any()):
            into.masked_fill_(exponents == _NOT_FINITE, float("nan"))

    def _round(self, numbers: torch.Tensor, out: torch.Tensor, place: Place, first: int, work: _Work) -> None:
        """Round `numbers`, of shape (groups, numbers of a block, BLOCKS), whose first group is the tensor's `first`."""
        count, bits = len(numbers), numbers.view(torch.int32)
        hashed, spare, values, scaled, integers = (each[:count] for each in work.spaces)
        largest = torch.bitwise_and(bits, 0x7FFFFFFF, out=hashed).amax(1)
        exponents = ((largest + self._up) >> 23).sub_(self.bits - 2).clamp_(1, 253)
        inverse = ((254 - exponents) << 23).view(torch.float32).unsqueeze(1)

        start = self.numbers_before(place.start) + first * self.group
        torch.add(work.places[:count], _wrap(start * _PLACE + place.step * _STEP + place.bucket * _BUCKET), out=hashed)
        hashed ^= bits
        hashed *= _MIX[0]
        hashed ^= torch.bitwise_right_shift(hashed, 15, out=spare)
        hashed *= _MIX[1]
        hashed >>= 16
        values.copy_(hashed).add_(32768.5).mul_(2.0**-16)  # above 0 and below 1

        values += torch.mul(numbers, inverse, out=scaled)
        integers.copy_(values.floor_())
        packed = out[:, 1:].view(torch.int8)
        if self.bits == 8:
            packed.copy_(integers)
        else:
            low, high = integers[:, :_ROWS], integers[:, _ROWS:]
            low &= 15
            high <<= 4
            torch.bitwise_or(low, high, out=packed)
        finite = largest < _NOT_FINITE << 23
        if not bool(finite.all()):
            exponents.masked_fill_(~finite, _NOT_FINITE)
        out[:, 0] = exponents

    @property
    def _up(self) -> int:
        """What to add to a number's bits so that its exponent grows if its mantissa is too large for the integers.

        With the exponent of the number less `bits - 2`, the largest number of a block becomes an integer of at least
        2**(bits - 2) and below twice that. The largest integer is 2**(bits - 1) - 1.
        """
        most = (1 << self.bits - 1) - 1
        return _MANTISSA - (most - (1 << self.bits - 2) << 23 - (self.bits - 2))


class _Work:
    """Memory for the steps of a computation on one device, for one thread. `groups`: how many it has room for."""

    def __init__(self, quantization: Quantization, device: torch.device) -> None:
        self.groups = _CHUNK.get(device.type, _DEVICE_CHUNK)
        shape = self.groups, quantization.group // BLOCKS, BLOCKS
        numbers = quantization.group * self.groups
        self.places = torch.arange(numbers, dtype=torch.int32, device=device).mul_(_wrap(_PLACE)).view(shape)
        self.left, self.right = (torch.empty(shape, device=device) for _ in range(2))
        self.integers = torch.empty(shape, dtype=torch.int8, device=device)
        whole = (torch.empty(shape, dtype=torch.int32, device=device) for _ in range(2))
        real = (torch.empty(shape, device=device) for _ in range(2))
        self.spaces = (*whole, *real, self.integers)


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.works: dict[tuple[Quantization, torch.device], _Work] = {}


_of_thread = _OfThread()


def _work(quantization: Quantization, device: torch.device) -> _Work:
    works, key = _of_thread.works, (quantization, device)
    if key not in works:
        works[key] = _Work(quantization, device)
    return works[key]
