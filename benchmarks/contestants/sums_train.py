"""farandole's contestant, whose workers copy the sums of gradients in every second block of `BLOCK` steps."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from contestants.recorder import Recorder, arguments
from models import build, dataset

import farandole
from farandole.collective.arena import Arena

BLOCK = 20
arenas: list[Arena] = []


def main() -> None:
    options = arguments()
    made = Arena.__init__

    def init(self: Arena, *values: object, **named: object) -> None:
        made(self, *values, **named)  # pyright: ignore[reportArgumentType]
        arenas.append(self)

    Arena.__init__ = init  # type: ignore[method-assign]
    run = farandole.join()
    recorder = Recorder(os.environ.get("FARANDOLE_WORKER", "alone"))
    data = dataset(options.samples)
    model = build(options.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    run.replicate(model=model, optimizer=optimizer)
    batch = farandole.GlobalBatch(options.batch * options.workers, micro=options.micro)
    loader = run.loader(data, batch=batch, num_workers=0)
    for step in run.steps(loader, epochs=options.epochs):
        for arena in arenas:
            arena.copies_sums = step.number // BLOCK % 2 == 1
        for images, labels in step:
            step.backward(F.cross_entropy(model(images), labels))
        optimizer.step()
        recorder.step(step.number, step.view.size)


if __name__ == "__main__":
    main()
