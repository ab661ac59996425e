"""What samples draw from generators of the dataset's own depends on the sample, not on what was made before."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from farandole.data.loader import Key, Loader
from farandole.data.order import own_generators
from farandole.plan.batch import GlobalBatch

N = 8


class Jitter:
    """A transform with a generator."""

    def __init__(self) -> None:
        self.rng = random.Random(3)

    def __call__(self, value: float) -> float:
        return value + self.rng.random()


class Drawing(Dataset[torch.Tensor]):
    """Draws from a generator of each kind."""

    def __init__(self) -> None:
        self.torch = torch.Generator().manual_seed(1)
        self.pair = {"new": np.random.default_rng(2), "old": np.random.RandomState(2)}
        self.transforms = [Jitter(), functools.partial(Jitter.__call__, Jitter())]
        self.itself = self

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        value = float(index)
        for transform in self.transforms:
            value = transform(value)
        numpy = [self.pair["new"].random(), self.pair["old"].random()]  # type: ignore[attr-defined]
        return torch.tensor([value, *numpy, torch.rand((), generator=self.torch).item()], dtype=torch.float64)


class Collate:
    def __init__(self) -> None:
        self.rng = np.random.default_rng()

    def collate(self, items: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(items) * self.rng.random()


def made(dataset: Any, keys: list[int], **options: Any) -> dict[int, torch.Tensor]:
    loader = Loader(dataset, GlobalBatch(4, micro=4), seed=5, shuffle=False, **options)
    return {start: loader.fetch(Key(epoch=0, step=0, shard=0, start=start, stop=start + 4)) for start in keys}


WRAPPED = {"itself": lambda d: d, "subset": lambda d: Subset(d, range(N)), "concatenated": lambda d: ConcatDataset([d])}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED.keys())
@pytest.mark.parametrize("collates", [False, True])
def test_who_makes_which_samples_does_not_show(wrap: Any, *, collates: bool) -> None:
    def options() -> dict[str, Any]:
        return {"collate_fn": Collate().collate} if collates else {}

    one, other = made(wrap(Drawing()), [0, 4], **options()), made(wrap(Drawing()), [4, 0], **options())
    assert all(torch.equal(one[start], other[start]) for start in (0, 4))
    assert len(one[0].unique()) == one[0].numel(), "each draws numbers of its own"


def test_each_generator_is_there_once() -> None:
    dataset = Drawing()
    kinds = [type(generator) for generator in own_generators(dataset)]
    assert kinds == [torch.Generator, np.random.Generator, np.random.RandomState, random.Random, random.Random]
    assert own_generators(object()) == own_generators([random.SystemRandom()]) == []
