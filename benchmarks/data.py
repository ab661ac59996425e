"""How fast samples come: farandole's data paths against others', in turns, each with two processes (or threads).

    python benchmarks/data.py images                               # pictures that are made up
    python benchmarks/data.py images --source photos --side 400    # a folder of one folder a class; made so large first
    python benchmarks/data.py tokens
    python benchmarks/data.py store --source photos                # one pass from S3, with nothing cached
    python benchmarks/data.py all --source photos --side 400       # the three, one after the other

Each contestant has a process of its own in each round, which warms up and is then timed for `--seconds`. Shown are the
medians over the rounds: samples a second; processor microseconds a sample, of all its processes and threads; and of
both farandole's ratio to the contestant in the same round, so that what else the machine does meets all alike: where
others compute as well, that of the processor's time says more. Whoever gives float32 has normalised it. From a store
nothing is warm: the clock runs from the beginning, and the time to the first batch is shown.

Others' packages are in environments of their own, since they want other versions of what all share (`make
bench-peers`); who is not installed is left out, with a word. A contestant is a function of `Here` that gives batches
without end, or one pass, and gives its versions first; `KINDS` is the table.
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
from data_store import STORE
from data_tokens import TOKENS

KINDS: dict[str, Kind] = {"images": IMAGES, "tokens": TOKENS, "store": STORE}
PEERS = Path(__file__).resolve().parent.parent / ".venv-peers"

# --- turns -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One contestant's in one round. `first_s`: seconds to its first batch. `absent`: why there is none."""

    first_s: float = math.nan
    samples_per_s: float = math.nan
    cpu_us: float = math.nan  # a sample
    versions: str = ""
    absent: str = ""


def turn(kind: Kind, name: str, here: Here, seconds: float) -> Turn:
    """In this process. The clock runs from a batch to a batch."""
    import torch

    torch.set_num_threads(1)
    try:
        batches = kind.contestants[name](here)
        versions = next(batches)
        for _ in range(kind.warm_up):
            next(batches)
    except ImportError as error:
        return Turn(absent=str(error))
    began, used, samples, first_s = time.perf_counter(), cpu_seconds(), 0, math.nan
    for batch in batches:
        samples += len(batch)
        took = time.perf_counter() - began
        first_s = took if math.isnan(first_s) else first_s
        if kind.warm_up and took > seconds:
            break
    cpu_us = 1e6 * (cpu_seconds() - used) / samples
    return Turn(first_s=first_s, samples_per_s=samples / took, cpu_us=cpu_us, versions=versions)


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
            parents[int(entry.name)] = int(fields[1])
            ticks[int(entry.name)] = sum(map(int, fields[11:15]))  # with those of its children that have ended

    def is_ours(pid: int) -> bool:
        while pid not in (0, os.getpid()):
            pid = parents.get(pid, 0)
        return pid != 0

    return {pid: its for pid, its in ticks.items() if is_ours(pid)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=[*KINDS, "all"])
    parser.add_argument("--source", type=Path, help="a folder of one folder a class")
    parser.add_argument("--side", type=int, default=0, help="pixels of the pictures' shorter side; 0: as they are")
    parser.add_argument("--size", type=int, default=224, help="pixels of what comes out")
    parser.add_argument("--batch", type=int, default=32, help="samples a batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--only", default="", help="contestants whose names hold one of these, with commas")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--turn", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help="where the data is made, or found again; none: made anew, and removed")
    options = parser.parse_args()
    if options.turn:
        here = Here(folder=options.folder, side=options.size, batch=options.batch)
        found = turn(KINDS[options.kind], options.turn, here, options.seconds)
        print(json.dumps(asdict(found)), flush=True)
        for pid in set(spent()) - {os.getpid()}:
            os.kill(pid, signal.SIGKILL)  # lest they go on in another's turn
        os._exit(0)
    with tempfile.TemporaryDirectory(prefix="farandole-bench-") as temporary:
        for kind in KINDS if options.kind == "all" else [options.kind]:
            folder = Path(options.folder or temporary, kind)
            made = folder / "made.txt"
            if not made.exists():
                folder.mkdir(parents=True, exist_ok=True)
                made.write_text(KINDS[kind].make(folder, options.source, options.side))
            with KINDS[kind].beside(folder):
                compete(kind, options, str(folder), made.read_text())


def compete(kind: str, options: argparse.Namespace, folder: str, what: str) -> None:
    wanted = options.only.split(",")
    names = [name for name in KINDS[kind].contestants if any(part in name for part in wanted)]
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for name in names:
            call = [python(KINDS[kind], name), __file__, kind, "--turn", name, "--folder", folder, "--size",
                    str(options.size), "--batch", str(options.batch), "--seconds", str(options.seconds)]  # fmt: skip
            done = subprocess.run(call, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{name}: {done.stderr[-2000:]}")
            turns[name].append(Turn(**json.loads(done.stdout.splitlines()[-1])))
    for name in names:
        if absent := turns[name][0].absent:
            print(f"{name}: not installed ({absent})")
    present = {name: its for name, its in turns.items() if not its[0].absent}
    shown(KINDS[kind], options, what, present)


def python(kind: Kind, name: str) -> str:
    """The interpreter that has what this contestant needs."""
    its = PEERS / kind.peers.get(name, "-") / "bin" / "python"
    return str(its) if its.exists() else sys.executable


def shown(kind: Kind, options: argparse.Namespace, what: str, turns: dict[str, list[Turn]]) -> None:
    from tables import number, show, spread

    ours = [name for name in kind.ours if name in turns]
    columns = ["", "samples/s", "CPU us", *["first, s"] * (not kind.warm_up)]
    for our in ours:
        columns += [f"{our}: times its samples/s", "of rounds", "times its CPU", "of rounds"]
        columns += ["times as soon"] * (not kind.warm_up)
    rows: list[list[str]] = []
    for name, its in turns.items():
        row = [name, number(statistics.median(t.samples_per_s for t in its), 0)]
        row.append(number(statistics.median(t.cpu_us for t in its), 0 if its[0].cpu_us > 100 else 1))
        row += [number(statistics.median(t.first_s for t in its), 2)] * (not kind.warm_up)
        for our in ours:
            pairs = list(zip(turns[our], its, strict=True))
            for ratios in (
                [mine.samples_per_s / other.samples_per_s for mine, other in pairs],
                [mine.cpu_us / other.cpu_us for mine, other in pairs],
            ):
                row += [number(statistics.median(ratios), 2), spread(ratios, 2)]
            sooner = statistics.median(other.first_s / mine.first_s for mine, other in pairs)
            row += [number(sooner, 2)] * (not kind.warm_up)
        rows.append([*row, its[0].versions])
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    title = f"{what}, in batches of {options.batch}; {PROCESSES} processes, {os.cpu_count()} cores, load {load}"
    show(title, [*columns, "versions"], rows, markdown=options.markdown)


if __name__ == "__main__":
    main()
