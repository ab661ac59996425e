"""A dataset that is nothing but random numbers, and the micro-batches of it that a loader is asked for."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
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


def same(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) and x.stride() == y.stride() for x, y in zip(a, b, strict=True))


class Made(Dataset[int]):
    """Writes down every sample that any process makes."""

    def __init__(self, path: Path, length: int = 240, seconds: float = 0.0) -> None:
        self.path = path
        self.length = length
        self.seconds = seconds

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, f"{index}\n".encode())
        os.close(file)
        time.sleep(self.seconds)
        return index

    def counts(self) -> Counter[int]:
        return Counter(int(line) for line in self.path.read_text().split()) if self.path.exists() else Counter()
