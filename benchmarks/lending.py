"""A training that lends its machines to an urgent job and takes them again, on a real Slurm.

    make lending

Slurm is slurmctld, three slurmd and munged on this machine (Debian's packages, and root). A training of the digits has
all three nodes. An urgent job of two nodes is submitted to a partition that preempts the training's. Two workers leave,
the urgent job runs, and the training goes on with one worker. After the urgent job the two nodes join again. The same
script then trains undisturbed, as one process. `--nodes 1` lends one node. `--idle` takes a training that leaves the
cores idle, and shows how long a host takes by itself.

It prints the times of the loan, what the training lost, and whether the weights have the same bits. The exit code is 0
only if nothing was lost and the bits are the same.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from farandole.data.ledger import count
from farandole.protocol import events
from farandole.protocol.metrics import Line, StepLine, parse_lines
from tests.support.slurm import CAN, NODES, WHY_NOT, Slurm, slurm

ROOT = Path(__file__).parents[1]
DIGITS, SMALL = ROOT / "examples" / "digits.py", ROOT / "tests" / "jobs" / "small.py"
PACE_S = 0.1  # a step of the training that leaves the cores idle
FARANDOLE = [sys.executable, "-m", "farandole"]
LIMIT_S = 600.0


class Training:
    """`farandole run` on all nodes of the partition `low`."""

    def __init__(self, folder: Path, job: Sequence[str]) -> None:
        self.folder = folder
        pool = f"slurm,size={NODES},partition=low,time=60"
        command = [*FARANDOLE, "run", "--folder", str(folder), "--pool", pool, "--ledger", *job]
        self.process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def lines(self) -> list[Line]:
        path = self.folder / "metrics.jsonl"
        return parse_lines(path.read_bytes().splitlines())[0] if path.exists() else []

    def views(self) -> list[events.ViewEvent]:
        return [line for line in self.lines() if isinstance(line, events.ViewEvent)]

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            if self.process.poll() is not None:
                sys.exit(f"the training ended before {what}; give it more --epochs")
            if time.monotonic() > deadline:
                sys.exit(f"{what}: not within {LIMIT_S:g} s")
            time.sleep(0.05)

    def until_workers(self, number: int) -> None:
        self.until(lambda: self.views() and len(self.views()[-1].members) == number, f"{number} workers")

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(LIMIT_S)


@dataclass(frozen=True, kw_only=True)
class Loan:
    """Unix times in seconds: when the urgent job was submitted, began and ended, when Slurm started the last of the
    training's new jobs, in whole seconds, and when that job's agent started.
    """

    submitted: float
    began: float
    ended: float
    given: float
    agent: float


def agent_start() -> float:
    """When the newest agent's process started, in Unix time."""
    boot, ticks = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME), os.sysconf("SC_CLK_TCK")
    newest = 0.0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (folder / "cmdline").read_bytes().split(b"\0")[1:4] == [b"-m", b"farandole", b"agent"]:
                newest = max(newest, float((folder / "stat").read_text().rpartition(")")[2].split()[19]))
    return boot + newest / ticks


def lend(cluster: Slurm, training: Training, folder: Path, urgent_s: float, nodes: int) -> Loan:
    """Wait until the training has all nodes, run the urgent job, and wait until the training has all nodes again."""
    training.until_workers(NODES)
    first = training.views()[-1].step
    training.until(lambda: any(isinstance(x, StepLine) and x.step > first + 20 for x in training.lines()), "20 steps")
    script = f"date +%s.%N > {folder}/began; sleep {urgent_s:g}; date +%s.%N > {folder}/ended"
    submitted = time.time()
    job = cluster.submit(script, "--partition=high", f"--nodes={nodes}")
    training.until((folder / "began").exists, "the urgent job's start")
    training.until_workers(NODES - nodes)
    training.until(lambda: cluster.state(job) == "COMPLETED", "the urgent job's end")
    training.until_workers(NODES)
    began, ended = (float((folder / name).read_text()) for name in ("began", "ended"))
    starts = cluster.run("squeue", "-h", "--states=running", "-o", "%S").split()
    given = max(datetime.fromisoformat(start).timestamp() for start in starts)
    return Loan(submitted=submitted, began=began, ended=ended, given=given, agent=agent_start())


def undisturbed(job: Sequence[str]) -> str:
    """The fingerprint of the same script as one process, which prints it or writes it to its first argument."""
    environ = {**os.environ, "FARANDOLE_SEED": "0", "FARANDOLE_THREADS": "1"}
    printed = subprocess.check_output([sys.executable, *job], text=True, env=environ)
    return printed.rsplit("fingerprint ", 1)[-1].strip() or Path(job[1]).read_text().strip()


def report(training: Training, loan: Loan, epochs: int, nodes: int, alone: str) -> bool:
    """Print the table. Returns True if nothing was lost and the bits are the same."""
    lines = training.lines()
    steps = [line for line in lines if isinstance(line, StepLine)]
    notices = [line for line in lines if isinstance(line, events.NoticeEvent)]
    left = [line for line in lines if isinstance(line, events.LeftEvent) and line.time < loan.ended]
    views = [view for view in training.views() if view.time > loan.submitted]
    [fewest] = [view for view in views if len(view.members) == NODES - nodes][:1]
    [again] = [view for view in views if view.time > loan.ended and len(view.members) == NODES][:1]
    meanwhile = [line for line in steps if line.workers == NODES - nodes]
    waits = [next(s.step for s in steps if s.time >= notice.time) for notice in notices]
    delivered, expected = count(training.folder / "ledger"), epochs * sum(s.samples for s in steps if s.epoch == 0)
    lost_steps = steps[-1].step + 1 - len({line.step for line in steps})
    lost_samples, repeated = expected - len(delivered), sum(number - 1 for number in delivered.values())
    fingerprint = next(line.fingerprint for line in lines if isinstance(line, events.FinishedEvent))
    rows = [
        ("urgent job: from its submission to its start", f"{loan.began - loan.submitted:.1f} s"),
        ("of this, from Slurm's first signal to the last exit", f"{left[-1].time - notices[0].time:.1f} s"),
        ("of this, from the last exit to its start", f"{loan.began - left[-1].time:.1f} s"),
        ("steps from the first notice to the view without them", str(fewest.step - min(waits))),
        ("steps meanwhile", str(len(meanwhile))),
        ("from the urgent job's end to the first step with all", f"{again.time - loan.ended:.1f} s"),
        ("of this, until Slurm starts the last job for it", f"{max(loan.given - loan.ended, 0.0):.0f} s"),
        ("of this, from there to the first step with all", f"{again.time - loan.given:.0f} s"),
        ("of this, from the last agent's start to the first step with all", f"{again.time - loan.agent:.1f} s"),
        ("steps lost or repeated from a checkpoint", str(lost_steps)),
        ("samples lost", str(lost_samples)),
        ("samples repeated", str(repeated)),
        ("the same bits as undisturbed", "yes" if fingerprint == alone else "NO"),
    ]
    print("\n| what | |\n| --- | --- |")
    for what, value in rows:
        print(f"| {what} | {value} |")
    print(f"load average: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    lost = any(isinstance(line, events.LostEvent) for line in lines)
    return fingerprint == alone and not (lost or lost_steps or lost_samples or repeated)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=120)
    parser.add_argument("--urgent", type=float, default=15.0, help="how long the urgent job takes, in seconds")
    parser.add_argument("--nodes", type=int, default=2, help="how many of the three nodes it takes: 1 or 2")
    parser.add_argument("--idle", action="store_true", help="a training that leaves the cores idle")
    parser.add_argument("--folder", type=Path, help="the run's folder; left out: a temporary one")
    args = parser.parse_args()
    if not CAN:
        sys.exit(WHY_NOT)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that Slurm's daemons end
    with tempfile.TemporaryDirectory() as place, slurm(Path(place)) as cluster:
        pace = Path(place, "pace")
        pace.write_text(str(PACE_S))
        slow = [str(SMALL), str(Path(place, "out")), "--pace", str(pace)]
        job = [*(slow if args.idle else [str(DIGITS), "--width", "48"]), "--epochs", str(args.epochs)]
        training = Training(args.folder or Path(place, "run"), job)
        try:
            loan = lend(cluster, training, Path(place), args.urgent, args.nodes)
            pace.unlink()
            if training.process.wait(LIMIT_S) != 0:
                sys.exit(f"the training ended with code {training.process.returncode}")
        finally:
            training.end()
        left = cluster.jobs()
        print("the same script, undisturbed, as one process", flush=True)
        good = report(training, loan, args.epochs, args.nodes, undisturbed(job)) and not left
    print("Everything as promised." if good else "NOT as promised.")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
