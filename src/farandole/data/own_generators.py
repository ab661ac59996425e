"""Random generators that a dataset keeps for itself, found among its attributes and seeded for each sample.

What a sample draws from such a generator would depend on all that was drawn from it before: on who made which samples,
and on whether the run was resumed. So each is put into a state that comes from (run seed, epoch, sample), as the
global ones are (`seeding.py`). They are looked for anew for each micro-batch, in the dataset, in what torch wraps
around datasets, and in transforms and other objects that it holds: 15 us for a dataset of ten attributes.

Left out: generators in long lists (more than `LONGEST`), in closures, in modules' globals, and those that a sample
makes for itself; nobody can seed those from outside.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Iterator
from types import MethodType
from typing import Any, cast

import numpy as np
import torch

from farandole.data.seeding import derive

DEPTH = 6  # of attributes and containers: a wrapper, its list, a dataset, a list of transforms, one, its own
LONGEST = 64
Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
_LEAVES = (str, bytes, int, float, bool, type(None), torch.Tensor, np.ndarray, type, torch.nn.Module)


def own_generators(dataset: Any) -> list[Generator]:
    """The generators that `dataset` holds, each once, in the order of its attributes."""
    found: dict[int, Generator] = {}
    for generator in _within(dataset, DEPTH, set()):
        found.setdefault(id(generator), generator)
    return list(found.values())


def seed_all(generators: Iterable[Generator], value: int) -> None:
    """Put each of them into a state of its own that `value` names."""
    for index, generator in enumerate(generators):
        seed = derive(value, "own", index)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = type(generator.bit_generator)(seed).state
        else:
            generator.seed(seed >> 32)


def _within(thing: Any, depth: int, seen: set[int]) -> Iterator[Generator]:
    if isinstance(thing, Generator):
        if not isinstance(thing, random.SystemRandom):
            yield thing
        return
    if depth == 0 or isinstance(thing, _LEAVES) or id(thing) in seen:
        return
    seen.add(id(thing))
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
        yield from _within(value, depth - 1, seen)
