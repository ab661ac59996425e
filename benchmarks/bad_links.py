"""What a bad link between two hosts costs, and what `farandole status` says of it. As root.

    python benchmarks/bad_links.py                       # all rows, about five minutes
    python benchmarks/bad_links.py --rows equal 'one way slow' --seconds 30

Two network namespaces hold one worker each. In the rows with a rate they are joined by a cable with a token bucket
filter in each direction. In the rows with loss or delay, a process here carries the packets between two TUN devices,
drops some of them at random, and holds each one back: so TCP meets both as it does in a network. Shown are the steps'
times, what the account says of the bytes, and the links that the status names.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from between_hosts import ADDRESSES, JOB, ip, members, process, run, steps, wait
from tables import number, show


class Link(NamedTuple):
    """One direction of a row. `mbit` 0: no limit; `loss`: part of the packets; `delay_ms` in this direction."""

    mbit: int = 0
    loss: float = 0.0
    delay_ms: float = 0.0


ROWS: dict[str, tuple[Link, Link]] = {
    "equal": (Link(mbit=500), Link(mbit=500)),
    "one way slow": (Link(mbit=50), Link(mbit=500)),
    "both ways slow": (Link(mbit=50), Link(mbit=50)),
    "carried, no fault": (Link(loss=1e-9), Link(loss=1e-9)),
    "loss of 1 % one way": (Link(loss=0.01), Link(loss=1e-9)),
    "delay of 80 ms": (Link(delay_ms=40), Link(delay_ms=40)),
    "loss of 1 % one way, delay of 80 ms": (Link(loss=0.01, delay_ms=40), Link(delay_ms=40)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="a run for each")
    parser.add_argument("--mb", type=int, default=4, help="of gradients")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each run")
    parser.add_argument("--program", nargs="+", default=[sys.executable, "-m", "farandole"])
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces are removed
    titles = ["link", "MB of gradients", "step ms", "least", "most", "GB between hosts", "MB a step", "named as slow"]
    show("Bad links", titles, [measure(options, name) for name in options.rows], markdown=True)


def measure(options: argparse.Namespace, name: str) -> list[str]:
    """A row of the table, of one run."""
    with ExitStack() as stack:
        names = stack.enter_context(joined(*ROWS[name]))
        here, there = (["ip", "netns", "exec", each] for each in names)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
        job = [str(JOB), "--mb", str(options.mb)]
        command = [*here, *options.program, "run", "--workers", "1", "--listen", "0.0.0.0", "--threads", "1"]
        stack.enter_context(process([*command, "--max", "2", "--folder", str(folder), *job], FARANDOLE_HOST="a"))
        wait(lambda: (folder / "ticket").exists())
        join = [*there, *options.program, "join", str(folder / "ticket"), *job]
        stack.enter_context(process(join, FARANDOLE_HOST="b"))
        wait(lambda: members(folder) == 2)
        wait(lambda: bool(steps(folder)))
        first = len(steps(folder)) + 2
        wait(lambda: len(steps(folder)) > first)
        time.sleep(options.seconds)
        times = steps(folder)[first:]
        status = json.loads(run([*here, *options.program, "status", "--json", "--run", str(folder)]))
    gaps = [(b - a) * 1000 for a, b in pairwise(times)]
    traffic = (status["account"] or {}).get("traffic") or {}
    row = [name, str(options.mb), *(number(value, 0) for value in (statistics.median(gaps), min(gaps), max(gaps)))]
    sent, a_step = traffic.get("sent_bytes"), traffic.get("exchange_bytes_per_step")
    row += [
        "unknown" if sent is None else number(sent / 1e9, 3),
        "unknown" if a_step is None else number(a_step / 1e6, 2),
    ]
    row.append("; ".join(map(_named, status["slow_links"])) or "none")
    print(" | ".join(row), file=sys.stderr, flush=True)  # a run that is interrupted has shown the rows so far
    return row


def _named(slow: dict[str, Any]) -> str:
    link = slow["link"]
    return (
        f"{link['source']} to {link['target']}: {link['bytes_per_s'] / 1e6:.2f} beside "
        f"{slow['others_bytes_per_s'] / 1e6:.2f} MB/s, {100 * link['resent']:.1f} % sent again, "
        f"waited {100 * link['waited']:.0f} %"
    )


# --- links ------------------------------------------------------------------------------------------------------------


@contextmanager
def joined(there: Link, back: Link) -> Iterator[list[str]]:
    """Two namespaces whose devices `cable` are joined."""
    names = [f"farandole-bad-{os.getpid()}-{side}" for side in "ab"]
    carrier = 0
    try:
        for name in names:
            ip("netns", "add", name)
        if there.mbit:
            ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        else:
            carrier = carry(names, (there, back))
        for name, address, other, link in zip(names, ADDRESSES, reversed(ADDRESSES), (there, back), strict=True):
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "route", "add", "default", "via", other)
            if link.mbit:
                limit = ["tbf", "rate", f"{link.mbit}mbit", "burst", "256kb", "latency", "200ms"]
                run(["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "cable", "root", *limit])
        yield names
    finally:
        if carrier:
            os.kill(carrier, 9)
            os.waitpid(carrier, 0)
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def carry(names: list[str], links: tuple[Link, Link]) -> int:
    """Starts the process that carries packets between the namespaces. Returns its id once the devices exist."""
    ready, made = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            ends = [tun(name) for name in names]
            os.write(made, b"x")
            forward(ends, links)
        finally:
            os._exit(1)
    os.close(made)
    assert os.read(ready, 1), "no TUN devices: is /dev/net/tun there?"
    os.close(ready)
    return child


def tun(namespace: str) -> int:
    """A new TUN device `cable` in a namespace, by its descriptor."""
    with open(f"/var/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0x40000000):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, 0x400454CA, struct.pack("16sH14x", b"cable", 0x1001))  # TUNSETIFF: IFF_TUN | IFF_NO_PI
    return device


def forward(ends: list[int], links: tuple[Link, Link]) -> None:
    """Carries packets both ways, for ever."""
    poll, chance, held = select.poll(), random.Random(0), list[tuple[float, int, int, bytes]]()
    for end in ends:
        poll.register(end, select.POLLIN)
    count = 0
    while True:
        timeout = max(0.0, held[0][0] - time.monotonic()) * 1000 if held else None
        for end, _ in poll.poll(timeout):
            side = ends.index(end)
            for _ in range(64):
                try:
                    packet = os.read(end, 65536)
                except BlockingIOError:
                    break
                if chance.random() >= links[side].loss:
                    count += 1
                    due = time.monotonic() + links[side].delay_ms / 1000
                    heapq.heappush(held, (due, count, ends[1 - side], packet))
        while held and held[0][0] <= time.monotonic():
            _, _, end, packet = heapq.heappop(held)
            with contextlib.suppress(OSError):  # the device is not up yet
                os.write(end, packet)


if __name__ == "__main__":
    main()
