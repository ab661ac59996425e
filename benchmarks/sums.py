"""What it saves to use the sums of gradients where other workers of the host have made them, instead of a copy.

    python benchmarks/sums.py                    # both models, 2 workers; about two minutes
    python benchmarks/sums.py --workers 4

In one run, blocks of steps take turns: in every second one each worker copies the sums into private memory. A step's
time is the gap between two step ends of a worker. A pair is a block in place and the next block, which copies; its
ratio compares the medians of the two, without the first steps of each. Gradients larger than
`collective/exchange.py` sends whole are used in place; smaller ones are always copied.
"""

from __future__ import annotations

import argparse

from contestants.sums_train import BLOCK
from launch import Farandole, Job
from records import middle
from tables import number, show, spread

BATCH = 64
SETTLE = 3  # steps of a block that are not counted


class Sums(Farandole):
    name = "sums"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="convolutional,perceptron")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=12, help="pairs of blocks, after one that is not counted")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    rows = [measured(model, options.workers, options.pairs) for model in options.models.split(",")]
    columns = ["model", "in place, ms a step", "copied, ms a step", "copied / in place", "min..max"]
    show(f"{options.workers} workers, {options.pairs} pairs of blocks", columns, rows, markdown=options.markdown)


def measured(model: str, workers: int, pairs: int) -> list[str]:
    """One row of the table."""
    samples = 2 * BLOCK * (pairs + 1) * BATCH * workers
    job = Job(model=model, workers=workers, batch=BATCH, micro=BATCH, samples=samples, minimum=workers)
    with Sums(job, limit_s=600) as fleet:
        fleet.start()
        fleet.wait_end(600)
        gaps = [record.gaps() for record in fleet.records()]
    blocks = [
        middle([gap for each in gaps for gap in each[start + SETTLE : start + BLOCK - 1]])
        for start in range(2 * BLOCK, 2 * BLOCK * (pairs + 1), BLOCK)
    ]
    in_place, copied = blocks[::2], blocks[1::2]
    ratios = [two / one for one, two in zip(in_place, copied, strict=True)]
    means = number(1e3 * middle(in_place)), number(1e3 * middle(copied))
    return [model, *means, number(middle(ratios), 3), spread(ratios, 3)]


if __name__ == "__main__":
    main()
