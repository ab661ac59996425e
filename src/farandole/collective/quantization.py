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
and the number's bits: (bits xor place * constant) * multiplier, of which the upper 16 bits count; the multiplier is an
odd random number for each step and bucket (multiply-shift hashing; Dietzfelbinger, Hagerup, Katajainen, Penttonen: A
Reliable Randomized Algorithm for the Closest-Pair Problem, 1997). So it is the same wherever the sum is computed, and
differs from step to step, from number to number, and between the shards and nodes of the tree.

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


_PLACE = 0x9E3779B1  # 2**32 by the golden ratio


def _multiplier(step: int, bucket: int) -> int:
    """Return the odd multiplier of the hash, of 32 bits: the upper ones of a number of SplitMix64."""
    mixed = (step << 9 | bucket) * 0x9E3779B97F4A7C15 + 1
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed %= 1 << 64
        mixed = (mixed ^ mixed >> shift) * factor
    return mixed % (1 << 64) >> 32 | 1


def _maybe_any(mask: torch.Tensor) -> bool:
    """Return True if the mask may have a True. It is not read on a device, since that would wait for the device."""
    return mask.device.type != "cpu" or bool(mask.any())


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
            sums = work.sums[: len(total[part])]
            self._values(a[part], sums, work)
            self._values(b[part], sums, work, added=True)
            self._round(sums, total[part], place, first, work)
        return out

    def _groups(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.view(-1, BLOCK_BYTES, BLOCKS)

    def _values(self, groups: torch.Tensor, into: torch.Tensor, work: _Work, *, added: bool = False) -> None:
        """Write the values of `groups` to `into`, of shape (groups, numbers of a block, BLOCKS), or add them to it."""
        exponents = groups[:, :1].to(torch.int32)
        scales = (exponents << 23).view(torch.float32)
        integers = groups[:, 1:].view(torch.int8)
        if self.bits == 4:
            packed, integers = integers, work.integers[: len(groups)]
            low, high = integers[:, :_ROWS], integers[:, _ROWS:]
            torch.bitwise_left_shift(packed, 4, out=low)
            low >>= 4
            torch.bitwise_right_shift(packed, 4, out=high)
        if added:  # the product is exact, so a fused multiplication and addition has the same bits
            into.addcmul_(work.real[: len(groups)].copy_(integers), scales)
        else:
            into.copy_(integers)
            into *= scales
        not_finite = exponents == _NOT_FINITE
        if _maybe_any(not_finite):
            into.masked_fill_(not_finite, float("nan"))

    def _round(self, numbers: torch.Tensor, out: torch.Tensor, place: Place, first: int, work: _Work) -> None:
        """Round `numbers`, of shape (groups, numbers of a block, BLOCKS), whose first group is the tensor's `first`."""
        count, bits, half = len(numbers), numbers.view(torch.int32), 1 << self.bits - 1
        hashed, real, scaled, integers = (each[:count] for each in (work.whole, work.real, work.scaled, work.integers))
        largest = torch.bitwise_and(bits, 0x7FFFFFFF, out=hashed).amax(1)
        exponents = ((largest + self._up) >> 23).sub_(self.bits - 2).clamp_(1, 253)
        inverse = ((254 - exponents) << 23).view(torch.float32).unsqueeze(1)

        start = self.numbers_before(place.start) + first * self.group
        torch.add(work.places[:count], _wrap(start * _PLACE), out=hashed)
        hashed ^= bits
        hashed *= _wrap(_multiplier(place.step, place.bucket))
        hashed >>= 16
        real.copy_(hashed)  # the random number less 1/2, times 2**16
        # Each product is exact. The half is added for the random number, and `half` so that all is above 0.
        torch.addcmul(work.offset, numbers, inverse, out=scaled).add_(real, alpha=2.0**-16)
        integers.view(torch.uint8).copy_(scaled)  # towards 0, so down
        integers -= half
        packed = out[:, 1:].view(torch.int8)
        if self.bits == 8:
            packed.copy_(integers)
        else:
            low, high = integers[:, :_ROWS], integers[:, _ROWS:]
            low &= 15
            high <<= 4
            torch.bitwise_or(low, high, out=packed)
        not_finite = largest >= _NOT_FINITE << 23
        if _maybe_any(not_finite):
            exponents.masked_fill_(not_finite, _NOT_FINITE)
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
    """Memory for the steps of a computation on one device, for one thread. `groups`: how many it has room for.

    `places` has the part of the hash that belongs to a number's place after the first one.
    """

    def __init__(self, quantization: Quantization, device: torch.device) -> None:
        self.groups = _CHUNK.get(device.type, _DEVICE_CHUNK)
        shape = self.groups, quantization.group // BLOCKS, BLOCKS
        numbers = quantization.group * self.groups
        self.places = torch.arange(numbers, dtype=torch.int32, device=device).mul_(_wrap(_PLACE)).view(shape)
        self.offset = torch.tensor((1 << quantization.bits - 1) + 0.5, device=device)
        self.sums, self.real, self.scaled = (torch.empty(shape, device=device) for _ in range(3))
        self.integers = torch.empty(shape, dtype=torch.int8, device=device)
        self.whole = torch.empty(shape, dtype=torch.int32, device=device)


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.works: dict[tuple[Quantization, torch.device], _Work] = {}


_of_thread = _OfThread()


def _work(quantization: Quantization, device: torch.device) -> _Work:
    works, key = _of_thread.works, (quantization, device)
    if key not in works:
        works[key] = _Work(quantization, device)
    return works[key]
