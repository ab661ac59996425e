"""What a step costs when gradients go over a slow cable between two hosts with several workers each. As root.

    python benchmarks/between_hosts.py                  # two and two workers, 500 Mbit/s; a minute
    python benchmarks/between_hosts.py --program PATH   # another version's farandole, to compare with
    python benchmarks/between_hosts.py --workers 1 --mbit 100 --codec none bf16 fp16
    python benchmarks/between_hosts.py --workers 1 --micro 4 --mbit 100 --codec none int4   # one micro-batch a worker
    python benchmarks/between_hosts.py --workers 1 --micro 4 --mbit 100 --codec none fp16 --ddp none fp16 --rounds 3

Two network namespaces are joined by a cable of that rate in both directions. A wide layer is trained, whose step is
nearly all exchange. TCP uses cubic. Shown are the steps' times and what one host sends in each, beside the size of the
gradients; a row for each codec, one run after the other, then one for each of DistributedDataParallel's communication
hooks (`--ddp`).
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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from congestion import use_cubic
from tables import number, show

JOB = Path(__file__).parent / "contestants" / "wide_train.py"
DDP = JOB.with_name("wide_ddp.py")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
STEPS = 20
WARM = 12  # of DistributedDataParallel's steps, not measured
LIMIT_S = 120.0


def main() -> None:
    options = parse()
    columns = ["workers a host", "Mbit/s", "MB of gradients", "codec", "MB sent by a host a step"]
    rows: list[list[str]] = []
    for _ in range(options.rounds):
        rows += [measure(options, codec) for codec in options.codec]
        rows += [measure_ddp(options, hook) for hook in options.ddp]
    show("A step of two hosts", [*columns, "step ms", "least", "most"], rows, markdown=False)


def measure(options: argparse.Namespace, codec: str) -> list[str]:
    """A row of the table, of one run."""
    program = str(options.program or Path(sys.executable).with_name("farandole"))
    with ExitStack() as stack:
        names = stack.enter_context(cable(options.mbit))
        here, there = (["ip", "netns", "exec", name] for name in names)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
        job = [str(JOB), "--mb", str(options.mb), "--micro", str(options.micro)]
        command = [*here, program, "run", "--workers", str(options.workers), "--listen", "0.0.0.0", "--threads", "1"]
        command += ["--codec", codec] if codec != "none" else []
        stack.enter_context(process([*command, "--max", str(2 * options.workers), "--folder", str(folder), *job]))
        wait(lambda: (folder / "ticket").exists())
        for _ in range(options.workers):
            join = [*there, program, "join", str(folder / "ticket"), *job]
            stack.enter_context(process(join, FARANDOLE_HOST="there"))
        wait(lambda: members(folder) == 2 * options.workers)
        first = len(steps(folder)) + 2
        wait(lambda: len(steps(folder)) > first)
        before = sent(here)
        first = len(steps(folder))
        wait(lambda: len(steps(folder)) >= first + STEPS)
        times, bytes_ = steps(folder)[first:], sent(here) - before
    return row(options, codec, times, bytes_)


def measure_ddp(options: argparse.Namespace, hook: str) -> list[str]:
    """A row of the table, of one run under DistributedDataParallel, with one worker on each host."""
    with ExitStack() as stack:
        names = stack.enter_context(cable(options.mbit))
        file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "times"
        job = [sys.executable, str(DDP), "--mb", str(options.mb), "--hook", hook, "--steps", str(STEPS + 2)]
        for rank, name in enumerate(names):
            environ = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500"}
            command = ["ip", "netns", "exec", name, *job, "--times", str(file if rank == 0 else os.devnull)]
            stack.enter_context(process(command, GLOO_SOCKET_IFNAME="cable", **environ))

        def written() -> list[float]:
            return [float(line) for line in file.read_text().splitlines()] if file.exists() else []

        here = ["ip", "netns", "exec", names[0]]
        wait(lambda: len(written()) > WARM)
        before, first = sent(here), len(written())
        wait(lambda: len(written()) >= WARM + STEPS)
        times, bytes_ = written()[first:], sent(here) - before
    return row(options, f"DDP {hook}", times, bytes_)


def row(options: argparse.Namespace, name: str, times: list[float], bytes_: int) -> list[str]:
    gaps = [(b - a) * 1000 for a, b in pairwise(times)]
    shown = [options.workers, options.mbit, options.mb, name, number(bytes_ / len(times) / 1e6, 1)]
    shown += [number(value, 0) for value in (statistics.median(gaps), min(gaps), max(gaps))]
    return [str(value) for value in shown]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="of each host")
    parser.add_argument("--mbit", type=int, default=500, help="a second, in each direction")
    parser.add_argument("--mb", type=int, default=16, help="of gradients")
    parser.add_argument("--micro", type=int, default=1, help="samples of a micro-batch; all workers have 8 in a step")
    parser.add_argument("--codec", nargs="*", default=["none"], help="a run for each")
    parser.add_argument(
        "--ddp", nargs="+", default=[], choices=("none", "fp16", "powersgd"),
        help="a run for each hook; powersgd has rank 4; torch has its bf16 hook for NCCL only",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=1, help="measure everything so often, in turns")
    parser.add_argument("--program", type=Path, help="another version's farandole")
    return parser.parse_args()


@contextmanager
def cable(mbit: int) -> Iterator[list[str]]:
    names = [f"farandole-bench-{os.getpid()}-{side}" for side in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address, other in zip(names, ADDRESSES, reversed(ADDRESSES), strict=True):
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "route", "add", "default", "via", other)
            limit = ["tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "200ms"]
            run(["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "cable", "root", *limit])
            use_cubic(name)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def ip(*arguments: str) -> None:
    run(["ip", *arguments])


def run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@contextmanager
def process(command: list[str], **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    quiet = subprocess.DEVNULL
    started = subprocess.Popen(command, env={**os.environ, **environ}, stdin=quiet, stdout=quiet, stderr=quiet)
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def members(folder: Path) -> int:
    views = [line for line in lines(folder) if line.get("event") == "view"]
    return len(views[-1]["members"]) if views else 0


def steps(folder: Path) -> list[float]:
    """When each ended."""
    return [line["time"] for line in lines(folder) if "event" not in line]


def sent(on: list[str]) -> int:
    return int(run([*on, "cat", "/sys/class/net/cable/statistics/tx_bytes"]))


def wait(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end:
            raise SystemExit(f"nothing for {LIMIT_S:.0f} s: see whether the run begins at all")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
