"""What a frozen worker costs the others: judged by what is usual, and by the constant that is the ceiling of that.

    python benchmarks/silences.py                # twelve freezes of each kind; about 8 minutes
    python benchmarks/silences.py --launches 1   # three of each

Three workers train as in `pauses.py`, some 50 ms a step; one of them (each in turn) is stopped with SIGSTOP at a random
moment, and killed once the others go on; another one takes its place before the next. The cost is, over the survivors,
the longest gap between two step ends from the signal on, minus the median step. Three freezes a launch: that many a run
may suspect early before it has earned more (`protocol/failure_detector.py`, 6). For the constant the same coordinator
is started with a floor that nothing is below.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time

from launch import Job, Process, alive
from outage import Bare
from pauses import JOB, LIMIT_SECONDS, longest, reached, two_steps_after, usual, wait_steps
from records import middle
from tables import number, show, spread

from farandole.protocol.failure_detector import STOCK

CONSTANT = """
import sys
from farandole.protocol import failure_detector
failure_detector.FLOOR_S = float("inf")
from farandole.coordinator.process import main
sys.exit(main(sys.argv[1:]))
"""
HEARTBEAT_S = 0.5


class Frozen(Bare):
    """`constant`: its coordinator knows nothing of what is usual."""

    constant = False
    freezes = 0

    def coordinate(self, *again: str) -> Process:
        if not self.constant:
            return super().coordinate(*again)
        return self.spawn("coordinator", [sys.executable, "-c", CONSTANT, str(self.run), *again])

    def freeze(self) -> float:
        """What it has cost, in s."""
        workers = [record for record in self.records() if alive(record.pid)]
        victim = workers[self.freezes % len(workers)].pid
        others = {record.pid for record in workers} - {victim}
        self.freezes += 1
        time.sleep(random.uniform(0.0, HEARTBEAT_S))
        sent = time.time()
        before = usual(workers, sent)
        os.kill(victim, signal.SIGSTOP)

        def settled() -> bool:
            return all(two_steps_after(record, sent, len(workers)) for record in self.records() if record.pid in others)

        self.wait(settled, LIMIT_SECONDS, "going on")
        rest = [record for record in self.records() if record.pid in others]
        cost = max(longest(record, sent, reached(record, sent, len(workers))) for record in rest) - before
        os.kill(victim, signal.SIGKILL)
        self.join()
        return cost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=4, help="of each kind, in turns")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    costs: dict[str, list[float]] = {"the constant": [], "what is usual": []}
    for _ in range(options.launches):
        for name, found in costs.items():
            found += launch(constant=name == "the constant")
            print(f"{name}: {', '.join(f'{1000 * cost:.0f}' for cost in found)} ms", file=sys.stderr)
    rows = [
        [name, str(len(found)), number(1000 * middle(found), 0), spread([1000 * cost for cost in found], 0)]
        for name, found in costs.items()
    ]
    show("What a frozen worker costs the others", ("limit", "n", "median ms", "range ms"), rows,
         markdown=options.markdown)  # fmt: skip


def launch(*, constant: bool) -> list[float]:
    job = Job(model=JOB.model, workers=3, batch=JOB.batch, micro=JOB.micro, samples=JOB.samples, epochs=JOB.epochs)
    costs: list[float] = []
    with Frozen(job, limit_s=300) as fleet:
        fleet.constant = constant
        fleet.start()
        for _ in range(STOCK):
            wait_steps(fleet, job.workers, time.time())
            costs.append(fleet.freeze())
    return costs


if __name__ == "__main__":
    main()
