"""ResNet-50, 101 or 152 on random pictures: how a net of the field scales, without its data.

    farandole bench scaling --workers 1,2,4 --argument depth=50,152 benchmarks/resnet.py --depth {depth}
    farandole bench steps benchmarks/resnet.py --side 64

| --depth | parameters | gradients of float32 |
| --- | --- | --- |
| 50 | 25,557,032 | 102 MB |
| 101 | 44,549,160 | 178 MB |
| 152 | 60,192,808 | 241 MB |

The pictures are drawn at random, so nothing is learnt, nothing is downloaded, and the data costs next to nothing.
`--side 224` is the field's; smaller ones make a CPU wait less, and the exchange counts for more. The net is the one of
torchvision, with the stride in a block's 3x3 convolution.

He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition, 2015, table 1.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import farandole

BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}  # of each stage, by depth
CLASSES = 1000
WIDER = 4  # a block's outputs over the channels within it


class Bottleneck(nn.Module):
    """Convolutions of 1x1, 3x3 and 1x1, and a way around them."""

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        outputs = WIDER * channels
        self.body = nn.Sequential(
            *convolution(inputs, channels, 1),
            nn.ReLU(inplace=True),
            *convolution(channels, channels, 3, stride),
            nn.ReLU(inplace=True),
            *convolution(channels, outputs, 1),
        )
        changes = stride != 1 or inputs != outputs
        self.around = nn.Sequential(*(convolution(inputs, outputs, 1, stride) if changes else ()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.around(x))


def convolution(inputs: int, outputs: int, side: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(inputs, outputs, side, stride, padding=side // 2, bias=False), nn.BatchNorm2d(outputs)


def resnet(depth: int) -> nn.Sequential:
    layers: list[nn.Module] = [*convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
    inputs = 64
    for stage, blocks in enumerate(BLOCKS[depth]):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, 64 << stage, stride=2 if stage and not block else 1))
            inputs = WIDER * 64 << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


class RandomPictures(Dataset[tuple[torch.Tensor, int]]):
    """`samples` times one of 64 pictures of shape (3, side, side): enough for a net that is not to learn."""

    def __init__(self, samples: int, side: int) -> None:
        self.samples = samples
        self.pictures = torch.randn(64, 3, side, side, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.pictures[index % len(self.pictures)], index % CLASSES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, choices=[*BLOCKS], default=50)
    parser.add_argument("--side", type=int, default=224, help="of a picture, in pixels")
    parser.add_argument("--batch", type=int, default=256, help="samples a step, of all workers together")
    parser.add_argument("--micro", type=int, default=32, help="samples a micro-batch")
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--samples", type=int, default=1_281_167, help="in an epoch; ImageNet's by default")
    options = parser.parse_args()

    run = farandole.join()
    model = resnet(options.depth).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    run.replicate(model=model, optimizer=optimizer)
    pictures = RandomPictures(options.samples, options.side)
    loader = run.loader(pictures, batch=farandole.GlobalBatch(options.batch, micro=options.micro))
    for step in run.steps(loader, epochs=options.epochs):
        for images, labels in step:
            images = images.to(run.device, memory_format=torch.channels_last)
            step.backward(F.cross_entropy(model(images), labels.to(run.device)))
        optimizer.step()


if __name__ == "__main__":
    main()
