"""What a step's looks at the replica cost, beside a step of the same model.

    python benchmarks/looks.py

The looks are those of `training/loop.py`: three at the tensors (`training/replica.py`), three at the modules'
attributes (`training/digest.py`), one at the plain values of optimizers (`training/replica.py`). CPU
time of this thread, the least of several rounds. The models: those of `steady.py`, and chains of small convolutions
that do little work for each parameter.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import models
import torch
import torch.nn.functional as F
from tables import show
from torch import nn

from farandole.training.digest import ModuleAttributes
from farandole.training.replica import Replica


def chain(blocks: int) -> nn.Sequential:
    """Four parameters and three buffers a block."""
    block = [[nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Identity()] for _ in range(blocks)]
    return nn.Sequential(*(nn.Sequential(*each) for each in block))


def least(call: Callable[[], object], times: int, rounds: int = 7) -> float:
    """In microseconds."""
    best = float("inf")
    for _ in range(rounds):
        before = time.thread_time()
        for _ in range(times):
            call()
        best = min(best, (time.thread_time() - before) / times)
    return best * 1e6


def row(name: str, net: nn.Module, x: torch.Tensor) -> list[str]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        output = net(x).flatten(1)
        F.cross_entropy(output, torch.zeros(len(x), dtype=torch.int64)).backward()
        optimizer.step()

    step()
    replica = Replica({"model": net, "optimizer": optimizer})
    attributes = ModuleAttributes({"model": net})

    def tensors() -> None:
        replica.look()
        replica.look(whole=False)
        replica.stays()

    def look_at_attributes() -> None:
        attributes.keep()
        attributes.shards_begin()
        attributes.shards_end()

    def plain() -> None:
        replica.plain.keep([*replica.parameters.values()])

    step_us = least(step, 2, 5)
    looks = [least(look, 50) for look in (tensors, look_at_attributes, plain)]
    found = [name, str(len(replica.parameters)), str(len(list(net.modules()))), f"{step_us / 1000:.1f}"]
    return [*found, *(f"{look:.0f}" for look in looks), *(f"{part / step_us:.3%}" for part in (*looks, sum(looks)))]


def main() -> None:
    torch.set_num_threads(1)
    images = torch.randn(64, 1, models.SIDE, models.SIDE)
    rows = [row(name, models.build(name), images) for name in ("convolutional", "perceptron")]
    rows += [row(f"chain of {blocks}", chain(blocks), torch.randn(8, 16, 16, 16)) for blocks in (5, 40, 250)]
    columns = ["model", "parameters", "modules", "step ms", "tensors us", "attributes us", "plain us"]
    show("Looks", [*columns, "tensors", "attributes", "plain", "all"], rows, markdown=True)


if __name__ == "__main__":
    main()
