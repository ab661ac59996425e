"""A job that prints and logs at every place, alike on all workers: python printing.py [--epochs N]"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings

import torch
from torch import nn
from torch.utils.data import TensorDataset

import farandole

STEPS_AN_EPOCH = 8


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    epochs = parser.parse_args().epochs
    print("before join")
    print("on standard error", file=sys.stderr)
    warnings.warn("a warning", stacklevel=1)
    run = farandole.join()
    logging.info("after join")
    inputs = torch.randn(8 * STEPS_AN_EPOCH, 4, generator=torch.Generator().manual_seed(0))
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.replicate(model=model, optimizer=optimizer)
    loader = run.loader(TensorDataset(inputs), batch=farandole.GlobalBatch(8, micro=2))
    for step in run.steps(loader, epochs=epochs):
        for (x,) in step:
            step.backward(model(x).square().mean())
        optimizer.step()
        print(f"printed step {step.number}")
        logging.info("logged step %d", step.number)
        if step.ends_epoch:
            run.log(loss=step.loss)
    print("after the loop")


main()
