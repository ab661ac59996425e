"""The models of the benchmarks as a script, for what farandole costs a step of them in the same processes.

    farandole bench steps benchmarks/steps.py --model perceptron
    farandole bench steps --workers 4 benchmarks/steps.py --model convolutional --micro 16

64 samples a worker and step, as in `steady.py`, which starts its contestants afresh in each round: here they take turns
within the same processes, and the floor is among them.

`--variant` changes one thing of the process, for all contestants alike, to see what it is worth: `freeze` takes what is
there out of the collector's sight, `no-collector` switches it off, `pinned` binds each worker to a core of its own,
`switch` lets threads change ten times as often, `trimming` has malloc give back what is freed, as glibc does by itself.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import sys

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
    parser.add_argument("--variant", default="none",
                        choices=["none", "freeze", "no-collector", "pinned", "switch", "trimming"])  # fmt: skip
    options = parser.parse_args()
    run = farandole.join()
    model, data = build(options.model), dataset(64 * options.batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    run.replicate(model=model, optimizer=optimizer)
    loader = run.loader(data, batch=farandole.GlobalBatch(options.batch, micro=options.micro))
    for step in run.steps(loader, epochs=options.epochs):
        if step.number == 0:
            vary(options.variant, run.rank)
        for images, labels in step:
            step.backward(F.cross_entropy(model(images), labels))
        optimizer.step()


def vary(variant: str, rank: int) -> None:
    match variant:
        case "freeze":
            gc.collect()
            gc.freeze()
        case "no-collector":
            gc.disable()
        case "pinned":
            cores = sorted(os.sched_getaffinity(0))
            for thread in os.listdir("/proc/self/task"):
                os.sched_setaffinity(int(thread), {cores[rank % len(cores)]})
        case "switch":
            sys.setswitchinterval(5e-4)
        case "trimming":
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(-3, 128 << 10)  # M_MMAP_THRESHOLD
            mallopt(-1, 128 << 10)  # M_TRIM_THRESHOLD
        case _:
            pass


if __name__ == "__main__":
    main()
