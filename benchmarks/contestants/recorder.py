"""What every worker process of every contestant writes down, in the same way: when each of its steps ended.

One file a process, `$BENCH_FOLDER/steps/LABEL.PID`, kept open, a line each:

    step TIME NUMBER SIZE      a step ended: Unix time, the step's number, how many workers took part
    mark TIME NAME VALUE       anything else worth knowing

With `BENCH_MEMORY` set, a thread samples the process's anonymous memory every 2 ms (what it allocated; mapped library
files, which every contestant shares, are left out) and each new peak is a mark. Timed runs go without that thread.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from pathlib import Path

PAGE = os.sysconf("SC_PAGESIZE")
SAMPLING_SECONDS = 0.002


def arguments() -> argparse.Namespace:
    """The arguments that the three training scripts share."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--workers", type=int, required=True, help="workers at the start")
    parser.add_argument("--batch", type=int, required=True, help="samples a worker and a step, at the start")
    parser.add_argument("--micro", type=int, required=True, help="samples a micro-batch (farandole)")
    parser.add_argument("--samples", type=int, required=True, help="size of the data")
    parser.add_argument("--epochs", type=int, required=True)
    return parser.parse_args()


class Recorder:
    """Writes this process's file; see the top. `label` is the contestant's own name for the worker."""

    def __init__(self, label: str) -> None:
        folder = Path(os.environ["BENCH_FOLDER"]) / "steps"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{label.replace('/', '_').replace('.', '_')}.{os.getpid()}"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def step(self, number: int, size: int) -> None:
        """A step ended just now."""
        os.write(self._file, b"step %.6f %d %d\n" % (time.time(), number, size))

    def mark(self, name: str, value: int = 0) -> None:
        """Something happened just now."""
        os.write(self._file, b"mark %.6f %s %d\n" % (time.time(), name.encode(), value))

    def built(self, gradient_bytes: int) -> None:
        """Model and data are there, nothing distributed is yet: the line that memory is measured from."""
        self.mark("gradient_bytes", gradient_bytes)
        self.mark("memory_built", anonymous_bytes())
        if os.environ.get("BENCH_MEMORY"):
            threading.Thread(target=self._watch_memory, daemon=True).start()

    def _watch_memory(self) -> None:
        peak = 0
        while True:
            now = anonymous_bytes()
            if now > peak:
                peak = now
                self.mark("memory_peak", peak)
            time.sleep(SAMPLING_SECONDS)


def anonymous_bytes() -> int:
    """This process's resident memory that no file stands behind."""
    fields = Path("/proc/self/statm").read_bytes().split()
    return (int(fields[1]) - int(fields[2])) * PAGE
