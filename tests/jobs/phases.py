"""Three loops: on one data set, on another one with a frozen trunk and a new head, and one that is left early.

    python phases.py OUT [--pace FILE] [--other-data FILE] [--per-worker]      OUT: the fingerprint, by one worker

While --pace FILE is there, every micro-batch takes as many seconds more as it says, 0.05 if it is empty. A worker that
starts while --other-data FILE is there has one more sample in the second data set. With --per-worker each worker adds
4 samples to a batch, 6 in the second loop, and the third one is not left early.
"""

from __future__ import annotations

import argparse
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import farandole

FIRST, SECOND = 96, 70
EPOCHS = (10, 20)
STEPS = (EPOCHS[0] * FIRST // 8, EPOCHS[1] * -(-SECOND // 12), 5)  # of the three loops


def rows(length: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(length, 6, generator=generator), torch.randint(0, 3, (length,), generator=generator)
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--pace", type=Path)
    parser.add_argument("--other-data", type=Path)
    parser.add_argument("--per-worker", action="store_true")
    args = parser.parse_args()
    run = farandole.join()
    torch.manual_seed(3)
    trunk = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2))
    head = nn.Linear(8, 3)
    model = nn.Sequential(trunk, head)
    pretraining: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if args.per_worker:  # one rule must fit all optimizers
        pretraining = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    finetuning = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
    run.replicate(model=model, pretraining=pretraining, finetuning=finetuning, best=0.0)
    more = args.other_data is not None and args.other_data.exists()
    first, second = rows(FIRST, 5), rows(SECOND + more, 6)
    first_batch: farandole.Batch = farandole.GlobalBatch(8, micro=2)
    second_batch: farandole.Batch = farandole.GlobalBatch(12, micro=3)
    if args.per_worker:
        first_batch, second_batch = farandole.PerWorkerBatch(4, micro=2), farandole.PerWorkerBatch(6, micro=3)
    first_loader = run.loader(first, batch=first_batch)
    second_loader = run.loader(second, batch=second_batch)

    def train(step: farandole.Step, optimizer: torch.optim.Optimizer) -> None:
        for inputs, targets in step:
            if args.pace is not None:
                with suppress(FileNotFoundError):
                    time.sleep(float(args.pace.read_text() or 0.05))
            logits = model(inputs)
            step.backward(F.cross_entropy(logits, targets))
            step.mean(accuracy=logits.argmax(1) == targets)
        run.log(loop_step=step.number, loop_epoch=step.epoch, loss=step.loss, **step.means)
        optimizer.step()

    for step in run.steps(first_loader, epochs=EPOCHS[0]):
        trunk[3].p = 0.2 + step.epoch / 100
        train(step, pretraining)
    accuracy = run.evaluate(model, second, lambda logits, y: logits.argmax(1) == y)
    with run.once() as mine:
        if mine:
            mine.result = {"scale": 0.5 + accuracy}
    run.log(pretrained=accuracy)
    trunk.requires_grad_(False)
    head.reset_parameters()
    scale = mine.result["scale"] + torch.rand(()).item()
    for step in run.steps(second_loader, epochs=EPOCHS[1]):
        train(step, finetuning)
        run.log(scale=scale)
    for step in run.steps(first_loader, base_steps=100):
        train(step, finetuning)
        run.state.best = max(run.state.best, step.means["accuracy"])
        if step.number == sum(STEPS) - 1 and not args.per_worker:
            break
    with run.once() as mine:
        if mine:
            args.out.write_text(run.fingerprint())


if __name__ == "__main__":
    main()
