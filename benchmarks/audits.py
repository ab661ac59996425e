"""Whether audits find machines that compute wrong: real runs, each with one bit of one gradient flipped on one worker.

    python benchmarks/audits.py --runs 100 --part 1        # found in the step in which it is flipped?
    python benchmarks/audits.py --runs 20 --part 0.1       # a worker that is wrong from some step on: after how many?
    python benchmarks/audits.py --cost --runs 3            # what it costs: the digits on two workers, in turns

Three workers train a small net, 6 shards a step. Which worker, which step and which of the gradient's bits is drawn by
the run's number, which is its seed too. With `--part 1` the bit is flipped in one step alone; otherwise from it on.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

JOB = Path(__file__).parents[1] / "tests" / "jobs" / "faults.py"
DIGITS = Path(__file__).parents[1] / "examples" / "digits.py"
PARTS = (0.01, 0.1, 1.0)
SHARDS, BITS = 6, 32 * 32  # of the job's first weight


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--part", type=float, default=1.0)
    parser.add_argument("--cost", action="store_true")
    args = parser.parse_args()
    if args.cost:
        cost(args.runs)
        return
    right, waited = 0, list[int]()
    for number in range(args.runs):
        draw = random.Random(number)
        worker, step, bit = draw.choice(("w1", "w2", "w3")), draw.randrange(2, 20), draw.randrange(BITS)
        found = run(number, worker, step, bit, args.part)
        ok = found is not None and found[0] == worker and (found[1] == step or args.part < 1.0)
        right += ok
        if found is not None:
            waited.append(found[1] - step)
        print(f"run {number}: {worker}, step {step}, bit {bit}: {found if found else 'NOT FOUND'}", flush=True)
    print(f"{right} of {args.runs} found", end="")
    print(f"; steps until then: {sorted(waited)}" if args.part < 1.0 else ", in the step itself")


def cost(runs: int) -> None:
    """Mean seconds a step after the first 50, beside those without an audit: the median over the runs' ratios."""
    ratios: dict[float, list[float]] = {part: [] for part in PARTS}
    took: dict[float, list[float]] = {part: [] for part in (0.0, *PARTS)}
    for _ in range(runs):
        plain = seconds(0.0)
        took[0.0].append(plain)
        for part in PARTS:
            took[part].append(seconds(part))
            ratios[part].append(took[part][-1] / plain)
    print("| audited | ms a step | against none | part times workers |\n| --- | --- | --- | --- |")
    print(f"| none | {1e3 * statistics.median(took[0.0]):.1f} | | |")
    for part in PARTS:
        ratio, step = statistics.median(ratios[part]), 1e3 * statistics.median(took[part])
        print(f"| {part:.1%} | {step:.1f} | +{ratio - 1:.1%} | +{2 * part:.1%} |")


def seconds(part: float) -> float:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "run")
        command = [sys.executable, "-m", "farandole", "run", "--workers", "2", "--min", "2", "--equal", "--folder"]
        command += [str(folder), "--audit", str(part), str(DIGITS), "--epochs", "20"]
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return statistics.mean(line["seconds"] for line in lines if "loss" in line and line["step"] >= 50)


def run(seed: int, worker: str, step: int, bit: int, part: float) -> tuple[str, int] | None:
    """Who was found to compute wrong, and in which step."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "run")
        command = [sys.executable, "-m", "farandole", "run", "--workers", "3", "--min", "3", "--audit", str(part)]
        command += ["--seed", str(seed), "--folder", str(folder), str(JOB), place, "--fault"]
        command += ["wrong-gradient-once" if part == 1.0 else "wrong-gradient", "--worker", worker, "--at", str(step)]
        command += ["--bit", str(bit), "--steps", "60", "--batch", "24", "--micro", "4"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while process.poll() is None:
                if found := verdict(folder):
                    return found
                try:
                    process.wait(0.1)
                except subprocess.TimeoutExpired:
                    continue
            return verdict(folder)
        finally:
            process.kill()  # the kernel ends the rest
            process.wait()


def verdict(folder: Path) -> tuple[str, int] | None:
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []
    wrong = [line["worker"] for line in lines if line.get("event") == "computes wrong"]
    views = [line for line in lines if line.get("event") == "view" and len(line["members"]) == 2]
    return (wrong[0], views[-1]["step"]) if wrong and views else None


if __name__ == "__main__":
    main()
