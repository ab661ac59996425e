"""What a coordinator's outage costs the training: throughput while there is none, against before and after.

    python benchmarks/outage.py --outages 3 --seconds 60

Two workers train a small convolutional net. The coordinator is killed, stays away for so long, and is started again;
between two outages it is there for as long. An outage's window ends two seconds after the workers have been brought
together again, so the kill, the silence and the return are all in it. The ratio is of samples a second, against the
mean of the windows before and after, which takes most of a shared machine's drift away.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

import msgspec
from launch import Fleet, Job, Process
from tables import number, show

from farandole.control.run_folder import METRICS, RECORD, SETTINGS, TICKET
from farandole.protocol.coordinator.state import RunSettings

SETTLED_S = 2.0
WAIT_S = 60.0


class Bare(Fleet):
    """A coordinator and workers without `farandole run`, which would start the coordinator again at once."""

    name = "farandole"
    joined = 0

    def start(self) -> None:
        self.run = self.folder / "run"
        self.run.mkdir()
        count = self.job.workers
        settings = RunSettings(run="outage", folder=str(self.run), wanted=count, minimum=self.job.minimum)
        (self.run / SETTINGS).write_bytes(msgspec.json.encode(settings))
        self.coordinator = self.coordinate()
        self.wait((self.run / RECORD).exists, WAIT_S, "the coordinator")
        for _ in range(count):
            self.join()
        self.wait(lambda: self.samples(0.0, time.time()) > 0, WAIT_S, "the first steps")

    def join(self) -> None:
        name = f"w{self.joined}"
        self.joined += 1
        command = [sys.executable, "-m", "farandole", "join", str(self.run / TICKET), *self.script()]
        self.spawn(name, command, {"FARANDOLE_WORKER": name})

    def coordinate(self, *again: str) -> Process:
        return self.spawn("coordinator", [sys.executable, "-m", "farandole.coordinator.process", str(self.run), *again])

    def outage(self, seconds: float) -> None:
        views = self.views()
        self.coordinator.kill()
        self.coordinator.wait()
        time.sleep(seconds)
        self.coordinator = self.coordinate("--again")
        self.wait(lambda: self.views() > views, WAIT_S, "the view that brings everyone together again")
        time.sleep(SETTLED_S)

    def views(self) -> int:
        return sum(1 for line in self.lines() if line.get("event") == "view")

    def lines(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.run / METRICS).read_bytes().split(b"\n")[:-1]]

    def samples(self, begin: float, end: float) -> float:
        """Trained between two times, by the steps' own times; the last steps come with the next heartbeat."""
        return sum(line["samples"] for line in self.lines() if "event" not in line and begin < line["time"] <= end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outages", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    job = Job(model="small", workers=2, batch=40, micro=40, samples=60_000, epochs=1000, minimum=2)
    limit_s = WAIT_S + 2 * (options.outages + 1) * (options.seconds + 20)
    marks: list[float] = []
    with Bare(job, limit_s=limit_s) as fleet:
        fleet.start()
        for _ in range(options.outages):
            marks.append(time.time())
            time.sleep(options.seconds)
            marks.append(time.time())
            fleet.outage(options.seconds)
        marks.append(time.time())
        time.sleep(options.seconds)
        marks.append(time.time())
        time.sleep(SETTLED_S)
        rates = [fleet.samples(a, b) / (b - a) for a, b in pairwise(marks)]
        members = {line["workers"] for line in fleet.lines() if "event" not in line}
    ratios = [rates[i] / mean((rates[i - 1], rates[i + 1])) for i in range(1, len(rates), 2)]
    rows = [
        [f"outage {i + 1}", number(rates[2 * i]), number(rates[2 * i + 1]), number(rates[2 * i + 2]), number(ratio, 3)]
        for i, ratio in enumerate(ratios)
    ]
    show(
        f"Samples a second around outages of {options.seconds:g} s, {Path(__file__).name}; workers: {members}; "
        f"median ratio {median(ratios):.3f}",
        ("", "before", "outage", "after", "ratio"),
        rows,
        markdown=options.markdown,
    )


if __name__ == "__main__":
    main()
