"""The main job: a small convolutional net with normalisation and dropout on scikit-learn's handwritten digits.

farandole run examples/digits.py        elastic, on this machine
python examples/digits.py               a world of one: the same bits

With --policy per-worker the batch follows the workers, and the learning rate the batch.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import farandole


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,437 training and 360 test images of shape (1, 8, 8), values 0 to 1."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target, dtype=torch.int64)
    test = torch.arange(len(labels)) % 5 == 4
    return TensorDataset(images[~test], labels[~test]), TensorDataset(images[test], labels[test])


def net(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(2 * width, 4 * width, 3, padding=1),
        nn.BatchNorm2d(4 * width),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(4 * width * 16, 10),
    )


def correct(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(1) == labels


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--micro", type=int, default=16)
    parser.add_argument("--policy", choices=("global", "per-worker"), default="global")
    parser.add_argument("--width", type=int, default=32)
    args = parser.parse_args()

    run = farandole.join()
    train_set, test_set = digits()
    model = net(args.width).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    batch = farandole.GlobalBatch(args.batch, micro=args.micro)
    if args.policy == "per-worker":
        batch = farandole.PerWorkerBatch(args.batch, micro=args.micro)
    loader = run.loader(train_set, batch=batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * len(loader))
    run.replicate(model=model, optimizer=optimizer, schedule=schedule)

    for step in run.steps(loader, epochs=args.epochs):
        for images, labels in step:
            loss = F.cross_entropy(model(images.to(run.device)), labels.to(run.device))
            step.backward(loss)
        optimizer.step()
        for _ in range(step.base_steps):  # 1 with a constant batch
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
