"""The job of test_same_bits: every model with every optimizer, side by side in one run, and a hash of each in the end.

    python table.py OUT [--pace FILE] [--loaders N]

All of them see the same micro-batches of small noisy images. While FILE holds a number, every step takes at least so
many seconds, and four times as many near the end, so that what is done to the run hits it in the middle.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import farandole

SAMPLES, BATCH, MICRO, EPOCHS = 150, 16, 4, 6  # 9 windows of 4 shards and one of 2, of which the second is short
STEPS = EPOCHS * -(-SAMPLES // BATCH)


class Noisy(Dataset[Any]):
    """Images (1, 6, 6) of four classes, augmented with draws from all three global generators."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(11)
        self.images = torch.randn(SAMPLES, 1, 6, 6, generator=generator)
        self.labels = torch.randint(0, 4, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self.images[index] + 0.1 * torch.randn(1, 6, 6)
        if random.random() < 0.5:
            image = image.flip(2)
        return image * float(np.random.uniform(0.8, 1.2)), int(self.labels[index])


# --- models: each gives its loss on a micro-batch ----------------------------------------------------------------


class Normalised(nn.Module):
    """Convolution, BatchNorm (buffers), dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3))
        self.head = nn.Linear(6 * 16, 4)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.body(images)), labels)


class Tied(nn.Module):
    """One weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 12), nn.Linear(12, 9, bias=False)
        self.head.weight = self.embed.weight
        self.mix = nn.Linear(12, 12)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        del labels
        tokens = (images.flatten(1)[:, :7] * 2 + 4).long().clamp(0, 8)
        guess = self.head(self.mix(self.embed(tokens[:, :-1])).tanh())
        return F.cross_entropy(guess.flatten(0, 1), tokens[:, 1:].flatten())


class Branches(nn.Module):
    """One branch a class, so a shard uses some of them, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(36, 1) for _ in range(4))
        self.spare = nn.Linear(36, 36)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = images.flatten(1)
        total = sum(self.branches[k](rows[labels == k]).square().sum() for k in labels.unique().tolist())
        return total / len(rows)  # type: ignore[return-value]


class Thawing(nn.Module):
    """Its first half is frozen, until the job thaws it after the second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Flatten(), nn.Linear(36, 10), nn.BatchNorm1d(10), nn.Tanh()).requires_grad_(False)
        self.head = nn.Linear(10, 4)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.base(images)), labels)


class Attention(nn.Module):
    """A transformer layer: LayerNorm, attention, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(6, 4)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.layer(images.squeeze(1)).mean(1)), labels)


class Half(nn.Module):
    """Autocast to bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(36, 24), nn.GELU(), nn.Linear(24, 4))

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scores = self.net(images)
        return F.cross_entropy(scores.float(), labels)


MODELS: dict[str, type[nn.Module]] = {
    "normalised": Normalised,
    "tied": Tied,
    "branches": Branches,
    "thawing": Thawing,
    "attention": Attention,
    "half": Half,
}


# --- optimizers: each makes an update from the gradients, whatever it takes --------------------------------------


class Update:
    """What is called after a step, and what it is made of."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.parts: dict[str, Any] = {}

    def step(self) -> None:
        for part in self.parts.values():
            part.step()


class Nesterov(Update):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.parts["sgd"] = torch.optim.SGD(self.parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)


class Adam(Update):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.parts["adam"] = torch.optim.AdamW(self.parameters, lr=3e-3)


class Clipped(Update):
    """Clipping and a schedule."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.parts["sgd"] = torch.optim.SGD(self.parameters, lr=0.1, momentum=0.5)
        self.parts["schedule"] = torch.optim.lr_scheduler.MultiStepLR(self.parts["sgd"], [STEPS // 3, STEPS // 2], 0.3)

    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters, 0.5)
        super().step()


class Several(Update):
    """Two optimizers, each with a part of the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        half = len(self.parameters) // 2
        self.parts["first"] = torch.optim.SGD(self.parameters[:half], lr=0.05, momentum=0.9)
        self.parts["second"] = torch.optim.AdamW(self.parameters[half:], lr=2e-3)


UPDATES: dict[str, type[Update]] = {"nesterov": Nesterov, "adam": Adam, "clipped": Clipped, "several": Several}


# --- evidence ----------------------------------------------------------------------------------------------------


def feed(digest: Any, value: Any) -> None:
    """Every bit of a nested state."""
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype}{list(value.shape)}".encode())
        digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key, inner in value.items():
            digest.update(repr(key).encode())
            feed(digest, inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            feed(digest, inner)
    else:
        digest.update(repr(value).encode())


def sha256(things: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for thing in things:
        feed(digest, thing.state_dict())
    return digest.hexdigest()


def correct(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return scores.argmax(1) == labels


def linger(pace: Path | None, step: int) -> None:
    if pace is not None and pace.exists():
        seconds = float(pace.read_text() or 0)
        time.sleep(seconds if step < STEPS - 15 else 4 * seconds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--pace", type=Path)
    parser.add_argument("--loaders", type=int, default=0)
    args = parser.parse_args()

    run = farandole.join()
    models = {f"{m}-{u}": MODELS[m]() for u in UPDATES for m in MODELS}
    updates = {name: UPDATES[name.split("-")[1]](model) for name, model in models.items()}
    run.replicate(
        **models, **{f"{name}-{part}": thing for name, u in updates.items() for part, thing in u.parts.items()}
    )
    dataset = Noisy()
    loader = run.loader(dataset, batch=farandole.GlobalBatch(BATCH, micro=MICRO), num_workers=args.loaders)
    judged = models["half-adam"]
    for step in run.steps(loader, epochs=EPOCHS):
        slept = False
        for images, labels in step:
            *first, last = UPDATES
            for update in (*first, last):  # one backward pass for all models of an optimizer
                losses = [model(images, labels) for name, model in models.items() if name.endswith(update)]
                step.backward(torch.stack(losses).sum(), last=update == last)
            if not slept:
                linger(args.pace, step.number)
                slept = True
        for update in updates.values():
            update.step()
        if step.ends_epoch:
            run.log(accuracy=run.evaluate(judged.net, dataset, correct, micro=10))
            for name, model in models.items():
                if name.startswith("thawing"):
                    model.requires_grad_(step.epoch >= 1)
    if run.is_leader:
        hashes = {name: sha256([model, *updates[name].parts.values()]) for name, model in models.items()}
        partial = args.out.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(hashes))
        os.replace(partial, args.out)


if __name__ == "__main__":
    main()
