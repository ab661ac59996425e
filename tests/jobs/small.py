"""A small job: quick to start, and every draw of a random number shows in its bits.

  python small.py OUT [options]      OUT: the fingerprint, by rank 0

--epochs, --base-steps, --samples, --batch, --micro, --drop-last   how long it is and how its data is divided
--rule RULE      the batch follows the workers
--width, --frozen MB   the size of the net; with frozen parameters a joiner has that much more to take over
--pace FILE      while FILE holds a number, every step takes at least so many seconds; what is in it counts at once
--slow WORKER    only this worker keeps the pace, each micro-batch a quarter of it: the others wait for it
--load FILE      while FILE holds a number, every micro-batch multiplies matrices so many times beside its own work
--anneal         the loop body sets two buffers before each step; OUT has their values after the fingerprint
--once SECONDS   after the inner loop of step `ONCE_AT`, one worker has work to do that takes so long. It draws random
                 numbers and changes buffers, none of which may show in the bits. OUT.began-PID: it works;
                 OUT.done: the process id, at its end; OUT.learned-PID: each worker's: is the work its own;
                 OUT.result-PID: each worker's: the work's result, that process id
--messages       OUT-RANK.json: [[seconds, view, sent, received], ...], one entry a step: control messages so far
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import farandole
from farandole import joining

SAMPLES, BATCH, MICRO, EPOCHS = 130, 16, 4, 6
STEPS = EPOCHS * -(-SAMPLES // BATCH)
RATE, ONCE_AT = 0.999, 2


class Annealed(nn.Sequential):
    """`temperature` is set anew in each step, `noise` is a little less than it was."""

    temperature: torch.Tensor
    noise: torch.Tensor

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.register_buffer("temperature", torch.ones(()))
        self.register_buffer("noise", torch.ones(3), persistent=False)

    def anneal(self, step: int) -> None:
        self.temperature.fill_(1.0 + RATE**step)
        self.noise.mul_(RATE)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input + 0.1 * self.noise.sum() * torch.randn_like(input)) / self.temperature


def drawn() -> float:
    """The sum of a draw from each of the three global generators."""
    return random.random() + float(np.random.standard_normal()) + float(torch.rand(()))


def keep(pace: Path) -> None:
    """Keeps the pace for one micro-batch, a quarter of a step."""
    began = time.monotonic()
    with contextlib.suppress(FileNotFoundError):
        while (rest := float(pace.read_text() or 0) / 4 - (time.monotonic() - began)) > 0:
            time.sleep(min(rest, 0.05))


def compute(load: Path) -> None:
    matrix = torch.eye(256)
    with contextlib.suppress(FileNotFoundError):
        for _ in range(int(load.read_text() or 0)):
            torch.mm(matrix, matrix)


def replace(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    partial.write_text(text)
    os.replace(partial, path)


def work(out: Path, model: nn.Module, seconds: float) -> None:
    Path(f"{out}.began-{os.getpid()}").touch()
    until = time.monotonic() + seconds
    model.eval()
    model.train()
    while time.monotonic() < until:
        model(torch.randn(5, 8) + drawn())
        time.sleep(0.05)
    model.eval()
    replace(Path(f"{out}.done"), str(os.getpid()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--base-steps", type=int, help="the run's length in these instead")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--micro", type=int, default=MICRO)
    parser.add_argument("--drop-last", action="store_true")
    parser.add_argument("--rule")
    parser.add_argument("--width", type=int, default=32, help="of the hidden layer")
    parser.add_argument("--frozen", type=int, default=0)
    parser.add_argument("--pace", type=Path)
    parser.add_argument("--slow", metavar="WORKER")
    parser.add_argument("--load", type=Path)
    parser.add_argument("--anneal", action="store_true")
    parser.add_argument("--once", type=float, metavar="SECONDS")
    parser.add_argument("--messages", action="store_true")
    args = parser.parse_args()

    run = farandole.join()
    hidden = nn.Linear(8, args.width), nn.BatchNorm1d(args.width), nn.ReLU(), nn.Dropout(0.2)
    model = (Annealed if args.anneal else nn.Sequential)(*hidden, nn.Linear(args.width, 1))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batch: Any = farandole.GlobalBatch(args.batch, micro=args.micro)
    if args.rule:
        batch = farandole.PerWorkerBatch(args.batch // 2, micro=args.micro, rule=getattr(farandole, args.rule)())
        if args.rule != "SquareRoot":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    rest = nn.ParameterList(
        nn.Parameter(torch.arange(n, n + 250_000.0), requires_grad=False) for n in range(args.frozen)
    )
    run.replicate(model=model, optimizer=optimizer, schedule=schedule, rest=rest)
    generator = torch.Generator().manual_seed(5)
    rows = TensorDataset(torch.randn(args.samples, 8, generator=generator))
    loader = run.loader(rows, batch=batch, drop_last=args.drop_last)
    length = {"base_steps": args.base_steps} if args.base_steps else {"epochs": args.epochs}
    keeps_pace = args.pace is not None and args.slow in (None, os.environ.get("FARANDOLE_WORKER"))
    messages: list[tuple[float, int, dict[str, int], dict[str, int]]] = []
    for step in run.steps(loader, **length):
        strength = 1 + 0.1 * drawn()
        if isinstance(model, Annealed):
            model.anneal(step.number)
        for (inputs,) in step:
            if keeps_pace:
                keep(args.pace)
            if args.load is not None:
                compute(args.load)
            noisy = inputs * (1 + 0.1 * random.random()) + 0.1 * float(np.random.standard_normal())
            step.backward(strength * (model(noisy) - noisy.sum(1, keepdim=True)).square().mean())
        if args.once is not None and step.number == ONCE_AT:
            with run.once() as mine:
                Path(f"{args.out}.learned-{os.getpid()}").write_text(str(mine))
                if mine:
                    work(args.out, model, args.once)
                    mine.result = os.getpid()
            Path(f"{args.out}.result-{os.getpid()}").write_text(str(mine.result))
        optimizer.step()
        with torch.no_grad():
            model[-1].bias.add_(0.001 * drawn())
        for _ in range(step.base_steps):
            schedule.step()
        if args.messages:
            client = joining.current()._context  # type: ignore[union-attr]
            messages.append((time.monotonic(), step.view.number, dict(client.sent), dict(client.received)))
    if args.messages:
        Path(f"{args.out}-{run.rank}.json").write_text(json.dumps(messages))
    if run.is_leader:
        buffers = f" {model.temperature.item()} {model.noise[0].item()}" if isinstance(model, Annealed) else ""
        replace(args.out, run.fingerprint() + buffers)


if __name__ == "__main__":
    main()
