"""Data in memory and networks, small enough that a training of some hundred thousand samples takes a minute.

Images are bytes of shape (samples, channels, height, width), taken evenly from the file, which may be sorted by class.
They are moved by up to `padding` pixels and mirrored at random, a whole micro-batch at a time, from torch's global
generator: the run sets it before each shard, so what is drawn depends on the seed and the shard alone.
"""

from __future__ import annotations

import gzip
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "runs" / "dynamic_sgd"

Part = tuple[torch.Tensor, torch.Tensor]  # images, labels


@dataclass(frozen=True, kw_only=True)
class Task:
    """`load(path, part, samples)`: part is "train" or "test"."""

    load: Callable[[Path, str, int], Part]
    net: Callable[[], nn.Module]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    padding: int

    def inputs(self, images: torch.Tensor) -> torch.Tensor:
        """Bytes as normalised floats."""
        shape = (1, -1, 1, 1)
        return (images / 255 - torch.tensor(self.mean).view(shape)) / torch.tensor(self.deviation).view(shape)

    def varied(self, images: torch.Tensor) -> torch.Tensor:
        """Each image moved and mirrored at random, bytes as before, in one gather."""
        count, _, height, width = images.shape
        top, left = torch.randint(0, 2 * self.padding + 1, (2, count, 1))
        rows, columns = top + torch.arange(height), left + torch.arange(width)
        columns = torch.where(torch.rand(count, 1) < 0.5, columns.flip(1), columns)
        padded = F.pad(images, (self.padding,) * 4)
        moved = padded[torch.arange(count).view(-1, 1, 1), :, rows.unsqueeze(2), columns.unsqueeze(1)]
        return moved.permute(0, 3, 1, 2)


def _fashion(folder: Path, part: str, samples: int) -> Part:
    def idx(name: str, header: int) -> torch.Tensor:
        path = folder / f"{'train' if part == 'train' else 't10k'}-{name}-ubyte.gz"
        if not path.is_file():
            raise SystemExit(f"{path}: no such file; --fashion must name the folder of Fashion-MNIST's *-ubyte.gz")
        return torch.from_numpy(np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8, offset=header).copy())

    labels = idx("labels-idx1", 8)
    chosen = _evenly(len(labels), samples)
    return idx("images-idx3", 16).view(-1, 1, 28, 28)[chosen].contiguous(), labels[chosen].long()


def _cifar(path: Path, part: str, samples: int) -> Part:
    """Decoded once into a file of its own: 0.2 ms a picture would be seconds in each of a hundred processes."""
    kept = CACHE / f"cifar10-{part}-{samples}.pt"
    if not kept.is_file():
        sys.path.insert(0, str(ROOT / "examples"))
        from pictures import decode, existing

        with np.load(existing(path, "cifar10_jpeg.npz")) as data:
            labels, offsets, jpegs = (data[f"{part}_{what}"] for what in ("y", "off", "blob"))
        chosen = _evenly(len(labels), samples).tolist()
        images = torch.stack([decode(jpegs[offsets[n] : offsets[n + 1]].tobytes()) for n in chosen])
        CACHE.mkdir(parents=True, exist_ok=True)
        half = kept.with_suffix(f".{os.getpid()}")
        torch.save((images, torch.from_numpy(labels[chosen]).long()), half)
        half.replace(kept)
    return torch.load(kept)


def _evenly(available: int, wanted: int) -> torch.Tensor:
    return torch.from_numpy(np.linspace(0, available, min(wanted, available), endpoint=False, dtype=np.int64))


def _plain_net() -> nn.Module:
    """Two convolutions without normalisation, which would forgive a rate that is too high."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]

    head = [nn.Flatten(), nn.Linear(24 * 49, 64), nn.ReLU(), nn.Linear(64, 10)]
    return nn.Sequential(*block(1, 12), *block(12, 24), *head)


def _normalised_net() -> nn.Module:
    """Three convolutions with batch normalisation, over a micro-batch each."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]

    return nn.Sequential(*block(3, 16), *block(16, 32), *block(32, 64), nn.Flatten(), nn.Linear(64 * 16, 10))


TASKS = {
    "fashion": Task(load=_fashion, net=_plain_net, mean=(0.2860,), deviation=(0.3530,), padding=2),
    "cifar": Task(
        load=_cifar,
        net=_normalised_net,
        mean=(0.4914, 0.4822, 0.4465),
        deviation=(0.2470, 0.2435, 0.2616),
        padding=4,
    ),
}
