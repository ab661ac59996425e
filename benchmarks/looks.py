"""The cost of a step's three looks at the replica (`training/tensor_listing.py`), beside the step of the same model.

    python benchmarks/looks.py

CPU time of this thread, the least of several rounds, in microseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from farandole.training.replica import Replica


def model(blocks: int) -> nn.Sequential:
    """Four parameters and three buffers a block."""
    block = [[nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Identity()] for _ in range(blocks)]
    return nn.Sequential(*(nn.Sequential(*each) for each in block))


def least(call: Callable[[], object], times: int, rounds: int = 7) -> float:
    best = float("inf")
    for _ in range(rounds):
        before = time.thread_time()
        for _ in range(times):
            call()
        best = min(best, (time.thread_time() - before) / times)
    return best * 1e6


def main() -> None:
    torch.set_num_threads(1)
    print("parameters  buffers  looks, us  step, us  part")
    for blocks in (5, 40, 250):
        net = model(blocks)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        replica = Replica({"model": net, "optimizer": optimizer})
        x = torch.randn(8, 16, 16, 16)

        def look(replica: Replica = replica) -> None:
            replica.look()
            replica.look(whole=False)
            replica.stays()

        def step(net: nn.Module = net, optimizer: torch.optim.Optimizer = optimizer, x: torch.Tensor = x) -> None:
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()

        looks, steps = least(look, 50), least(step, 2, 5)
        row = f"{len(replica.parameters):>10}  {len(replica.buffers):>7}  {looks:>9.1f}  {steps:>8.0f}"
        print(f"{row}  {looks / steps:.2%}")


if __name__ == "__main__":
    main()
