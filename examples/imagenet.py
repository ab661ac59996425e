"""ImageNet: ResNet-50 as the field trains it, from folders of photos, reporting top-1 and top-5.

    farandole run --workers 8 examples/imagenet.py --data /data/imagenet --loaders 6   workers that come and go
    python examples/imagenet.py --data synthetic --samples 128 --size 64 --batch 32 --micro 8 --epochs 1

The folder holds `train/<class>/*.JPEG` and `val/<class>/*.JPEG`. `synthetic` is noise of the same shape, to try the
rest. Needs torchvision (`pip install ".[examples]"`).

The recipe: SGD with Nesterov momentum; a rate of 0.1 for each 256 samples of `--batch`, reached over five epochs, then
half a cosine (Goyal et al., Accurate, Large Minibatch SGD, 2017, who report about 76 % top-1 after 90 epochs); label
smoothing; no weight decay on norms and biases; residual branches that begin at zero (He et al., Bag of Tricks, 2018).

It has been run on noise and on a handful of photos only: the second command prints a loss near log(1000) = 6.9.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pictures import existing
from policies import add_batch_options, batch_policy
from schedules import warmup_cosine
from torch import nn
from vision import datasets, models, transforms

import farandole

CLASSES = 1000
NORMALIZE = transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


def photos(data: str, part: str, size: int, samples: int) -> Any:
    """The part `train` or `val` as (3, size, size) and class; `samples`: how many synthetic ones."""
    if part == "train":
        change = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
    else:
        change = [transforms.Resize(size * 8 // 7), transforms.CenterCrop(size)]
    transform = transforms.Compose([*change, transforms.ToTensor(), NORMALIZE])
    if data == "synthetic":
        shape = (3, size * 8 // 7, size * 8 // 7)
        first = 0 if part == "train" else samples
        return datasets.FakeData(samples, shape, CLASSES, transform, random_offset=first)
    folder = existing(Path(data) / part, f"ImageNet's {part}, one folder a class")
    found = datasets.ImageFolder(str(folder), transform)
    if len(found.classes) > CLASSES:
        raise SystemExit(f"{folder} has {len(found.classes)} classes; the network knows {CLASSES}")
    return found


def groups(model: nn.Module, decay: float) -> list[dict[str, object]]:
    """Weight decay for the weights of convolutions and of the last layer only: all else has one dimension."""
    weights = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    return [{"params": weights, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]


def top1(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(1) == labels


def top5(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (logits.topk(5).indices == labels[:, None]).any(1)


def main() -> None:
    parser = argparse.ArgumentParser(description="ResNet-50 on ImageNet")
    parser.add_argument("--data", required=True, help="the folder with train/ and val/, or: synthetic")
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--warmup", type=int, default=5, help="epochs")
    add_batch_options(parser, batch=1024, micro=64)
    parser.add_argument("--size", type=int, default=224, help="pixels each way")
    parser.add_argument("--rate", type=float, default=0.1, help="for each 256 samples of --batch")
    parser.add_argument("--loaders", type=int, default=0, help="loader processes of each worker")
    parser.add_argument("--bfloat16", action="store_true", help="compute in bfloat16 where that is safe")
    parser.add_argument("--samples", type=int, default=2048, help="of the synthetic data")
    args = parser.parse_args()

    run = farandole.join()
    train_set, val_set = (photos(args.data, part, args.size, args.samples) for part in ("train", "val"))
    model = models.resnet50(weights=None, num_classes=CLASSES, zero_init_residual=True).to(run.device)
    rate = args.rate * args.batch / 256
    optimizer = torch.optim.SGD(groups(model, decay=1e-4), lr=rate, momentum=0.9, nesterov=True)
    batch = batch_policy(args, farandole.MomentumCompensation())
    loader = run.loader(train_set, batch, num_workers=args.loaders, pin_memory=run.device.type == "cuda")
    factor = warmup_cosine(args.epochs * len(loader), warmup=min(args.warmup, args.epochs - 1) * len(loader))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    run.replicate(model=model, optimizer=optimizer, schedule=schedule)

    for step in run.steps(loader, epochs=args.epochs):
        for images, labels in step:
            images = images.to(run.device, memory_format=torch.channels_last, non_blocking=True)
            with torch.autocast(run.device.type, torch.bfloat16, enabled=args.bfloat16):
                logits = model(images)
            loss = F.cross_entropy(logits.float(), labels.to(run.device), label_smoothing=0.1)
            step.backward(loss)
        optimizer.step()
        for _ in range(step.base_steps):
            schedule.step()
        if step.ends_epoch:
            metrics = {"top1": top1, "top5": top5}
            accuracy = run.evaluate(model, val_set, metrics, micro=args.micro, num_workers=args.loaders)
            run.log(**accuracy)
            if run.is_leader:
                first, fifth = accuracy["top1"], accuracy["top5"]
                print(f"epoch {step.epoch}: loss {step.loss:.4f}, top-1 {first:.4f}, top-5 {fifth:.4f}", flush=True)
    if run.is_leader:
        print(f"fingerprint {run.fingerprint()}", flush=True)


if __name__ == "__main__":
    main()
