"""Files that somebody hands to the owner of a run: shards of images, and checkpoints to go on from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from attack import files
from attack.base import AUTHOR, Attack, Succeeded
from attack.live import Live
from chaos.trial import digits

LIMIT_MIB = 100  # of files of a few hundred kB, one of which becomes 256 MiB
READ_S, RUN_S = 60.0, 60.0
ROOT = Path(__file__).parent.parent


def reading(live: Live) -> str:
    """Every one of them, read by the code with which a worker reads."""
    folder = live.place / "handed"
    command = [sys.executable, "-m", "attack.reader", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=READ_S, check=False)
    if done.returncode != 0:
        raise Succeeded(f"who read them ended with {done.returncode}: {done.stderr[-200:]!r}")
    told = json.loads(done.stdout)
    if told["called"]:
        raise Succeeded("a program was started, by an image")
    if told["read"]:
        raise Succeeded(f"read as if it were good: {', '.join(told['read'])}")
    if told["mib"] > LIMIT_MIB:
        raise Succeeded(f"reading took {told['mib']} MiB")
    return f"{told['tried']} files refused, {told['mib']} MiB more memory at most"


def resuming(live: Live) -> str:
    """A run that is to go on from one says so, and ends."""
    there = files.checkpoint(live.place / "bombs", files.deflated(1 << 28))
    command = [sys.executable, "-m", "farandole", "run", "--workers", "1", "--folder", str(live.place / "resumed")]
    command += ["--resume", str(there), str(ROOT / "chaos" / "job.py"), str(digits(live.place))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S, check=False)
    said = done.stdout + done.stderr
    if done.returncode != 1 or "Traceback" in said or "is not stored as it is" not in said:
        raise Succeeded(f"a run went on from it, or died of it ({done.returncode}): {said[-200:]!r}")
    return "a deflated one: the run says so and ends with 1"


ATTACKS = (
    Attack(name="files: shards and checkpoints", who=AUTHOR, act=reading),
    Attack(name="files: a run that resumes from one", who=AUTHOR, act=resuming),
)
