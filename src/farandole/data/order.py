"""The order in which an epoch visits the samples, as arithmetic instead of a list.

Position p of an epoch maps to a sample by a keyed bijection on [0, N): a Feistel network on the smallest power of two
that holds N, applied again while the result falls outside (cycle walking, Black and Rogaway: Ciphers with arbitrary
finite domains, 2002). The domain is less than 2N for N > 2, so that takes two applications on average, at most.

What that buys: any worker can name any slice of any epoch at once, with nothing to store, send or checkpoint: memory
does not depend on N, and a joiner knows the order from (N, seed) alone.

Two halves of nearly equal width are xored six times each with a keyed hash of the other. Measured on one core: 0.09 us
a sample in long slices; for a micro-batch of 64, 0.6 us when its block of 4096 positions is remembered, 0.3 to 1 ms
when the block has to be made.

Left out: cryptographic strength; this is a shuffle, its keys are public.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from farandole.data.seeding import derive
from farandole.errors import UsageError

_ROUNDS = 12  # by chi-square over all permutations: 8 are visibly uneven for N = 6 (971 where 719 is due), 12 are not
_BLOCK = 4096  # positions made and remembered together: a micro-batch alone is all NumPy call overhead
_LONGEST = 1 << 62


@dataclass(frozen=True)
class Order:
    """The order of `length` samples under `seed`, different in every epoch; without `shuffle`, the dataset's own."""

    length: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.length <= _LONGEST:
            raise UsageError(f"an order of {self.length} samples: give between 1 and 2^62")

    def samples(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Sample indexes at positions [start, stop) of `epoch`; shape `(stop - start,)`, int64, the caller's own.

        Raises `UsageError` for a range that is not inside [0, length] or a negative epoch.
        """
        if not 0 <= start <= stop <= self.length:
            raise UsageError(f"positions [{start}, {stop}): an epoch here has positions 0 to {self.length}")
        if epoch < 0:
            raise UsageError(f"epoch {epoch}: epochs are counted from 0")
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        if stop - start >= _BLOCK:
            return _permuted(self.length, self.seed, epoch, start, stop)
        first = start // _BLOCK * _BLOCK
        block = _block(self.length, self.seed, epoch, first)
        if stop <= first + _BLOCK:
            return block[start - first : stop - first].copy()
        following = _block(self.length, self.seed, epoch, first + _BLOCK)
        return np.concatenate((block[start - first :], following[: stop - first - _BLOCK]))


@functools.lru_cache(maxsize=8)  # 256 kB: the blocks around a few loaders' positions
def _block(length: int, seed: int, epoch: int, first: int) -> npt.NDArray[np.int64]:
    return _permuted(length, seed, epoch, first, min(first + _BLOCK, length))


def _permuted(length: int, seed: int, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
    bits = max(2, (length - 1).bit_length())  # two halves of at least one bit
    keys = [np.uint64(derive(seed, "order", epoch, number)) for number in range(_ROUNDS)]
    value = _feistel(np.arange(start, stop, dtype=np.uint64), bits, keys)
    outside = np.flatnonzero(value >= length)
    while outside.size:
        again = _feistel(value[outside], bits, keys)
        value[outside] = again
        outside = outside[again >= length]
    return value.astype(np.int64)


def _feistel(value: npt.NDArray[np.uint64], bits: int, keys: list[np.uint64]) -> npt.NDArray[np.uint64]:
    """A bijection on [0, 2^bits): xoring one half with any function of the other can be undone."""
    low_bits = bits // 2
    high_bits = bits - low_bits
    low = value & np.uint64((1 << low_bits) - 1)
    high = value >> np.uint64(low_bits)
    for number in range(0, _ROUNDS, 2):
        low ^= _hash(high, keys[number], low_bits)
        high ^= _hash(low, keys[number + 1], high_bits)
    return (high << np.uint64(low_bits)) | low


def _hash(value: npt.NDArray[np.uint64], key: np.uint64, bits: int) -> npt.NDArray[np.uint64]:
    """The top `bits` of a keyed multiply-xorshift-multiply; wraps modulo 2^64."""
    mixed = value + key
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed >>= np.uint64(64 - bits)
    return mixed
