"""How fast samples come: farandole's data paths against others', in turns, each with two processes (or threads).

    python benchmarks/data.py images                               # pictures that are made up
    python benchmarks/data.py images --source photos --side 400    # a folder of one folder a class; made so large first

Each contestant has a process of its own in each round, which warms up and is then timed for `--seconds`. Shown are the
medians over the rounds: samples a second; processor microseconds a sample, of all its processes and threads; and of
both the ratio to the first contestant in the same round, so that what else the machine does meets all alike: where
others compute as well, that of the processor's time says more. Who is not installed is left out, with a word. Whoever
gives float32 has normalised it.

A contestant is a function of `Here` that gives batches without end, and gives its versions first; `KINDS` is the table.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from data_images import IMAGES
from data_kind import PROCESSES, Here, Kind

WARM_UP = 12  # batches
KINDS: dict[str, Kind] = {"images": IMAGES}

# --- turns -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One contestant's in one round. `absent`: why there is none."""

    samples_per_s: float = math.nan
    cpu_us: float = math.nan  # a sample
    versions: str = ""
    absent: str = ""


def turn(kind: str, name: str, here: Here, seconds: float) -> Turn:
    """In this process. The clock runs from a batch to a batch."""
    import torch

    torch.set_num_threads(1)
    try:
        batches = KINDS[kind].contestants[name](here)
        versions = next(batches)
        for _ in range(WARM_UP):
            next(batches)
    except ImportError as error:
        return Turn(absent=str(error))
    began, used, samples = time.perf_counter(), cpu_seconds(), 0
    while (took := time.perf_counter() - began) < seconds:
        samples += len(next(batches))
    return Turn(samples_per_s=samples / took, cpu_us=1e6 * (cpu_seconds() - used) / samples, versions=versions)


def cpu_seconds() -> float:
    """Of this process and all that it has started."""
    return sum(spent().values()) / os.sysconf("SC_CLK_TCK")


def spent() -> dict[int, int]:
    """The processor ticks of each of these processes."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended meanwhile
            parents[int(entry.name)], ticks[int(entry.name)] = int(fields[1]), int(fields[11]) + int(fields[12])

    def is_ours(pid: int) -> bool:
        while pid not in (0, os.getpid()):
            pid = parents.get(pid, 0)
        return pid != 0

    return {pid: its for pid, its in ticks.items() if is_ours(pid)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--source", type=Path, help="a folder of one folder a class")
    parser.add_argument("--side", type=int, default=0, help="pixels of the pictures' shorter side; 0: as they are")
    parser.add_argument("--size", type=int, default=224, help="pixels of what comes out")
    parser.add_argument("--batch", type=int, default=64, help="samples a batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--only", default="", help="contestants whose names hold one of these, with commas")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--turn", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help="where the data is made, or found again; none: made anew, and removed")
    options = parser.parse_args()
    if options.turn:
        here = Here(folder=options.folder, side=options.size, batch=options.batch)
        found = turn(options.kind, options.turn, here, options.seconds)
        print(json.dumps(asdict(found)), flush=True)
        for pid in set(spent()) - {os.getpid()}:
            os.kill(pid, signal.SIGKILL)  # lest they go on in another's turn
        os._exit(0)
    with tempfile.TemporaryDirectory(prefix="farandole-bench-") as temporary:
        folder = Path(options.folder or temporary)
        made = folder / f"{options.kind}.txt"
        if not made.exists():
            folder.mkdir(parents=True, exist_ok=True)
            made.write_text(KINDS[options.kind].make(folder, options.source, options.side))
        compete(options, str(folder), made.read_text())


def compete(options: argparse.Namespace, folder: str, what: str) -> None:
    from tables import number, show, spread

    wanted = options.only.split(",")
    names = [name for name in KINDS[options.kind].contestants if any(part in name for part in wanted)]
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for name in names:
            call = [sys.executable, __file__, options.kind, "--turn", name, "--folder", folder, "--size",
                    str(options.size), "--batch", str(options.batch), "--seconds", str(options.seconds)]  # fmt: skip
            done = subprocess.run(call, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{name}: {done.stderr[-2000:]}")
            turns[name].append(Turn(**json.loads(done.stdout.splitlines()[-1])))
    for name in names:
        if absent := turns[name][0].absent:
            print(f"{name}: not installed ({absent})")
    rows: list[list[str]] = []
    present = [name for name in names if not turns[name][0].absent]
    for name in present:
        pairs = list(zip(turns[name], turns[present[0]], strict=True))
        ratios = [each.samples_per_s / first.samples_per_s for each, first in pairs]
        cheaper = [first.cpu_us / each.cpu_us for each, first in pairs]
        rows.append([
            name, number(statistics.median(t.samples_per_s for t in turns[name]), 0),
            number(statistics.median(ratios), 2), spread(ratios, 2),
            number(statistics.median(t.cpu_us for t in turns[name]), 0),
            number(statistics.median(cheaper), 2), spread(cheaper, 2), turns[name][0].versions,
        ])  # fmt: skip
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    title = (
        f"{what}, to {options.size} x {options.size}, in batches of {options.batch}; {PROCESSES} processes, "
        f"{os.cpu_count()} cores, load {load}; times {present[0]}"
    )
    columns = ["", "samples/s", "times", "of rounds", "CPU us", "samples a CPU second, times", "of rounds", "versions"]
    show(title, columns, rows, markdown=options.markdown)


if __name__ == "__main__":
    main()
