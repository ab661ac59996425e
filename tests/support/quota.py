"""A processor quota for one process, as a container or a small instance has it: cgroup v1 or v2. Needs root.

A process in it computes at full speed until its part of each period is used up, and stands still for the rest.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType

PERIOD_US = 50_000
V1, V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
WHY_NOT = "processor quotas need root and a writable cgroup with the cpu controller"


def place() -> Path | None:
    """The folder in which a cgroup with a quota can be made."""
    v2 = V2 / "cgroup.subtree_control"
    if os.geteuid() != 0:
        return None
    if (V1 / "cpu.cfs_quota_us").exists() or (V1.is_dir() and (V1 / "cgroup.procs").exists()):
        return V1
    return V2 if v2.exists() and "cpu" in v2.read_text().split() else None


class Quota:
    """Holds process `pid` to `cores` of a core, until the context is left."""

    def __init__(self, pid: int, cores: float) -> None:
        self.pid = pid
        self.cores = cores

    def __enter__(self) -> Quota:
        parent = place()
        assert parent is not None, WHY_NOT
        self.folder = parent / f"farandole-{os.getpid()}-{self.pid}"
        self.folder.mkdir()
        quota_us = max(1000, round(self.cores * PERIOD_US))
        if parent == V1:
            (self.folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (self.folder / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (self.folder / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        (self.folder / "cgroup.procs").write_text(str(self.pid))
        self._parent = parent
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pid in (self.folder / "cgroup.procs").read_text().split():
            try:
                (self._parent / "cgroup.procs").write_text(pid)
            except ProcessLookupError:
                continue  # it has ended meanwhile
        self.folder.rmdir()


def to_be_had(seconds: float = 1.0) -> float:
    """What a process gets of a core here and now, beside a second one that computes: 1.0 on an idle machine of two."""
    program = (
        "import os, time\n"
        f"began, until = time.monotonic(), time.monotonic() + {seconds}\n"
        "while time.monotonic() < until: pass\n"
        "print(time.process_time() / (time.monotonic() - began))"
    )
    both = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    return sum(float(process.communicate(timeout=60)[0]) for process in both) / 2
