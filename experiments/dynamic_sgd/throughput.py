"""Experiment D: samples a second of real runs of 1, 2 and 4 processes, with a constant batch and with one a worker.

Each run takes the same samples. The first steps, in which caches fill and connections are made, do not count.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.dynamic_sgd.cases import CHOSEN, PACE, Scale
from experiments.dynamic_sgd.runner import SCRIPT, environment
from experiments.dynamic_sgd.shelf import RESULTS

WORKERS = (1, 2, 4)
POLICIES = ("constant", "compensation")
BATCH = 64  # of the constant batch, and of each worker where it follows them; in micro-batches of 16
FIRST = 10  # steps that do not count


def run(scale: Scale, path: Path, console: Console) -> None:
    """Measure what is missing; CIFAR-10's network and data from `path`. One run at a time, or they'd share the cores.

    Raises:
        SystemExit: a run failed; its last lines are shown.
    """
    for workers in WORKERS:
        for policy in POLICIES:
            found = read(scale)
            if (name := f"{policy}-{workers}") not in found:
                found[name] = round(_measured(scale, path, workers, policy), 1)
                place = _path(scale)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(json.dumps(found, indent=1) + "\n")
            console.print(f"{workers} workers, {policy}: {found[name]:.0f} samples/s")


def read(scale: Scale) -> dict[str, float]:
    """Samples a second by `POLICY-WORKERS`, as far as they have been measured."""
    return json.loads(_path(scale).read_text()) if _path(scale).is_file() else {}


def pace(lines: Sequence[Mapping[str, Any]], first: int) -> float:
    """Samples a second from the end of step `first` on. Pure."""
    steps = [line for line in lines if "samples" in line][first:]
    return sum(line["samples"] for line in steps[1:]) / (steps[-1]["time"] - steps[0]["time"])


def _path(scale: Scale) -> Path:
    return RESULTS / scale.name / "throughput.json"


def _measured(scale: Scale, path: Path, workers: int, policy: str) -> float:
    size = PACE.name if scale.name == "full" else scale.name
    with tempfile.TemporaryDirectory(prefix="dynamic-sgd-") as name:
        folder = Path(name) / "run"
        command = [sys.executable, "-m", "farandole", "run", "--workers", str(workers), "--min", str(workers)]
        command += ["--threads", "1", "--folder", str(folder), str(SCRIPT), "cifar", str(path)]
        command += ["--policy", policy, "--batch", str(BATCH), "--rate", str(CHOSEN["cifar"]), "--scale", size]
        done = subprocess.run(command, env=environment({}), capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{workers} workers, {policy}: exit code {done.returncode}\n{done.stderr[-2000:]}")
        return pace([json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()], FIRST)
