"""What a codec does to a training's result: the paired difference of the test accuracy over seeds.

    python benchmarks/codec_accuracy.py --seeds 10 -- examples/digits.py
    python benchmarks/codec_accuracy.py --seeds 10 --codec bf16 int8 int4 -- examples/cifar10.py DATA --samples 5000
    python benchmarks/codec_accuracy.py --seeds 10 --jobs 14 -- examples/shakespeare.py TEXT --width 256    # on a GPU

Each seed is trained once with each codec and once without, in single processes, which have the bits of any run. The
script must print "test accuracy" or "validation accuracy" and a number, as the examples do; the last one counts. The
table has the mean difference to no codec in percentage points, with its 95 % interval by Student's t distribution.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from tables import number, show

ACCURACY = re.compile(r"(?:test|validation) accuracy ([0-9.]+)")
# of the 97.5 % quantile of Student's t distribution, by degrees of freedom
T = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 14: 2.14, 19: 2.09}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, help=f"one of {', '.join(str(n + 1) for n in T)}")
    parser.add_argument("--codec", nargs="+", default=["bf16", "int8", "int4"])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="trainings at a time")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the script and its arguments")
    options = parser.parse_args()
    if options.seeds - 1 not in T:
        parser.error(f"--seeds {options.seeds}: one of {', '.join(str(n + 1) for n in T)}")
    command = options.command[options.command[:1] == ["--"] :]
    if not command:
        parser.error("no script is given")
    trainings = [(codec, seed) for seed in range(options.seeds) for codec in ("none", *options.codec)]
    with ThreadPoolExecutor(options.jobs) as pool:
        results = dict(zip(trainings, pool.map(lambda each: train(command, *each), trainings), strict=True))
    rows = [["none", *(number(value, 2) for value in spread(results, "none", options.seeds)), "", ""]]
    for codec in options.codec:
        differences = [results[codec, seed] - results["none", seed] for seed in range(options.seeds)]
        mean, half = statistics.mean(differences), interval(differences)
        row = [number(value, 2) for value in (*spread(results, codec, options.seeds), mean)]
        rows.append([codec, *row, f"{mean - half:.2f} to {mean + half:.2f}"])
    columns = ["codec", "accuracy, %", "deviation over seeds", "difference, points", "95 % interval"]
    show(f"{' '.join(command)}, {options.seeds} seeds", columns, rows, markdown=False)


def train(command: list[str], codec: str, seed: int) -> float:
    """The test accuracy in percent."""
    environ = {**os.environ, "FARANDOLE_SEED": str(seed), "FARANDOLE_CODEC": codec, "FARANDOLE_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], env=environ, capture_output=True, text=True, check=False)
    found = ACCURACY.findall(done.stdout)
    if done.returncode or not found:
        raise SystemExit(f"{' '.join(command)} with {codec}, seed {seed}: exit code {done.returncode}\n{done.stderr}")
    print(f"{codec}, seed {seed}: {found[-1]}", file=sys.stderr, flush=True)
    return 100 * float(found[-1])


def spread(results: dict[tuple[str, int], float], codec: str, seeds: int) -> tuple[float, float]:
    values = [results[codec, seed] for seed in range(seeds)]
    return statistics.mean(values), statistics.stdev(values)


def interval(differences: list[float]) -> float:
    """Half of the width of the 95 % interval."""
    count = len(differences)
    return T[count - 1] * statistics.stdev(differences) / count**0.5


if __name__ == "__main__":
    main()
