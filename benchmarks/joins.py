"""How long the others stand still when a worker joins a run whose state is large.

    python benchmarks/joins.py                    # ten joins of 1 GB, steps of a second; about 4 minutes
    python benchmarks/joins.py --matmul 14        # cores that compute, instead of workers that wait for an accelerator

One launch: two workers of one host train, six micro-batches a step, a third of a second each. A third joins, takes part
in some steps, and leaves; then the next one. The pause is as `pauses.py` defines it: over the others the longest gap
between two step ends, from the view's proposal until two steps after the first step with the joiner, minus the usual
step, which is the median of the calm steps before. In the step in which it enters a joiner has the state to take over
and then one micro-batch to compute, with which it proves itself; the others have three each. "nothing" is the same
measure over the calm steps before each join. "first steps" are those after the entering step (and after the leaving
worker's last), against the median of the steps with as many workers: what a view costs beyond the change itself.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from launch import HERE, Farandole, Job, alive
from pauses import longest
from records import Record, middle
from tables import number, show

CALM_STEPS = 6
LIMIT_SECONDS = 120.0


class Large(Farandole):
    """farandole with a large state. `program`: the farandole to be run, this interpreter's by default."""

    def __init__(self, *, mb: int, matmul: int, program: Path | None, limit_s: float) -> None:
        super().__init__(Job(model="", workers=2, batch=0, micro=0, samples=0), limit_s=limit_s)
        self._options = ["--mb", str(mb), "--matmul", str(matmul)]
        self._program = program

    def program(self) -> str:
        return str(self._program or super().program())

    def script(self) -> list[str]:
        return [str(HERE / "contestants" / "large_train.py"), *self._options]


@dataclass(frozen=True, kw_only=True)
class Join:
    """Seconds. nothing: of the yardstick. first, first_left: of the steps after, over the usual ones."""

    pause_s: float
    nothing_s: float
    first_s: float
    first_left_s: float


def main() -> None:
    options = parse()
    joins: list[Join] = []
    with Large(mb=options.mb, matmul=options.matmul, program=options.program, limit_s=60 + 40 * options.joins) as fleet:
        fleet.start()
        for turn in range(options.joins):
            joins.append(join(fleet))
            print(f"join {turn + 1} of {options.joins}: {describe(joins[-1])}", file=sys.stderr)
    columns = ["event", "n", "median ms", "least ms", "most ms"]
    rows = [
        row("nothing", [join.nothing_s for join in joins]),
        row("join", [join.pause_s for join in joins]),
        row("first step after a join", [join.first_s for join in joins]),
        row("first step after a leave", [join.first_left_s for join in joins]),
    ]
    show(f"Pauses of the others, {options.mb} MB of state", columns, rows, markdown=options.markdown)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--joins", type=int, default=10)
    parser.add_argument("--mb", type=int, default=1000)
    parser.add_argument("--matmul", type=int, default=0, help="matrix products a micro-batch, instead of the wait")
    parser.add_argument("--program", type=Path, help="another version's farandole, to compare with")
    parser.add_argument("--markdown", action="store_true")
    return parser.parse_args()


def join(fleet: Large) -> Join:
    """One worker comes, and goes again."""
    veterans = {record.pid for record in calm(fleet, 2, 0.0)}
    asked = time.time()
    fleet.join()
    workers = calm(fleet, 3, asked)
    others = [record for record in workers if record.pid in veterans]
    joiner = next(record for record in workers if record.pid not in veterans)
    before = usual(others, 2, asked)
    proposed = fleet.proposed(asked)
    left = time.time()
    fleet.leave(joiner)
    stayed = [record for record in calm(fleet, 2, left) if record.pid in veterans]
    return Join(
        pause_s=max(longest(record, proposed, 3) for record in others) - before,
        nothing_s=max(max(steps(record, 2, asked)[-4:]) for record in others) - before,
        first_s=max(after(record, 3, asked) for record in stayed),
        first_left_s=max(after(record, 2, left) for record in stayed),
    )


def calm(fleet: Large, size: int, since: float) -> list[Record]:
    """The workers, once as many as `size` have taken `CALM_STEPS` together."""
    found: list[Record] = []

    def settled() -> bool:
        found[:] = [record for record in fleet.records() if alive(record.pid)]
        return len(found) == size and all(
            len([0 for time_, size_ in zip(record.times, record.sizes, strict=True) if time_ > since and size_ == size])
            > CALM_STEPS
            for record in found
        )

    fleet.wait(settled, LIMIT_SECONDS, f"training with {size} workers")
    return found


def steps(record: Record, size: int, until: float = float("inf")) -> list[float]:
    """The newest steps with so many workers that ended before `until`, seconds each; without the one that began it."""
    ends = [i for i, time_ in enumerate(record.times) if time_ <= until and record.sizes[i] == size]
    return [record.times[i] - record.times[i - 1] for i in ends if i and record.sizes[i - 1] == size][-CALM_STEPS:]


def usual(workers: list[Record], size: int, until: float) -> float:
    return middle([gap for record in workers for gap in steps(record, size, until)])


def after(record: Record, size: int, since: float) -> float:
    """The step after the first one of `size` workers, beyond the median of those that follow."""
    first = record.switch(size, since)
    assert first is not None
    gaps = [record.times[i] - record.times[i - 1] for i in range(first + 1, first + CALM_STEPS)]
    return gaps[0] - middle(gaps[1:])


def describe(join: Join) -> str:
    return (
        f"pause {1e3 * join.pause_s:.0f} ms, nothing {1e3 * join.nothing_s:.0f}, "
        f"first step {1e3 * join.first_s:.0f}, after the leave {1e3 * join.first_left_s:.0f}"
    )


def row(event: str, seconds: list[float]) -> list[str]:
    return [event, str(len(seconds)), *(number(1e3 * f(seconds), 0) for f in (middle, min, max))]


if __name__ == "__main__":
    main()
