"""`jobs/ending.py` as a run and by itself, and what is there afterwards."""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch

from farandole.training.replica import Replica
from tests.jobs import ending
from tests.support.harness import ENVIRON, FARANDOLE, Elastic, alone

SCRIPT = Path(__file__).parents[1] / "jobs" / "ending.py"


def fingerprint_of(checkpoint: str) -> str:
    """Of the state in a checkpoint, found by torch.load and load_state_dict alone."""
    found = torch.load(checkpoint, weights_only=True)
    objects = ending.made()
    for name, thing in objects.items():
        thing.load_state_dict(found[name])
    return Replica(objects).fingerprint()


def by_itself(folder: Path, *arguments: str) -> str:
    """The fingerprint after the loop of a world of one."""
    out = folder.with_name(f"{folder.name}-out")
    alone(folder, SCRIPT, str(out), *arguments)
    (found,) = out.parent.glob(f"{out.name}.*")
    return found.read_text()


def status(folder: Path, *options: str) -> str:
    command = [*FARANDOLE, "status", "--run", str(folder), *options]
    done = subprocess.run(command, env=ENVIRON, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def ended(run: Elastic) -> int:
    run.until(lambda: run.process.poll() is not None, "the end")
    return run.process.returncode
