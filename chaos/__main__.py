"""`python -m chaos`: run after run, each under the faults of its own seed, until the time or the number is over.

A run that breaks a promise prints its seed, what was struck and what happened, and keeps its folder; the exit code is
then 1. Ctrl-C ends the run in hand and everything that it started.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from chaos.attack import ENVIRON, Attack
from chaos.job import EPOCHS
from chaos.schedule import schedule
from chaos.verdict import Reference, complaints
from farandole.data.ledger import count

ALONE_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Told:
    """One run, for the table. `redone`: steps whose exchange was done again."""

    seed: int
    seconds: float
    faults: Counter[str]
    views: int
    redone: int
    complaints: list[str]


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos", description="runs of the digits job under random faults")
    parser.add_argument("--minutes", type=float, default=10.0, help="begin no further run after so long")
    parser.add_argument("--runs", type=int, default=sys.maxsize, help="no more runs than this")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first run; the next has the next")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    place = Path(tempfile.mkdtemp(prefix="farandole-chaos-"))
    told: list[Told] = []
    began = time.monotonic()
    try:
        reference = undisturbed(place)
        while len(told) < options.runs and time.monotonic() - began < 60 * options.minutes:
            told.append(one(options.seed + len(told), place, reference))
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


def undisturbed(place: Path) -> Reference:
    """The same job as a world of one, and on the way the digits in a file."""
    from sklearn.datasets import load_digits  # slow, and needed once

    data = load_digits()
    np.savez(digits(place), images=data.images.astype(np.float32), labels=data.target.astype(np.int64))
    folder = place / "undisturbed"
    job = [sys.executable, str(Path(__file__).with_name("job.py")), str(digits(place))]
    environ = {**ENVIRON, "FARANDOLE_FOLDER": str(folder), "FARANDOLE_LEDGER": "1"}
    done = subprocess.run(job, env=environ, stdout=subprocess.PIPE, text=True, timeout=ALONE_S, check=True)
    counts = count(folder / "ledger")
    train = sum(1 for epoch, _ in counts if epoch == 0)
    assert counts == Counter((epoch, sample) for epoch in range(EPOCHS) for sample in range(train))
    return Reference(done.stdout.rsplit("fingerprint ", 1)[-1].strip(), counts)


def digits(place: Path) -> Path:
    return place / "digits.npz"


def one(seed: int, place: Path, reference: Reference) -> Told:
    folder = place / f"run-{seed}"
    with Attack(schedule(seed), folder, digits(place)) as attack:
        code = attack.fight()
        watch = attack.watch
        left = watch.processes()
        found = [*complaints(code, watch.lines, folder / "ledger", left, reference), *attack.troubles()]
        if found:
            print(f"\nseed {seed}: {'; '.join(found)}\n{report(attack)}", flush=True)
    if not found:
        shutil.rmtree(folder)
        attack.output.unlink()
    return Told(
        seed=seed,
        seconds=attack.seconds,
        faults=Counter(struck.blow.kind for struck in attack.struck if struck.target),
        views=watch.seen["view"],
        redone=sum(event.get("outcome") == "redo" for event in watch.events("view")),
        complaints=found,
    )


def report(attack: Attack) -> str:
    """What was planned, what was struck, what happened."""
    plan = attack.schedule
    lines = [f"{plan.workers} workers, --min {plan.minimum}; folder {attack.folder}", "struck:"]
    lines += [f"  {struck}" for struck in attack.struck]
    lines += ["events:", *(f"  {json.dumps(line)}" for line in attack.watch.lines if "event" in line)]
    lines += ["output:", attack.output.read_text(errors="replace")[-3000:]]
    return "\n".join(lines)


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
        ("steps redone", sum(run.redone for run in told)),
        ("seconds a run, median", f"{median(seconds):.1f}"),
        ("seconds a run, longest", f"{seconds[-1]:.1f}"),
    ]
    return "\n".join(f"{name:<24} {value:>8}" for name, value in rows)


if __name__ == "__main__":
    sys.exit(main())
