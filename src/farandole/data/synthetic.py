"""Images that are made up: for trying a script, and for timing one without any disk.

A sample is its class's own bands of colour plus noise, a slice of one long stretch of noise that begins where the
sample's index says. So it depends on the index alone, is cheap (0.12 ms for 3x224x224 on one core, where drawing as
many normal numbers takes 0.57), and a model can learn the classes. Left out: realism.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from farandole.data.seeding import derive
from farandole.errors import UsageError

_SPARE = 65_521  # elements of noise beyond one sample: so many places to begin at
_BANDS = 7  # a pattern is so many horizontal bands, each of a colour


class Synthetic(Dataset[tuple[torch.Tensor, int]]):
    """Samples `(image, label)`: float32 of `shape`, channels first, of variance about 1; `0 <= label < classes`."""

    def __init__(
        self, length: int, shape: Sequence[int] = (3, 224, 224), classes: int = 1000, *, seed: int = 0
    ) -> None:
        """Raises `UsageError` for a length, a number of classes or an extent below 1."""
        if min(length, classes, *shape, len(shape)) < 1:
            raise UsageError(f"Synthetic({length}, {tuple(shape)}, {classes}): each at least 1")
        self.length, self.shape, self.classes, self.seed = length, tuple(shape), classes, seed
        generator = torch.Generator().manual_seed(derive(seed, "synthetic") >> 1)
        self._elements = torch.Size(self.shape).numel()
        self._noise = torch.randn(self._elements + _SPARE, generator=generator) * 0.9
        rows = torch.randn(classes, self.shape[0], _BANDS, generator=generator) * 0.44
        if len(self.shape) == 1:
            self._patterns = rows[..., 0]
        else:
            band = torch.arange(self.shape[1]) * _BANDS // self.shape[1]
            self._patterns = rows[..., band].view(classes, *self.shape[:2], *(1 for _ in self.shape[2:]))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not -self.length <= index < self.length:
            raise IndexError(f"sample {index} of {self.length}")
        index %= self.length
        begin = derive(self.seed, "begin", index) % _SPARE
        label = derive(self.seed, "label", index) % self.classes
        noise = self._noise[begin : begin + self._elements]
        return noise.view(self.shape) + self._patterns[label], label

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.length, self.shape, self.classes, self.seed)  # not its megabytes of noise


def _again(length: int, shape: tuple[int, ...], classes: int, seed: int) -> Synthetic:
    return Synthetic(length, shape, classes, seed=seed)
