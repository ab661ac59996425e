"""Fashion-MNIST: 60,000 photos of clothes, with augmentation in loader processes, AdamW and a warm-up.

    farandole run --workers 2 examples/fashion_mnist.py /usr/share/datasets/fashion-mnist
    python examples/fashion_mnist.py FOLDER --epochs 1          a world of one: the same bits

FOLDER holds the four gzip IDX files as they are published (Debian: apt-get install dataset-fashion-mnist).
"""

import argparse
import gzip
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from policies import add_batch_options, batch_policy
from torch import nn
from torch.utils.data import Dataset

import farandole


def idx(path: Path, header: int) -> torch.Tensor:
    """The bytes of a gzip IDX file after its header."""
    if not path.is_file():
        raise SystemExit(f"{path}: no such file; FOLDER must hold the four *-ubyte.gz files of Fashion-MNIST")
    return torch.from_numpy(np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8, offset=header).copy())


class Clothes(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Images of shape (1, 28, 28), values 0 to 1; shifted by up to two pixels and mirrored at random where `vary`."""

    def __init__(self, folder: Path, part: str, *, vary: bool) -> None:
        self.images = idx(folder / f"{part}-images-idx3-ubyte.gz", 16).view(-1, 1, 28, 28)
        self.labels = idx(folder / f"{part}-labels-idx1-ubyte.gz", 8).long()
        self.vary = vary

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = self.images[index].float() / 255
        if self.vary:
            top, left, mirror = (int(n) for n in torch.randint(0, 5, (3,)))
            image = F.pad(image, (2, 2, 2, 2))[:, top : top + 28, left : left + 28]
            image = image.flip(2) if mirror % 2 else image
        return image, self.labels[index]


def net() -> nn.Module:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]

    head = [nn.Flatten(), nn.Dropout(0.2), nn.Linear(48 * 49, 128), nn.ReLU(), nn.Linear(128, 10)]
    return nn.Sequential(*block(1, 24), *block(24, 48), *head)


def correct(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(1) == labels


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=5)
    add_batch_options(parser, batch=256, micro=64)
    parser.add_argument("--loaders", type=int, default=1, help="loader processes of each worker")
    parser.add_argument("--samples", type=int, default=60_000, help="train on the first so many")
    args = parser.parse_args()

    run = farandole.join()
    train_set = Clothes(args.folder, "train", vary=True)
    train_set.images, train_set.labels = train_set.images[: args.samples], train_set.labels[: args.samples]
    test_set = Clothes(args.folder, "t10k", vary=False)
    model = net().to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    loader = run.loader(train_set, batch_policy(args, farandole.SquareRoot()), num_workers=args.loaders)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=args.epochs * len(loader) + 1)
    run.replicate(model=model, optimizer=optimizer, schedule=schedule)

    for step in run.steps(loader, epochs=args.epochs):
        for images, labels in step:
            loss = F.cross_entropy(model(images.to(run.device)), labels.to(run.device), label_smoothing=0.05)
            step.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
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
