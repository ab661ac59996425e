"""What a trace costs the steps that it is of: one run, traced and not in turns, so that a slow minute falls on both.

    python benchmarks/traced.py [--workers 2] [--turns 20] [--steps 200]

The steps are as small as they get, a few milliseconds, so that what is kept of each weighs most. A turn is a trace of
--steps steps, as long as the workers record it and tell of it, and some time without. Printed: of each turn's median
step time, and of the processor time that the workers took a step, the ratio, traced over not; the median of these
ratios, and their quartiles. Then the same of turns of which neither is traced: what the machine does by itself.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from farandole.control.api import Api
from farandole.control.ticket import load
from farandole.protocol.metrics import StepLine, parse_line

SCRIPT = """
import torch, farandole
from torch.utils.data import TensorDataset
run = farandole.join()
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run.replicate(model=model, optimizer=optimizer)
loader = run.loader(TensorDataset(torch.randn(16_000, 8)), batch=farandole.GlobalBatch(16, micro=8))
for step in run.steps(loader, epochs=10_000):
    for (inputs,) in step:
        step.backward(model(inputs).square().mean())
    optimizer.step()
"""


class Lines:
    """Of the run's file, as it grows."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")

    def new(self) -> list[StepLine]:
        found = [parse_line(line) for line in self._file.read().split(b"\n") if line]
        return [line for line in found if isinstance(line, StepLine)]


def traced(api: Api, steps: int) -> None:
    asked = api.trace(steps)
    while asked.owed:
        time.sleep(0.05)
        asked = api.traced()


def processor_s(workers: list[int]) -> float:
    """That all threads of these processes have had."""
    tasks = [path for pid in workers for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(path.read_text().split()[0]) for path in tasks) / 1e9


def turns(api: Api, lines: Lines, count: int, steps: int, *, trace: bool) -> None:
    """A line comes a heartbeat late: between two halves of a turn those of the one before are waited for."""
    ratios: list[float] = []
    of_processor: list[float] = []
    medians: dict[bool, float] = {}
    workers = [worker.pid for worker in api.status().workers]
    for number in range(count):
        spent: dict[bool, float] = {}
        for on in (True, False) if number % 2 else (False, True):
            time.sleep(1.0)
            lines.new()
            began, before = time.time(), processor_s(workers)
            if on and trace:
                traced(api, steps)
            else:
                time.sleep(1.5)
            ended, spent[on] = time.time(), processor_s(workers) - before
            time.sleep(1.5)
            took = [line.seconds for line in lines.new() if began < line.time < ended]
            medians[on] = statistics.median(took)
            spent[on] /= len(took)
        ratios.append(medians[True] / medians[False])
        of_processor.append(spent[True] / spent[False])
    print("traced over not:" if trace else "neither:", f"time of a step {quartiles(ratios)}")
    print(f"    of {1e3 * medians[False]:.1f} ms; processor time {quartiles(of_processor)}")


def quartiles(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.4f} ({low:.4f} to {high:.4f})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="farandole-") as place:
        script, folder = Path(place, "job.py"), Path(place, "run")
        script.write_text(textwrap.dedent(SCRIPT))
        command = [sys.executable, "-m", "farandole", "run", "--workers", str(args.workers), "--folder", str(folder)]
        with Path(place, "out").open("wb") as output:
            run = subprocess.Popen([*command, str(script)], stdout=output, stderr=output)
        try:
            while not (
                (folder / "metrics.jsonl").exists() and b'"step":50,' in (folder / "metrics.jsonl").read_bytes()
            ):
                time.sleep(0.2)
                assert run.poll() is None, Path(place, "out").read_text()
            api, lines = Api(load(str(folder / "ticket"))), Lines(folder / "metrics.jsonl")
            turns(api, lines, args.turns, args.steps, trace=True)
            turns(api, lines, args.turns, args.steps, trace=False)
        finally:
            run.terminate()
            run.wait()


if __name__ == "__main__":
    main()
