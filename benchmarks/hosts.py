"""How long a host of a hosts file takes to take part, over real SSH, beside what a worker takes that joins by itself.

    python -m benchmarks.hosts [--times 5]

Hosts are sshd processes on loopback addresses (openssh-server, and root). In one run, in turns:

    by itself    from `farandole join` typed here to the first view with its worker: a worker's own start-up
    line added   from the edit of the hosts file to the first view with the new host's worker
    slots raised from the edit to the first view with one worker more, on a host that has one already
    replaced     from the event that says that a host's worker is lost (killed -9, with all of its agent) to the event
                 that another one has started, on a host that has room; in a run of its own

Views change between two steps, so the first view is the first shared step, but for the pause of the switch.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import sshd
from tests.support.sshd import Sshd

JOB = Path(__file__).parents[1] / "tests" / "jobs" / "small.py"
FARANDOLE = [sys.executable, "-m", "farandole"]
STEP_S = 0.05
DEADLINE_S = 120.0


class Rack:
    """A run on the hosts of a file, of which the first `count` are in it from the start."""

    def __init__(self, folder: Path, hosts: Sshd, count: int, *options: str) -> None:
        folder.mkdir()
        self.folder, self.hosts = folder / "run", hosts
        self.file, self.said = folder / "hosts", folder / "said"
        self.slots = dict.fromkeys(range(count), 1)
        (folder / "pace").write_text(str(STEP_S))
        self.job = [str(JOB), str(folder / "out"), "--pace", str(folder / "pace"), "--epochs", "100000"]
        self.write()
        pool = f"ssh,hosts={self.file},ssh={hosts.ssh},python={sys.executable}"
        self.run = subprocess.Popen(
            [*FARANDOLE, "run", "--pool", pool, *options, "--folder", str(self.folder), *self.job],
            stdout=self.said.open("wb"), stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.until_members(2)

    def write(self) -> float:
        """Returns when."""
        lines = [f"{self.hosts.addresses[n]}:{self.hosts.port} slots={slots}\n" for n, slots in self.slots.items()]
        self.file.with_suffix(".new").write_text("".join(lines))
        now = time.time()
        os.replace(self.file.with_suffix(".new"), self.file)
        return now

    def events(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [line for line in map(json.loads, text.split("\n")[:-1]) if "event" in line]

    def until(self, found: Callable[[list[dict[str, Any]]], dict[str, Any] | None]) -> dict[str, Any]:
        began = time.monotonic()
        while (event := found(self.events())) is None:
            if self.run.poll() is not None or time.monotonic() - began > DEADLINE_S:
                sys.exit(f"the run is no longer what it was:\n{self.said.read_text()}")
            time.sleep(0.02)
        return event

    def until_members(self, count: int, since: float = 0.0) -> float:
        """When the first view of so many came into force, after `since`."""

        def view(events: list[dict[str, Any]]) -> dict[str, Any] | None:
            views = [event for event in events if event["event"] == "view" and event["time"] > since]
            return next((event for event in views if len(event["members"]) == count), None)

        return self.until(view)["time"]

    def settle(self, count: int) -> None:
        """Until the newest view is of so many, and has trained for a while."""

        def settled(events: list[dict[str, Any]]) -> dict[str, Any] | None:
            view = next(event for event in reversed(events) if event["event"] == "view")
            return view if len(view["members"]) == count and time.time() - view["time"] > 1.0 else None

        self.until(settled)

    # --- what is measured ------------------------------------------------------------------------------------

    def by_itself(self) -> float:
        began = time.time()
        external_worker = subprocess.Popen(
            [*FARANDOLE, "join", str(self.folder / "ticket"), *self.job],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        took = self.until_members(3, began) - began
        external_worker.send_signal(signal.SIGTERM)
        external_worker.wait()
        self.settle(2)
        return took

    def edited(self, host: int, slots: int) -> float:
        before = dict(self.slots)
        self.slots[host] = slots
        began = self.write()
        took = self.until_members(3, began) - began
        self.slots = before
        self.write()
        self.settle(2)
        return took

    def replaced(self) -> float:
        """A worker's host is lost with all that runs there."""
        view = next(event for event in reversed(self.events()) if event["event"] == "view")
        hosts = {event["worker"]: event["host"] for event in self.events() if event["event"] == "ready"}
        began = time.time()
        for pid in agents(hosts[view["members"][-1]]):
            os.killpg(pid, signal.SIGKILL)
        lost = self.until(lambda events: _after(events, "lost", began))
        started = self.until(lambda events: _after(events, "starting", began))
        self.settle(2)
        return started["time"] - lost["time"]

    def end(self) -> None:
        subprocess.run([*FARANDOLE, "stop", "--run", str(self.folder)], check=True, stdout=subprocess.DEVNULL)
        self.run.wait(DEADLINE_S)


def _after(events: list[dict[str, Any]], kind: str, since: float) -> dict[str, Any] | None:
    return next((event for event in events if event["event"] == kind and event["time"] > since), None)


def _joined(events: list[dict[str, Any]], count: int) -> dict[str, Any] | None:
    """What was said last of a host, once all have agents that are ready."""
    states = {event["host"]: event for event in events if event["event"] == "host"}
    there = [event for event in states.values() if event["state"] == "joined"]
    return there[-1] if len(there) == count else None


def agents(host: str) -> list[int]:
    """Processes that show themselves as that host's agent."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"agent" in words and host.encode() in words and int(path.parent.name) == os.getpgid(int(path.parent.name)):
            found.append(int(path.parent.name))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=5)
    args = parser.parse_args()
    if not sshd.AVAILABLE:
        sys.exit(sshd.WHY_NOT)
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as place, Sshd(Path(place), 3) as hosts:
        rack = Rack(Path(place, "one"), hosts, 2)
        rack.settle(2)
        for _ in range(args.times):
            found.setdefault("by itself", []).append(rack.by_itself())
            found.setdefault("line added", []).append(rack.edited(2, 1))
            found.setdefault("slots raised", []).append(rack.edited(0, 2))
        rack.end()
        rack = Rack(Path(place, "other"), hosts, 3, "--workers", "2")
        rack.settle(2)
        for _ in range(args.times):
            rack.until(lambda events: _joined(events, 3))
            found.setdefault("replaced", []).append(rack.replaced())
        rack.end()
    print("| what | median, s | least | most |")
    print("| --- | --- | --- | --- |")
    for what, seconds in found.items():
        print(f"| {what} | {statistics.median(seconds):.2f} | {min(seconds):.2f} | {max(seconds):.2f} |")
    print(f"load average: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
