"""A small job on whatever device its run gives: convolutions, dropout, batch norm, Adam, an evaluation each epoch.

    python on_device.py OUT [--pace FILE] [--operator NAME] [--way WAY]

While there is a FILE, steps are slow. With an operator that of its name in `OPERATORS` is used too. WAY is one of
`WAYS`: how the loop uses the device. The leader writes to OUT, as JSON, the bits of what was trained and of the last
evaluation, and what was in force.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import farandole
from farandole.numerics import settings

SAMPLES, BATCH, MICRO, EPOCHS = 200, 32, 8, 6
PACE_S = 0.4  # longer than a worker needs to start, over all steps
STEPS = EPOCHS * -(-SAMPLES // BATCH)
VARIABLE = "CUBLAS_WORKSPACE_CONFIG"

# Without a deterministic form on CUDA: in the forward pass, and in the backward pass.
OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "histc": lambda x: x.sum() * torch.histc(x.detach(), 4).sum(),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 3).sum(),
}

# float16: autocast, and a GradScaler; bfloat16: autocast; stream: the whole loop on a stream of its own.
WAYS = ("float32", "float16", "bfloat16", "stream", "compiled")


def net(device: torch.device) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.ReLU(),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(16 * 9, 10),
    ).to(device)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--pace", type=Path)
    parser.add_argument("--operator", choices=OPERATORS)
    parser.add_argument("--way", choices=WAYS, default="float32")
    args = parser.parse_args()

    run = farandole.join()
    drawn = torch.rand(3, device=run.device).tolist()
    model = net(run.device)
    if args.way == "compiled":
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    scaler = torch.amp.GradScaler(run.device.type, enabled=args.way == "float16")
    run.replicate(model=model, optimizer=optimizer, scaler=scaler)
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(SAMPLES, 1, 12, 12, generator=generator)
    rows = TensorDataset(images, (images.sum((1, 2, 3)) > 0).long())
    found: list[float] = []
    loader = run.loader(rows, batch=farandole.GlobalBatch(BATCH, micro=MICRO))
    if args.way == "stream":
        torch.cuda.set_stream(torch.cuda.Stream())
    half = args.way if args.way in ("float16", "bfloat16") else None
    for step in run.steps(loader, epochs=EPOCHS):
        for x, y in step:
            if args.pace is not None and args.pace.exists():
                time.sleep(PACE_S)
            inputs = x.to(run.device)
            with torch.autocast(run.device.type, getattr(torch, half or "bfloat16"), enabled=half is not None):
                loss = F.cross_entropy(model(inputs), y.to(run.device))
            if args.operator:
                loss = loss + 1e-3 * OPERATORS[args.operator](model[:3](inputs))
            step.backward(scaler.scale(loss))
        scaler.step(optimizer)
        scaler.update()
        if step.ends_epoch:
            found.append(run.evaluate(model, rows, F.cross_entropy))
            run.log(loss_of_all=found[-1])
    if run.is_leader:
        told = {
            "fingerprint": run.fingerprint(), "last": found[-1].hex(), "drawn": drawn, "device": str(run.device),
            "in force": dict(settings.setting_facts()), VARIABLE: os.environ.get(VARIABLE, ""),
            "current": torch.cuda.current_device() if run.device.type == "cuda" else None,
        }  # fmt: skip
        partial = args.out.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(told))
        os.replace(partial, args.out)


if __name__ == "__main__":
    main()
