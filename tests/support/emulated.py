"""Other x86 CPUs, emulated: `qemu-x86_64` runs this Python as on one of them, 60 to 150 times slower.

It shows which instructions a library chooses there and what they give, as far as they are defined. What makers define
each for themselves (estimates of 1/x) an emulator has in a third way: so it is seen, whatever the CPU is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
QEMU = shutil.which("qemu-x86_64")
AMD, INTEL = ("EPYC", "EPYC-Rome", "Dhyana"), ("Haswell", "Broadwell", "Skylake-Client")
MISSING = "" if QEMU else "qemu-x86_64 is not installed: apt-get install qemu-user"


def start(cpu: str, words: Sequence[str], environ: Mapping[str, str] = os.environ) -> subprocess.Popen[str]:
    """This interpreter with `words`, on that CPU, or on the one that is here for ""."""
    assert QEMU or not cpu, MISSING
    emulator = [QEMU or "", "-cpu", cpu] if cpu else []
    return subprocess.Popen([*emulator, sys.executable, *words], cwd=ROOT, env={**environ, "OMP_NUM_THREADS": "1"},
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip
