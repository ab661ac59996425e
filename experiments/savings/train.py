"""A training of digits that takes as long as on machines of their own: each micro-batch lasts `--pad` seconds.

Workers of one laptop share its cores. Here they only wait most of the time, as a process does whose GPU computes, so N
workers are as fast as N machines. What they train is real: the accuracy on the test images is printed.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn

import farandole
from examples.digits import correct, digits, net


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--micro", type=int, default=4)
    parser.add_argument("--pad", type=float, default=0.04)
    args = parser.parse_args()

    run = farandole.join()
    train_set, test_set = digits()
    model: nn.Module = net(16).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    loader = run.loader(train_set, batch=farandole.GlobalBatch(args.batch, micro=args.micro))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * len(loader))
    run.replicate(model=model, optimizer=optimizer, schedule=schedule)
    for step in run.steps(loader, epochs=args.epochs):
        for images, labels in step:
            ends = time.monotonic() + args.pad
            step.backward(F.cross_entropy(model(images), labels))
            time.sleep(max(ends - time.monotonic(), 0.0))
        optimizer.step()
        schedule.step()
    accuracy = run.evaluate(model, test_set, correct)
    if run.is_leader:
        print(f"accuracy {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    main()
