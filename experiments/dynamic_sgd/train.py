"""One training of the study: SGD or AdamW under a batch policy, warm-up and cosine by samples seen.

    FARANDOLE_HISTORY=h.txt FARANDOLE_FOLDER=out PYTHONPATH=. python experiments/dynamic_sgd/train.py fashion FOLDER \\
        --policy linear --rate 0.04

The training loss of every step is what the run itself writes to metrics.jsonl; test loss and accuracy are added to it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import farandole
from experiments.dynamic_sgd.cases import ADAPTIVE, POLICIES, SCALES
from experiments.dynamic_sgd.tasks import TASKS, Part, Task


def main() -> None:
    parser = argparse.ArgumentParser(description="one training of the study")
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("path", type=Path, help="where the data is")
    parser.add_argument("--policy", choices=POLICIES, required=True)
    parser.add_argument("--rate", type=float, required=True, help="the base batch's learning rate at its highest")
    parser.add_argument("--scale", choices=SCALES, default="full")
    parser.add_argument("--batch", type=int, default=0, help="one worker's, if not the scale's; the rate is for it")
    args = parser.parse_args()
    task, scale = TASKS[args.task], SCALES[args.scale]

    run = farandole.join()
    tests = task.load(args.path, "test", scale.tested)
    some = tuple(part[:: scale.tested // scale.probed].contiguous() for part in tests)
    model = task.net()
    if args.policy in ADAPTIVE:
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, weight_decay=0.01)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=args.rate, momentum=0.9, weight_decay=5e-4)
    batch = POLICIES[args.policy](args.batch or scale.base, scale.micro)
    loader = run.loader(TensorDataset(*task.load(args.path, "train", scale.samples)), batch)
    base_steps = scale.epochs * len(loader)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=base_steps // 20),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=base_steps - base_steps // 20),
        ],
        milestones=[base_steps // 20],
    )
    run.replicate(model=model, optimizer=optimizer, schedule=schedule)

    seen = 0
    for step in run.steps(loader, epochs=scale.epochs):
        for images, labels in step:
            step.backward(F.cross_entropy(model(task.inputs(task.varied(images))), labels))
        optimizer.step()
        for _ in range(step.base_steps):
            schedule.step()
        before, seen = seen, seen + step.samples
        if seen // scale.probe > before // scale.probe:
            loss, accuracy = tested(task, model, some if seen < scale.total else tests)
            run.log(seen=seen, test_loss=loss, accuracy=accuracy)
    run.log(fingerprint=run.fingerprint())


def tested(task: Task, model: nn.Module, part: Part) -> tuple[float, float]:
    """Mean loss and accuracy. A world of one has all the data, and one pass gives both."""
    loss = right = 0.0
    model.eval()
    with torch.no_grad():
        for images, labels in zip(part[0].split(250), part[1].split(250), strict=True):
            logits = model(task.inputs(images))
            loss += F.cross_entropy(logits, labels, reduction="sum").item()
            right += int((logits.argmax(1) == labels).sum())
    model.train()
    return loss / len(part[1]), right / len(part[1])


if __name__ == "__main__":
    main()
