"""A state of `--mb` MB, of which a little is trained with Adam and the rest is parameters that are frozen.

A micro-batch takes a third of a second: it sleeps, as a process does whose accelerator computes, or multiplies matrices
for about as long (`--matmul`), which takes the core that a joiner would use.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.nn.functional as F
from contestants.recorder import Recorder
from models import build, dataset
from torch import nn

import farandole

MICRO_SECONDS = 1 / 3
MICRO_BATCHES, MICRO = 6, 8
PIECE = 8 << 20  # elements
MATRIX = 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, required=True)
    parser.add_argument("--matmul", type=int, default=0, help="so many matrix products a micro-batch, for the sleep")
    options = parser.parse_args()
    run = farandole.join()
    recorder = Recorder(os.environ.get("FARANDOLE_WORKER", "alone"))
    data = dataset(60_000)
    trained = build("perceptron")
    elements = options.mb * 1_000_000 // 4 - 3 * sum(parameter.numel() for parameter in trained.parameters())
    frozen = nn.ParameterList(
        nn.Parameter(torch.full((min(PIECE, elements - start),), 0.5 + start), requires_grad=False)
        for start in range(0, elements, PIECE)
    )
    model = nn.ModuleDict({"trained": trained, "frozen": frozen})
    optimizer = torch.optim.Adam(trained.parameters(), lr=1e-4)
    run.replicate(model=model, optimizer=optimizer)
    loader = run.loader(data, batch=farandole.GlobalBatch(MICRO_BATCHES * MICRO, micro=MICRO), num_workers=0)
    matrix = torch.eye(MATRIX)
    recorder.mark("ready")
    for step in run.steps(loader, epochs=1000):
        for images, labels in step:
            if options.matmul:
                for _ in range(options.matmul):
                    torch.mm(matrix, matrix)
            else:
                time.sleep(MICRO_SECONDS)
            step.backward(F.cross_entropy(trained(images), labels))
        optimizer.step()
        recorder.step(step.number, step.view.size)


if __name__ == "__main__":
    main()
