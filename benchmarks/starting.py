"""How long workers take to start: from the command to the first view of all of them, in units of one `import torch`.

    python benchmarks/starting.py [--workers 2 16 64] [--fresh]

Each run is preceded by an `import torch` in an interpreter of its own, and measured in units of that, as both feel
what else the machine does (the load is said too). Of each worker: the CPU time that it has spent when all are in, and
the memory that is its own by then (private pages), medians. A worker that was evicted meanwhile is counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

JOB = Path(__file__).parents[1] / "tests" / "jobs" / "small.py"
DEADLINE_S = 900.0
POLL_S = 0.05


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 16, 64])
    parser.add_argument("--fresh", action="store_true", help="compare with an interpreter for each worker")
    args = parser.parse_args()
    print("| workers | started | import torch, s | all are in, s | ratio | CPU of each, s | own memory, MB | evicted |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for workers in args.workers:
        for fresh in (False, True) if args.fresh else (False,):
            torch_s = import_torch()
            row = start(workers, fresh=fresh)
            print(
                f"| {workers} | {'afresh' if fresh else 'forked'} | {torch_s:.1f} | {row['seconds']:.1f} "
                f"| {row['seconds'] / torch_s:.1f} | {row['cpu_s']:.2f} | {row['own_mb']:.0f} | {row['evicted']} |",
                flush=True,
            )
    print(f"load average: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


def import_torch() -> float:
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.monotonic() - began


def start(workers: int, *, fresh: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        folder, pace = Path(place, "run"), Path(place, "pace")
        pace.write_text("2")
        options = [
            "--workers",
            str(workers),
            "--min",
            str(workers),
            "--folder",
            str(folder),
            *["--fresh"][: int(fresh)],
        ]
        job = [str(JOB), str(Path(place, "out")), "--pace", str(pace)]
        began = time.monotonic()
        with Path(place, "said").open("wb") as said:
            run = subprocess.Popen(
                [sys.executable, "-m", "farandole", "run", *options, *job], stdout=said, stderr=said,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        try:
            while not any(len(view["members"]) == workers for view in events(folder, "view")):
                if run.poll() is not None or time.monotonic() - began > DEADLINE_S:
                    sys.exit(f"{workers} workers never met:\n{Path(place, 'said').read_text()}")
                time.sleep(POLL_S)
            seconds = time.monotonic() - began
            members = {*events(folder, "view")[-1]["members"]}
            processes = [psutil.Process(each["pid"]) for each in events(folder, "ready") if each["worker"] in members]
            return {
                "seconds": seconds,
                "cpu_s": statistics.median(sum(process.cpu_times()[:2]) for process in processes),
                "own_mb": statistics.median(process.memory_full_info().uss for process in processes) / 1e6,
                "evicted": len(events(folder, "evicted")) + len(events(folder, "lost")),
            }
        finally:
            run.kill()  # the kernel ends the rest
            run.wait()
            pace.unlink()


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    whole = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [line for line in map(json.loads, whole) if line.get("event") == name]


if __name__ == "__main__":
    main()
