"""CIFAR-10: a residual network of 8, 14 or 20 layers, random crops and flips, SGD with momentum, warm-up and cosine.

    python examples/cifar10.py cifar10_jpeg.npz                      a world of one
    farandole run --workers 2 examples/cifar10.py cifar10_jpeg.npz   workers that come and go: the same bits

The file holds JPEG bytes: for `train` and `test`, `_blob` (all of them in a row), `_off` (where each begins, and the
end) and `_y` (the classes). `Cifar10`, `resnet` and `correct` can be imported.

Two workers printed a test accuracy of 0.4787, 0.5718, 0.6144, 0.7094 and in the end 0.7413, in 470 s of processor
time.

He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition, 2015, section 4.2.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from pictures import crop_and_flip, decode, existing
from policies import add_batch_options, batch_policy
from schedules import warmup_cosine
from torch import nn
from torch.utils.data import Dataset

import farandole

MEAN = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
DEVIATION = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)


class Cifar10(Dataset[tuple[torch.Tensor, int]]):
    """Images of shape (3, 32, 32), normalised; cropped and mirrored at random where `vary`.

    A JPEG is decoded when it is first asked for and kept as bytes in memory that loader processes share: 0.2 ms once,
    and nothing for a worker that has just joined to wait for.
    """

    def __init__(self, path: Path, part: str, *, vary: bool, samples: int | None = None) -> None:
        with np.load(existing(path, "cifar10_jpeg.npz")) as data:
            labels, offsets, self.jpegs = (data[f"{part}_{what}"] for what in ("y", "off", "blob"))
        # evenly spaced, since the file may be sorted by class
        chosen = np.linspace(0, len(labels), samples or len(labels), endpoint=False, dtype=np.int64)
        self.labels: list[int] = labels[chosen].tolist()
        self.spans: list[list[int]] = np.stack([offsets[chosen], offsets[chosen + 1]], 1).tolist()
        self.images = torch.empty(len(self.labels), 3, 32, 32, dtype=torch.uint8).share_memory_()
        self.decoded = torch.zeros(len(self.labels), dtype=torch.bool).share_memory_()
        self.vary = vary

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not self.decoded[index]:
            start, stop = self.spans[index]
            self.images[index] = decode(self.jpegs[start:stop].tobytes())
            self.decoded[index] = True
        image = (self.images[index] / 255 - MEAN) / DEVIATION
        return crop_and_flip(image, padding=4) if self.vary else image, self.labels[index]


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.around = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.around = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(y)) + self.around(x))


def resnet(depth: int, width: int = 16, classes: int = 10) -> nn.Sequential:
    """`depth` is 6n + 2: 8, 14, 20, ...; three stages of n blocks, `width` channels in the first, then double."""
    blocks, rest = divmod(depth - 2, 6)
    if rest or blocks < 1:
        raise SystemExit(f"--depth {depth}: such a network has 6n + 2 layers; use 8, 14, 20, 32, 44 or 56")
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    inputs = width
    for stage in range(3):
        for block in range(blocks):
            outputs = width << stage
            layers.append(Block(inputs, outputs, stride=2 if stage and not block else 1))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def correct(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(1) == labels


def main() -> None:
    parser = argparse.ArgumentParser(description="a residual network on CIFAR-10")
    parser.add_argument("path", type=Path, help="cifar10_jpeg.npz")
    parser.add_argument("--depth", type=int, default=8, help="8, 14, 20, ...")
    parser.add_argument("--width", type=int, default=16, help="channels of the first stage")
    parser.add_argument("--epochs", type=int, default=5)
    add_batch_options(parser, batch=128, micro=32)
    parser.add_argument("--rate", type=float, default=0.2, help="the learning rate at its highest")
    parser.add_argument("--loaders", type=int, default=1, help="loader processes of each worker")
    parser.add_argument("--samples", type=int, help="use so many of each part only")
    args = parser.parse_args()

    run = farandole.join()
    train_set = Cifar10(args.path, "train", vary=True, samples=args.samples)
    test_set = Cifar10(args.path, "test", vary=False, samples=args.samples)
    model = resnet(args.depth, args.width).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.rate, momentum=0.9, nesterov=True, weight_decay=5e-4)
    loader = run.loader(train_set, batch_policy(args, farandole.MomentumCompensation()), num_workers=args.loaders)
    steps = args.epochs * len(loader)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine(steps, warmup=steps // 8))
    run.replicate(model=model, optimizer=optimizer, schedule=schedule)

    for step in run.steps(loader, epochs=args.epochs):
        for images, labels in step:
            images = images.to(run.device, memory_format=torch.channels_last)  # a third faster on a CPU
            loss = F.cross_entropy(model(images), labels.to(run.device))
            step.backward(loss)
        optimizer.step()
        for _ in range(step.base_steps):
            schedule.step()
        if step.ends_epoch:
            accuracy = run.evaluate(model, test_set, correct)
            run.log(accuracy=accuracy)
            if run.is_leader:
                print(f"epoch {step.epoch}: loss {step.loss:.4f}, test accuracy {accuracy:.4f}", flush=True)
    if run.is_leader:
        print(f"fingerprint {run.fingerprint()}", flush=True)


if __name__ == "__main__":
    main()
