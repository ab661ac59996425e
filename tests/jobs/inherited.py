"""The program of test_fork_server: what a process has inherited, as JSON in the file OUT.

python -m tests.jobs.inherited OUT [WORDS]
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader


def facts() -> dict[str, Any]:
    """Equal in all processes that were started alike."""
    return {
        "signals": {n.name: str(signal.getsignal(n)) for n in signal.Signals},
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "descriptors": sorted(int(name) for name in os.listdir("/proc/self/fd"))[:-1],  # the last lists them
        "streams": [(stream.fileno(), stream.encoding, stream.isatty()) for stream in (sys.stdin, sys.stdout)],
        "unbuffered": sys.stdout.write_through,  # type: ignore[attr-defined]
        "input": sys.stdin.read(),
        "environ": {**os.environ, "OUT": ""},
        "shown environ": Path("/proc/self/environ").read_text().split("\0")[:-1] == _environ(),
        "arguments": [sys.argv, sys.path, sys.executable, list(sys.flags)],
        "shown": [sys.orig_argv[1:], Path("/proc/self/cmdline").read_text().split("\0")[1:-1] == sys.orig_argv[1:]],
        "main": [sys.modules["__main__"] is sys.modules[__name__], sys.modules["__main__"].__spec__.name],  # type: ignore[union-attr]
        "folder": os.getcwd(),
        "limits": [resource.getrlimit(number) for number in range(16)],
        "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "start method": multiprocessing.get_start_method(allow_none=True),
        "process": multiprocessing.current_process().name,
        "threads": [threading.active_count(), threading.current_thread() is threading.main_thread()],
        "torch": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch's": [torch.get_default_dtype() is torch.float32, torch.is_grad_enabled(), torch.cuda.is_initialized()],
    }


def _environ() -> list[str]:
    return [f"{name}={value}" for name, value in os.environ.items()]


def draws() -> list[Any]:
    """Others in each process."""
    key = bytes(multiprocessing.current_process().authkey).hex()
    return [random.random(), float(np.random.standard_normal()), float(torch.rand(1)), key]


def loaded() -> dict[str, list[int]]:
    """By each start method of a loader's process."""
    return {method: [int(row) for row in DataLoader(range(4), num_workers=1, multiprocessing_context=method)]
            for method in ("fork", "forkserver", "spawn")}  # fmt: skip


def main() -> None:
    said = {"facts": facts(), "draws": draws()}
    if "--load" in sys.argv:
        multiprocessing.set_start_method("spawn")  # once in a process
        said["loaded"] = loaded()
    partial = Path(f"{os.environ['OUT']}.{os.getpid()}")
    partial.write_text(json.dumps(said))
    partial.rename(os.environ["OUT"])
    if "--exit" in sys.argv:
        sys.exit(7)
    if "--raise" in sys.argv:
        raise OSError("no disk")
    if "--signal" in sys.argv:
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
