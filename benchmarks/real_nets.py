"""Samples a second of real nets on several hosts with a slow network, by codec. As root.

    python -m benchmarks.real_nets cifar cifar10_jpeg.npz --mbit 100 1000 --hosts 2 --codec none bf16+zstd int4
    python -m benchmarks.real_nets shakespeare tinyshakespeare.txt --hosts 4 --workers 1 2 4 -- --batch 32 --micro 8

Options after `--` are those of the example.
Each host is a network namespace with one worker, and its cable to the switch has the rate in both directions. Each rate
is one `farandole bench scaling` on a hosts file. The nets are those of examples/, larger, so that the network counts:
a ResNet-20 of four times the width, and a transformer of twice the width. The hosts share this machine's cores equally:
a control group limits the processor time of each, also while the others are idle. TCP uses cubic
(`congestion.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.congestion import use_cubic
from tests.support.network import Switched, ip

EXAMPLES = Path(__file__).parents[1] / "examples"
NETS = {
    "cifar": ("cifar10.py", "--depth", "20", "--width", "64", "--epochs", "100", "--samples", "2000"),
    "shakespeare": ("shakespeare.py", "--width", "256", "--epochs", "100"),
}
SSH = '#!/bin/sh\nhost=$1\nshift 2\necho $$ > {groups}/$host/cgroup.procs\nexec ip netns exec "$host" sh -c "$*"\n'
GROUPS = Path("/sys/fs/cgroup/cpu")  # control groups, version 1
PERIOD_US = 10_000


def main() -> None:
    options = parse()
    rows: list[Any] = []
    for mbit in options.mbit:
        with Switched(options.hosts + 1) as machines, ExitStack() as stack:
            place = stack.enter_context(tempfile.TemporaryDirectory())
            for number, name in enumerate(machines.names):
                limit(name, "cable", mbit)
                limit(machines.switch, f"port{number}", mbit)
                use_cubic(name)
            for name in machines.names[1:]:
                stack.enter_context(processor_time(name, (os.cpu_count() or 1) / options.hosts))
            rows += [{"mbit": mbit, **row} for row in measured(options, machines, Path(place))]
    print(f"\n{options.net}, {options.hosts} hosts, 1 worker each\n")
    print("| Mbit/s | codec | workers | samples/s | step, ms | MB a step | waiting | efficiency | predicted |")
    print("| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        run, found = row["run"], row["measured"]
        waits = "" if found["exposed"] is None else f"{found['exposed']:.0%}"
        predicted = "" if row["predicted"] is None else f"{row['predicted']:.0%}"
        shown = [row["mbit"], run["codec"], run["workers"], f"{row['samples_per_s']:.1f}", f"{found['step_ms']:.0f}"]
        shown += [f"{found['sent_mb'] or 0:.2f}", waits, f"{row['efficiency']:.0%}", predicted]
        print(f"| {' | '.join(map(str, shown))} |")


def measured(options: argparse.Namespace, machines: Switched, place: Path) -> list[dict[str, Any]]:
    """The rows of the table of one `farandole bench scaling`."""
    here, *others = machines.names
    hosts, ssh, files, result = (place / name for name in ("hosts", "ssh", "files", "rows.json"))
    hosts.write_text("".join(f"{name} slots=1\n" for name in others))
    ssh.write_text(SSH.format(groups=GROUPS))
    ssh.chmod(0o755)
    files.write_text("*.py\n")
    pool = f"ssh,hosts={hosts},ssh={ssh},python={sys.executable}"
    command = ["ip", "netns", "exec", here, sys.executable, "-m", "farandole", "bench", "scaling", "--pool", pool]
    workers = ",".join(map(str, options.workers or (1, options.hosts)))
    command += ["--listen", machines.addresses[0], "--files", str(files), "--workers", workers]
    command += ["--mode", "strong", "--steps", str(options.steps), "--codec", ",".join(options.codec)]
    script, *words = NETS[options.net]
    subprocess.run(
        [*command, "--json", str(result), script, str(options.data.absolute()), *words, *options.words],
        cwd=EXAMPLES, check=True,
    )  # fmt: skip
    return json.loads(result.read_text())


def limit(name: str, device: str, mbit: int) -> None:
    """Packets leave this device of a namespace at this rate."""
    tbf = ["tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "200ms"]
    ip("netns", "exec", name, "tc", "qdisc", "add", "dev", device, "root", *tbf)


@contextmanager
def processor_time(name: str, cores: float) -> Iterator[None]:
    """A control group of this name, whose processes together have the time of so many cores."""
    group = GROUPS / name
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(round(PERIOD_US * cores)))
        yield
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                (GROUPS / "cgroup.procs").write_text(pid)
        group.rmdir()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("net", choices=[*NETS])
    parser.add_argument("data", type=Path, help="the file that the example reads")
    parser.add_argument("--mbit", type=int, nargs="+", default=[100], help="a second, in each direction of each host")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--workers", type=int, nargs="+", help="of each row; default: 1, and one for each host")
    parser.add_argument("--codec", nargs="+", default=["none", "bf16+zstd"])
    parser.add_argument("--steps", type=int, default=10)
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    return argparse.Namespace(**vars(parser.parse_args(given[:end])), words=given[end + 1 :])


if __name__ == "__main__":
    main()
