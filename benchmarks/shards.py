"""What a shard costs: a step of many shards against plain accumulation of the same micro-batches.

    python benchmarks/shards.py                      # 2 models, micro-batches of 2, 8 and 32 samples; some 3 minutes
    python benchmarks/shards.py --models perceptron --micro 2

Both sides are in one process and take turns, a step each: farandole's loop as a world of one (random state, buffers,
lanes, partial sums; no peers), and `loss.backward()` on the same micro-batches, from the same loader class, into
`.grad`. The ratio of two neighbours is one figure; shown are the median of all and the middle half of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
import torch.nn.functional as F
from models import build, dataset
from tables import number, show
from torch.utils.data import DataLoader

import farandole

BATCH = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="convolutional,perceptron")
    parser.add_argument("--micro", default="2,8,32", help="samples a micro-batch, with commas")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    rows: list[list[str]] = []
    for model in options.models.split(","):
        for micro in map(int, options.micro.split(",")):
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:  # a process has one run
                ratios, plain, ours = fresh.submit(compare, model, micro, options.steps).result()
            quarters = statistics.quantiles(ratios, n=4)
            rows.append([
                model, str(micro), number(1e3 * plain, 1), number(1e3 * ours, 1), number(quarters[1], 3),
                f"{quarters[0]:.3f}..{quarters[2]:.3f}",
            ])  # fmt: skip
    columns = ["model", "micro", "plain ms", "farandole ms", "ratio", "middle half"]
    show(f"a step of {BATCH} samples, in micro-batches", columns, rows, markdown=options.markdown)


def compare(name: str, micro: int, steps: int) -> tuple[list[float], float, float]:
    """The ratios, and the median seconds of a plain step and of farandole's."""
    run = farandole.join()
    theirs = plain_steps(name, micro)
    model, data = build(name), dataset(BATCH * steps)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    run.replicate(model=model, optimizer=optimizer)
    loader = run.loader(data, batch=farandole.GlobalBatch(BATCH, micro=micro), num_workers=0)
    plain: list[float] = []
    ours: list[float] = []
    for step in run.steps(loader, epochs=1):
        began = time.perf_counter()
        for images, labels in step:
            step.backward(F.cross_entropy(model(images), labels))
        optimizer.step()
        ours.append(time.perf_counter() - began)
        plain.append(next(theirs))
    kept = steps // 5  # what comes before is warm-up
    ratios = [a / b for a, b in zip(ours[kept:], plain[kept:], strict=True)]
    return ratios, statistics.median(plain[kept:]), statistics.median(ours[kept:])


def plain_steps(name: str, micro: int) -> Iterator[float]:
    """The seconds of one step after the other."""
    model = build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    loader = DataLoader(dataset(BATCH * 8), batch_size=micro)
    while True:
        batches = iter(loader)
        for _ in range(8):
            began = time.perf_counter()
            for _ in range(BATCH // micro):
                images, labels = next(batches)
                F.cross_entropy(model(images), labels).mul(micro / BATCH).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield time.perf_counter() - began


if __name__ == "__main__":
    main()
