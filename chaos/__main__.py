"""`python -m chaos`: run after run, each under the faults of its own seed, until the time or the number is over.

A run that breaks a promise prints its seed, what was struck and what happened, and keeps its folder; the exit code is
then 1. Ctrl-C ends the run in hand and everything that it started.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

from chaos.network import missing
from chaos.trial import Told, network, processes, undisturbed


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="chaos", description="runs of the digits job under random faults")
    parser.add_argument("--minutes", type=float, default=10.0, help="begin no further run after so long")
    parser.add_argument("--runs", type=int, default=sys.maxsize, help="no more runs than this")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first run; the next has the next")
    parser.add_argument("--network", action="store_true", help="strike the links of hosts, not processes; needs root")
    parser.add_argument("--audit", default="0", help="of all shards, so many are computed a second time")
    options = parser.parse_args(arguments)
    trial = network if options.network else partial(processes, audit=options.audit)
    if options.network and (why := missing()):
        parser.error(f"--network: {why}")
    if options.network and options.audit != "0":
        parser.error("--audit goes with struck processes: leave out --network")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    place = Path(tempfile.mkdtemp(prefix="farandole-chaos-"))
    told: list[Told] = []
    began = time.monotonic()
    try:
        reference = undisturbed(place)
        while len(told) < options.runs and time.monotonic() - began < 60 * options.minutes:
            told.append(trial(options.seed + len(told), place, reference))
            print(line(told, time.monotonic() - began), flush=True)
    except KeyboardInterrupt:
        print("chaos: interrupted", file=sys.stderr)
    failed = [run for run in told if run.complaints]
    print(table(told))
    if failed:
        print(f"seeds that failed: {' '.join(str(run.seed) for run in failed)}; their folders are in {place}")
    else:
        shutil.rmtree(place)
    return 1 if failed or not told else 0


def line(told: list[Told], seconds: float) -> str:
    run = told[-1]
    struck = ", ".join(f"{kind} {number}" if number > 1 else kind for kind, number in run.faults.items()) or "nothing"
    failed = sum(bool(other.complaints) for other in told)
    faults = sum(other.faults.total() for other in told)
    return (
        f"seed {run.seed}: {'FAILED' if run.complaints else 'ok'}, {run.seconds:.1f} s, {run.views} views, {struck}"
        f"  | {len(told)} runs, {failed} failed, {faults} faults, {seconds / 60:.1f} min"
    )


def table(told: list[Told]) -> str:
    if not told:
        return "no run was made"
    faults = sum((run.faults for run in told), Counter[str]())
    seconds = sorted(run.seconds for run in told)
    rows = [
        ("runs", len(told)),
        ("failed", sum(bool(run.complaints) for run in told)),
        *faults.most_common(),
        ("faults", faults.total()),
        ("views", sum(run.views for run in told)),
        ("steps", sum(run.steps for run in told)),
        ("steps redone", sum(run.redone for run in told)),
        ("steps committed", sum(run.committed for run in told)),
        ("seconds a run, median", f"{median(seconds):.1f}"),
        ("seconds a run, longest", f"{seconds[-1]:.1f}"),
    ]
    return "\n".join(f"{name:<24} {value:>8}" for name, value in rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
