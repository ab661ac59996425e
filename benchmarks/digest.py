"""What the digest of a step's control word costs: its own time over the step's, in one process and on one thread.

python benchmarks/digest.py [--rounds 3] [--steps 60] [--markdown]

A step here is a forward and backward pass of 64 samples and the update, so an upper bound: no exchange, no loader. Each
round gives medians over its steps; the worst round's share is what counts, and the bound is `ALLOWED`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from models import CLASSES, SIDE, build
from records import middle
from tables import number, show, spread

from farandole.numerics.settings import Alterations
from farandole.training.digest import StepDigest
from farandole.training.replica import Replica

BATCH, WARMUP = 64, 10
ALLOWED = 0.005
MODELS = ("convolutional", "perceptron")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, worst = [], 0.0
    for model in MODELS:
        for name, make in OPTIMIZERS.items():
            rounds = [measured(model, make, options.steps) for _ in range(options.rounds)]
            shares = [digest / step for step, digest in rounds]
            worst = max(worst, *shares)
            steps, digests = [1e3 * step for step, _ in rounds], [1e6 * digest for _, digest in rounds]
            percents = [100 * share for share in shares]
            costs = [number(middle(steps)), number(middle(digests), 0)]
            rows.append([f"{model}, {name}", *costs, number(max(percents), 2), spread(percents, 2)])
    columns = ["model", "step ms", "digest us", "worst %", "min..max"]
    show(f"digests, {options.rounds} rounds", columns, rows, markdown=options.markdown)
    return int(worst > ALLOWED)


def measured(model_name: str, make: Callable[[Any], torch.optim.Optimizer], steps: int) -> tuple[float, float]:
    """The median seconds of a step without its digest, and of the digest."""
    model = build(model_name)
    optimizer = make(model.parameters())
    replica = Replica({"model": model, "optimizer": optimizer})
    digest, settings = StepDigest(replica), Alterations()
    images, labels = torch.randn(BATCH, 1, SIDE, SIDE), torch.randint(0, CLASSES, (BATCH,))
    others: list[float] = []
    digests: list[float] = []
    for step in range(steps + WARMUP):
        began = time.perf_counter()
        settings.look()
        digest.at(step, settings.known_values)
        digested = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        others.append(time.perf_counter() - digested)
        digests.append(digested - began)
    return middle(others[WARMUP:]), middle(digests[WARMUP:])


if __name__ == "__main__":
    raise SystemExit(main())
