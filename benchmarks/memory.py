"""Memory of a host that trains: all processes of a run, with farandole and under DistributedDataParallel.

    python benchmarks/memory.py --model perceptron --workers 2,4 --launches 3

Each contestant is launched afresh, in turns; while it trains, the proportional set size (PSS) of all its processes is
added up, again and again, so a page that several of them share counts once: the fork server's, an arena's. The
supervisor and the coordinator count too. The most of a launch is shown. Allocators are as each contestant sets them.
The bound is what DistributedDataParallel takes, and one gradient's size. DistributedDataParallel saves nothing, so
farandole is also launched without checkpoints: who writes them has a copy of the state.
"""

from __future__ import annotations

import argparse
import contextlib

import psutil
from launch import Ddp, Farandole, Fleet, Job
from records import middle
from tables import number, show, spread

BATCH = 64
MEGABYTE = 1e6


class Unsaved(Farandole):
    options = ("--checkpoint-every", "never")


CONTESTANTS: dict[str, type[Fleet]] = {"farandole": Farandole, "farandole, no checkpoints": Unsaved, "ddp": Ddp}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="perceptron")
    parser.add_argument("--workers", default="2,4", help="numbers of workers, with commas")
    parser.add_argument("--launches", type=int, default=3, help="of each contestant")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    for workers in map(int, options.workers.split(",")):
        compare(options.model, workers, options)


def compare(model: str, workers: int, options: argparse.Namespace) -> None:
    samples = options.steps * BATCH * workers
    job = Job(model=model, workers=workers, batch=BATCH, micro=BATCH, samples=samples, minimum=workers)
    peaks: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    gradients = 0.0
    for _ in range(options.launches):
        for name, found in peaks.items():
            with CONTESTANTS[name](job, limit_s=300) as fleet:
                fleet.start()
                found.append(most(fleet) / MEGABYTE)
                gradients = fleet.records()[0].mark("gradient_bytes") / MEGABYTE
    bound = middle(peaks["ddp"]) + gradients
    rows = [[name, number(middle(found)), spread(found)] for name, found in peaks.items()]
    rows.append(["allowed", number(bound), ""])
    show(f"{model}, {workers} workers: memory of the host", ["contestant", "PSS MB", "min..max"], rows, markdown=False)


def most(fleet: Fleet) -> float:
    """Bytes of all the fleet's processes together, the most until it has ended."""
    highest = 0.0

    def ended() -> bool:
        nonlocal highest
        highest = max(highest, sum(map(size, processes(fleet))))
        codes = [process.poll() for process in fleet.processes]
        if any(codes):
            raise RuntimeError(f"{fleet.name}: exit codes {codes}\n{fleet.logs()}")
        return None not in codes

    fleet.wait(ended, 300, "end")
    return highest


def processes(fleet: Fleet) -> set[psutil.Process]:
    """What it has started, and the workers that have written a record, with all their descendants."""
    found = set[psutil.Process]()
    for pid in [process.pid for process in fleet.processes] + [record.pid for record in fleet.records()]:
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(pid)
            found |= {root, *root.children(recursive=True)}
    return found


def size(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return process.memory_full_info().pss
    return 0


if __name__ == "__main__":
    main()
