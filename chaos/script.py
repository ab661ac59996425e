"""Any training script through a random history of joins, leaves and kills, judged like the job of digits.

    python -m chaos.script examples/cifar10.py cifar10_jpeg.npz           alone, then struck; compares
    python -m chaos.script --seed 7 --blows 9 --every 20 SCRIPT [ARGUMENTS ...]

The script prints `fingerprint` and `run.fingerprint()` in the end. It trains alone first, as a world of one, which says
what the bits must be and that every sample of every epoch is used once; then with three workers, to which the history
of the seed happens. The exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from chaos.attack import Attack
from chaos.launched import ENVIRON, Launched
from chaos.schedule import KINDS, ROLES, Blow, Schedule
from chaos.trial import Told, judged
from chaos.verdict import Reference
from farandole.data.ledger import count

PACED = Path(__file__).with_name("paced.py")
HAPPENINGS = ("kill", "notice", "release", "scale", "join")
MOST = 4
TARGET_S = 60.0  # a replacement may have to start up before anybody else can be struck


def history(seed: int, *, workers: int, blows: int, every_s: float) -> Schedule:
    """Joins, leaves and at least one kill, by seed: the first after the first view, then `every_s` apart on average."""
    assert set(HAPPENINGS) < set(KINDS)
    draw = random.Random(seed)
    kinds = ["kill", *draw.choices(HAPPENINGS, k=blows - 1)]
    draw.shuffle(kinds)
    chosen = tuple(
        Blow(
            kind=kind,
            event="" if number else "view",
            delay_s=draw.uniform(0.0, 2.0) * every_s,
            role=draw.choice(list(ROLES)),
            choice=draw.random(),
            seconds=0.0,
            workers=draw.randint(2, MOST),
        )
        for number, kind in enumerate(kinds)
    )
    return Schedule(seed=seed, workers=workers, minimum=1, blows=chosen)


def alone(script: Path, arguments: Sequence[str], folder: Path, *, limit_s: float) -> tuple[Reference, str]:
    """What the script comes to as a world of one, and what it printed."""
    environ = {**ENVIRON, "FARANDOLE_FOLDER": str(folder), "FARANDOLE_LEDGER": "1"}
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=limit_s, check=False)
    found = re.search(r"^fingerprint (\w+)", done.stdout, re.MULTILINE)
    if done.returncode != 0 or found is None:
        raise RuntimeError(f"{script} alone: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    counts = count(folder / "ledger")
    epochs, samples = (1 + max(numbers) for numbers in zip(*counts, strict=True))
    assert counts == Counter((epoch, sample) for epoch in range(epochs) for sample in range(samples))
    return Reference(found[1], counts), done.stdout


def struck(
    script: Path, arguments: Sequence[str], plan: Schedule, folder: Path, reference: Reference, *, pace_s: float,
    limit_s: float,
) -> tuple[Told, str]:  # fmt: skip
    """The same with workers to whom the plan happens, each update `pace_s` slower meanwhile; and what was struck."""
    options = ["--workers", str(plan.workers), "--min", str(plan.minimum)]
    with Launched(folder, script, options, job=PACED, arguments=arguments, pace_s=pace_s) as run:
        attack = Attack(plan, run, target_s=TARGET_S)
        attack.fight()
        told = judged(plan.seed, run, run.finish(limit_s), attack.struck, reference)
        return told, "\n".join(str(blow) for blow in attack.struck)


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos.script", description="a training script through a random history")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=3, help="in the beginning")
    parser.add_argument("--blows", type=int, default=5)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two, on average")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for each of the two runs")
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="farandole-script-"))
    reference, printed = alone(args.script, args.arguments, place / "alone", limit_s=args.limit)
    print(f"alone:\n{printed}", flush=True)
    plan = history(args.seed, workers=args.workers, blows=args.blows, every_s=args.every)
    told, blows = struck(args.script, args.arguments, plan, place / "struck", reference, pace_s=0.0, limit_s=args.limit)
    print(f"struck:\n{blows}")
    samples = reference.counts.total()
    same = "the same bits, every sample once" if not told.complaints else "NOT the same: see above"
    print(f"{told.seconds:.0f} s, {told.views} views, {told.redone} steps redone, {samples} samples: {same}")
    if told.complaints:
        return 1
    shutil.rmtree(place)
    return 0


if __name__ == "__main__":
    sys.exit(main())
