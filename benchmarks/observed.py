"""What it costs a run to be looked at: the dashboard with a page open, in turns with nobody looking.

    python benchmarks/observed.py [--workers 2] [--turns 6] [--seconds 15]

Two workers of one thread train the digits. In each turn the dashboard is started and a page's stream is read (without
a browser, which is on another machine in earnest), or nothing is. Printed: the steps a second, and the processor's
time of the dashboard and of the coordinator as a part of the workers'.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import psutil

ROOT = Path(__file__).parents[1]
FARANDOLE = [sys.executable, "-m", "farandole"]
WARM_S = 5.0


def processor_s(processes: list[psutil.Process]) -> float:
    """User and system time, of each with its children that have ended."""
    found = 0.0
    for process in processes:
        spent = process.cpu_times()
        found += spent.user + spent.system
    return found


def steps(folder: Path) -> int:
    return sum(line.startswith(b'{"step":') for line in (folder / "metrics.jsonl").open("rb"))


class Looking:
    """A dashboard with one page open."""

    def __init__(self, folder: Path) -> None:
        command = [*FARANDOLE, "dashboard", "--run", str(folder)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        link = urlsplit(self.process.stdout.readline().split()[-1])
        entering = http.client.HTTPConnection("127.0.0.1", link.port or 0)
        entering.request("GET", f"{link.path}?{link.query}")
        cookie = (entering.getresponse().getheader("Set-Cookie") or "").partition(";")[0]
        self.page = http.client.HTTPConnection("127.0.0.1", link.port or 0)
        self.page.request("GET", "/ticks", headers={"Cookie": cookie})
        self.read = 0
        threading.Thread(target=self._take, args=(self.page.getresponse(),), daemon=True).start()

    def _take(self, answer: http.client.HTTPResponse) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):  # the end
            while data := answer.read1(65536):
                self.read += len(data)

    def end(self) -> None:
        self.process.terminate()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--turns", type=int, default=6, help="of each kind")
    parser.add_argument("--seconds", type=float, default=15.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        job = [str(ROOT / "examples" / "digits.py"), "--epochs", "100000", "--width", "256"]
        command = [*FARANDOLE, "run", "--workers", str(args.workers), "--folder", str(folder), *job]
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while not (folder / "metrics.jsonl").exists() or steps(folder) < 50:
                time.sleep(0.2)
            below = psutil.Process(run.pid).children(recursive=True)
            workers = [p for p in below if "join" in p.cmdline()]
            coordinator = [p for p in below if any("coordinator.process" in word for word in p.cmdline())]
            measure(folder, workers, coordinator, args.turns, args.seconds)
        finally:
            run.terminate()
            run.wait(60)


def measure(
    folder: Path, workers: list[psutil.Process], coordinator: list[psutil.Process], turns: int, seconds: float
) -> None:
    print(f"{len(workers)} workers, {turns} turns of {seconds:g} s with a page open and as many without")
    pace: dict[bool, list[float]] = {False: [], True: []}
    parts: dict[str, list[float]] = {"dashboard": [], "coordinator, looked at": [], "coordinator, not": []}
    for turn in range(2 * turns):
        looked = turn % 2 == 1
        looking = Looking(folder) if looked else None
        time.sleep(WARM_S)
        watched = [psutil.Process(looking.process.pid)] if looking else []
        before = [processor_s(each) for each in (workers, coordinator, watched)]
        had, began = steps(folder), time.monotonic()
        time.sleep(seconds)
        pace[looked].append((steps(folder) - had) / (time.monotonic() - began))
        spent = [processor_s(each) - b for each, b in zip((workers, coordinator, watched), before, strict=True)]
        parts["coordinator, looked at" if looked else "coordinator, not"].append(100 * spent[1] / spent[0])
        if looking:
            parts["dashboard"].append(100 * spent[2] / spent[0])
            assert looking.read > 0
            looking.end()
    ratios = [seen / alone for seen, alone in zip(pace[True], pace[False], strict=True)]
    spread = f"({min(ratios):.3f} to {max(ratios):.3f})"
    print(f"{'steps/s, looked at over not':42}{statistics.median(ratios):.3f} {spread}")
    for name, found in parts.items():
        print(f"{name + ', % of the workers':42}{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})")


if __name__ == "__main__":
    main()
