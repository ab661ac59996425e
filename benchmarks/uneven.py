"""Throughput with two workers of which one has half a core, its shards dealt equally and by speed. Needs root.

    python benchmarks/uneven.py               # 3 rounds, about 7 minutes
    python benchmarks/uneven.py --quick       # 1 round

Each round launches the same job three times, in turn: undisturbed; with one worker held to half a core by a processor
quota and equal shares (`--equal`); and with shares by speed. After `SETTLE_S` the samples of `TIMED_S` are counted,
by the times that the run's own metrics carry. Where a core is shared with others, the quota is half of what a process
got of it just before, which is printed. Were computing all that a worker does, equal shares would use 2 x 0.5 cores
where 1 + 0.5 are there: a ratio of 1.5 at most, 16 / 11 = 1.45 with 16 shards. But the quota is spent on the exchange
and the update too, and stands still in the middle of them, so that equal shares cost more than half; and what the
others on the machine take changes between the cases. The first case tells how much worse than half it was.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from launch import Farandole, Job
from records import middle
from tables import number, show, spread

sys.path.append(str(Path(__file__).resolve().parents[1]))
from tests.support.quota import WHY_NOT, Quota, place, to_be_had

SHARDS, MICRO = 16, 8
SETTLE_S, TIMED_S = 25.0, 20.0
CASES = {
    "undisturbed": ("--by-speed", False),
    "half a core, equal": ("--equal", True),
    "by speed": ("--by-speed", True),
}


class Dealt(Farandole):
    """farandole, its shards dealt as `option` says."""

    option = "--by-speed"

    def start(self) -> None:
        size = ["--workers", str(self.job.workers), "--min", str(self.job.minimum), self.option]
        identity = ["--threads", "1", "--seed", "0", "--folder", str(self.run_folder())]
        self.spawn("run", [self.program(), "run", *size, *identity, *self.script()])

    def lines(self) -> list[dict[str, Any]]:
        path = self.run_folder() / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.lines() if "event" not in line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    if place() is None:
        raise SystemExit(WHY_NOT)
    paces: dict[str, list[float]] = {name: [] for name in CASES}
    parts: dict[str, str] = {}
    for _ in range(1 if options.quick else options.rounds):
        for name, (option, held) in CASES.items():
            pace, parts[name] = measure(option, held=held)
            paces[name].append(pace)
    equal = paces["half a core, equal"]
    rows: list[list[str]] = []
    for name, found in paces.items():
        ratios = [pace / base for pace, base in zip(found, equal, strict=True)]
        rows.append(
            [name, parts[name], number(middle(found)), spread(found), number(middle(ratios), 2), spread(ratios, 2)]
        )
    columns = ["2 workers", f"shards of {SHARDS}", "samples/s", "min..max", "ratio to equal", "min..max"]
    show("one of two workers has half a core", columns, rows, markdown=options.markdown)


def measure(option: str, *, held: bool) -> tuple[float, str]:
    """Samples a second of one launch once it has settled, and how its shards were dealt at the end."""
    job = Job(
        model="convolutional", workers=2, batch=SHARDS * MICRO // 2, micro=MICRO, samples=20_000, epochs=100, minimum=2
    )
    cores = to_be_had() / 2 if held else 0.0  # before there are workers that want a part of it too
    fleet = Dealt(job, limit_s=300)
    with fleet:
        fleet.option = option
        fleet.start()
        fleet.wait(lambda: len(fleet.steps()) > 10, 120, "tenth step")
        workers = fleet.api().status().workers
        with Quota(workers[-1].pid, cores) if held else contextlib.nullcontext() as quota:
            print(f"{option}: {f'a quota of {quota.cores:.2f} cores' if quota else 'undisturbed'}", file=sys.stderr)
            time.sleep(SETTLE_S)
            since = time.time()
            time.sleep(TIMED_S)
            until = time.time()
            dealt = " + ".join(str(worker.shards) for worker in fleet.api().status().workers)
        time.sleep(1.0)  # for the newest heartbeat's lines
        samples = sum(line["samples"] for line in fleet.steps() if since <= line["time"] < until)
        return samples / TIMED_S, dealt


if __name__ == "__main__":
    main()
