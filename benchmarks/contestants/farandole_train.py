"""farandole, written as its README shows it: join, replicate, and the two nested loops."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from contestants.recorder import Recorder, arguments
from models import build, dataset

import farandole


def main() -> None:
    options = arguments()
    run = farandole.join()
    recorder = Recorder(os.environ.get("FARANDOLE_WORKER", "alone"))
    data = dataset(options.samples)
    model = build(options.model)
    recorder.built(sum(4 * parameter.numel() for parameter in model.parameters()))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    run.replicate(model=model, optimizer=optimizer)
    batch = farandole.GlobalBatch(options.batch * options.workers, micro=options.micro)
    loader = run.loader(data, batch=batch, num_workers=0)
    recorder.mark("ready")
    for step in run.steps(loader, epochs=options.epochs):
        for images, labels in step:
            step.backward(F.cross_entropy(model(images), labels))
        optimizer.step()
        recorder.step(step.number, step.view.size)


if __name__ == "__main__":
    main()
