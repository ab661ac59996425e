"""Iterable datasets for tests: with a state and without, shuffled, augmented, with mistakes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info


class Numbers(IterableDataset[torch.Tensor]):
    """0 to length - 1, without `len()` and without a state. `reads` counts what is read."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._read: list[int] = []

    @property
    def reads(self) -> int:
        return len(self._read)

    def __iter__(self) -> Iterator[Any]:
        process = get_worker_info()
        first, parts = (0, 1) if process is None else (process.id, process.num_workers + 1)
        for number in range(first, self.length, parts):  # with a process visible, it would yield a part
            self._read.append(1)
            yield torch.tensor(float(number))


class Sized(Numbers):
    def __len__(self) -> int:
        return self.length


class Noisy(Sized):
    """Each sample plus noise from four generators, in an order that depends on the epoch."""

    epoch = 0

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.rng = np.random.default_rng()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> list[int]:
        numbers = list(range(self.length))
        random.Random(self.epoch).shuffle(numbers)
        return numbers

    def noise(self) -> float:
        return float(torch.rand(()) + np.random.rand() + random.random() + self.rng.random()) / 8

    def __iter__(self) -> Iterator[Any]:
        for number in self.order():
            self._read.append(1)
            yield torch.tensor(number + self.noise())


class Resumable(Noisy):
    """`Noisy` with a state: the place in the dataset itself, where an iteration that was left goes on."""

    place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "name": "resumable", "weights": torch.arange(3.0)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]

    def __iter__(self) -> Iterator[Any]:
        order = self.order()
        while self.place < self.length:
            self._read.append(1)
            self.place += 1
            yield torch.tensor(order[self.place - 1] + self.noise())
        self.place = 0


class OwnIterator(Resumable):
    """`Noisy` with a state in its iterator."""

    def __iter__(self) -> Iterator[Any]:
        return _Places(self)

    state_dict = load_state_dict = None  # type: ignore[assignment]


class _Places:
    def __init__(self, dataset: Noisy) -> None:
        self.dataset, self.order, self.place = dataset, dataset.order(), 0

    def __iter__(self) -> _Places:
        return self

    def __next__(self) -> torch.Tensor:
        if self.place == self.dataset.length:
            raise StopIteration
        self.place += 1
        self.dataset._read.append(1)
        return torch.tensor(self.order[self.place - 1] + self.dataset.noise())

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Forgetful(Resumable):
    """Its state leads one sample too far."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"] + (state["place"] > 0)
