"""The models and the data that every contestant trains: the same code, the same seed, the same values.

| name | parameters | what it stands for |
| --- | --- | --- |
| convolutional | 1,664,910 | more computing than traffic: about 40 ms a batch of 64 on one core, 6.7 MB of gradients |
| perceptron | 7,912,458 | more traffic than computing: about the same time a batch, 31.6 MB of gradients |
| small | 1,242,842 | the pauses' model: with SGD's momentum 9.9 MB of state, some 15 ms a micro-batch of 40 |

The inputs are 28x28 like Fashion-MNIST's, drawn at random: what is measured does not depend on what is learnt, and
nothing has to be downloaded.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

CLASSES = 10
SIDE = 28


def build(name: str) -> nn.Module:
    """The model of that name, initialised from seed 0: equal in every process."""
    torch.manual_seed(0)
    if name == "convolutional":
        return convolutional(24, 48, 700)
    if name == "perceptron":
        return perceptron(2048, 2048, 1024)
    if name == "small":
        return convolutional(16, 32, 784)
    raise SystemExit(f"no model is called {name!r}; there are: convolutional, perceptron, small")


def convolutional(first: int, second: int, hidden: int) -> nn.Module:
    """Two convolutions with batch normalisation and pooling, then two linear layers; widths in channels and units."""
    return nn.Sequential(
        *block(1, first),
        *block(first, second),
        nn.Flatten(),
        nn.Linear(second * (SIDE // 4) ** 2, hidden),
        nn.ReLU(),
        nn.Linear(hidden, CLASSES),
    )


def block(inputs: int, outputs: int) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, kernel_size=3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]


def perceptron(*hidden: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    width = SIDE * SIDE
    for units in hidden:
        layers += [nn.Linear(width, units), nn.ReLU()]
        width = units
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def dataset(samples: int) -> TensorDataset:
    """`samples` pairs of an image, shape `(1, 28, 28)`, and a label; the same values in every process."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(samples, 1, SIDE, SIDE, generator=generator)
    labels = torch.randint(0, CLASSES, (samples,), generator=generator)
    return TensorDataset(images, labels)
