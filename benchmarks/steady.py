"""Throughput while nothing happens: farandole against DistributedDataParallel and torchft.

    python benchmarks/steady.py                  # everything: 2 models, 2 and 4 workers, 5 rounds; about 15 minutes
    python benchmarks/steady.py --quick          # one model, 2 workers, 2 rounds: does it work?
    python benchmarks/steady.py --markdown       # tables for the README

All contestants train the same model on the same data with the same number of workers, one thread and 64 samples a
worker, SGD with momentum, on the loopback interface. They take turns: in every round each is launched afresh, in an
order that rotates, so that a slow minute of the machine falls on all of them. A round's step time is the median of the
gaps between step ends, as every worker writes them down, without the warm-up steps and over all workers; its
throughput is the timed samples over the seconds from the first timed step's end to the last's. A ratio compares
two contestants of the same round: 1.00 and above means at least as fast as DistributedDataParallel. The floor, a step
without any exchange, is not among them: `steps.py` has it, in the same processes.

Memory is measured in a launch of its own: the highest anonymous memory of worker 0 above what it had when model and
data were there and nothing distributed was (activations, gradients, momentum and torch's own late imports are in it,
for everybody alike; malloc gives large blocks back at once, which makes it repeat to 0.2 MB). farandole's bound for
what it may use beyond DistributedDataParallel is printed beside it: the partial sums that a worker holds, times the
gradients' size.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import pairwise

from launch import FLEETS, Job
from records import Record, middle
from tables import number, show, spread

BATCH = 64
MEGABYTE = 1e6


@dataclass(frozen=True, kw_only=True)
class Round:
    """One launch: step_s the median step, samples_a_second the throughput of all workers together."""

    step_s: float
    samples_a_second: float


def main() -> None:
    options = parse()
    for model in options.models.split(","):
        for workers in map(int, options.workers.split(",")):
            compare(model, workers, options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="convolutional,perceptron")
    parser.add_argument("--workers", default="2,4", help="numbers of workers, with commas")
    parser.add_argument("--contestants", default=",".join(FLEETS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=80, help="timed steps a round")
    parser.add_argument("--warmup", type=int, default=20, help="steps before them")
    parser.add_argument("--micro", type=int, default=BATCH, help="samples a micro-batch (farandole)")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--quick", action="store_true", help="one model, 2 workers, 2 short rounds, unless told")
    if parser.parse_args().quick:
        parser.set_defaults(models="convolutional", workers="2", rounds=2, steps=30)
    return parser.parse_args()


def compare(model: str, workers: int, options: argparse.Namespace) -> None:
    """All rounds of one model at one number of workers, and their tables."""
    contestants = options.contestants.split(",")
    samples = (options.warmup + options.steps) * BATCH * workers
    job = Job(model=model, workers=workers, batch=BATCH, micro=options.micro, samples=samples, minimum=workers)
    rounds: dict[str, list[Round]] = defaultdict(list)
    for turn in range(options.rounds):
        first = turn % len(contestants)
        for name in contestants[first:] + contestants[:first]:
            rounds[name].append(timed(launch(name, job), options.warmup))
    rows = [row(name, rounds[name], rounds.get("ddp", [])) for name in contestants]
    columns = ["contestant", "step ms", "min..max", "samples/s", "ratio to DDP", "min..max", "by throughput"]
    show(f"{model}, {workers} workers, {options.rounds} rounds", columns, rows, markdown=options.markdown)

    peaks = {name: memory(launch(name, replace(job, memory=True))) for name in contestants}
    show_memory(peaks, job, markdown=options.markdown)


def launch(name: str, job: Job) -> list[Record]:
    """Train the job's data once through; one record a worker."""
    with FLEETS[name](job, limit_s=300) as fleet:
        fleet.start()
        fleet.wait_end(300)
        found = fleet.records()
    steps = job.samples // (job.batch * job.workers)
    counts = [len(record.times) for record in found]
    if counts != [steps] * job.workers:
        raise SystemExit(f"{name}: {job.workers} workers should have done {steps} steps each, they did {counts}")
    return found


def timed(found: list[Record], warmup: int) -> Round:
    gaps = [gap for record in found for gap in record.gaps()[warmup:]]
    paces = [(len(record.times) - 1 - warmup) / (record.times[-1] - record.times[warmup]) for record in found]
    return Round(step_s=middle(gaps), samples_a_second=sum(paces) * BATCH)


def row(name: str, rounds: list[Round], yardstick: list[Round]) -> list[str]:
    steps = [1e3 * one.step_s for one in rounds]
    pairs = list(zip(rounds, yardstick, strict=False))
    ratios = [ddp.step_s / one.step_s for one, ddp in pairs]
    paces = [one.samples_a_second / ddp.samples_a_second for one, ddp in pairs]
    return [
        name,
        number(middle(steps)),
        spread(steps),
        number(middle([one.samples_a_second for one in rounds]), 0),
        number(middle(ratios), 3),
        spread(ratios, 3),
        number(middle(paces), 3),
    ]


def memory(found: list[Record]) -> tuple[float, float]:
    """(peak above model and data, gradients) of the first worker, in megabytes."""
    worker = min(found, key=lambda record: record.label)
    above = worker.mark("memory_peak") - worker.mark("memory_built")
    return above / MEGABYTE, worker.mark("gradient_bytes") / MEGABYTE


def show_memory(peaks: dict[str, tuple[float, float]], job: Job, *, markdown: bool) -> None:
    ddp = peaks.get("ddp", (float("nan"), 0.0))[0]
    rows: list[list[str]] = []
    for name, (peak, gradients) in peaks.items():
        bound = partial_sums(job) * gradients if name == "farandole" else float("nan")
        rows.append([name, number(gradients), number(peak), number(peak - ddp), number(bound)])
    columns = ["contestant", "gradients MB", "peak above model and data MB", "beyond DDP MB", "allowed beyond DDP MB"]
    show(f"{job.model}, {job.workers} workers: memory of worker 0", columns, rows, markdown=markdown)


def partial_sums(job: Job) -> int:
    """The most partial sums that a worker holds when the shards are dealt out equally."""
    from farandole.plan.shards import maximal

    shards = -(-job.batch * job.workers // job.micro)
    edges = [round(worker * shards / job.workers) for worker in range(job.workers + 1)]
    return max(len(maximal(range(low, high), shards)) for low, high in pairwise(edges))


if __name__ == "__main__":
    main()
