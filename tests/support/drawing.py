"""A dataset that is nothing but random numbers, and the micro-batches of it that a loader is asked for."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from farandole.data.loader import Key, Loader
from farandole.plan.batch import GlobalBatch

BATCH = GlobalBatch(size=24, micro=8)


def keys(loader: Loader, epochs: int = 1) -> list[Key]:
    """Every shard of every step, in order."""
    result: list[Key] = []
    for epoch in range(epochs):
        for step in range(len(loader)):
            stop = min((step + 1) * loader.batch.size, loader.length)
            edges = [*range(step * loader.batch.size, stop, loader.batch.micro), stop]
            result += [
                Key(epoch, epoch * len(loader) + step, shard, *ends) for shard, ends in enumerate(pairwise(edges))
            ]
    return result


class Drawing(Dataset[Any]):
    """Samples that are nothing but what three random generators give."""

    def __init__(self, length: int = 100) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, float, float, torch.Tensor]:
        return index, random.random(), float(np.random.rand()), torch.randn(5)


def mixing(samples: list[Any]) -> dict[str, Any]:
    """A collate function that draws, as MixUp does."""
    return {"weight": random.random() + float(torch.rand(1)), "n": len(samples)}


def misaligned(*shape: int) -> torch.Tensor:
    """A tensor at 4 bytes after an aligned address."""
    whole = torch.arange(1.0 + int(np.prod(shape)))
    tensor = whole[1:].view(*shape)
    assert tensor.data_ptr() % 64 == 4
    return tensor
