"""What every worker process of every contestant writes down, in the same way: when each of its steps ended.

One file a process, `$BENCH_FOLDER/steps/LABEL.PID`, kept open, a line each:

    step TIME NUMBER SIZE      a step ended: Unix time, the step's number, how many workers took part
    mark TIME NAME VALUE       anything else worth knowing

With `BENCH_MEMORY` set, every step also marks the highest anonymous memory so far: what the process had allocated at
the worst moment, exactly, by the kernel's own high-water mark of resident memory, reset once model and data are there,
less the pages of mapped files, which only ever grow in number. Timed runs go without it.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

PAGE = os.sysconf("SC_PAGESIZE")


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
        self._memory = "BENCH_MEMORY" in os.environ
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def step(self, number: int, size: int) -> None:
        """A step ended just now."""
        os.write(self._file, b"step %.6f %d %d\n" % (time.time(), number, size))
        if self._memory:
            self.mark("memory_peak", high_water_bytes() - mapped_bytes())

    def mark(self, name: str, value: int = 0) -> None:
        """Something happened just now."""
        os.write(self._file, b"mark %.6f %s %d\n" % (time.time(), name.encode(), value))

    def built(self, gradient_bytes: int) -> None:
        """Model and data are there, nothing distributed is yet: the line that memory is measured from."""
        self.mark("gradient_bytes", gradient_bytes)
        if self._memory:
            Path("/proc/self/clear_refs").write_text("5")
            self.mark("memory_built", high_water_bytes() - mapped_bytes())


def high_water_bytes() -> int:
    """The most resident memory that this process has had since the mark was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def mapped_bytes() -> int:
    """This process's resident memory that a file stands behind and that is not its own: libraries, others' arenas."""
    return int(Path("/proc/self/statm").read_bytes().split()[2]) * PAGE - arena_bytes()


def arena_bytes() -> int:
    """What this process lends to others of its host: it is mapped for reading by them, and counted here once."""
    own, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            own = words[1].endswith("s") and "memfd:farandole" in line
        elif own and words[0] == "Rss:":
            total += 1024 * int(words[1])
    return total
