"""Many random schedules of the protocol, on all cores: `make simulate`, or

python -m tests.protocol.simulate --schedules 100000     seeds 0 to 99,999; exit code 1 after a violation
python -m tests.protocol.simulate --seed 1234            one schedule again, with its whole trace

Of eight schedules one has hosts in two zones, one slices in pieces, one a machine that computes wrong, one a replica
that drifts, and one a replica that may; in one hosts can't get their workers the data.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from farandole.protocol.worker import state_machine
from farandole.simulate.witness import Violation
from tests.protocol.schedule import Schedule, simulate

CHUNK = 250
WORLDS: tuple[dict[str, Any], ...] = (
    {"zones": True}, {"pieces": True}, {}, {}, {"starves": True}, {"errs": True}, {"drift": True},
    {"drift": True, "bits": "any"},
)  # fmt: skip
SHOWN = (
    "view",
    "lost",
    "left",
    "shares",
    "coordinator back",
    "out of reach",
    "state lost",
    "stopping",
    "failed",
    "unfed",
    "finished",
    "computes wrong",
    "replicas differ",
    "renewed",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="only this one, with its trace")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    state_machine.EVERY = 2  # simulated runs are short
    if options.seed is not None:
        return replay(options.seed)
    began = time.monotonic()
    starts = range(options.first, options.first + options.schedules, CHUNK)
    ranges = [range(start, min(start + CHUNK, starts.stop)) for start in starts]
    total: Counter[str] = Counter()
    columns = (TextColumn("schedules"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with multiprocessing.Pool(options.jobs) as pool, Progress(*columns) as progress:
        task = progress.add_task("", total=options.schedules)
        for seeds, counts, violation in pool.imap_unordered(several, ranges):
            if violation:
                progress.print(violation, markup=False, highlight=False)
            total.update(counts)
            progress.advance(task, seeds)
    seconds = time.monotonic() - began
    found = f"{total['violations']:,} violations" if total["violations"] else "no violation"
    print(f"{options.schedules:,} schedules, {total['events']:,} events, {seconds:.0f} s, {found}")
    print(", ".join(f"{total[name]:,} {name}" for name in SHOWN))
    return int(total["violations"] > 0)


def several(seeds: Sequence[int]) -> tuple[int, Counter[str], str]:
    """How many schedules, what has happened in them, and the first violation."""
    counts: Counter[str] = Counter()
    first = ""
    for seed in seeds:
        try:
            schedule = simulate(seed, **WORLDS[seed % len(WORLDS)])
        except Violation as violation:
            first = first or str(violation)
            counts["violations"] += 1
            continue
        counts.update(schedule.records)
        counts["events"] += schedule.events
    return len(seeds), counts, first


def replay(seed: int) -> int:
    schedule = Schedule(seed, trace=True, **WORLDS[seed % len(WORLDS)])
    try:
        schedule.run()
    except Exception as error:  # noqa: BLE001  a crash of the machines counts as well
        print("\n".join(schedule.lines))
        print(f"seed {seed}: {type(error).__name__}: {error}")
        return 1
    print("\n".join(schedule.lines))
    print(f"seed {seed}: no violation")
    return 0


if __name__ == "__main__":
    sys.exit(main())
