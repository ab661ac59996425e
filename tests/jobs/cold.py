"""Trains on images of a store; each worker has a cache of its own, in FOLDER, and prints what is in it when it begins.

cold.py URL FOLDER OUT PACE    PACE: a file with the seconds that a step takes at least; none: none
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import farandole


def small(image: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(image.resize((4, 4)).tobytes()), dtype=torch.uint8).float() / 255


def main() -> None:
    url, folder, out, pace = sys.argv[1:]
    run = farandole.join()
    cache = Path(folder) / os.environ.get("FARANDOLE_WORKER", "alone")
    images = farandole.ShardedImages(url, transform=small, cache=cache)
    torch.manual_seed(3)
    model = torch.nn.Linear(48, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.replicate(model=model, optimizer=optimizer)
    loader = run.loader(images, batch=farandole.GlobalBatch(8, micro=2), num_workers=1)
    for step in run.steps(loader, epochs=40):
        if not cache.with_suffix(".began").exists():
            cache.with_suffix(".began").write_text(str(len(list(cache.glob("*.tar")))))
        for values, labels in step:
            step.backward(F.cross_entropy(model(values), labels))
        optimizer.step()
        if Path(pace).exists():
            time.sleep(float(Path(pace).read_text()))
    with run.once() as mine:
        if mine:
            Path(out).write_text(str([p.tolist() for p in model.parameters()]))


if __name__ == "__main__":
    main()
