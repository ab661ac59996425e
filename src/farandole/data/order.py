"""The order in which an epoch visits the samples, computed instead of stored; and the random state of each sample.

Position p of an epoch maps to a sample by a keyed bijection on [0, N): a Feistel network on the smallest power of two
that holds N, applied again while the result falls outside (cycle walking, Black and Rogaway: Ciphers with arbitrary
finite domains, 2002). The domain is less than 2N for N > 2, so it takes at most two applications on average.

The benefit: any worker can compute any slice of any epoch at once. There is nothing to store, send or checkpoint,
memory does not depend on N, and a joiner knows the order from (N, seed) alone.

Each of two halves of nearly equal width is xored six times with a keyed hash of the other. Measured on one core: 0.09
us a sample in long slices; for a micro-batch of 64, 0.6 us if its block of 4096 positions is cached, 0.3 to 1 ms if the
block has to be computed.

Left out: cryptographic strength; this is a shuffle, its keys are public.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from farandole.errors import UsageError

# --- seeding ----------------------------------------------------------------------------------------------------------
#
# Random state is derived from names, not from history: the numbers that a sample or a shard draws depend on its name,
# not on the process that makes it.
#
# `derive` turns a path such as `(run seed, "sample", epoch, sample)` into 64 bits; `set_random_state` seeds Python's,
# NumPy's and torch's global generators with those bits. It runs before every sample and every shard, so it must take
# microseconds: 6.9 us a call (`random` 3.8, NumPy 1.6, torch 1.1) where `torch.manual_seed` alone takes 130, and 1.3 us
# for `derive` with three path elements (measured on one core of a virtual machine, torch 2.13 without CUDA, Python
# 3.11).
#
# Tried and not taken: seeding only when something is drawn. Code that draws has bound the generators' methods long
# before, and some code reads a generator's state without drawing. To find out afterwards whether anything was drawn
# costs more than seeding (`random.getstate` alone 10 us).
#
# Generators among a dataset's attributes are seeded beside these (`own_generators`). Left out: generators that a
# sample makes for itself (`numpy.random.default_rng()` without a seed, `os.urandom`, `secrets`), which can't be seeded
# from outside. Accelerators other than CUDA.

_WORD = (1 << 64) - 1
# 2^64 / golden ratio, whose multiples keep farthest apart: for seeds and elements below 2^31, no two different pairs
# (seed, element) give the same state * _GOLDEN + element.
_GOLDEN = 0x9E3779B97F4A7C15
_OFFSET = 0xD1B54A32D192ED03  # odd; without it the state of (0, 0) would stay 0


def derive(seed: int, *path: int | str) -> int:
    """Returns 64 bits derived from `seed` and `path`; equal in every process, machine and version of Python.

    Each element is folded in by splitmix64's finaliser (Steele, Lea, Flood: Fast splittable pseudorandom number
    generators, 2014), strings by their BLAKE2b digest. Integers count modulo 2^64. It is a fold, so
    `derive(derive(seed, *a), *b) == derive(seed, *a, *b)`: a prefix that many paths share can be computed once.
    """
    state = seed & _WORD
    for element in path:
        word = _text_word(element) if isinstance(element, str) else operator.index(element)
        state = (state * _GOLDEN + word + _OFFSET) & _WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
        state ^= state >> 31
    return state


def set_random_state(value: int) -> None:
    """Seeds `random`, NumPy's global state, torch's CPU generator, and CUDA's if CUDA is already initialised.

    `value` is 64 bits, as from `derive`. CUDA is never initialised by this call: a forked loader worker must not.
    """
    random.seed(value)
    # NumPy's and torch's generators are Mersenne twisters, seeded in the same way with 32 bits: the same 32 bits would
    # give the same draws.
    np.random.seed((value * _GOLDEN & _WORD) >> 32)
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        for generator in torch.cuda.default_generators:
            generator.manual_seed(value)


def keep_random_state() -> Callable[[], None]:
    """Returns a function that restores the generators of `set_random_state` to their present state."""
    python, arrays, tensors = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    cuda = list(torch.cuda.default_generators) if torch.cuda.is_initialized() else []
    states = [generator.get_state() for generator in cuda]

    def put_back() -> None:
        random.setstate(python)
        np.random.set_state(arrays)
        torch.default_generator.set_state(tensors)
        for generator, state in zip(cuda, states, strict=True):
            generator.set_state(state)

    return put_back


@functools.lru_cache(maxsize=256)
def _text_word(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


# --- order ------------------------------------------------------------------------------------------------------------

_ROUNDS = 12  # by chi-square over all permutations: 8 are visibly uneven for N = 6 (971 where 719 is due), 12 are not
_BLOCK = 4096  # positions computed and cached together: for one micro-batch NumPy's call overhead would dominate
_LONGEST = 1 << 62


@dataclass(frozen=True)
class SampleOrder:
    """The order of `length` samples for `seed`, different in every epoch; without `shuffle`, the dataset's own."""

    length: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.length <= _LONGEST:
            raise UsageError(f"an order of {self.length} samples: give between 1 and 2^62")

    def samples(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Returns a new array of the samples at positions [start, stop) of `epoch`; shape `(stop - start,)`, int64.

        Raises `UsageError` for a range that is not inside [0, length] or a negative epoch.
        """
        check_range(epoch, start, stop, self.length)
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

    def draws(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Returns a number for each of these positions, from which its random state is derived: its sample."""
        return self.samples(epoch, start, stop)

    def length_in(self, epoch: int) -> int:
        """Returns the number of positions in `epoch`."""
        del epoch
        return self.length


def check_range(epoch: int, start: int, stop: int, length: int) -> None:
    """Raises `UsageError` for a range that is not inside [0, length) or a negative epoch."""
    if not 0 <= start <= stop <= length:
        raise UsageError(f"positions [{start}, {stop}): this order has positions 0 to {length}")
    if epoch < 0:
        raise UsageError(f"epoch {epoch}: epochs are counted from 0")


@functools.lru_cache(maxsize=8)  # 256 kB: the blocks around a few loaders' positions
def _block(length: int, seed: int, epoch: int, first: int) -> npt.NDArray[np.int64]:
    return _permuted(length, seed, epoch, first, min(first + _BLOCK, length))


def _permuted(length: int, seed: int, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
    bits = max(2, (length - 1).bit_length())  # two halves of at least one bit
    keys = [np.uint64(derive(seed, "order", epoch, number)) for number in range(_ROUNDS)]
    value = _feistel(np.arange(start, stop, dtype=np.uint64), bits, keys)
    outside = np.flatnonzero(value >= length)
    while outside.size:
        permuted = _feistel(value[outside], bits, keys)
        value[outside] = permuted
        outside = outside[permuted >= length]
    return value.astype(np.int64)


def _feistel(value: npt.NDArray[np.uint64], bits: int, keys: list[np.uint64]) -> npt.NDArray[np.uint64]:
    """A bijection on [0, 2^bits): xoring one half with any function of the other half can be undone."""
    low_bits = bits // 2
    high_bits = bits - low_bits
    low = value & np.uint64((1 << low_bits) - 1)
    high = value >> np.uint64(low_bits)
    for number in range(0, _ROUNDS, 2):
        low ^= _hash(high, keys[number], low_bits)
        high ^= _hash(low, keys[number + 1], high_bits)
    return (high << np.uint64(low_bits)) | low


def _hash(value: npt.NDArray[np.uint64], key: np.uint64, bits: int) -> npt.NDArray[np.uint64]:
    """Returns the top `bits` of a keyed multiply-xorshift-multiply; wraps modulo 2^64."""
    mixed = value + key
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed >>= np.uint64(64 - bits)
    return mixed


# --- own generators ---------------------------------------------------------------------------------------------------
#
# Random generators among a dataset's attributes, which are seeded for each sample.
#
# Without this a sample's draws from such a generator would depend on all earlier draws: on which process made which
# samples, and on whether the run was resumed. So each generator gets a state derived from (run seed, epoch, sample),
# like the global ones (`set_random_state`). The search is repeated for each micro-batch, in the dataset, in torch's
# wrappers of datasets, and in transforms and other objects that it holds: 15 us for a dataset of ten attributes.
#
# Left out: generators in long lists (more than `LONGEST`), in closures, in modules' globals, and those that a sample
# makes for itself, which can't be seeded from outside.

DEPTH = 6  # levels: a wrapper, its list, a dataset, its list of transforms, one transform, that one's attributes
LONGEST = 64
RandomGenerator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
_LEAVES = (str, bytes, int, float, bool, type(None), torch.Tensor, np.ndarray, type, torch.nn.Module)


def own_generators(dataset: Any) -> list[RandomGenerator]:
    """Returns the generators that `dataset` holds, each once, in the order of its attributes."""
    generators: dict[int, RandomGenerator] = {}
    for generator in _within(dataset, DEPTH, set()):
        generators.setdefault(id(generator), generator)
    return list(generators.values())


def seed_all(generators: Iterable[RandomGenerator], value: int) -> None:
    """Seeds each generator with its own seed, derived from `value`."""
    for index, generator in enumerate(generators):
        seed = derive(value, "own", index)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = type(generator.bit_generator)(seed).state
        else:
            generator.seed(seed >> 32)


def _within(thing: Any, depth: int, visited_ids: set[int]) -> Iterator[RandomGenerator]:
    if isinstance(thing, RandomGenerator):
        if not isinstance(thing, random.SystemRandom):
            yield thing
        return
    if depth == 0 or isinstance(thing, _LEAVES) or id(thing) in visited_ids:
        return
    visited_ids.add(id(thing))
    inner: Iterable[Any]
    if isinstance(thing, dict):
        inner = cast("dict[Any, Any]", thing).values() if len(cast("dict[Any, Any]", thing)) <= LONGEST else ()
    elif isinstance(thing, functools.partial):
        inner = (thing.func, *thing.args, *thing.keywords.values())
    elif isinstance(thing, MethodType):
        inner = (thing.__self__,)
    elif isinstance(thing, list | tuple):
        inner = cast("list[Any]", thing) if len(cast("list[Any]", thing)) <= LONGEST else ()
    else:
        inner = getattr(thing, "__dict__", {}).values()
    for value in inner:
        yield from _within(value, depth - 1, visited_ids)
