"""The models of the benchmarks as a script, for what farandole costs a step of them in the same processes.

    farandole bench steps benchmarks/steps.py --model perceptron
    farandole bench steps --workers 4 benchmarks/steps.py --model convolutional --micro 16

64 samples a worker and step, as in `steady.py`, which starts its contestants afresh in each round: here they take turns
within the same processes, and the floor is among them.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from models import build, dataset

import farandole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="convolutional")
    parser.add_argument("--batch", type=int, default=128, help="samples a step, of all workers together")
    parser.add_argument("--micro", type=int, default=64, help="samples a micro-batch")
    parser.add_argument("--epochs", type=int, default=1000)
    options = parser.parse_args()
    run = farandole.join()
    model, data = build(options.model), dataset(64 * options.batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    run.replicate(model=model, optimizer=optimizer)
    loader = run.loader(data, batch=farandole.GlobalBatch(options.batch, micro=options.micro))
    for step in run.steps(loader, epochs=options.epochs):
        for images, labels in step:
            step.backward(F.cross_entropy(model(images), labels))
        optimizer.step()


if __name__ == "__main__":
    main()
