"""One trial: a run under attack, its verdict, and what is told of it; and the undisturbed job to compare it with."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from chaos.attack import Attack, Struck
from chaos.job import EPOCHS
from chaos.launched import ENVIRON, JOB, Launched
from chaos.network import Network
from chaos.partition import HOSTS, Partition, fight
from chaos.schedule import schedule
from chaos.verdict import Reference, complaints
from farandole.data.ledger import count
from farandole.protocol.events import ViewEvent
from farandole.protocol.metrics import StepLine

ALONE_S = 120.0
STALL_S = 4
DISK = "32m"
ORPHAN_LIMIT = "45"  # so long a run waits for a worker that was killed with everyone who held the state, or that for it
SHARED, UNSHARED = {"FARANDOLE_SHARED_MEMORY": "1"}, {"FARANDOLE_SHARED_MEMORY": "0"}
TRANSPORTS = (
    (SHARED, SHARED),
    (SHARED, UNSHARED),
    (UNSHARED, SHARED),
)  # of the run's own workers, and of external workers


@dataclass(frozen=True, kw_only=True)
class Told:
    """One run, for the table. `redone`, `committed`: recoveries that did a step's exchange again, or found it whole."""

    seed: int
    seconds: float
    faults: Counter[str]
    views: int
    steps: int
    redone: int
    committed: int
    complaints: list[str]


Trial = Callable[[int, Path, Reference], Told]


@cache
def undisturbed(place: Path) -> Reference:
    """The same job as a world of one, and on the way the digits in a file; once for each place."""
    from sklearn.datasets import load_digits  # slow, and needed once

    data = load_digits()
    np.savez(digits(place), images=data.images.astype(np.float32), labels=data.target.astype(np.int64))
    folder = place / "undisturbed"
    job = [sys.executable, str(Path(__file__).with_name("job.py")), str(digits(place))]
    environ = {**ENVIRON, "FARANDOLE_FOLDER": str(folder), "FARANDOLE_LEDGER": "1"}
    done = subprocess.run(job, env=environ, stdout=subprocess.PIPE, text=True, timeout=ALONE_S, check=True)
    counts = count(folder / "ledger")
    train = sum(1 for epoch, _ in counts if epoch == 0)
    assert counts == Counter((epoch, sample) for epoch in range(EPOCHS) for sample in range(train))
    return Reference(done.stdout.rsplit("fingerprint ", 1)[-1].strip(), counts)


def digits(place: Path) -> Path:
    return place / "digits.npz"


def processes(seed: int, place: Path, reference: Reference, *, audit: str = "0") -> Told:
    """A run whose processes are struck, whose script is edited, and whose disk is full for a while."""
    plan = schedule(seed)
    kinds = {blow.kind for blow in plan.blows}
    options = ["--workers", str(plan.workers), "--min", str(plan.minimum), "--checkpoint-every", "20steps"]
    options += ["--audit", audit, "--orphan-limit", ORPHAN_LIMIT]
    options += ["--stall", str(STALL_S)] if "hang" in kinds else []
    loaders = ["--loaders", "1"] if "kill loader" in kinds else []
    folder = place / f"run-{seed}"
    with _script(folder) as script, _disk(folder) if "fill disk" in kinds else nullcontext(folder) as where:
        if where is None:  # nobody may mount one here
            plan = replace(plan, blows=tuple(blow for blow in plan.blows if blow.kind != "fill disk"))
        ours, external_workers = TRANSPORTS[seed % len(TRANSPORTS)]
        with Launched(where or folder, digits(place), options, job=script, arguments=loaders, beside=folder,
                      environ=ours, external_workers=external_workers) as run:  # fmt: skip
            attack = Attack(plan, run)
            attack.fight()
            return judged(seed, run, run.finish(), attack.struck, reference)


@contextmanager
def _script(folder: Path) -> Iterator[Path]:
    """A copy of the job, which may be edited."""
    script = folder.with_suffix(".job") / JOB.name
    script.parent.mkdir()
    shutil.copy(JOB, script)
    try:
        yield script
    finally:
        shutil.rmtree(script.parent)


@contextmanager
def _disk(folder: Path) -> Iterator[Path | None]:
    """A run's folder on a small disk, which can be filled; None where one may not mount any."""
    disk = folder.with_suffix(".disk")
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(disk)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, stderr=subprocess.DEVNULL, check=False).returncode == 0
    try:
        yield disk / folder.name if mounted else None
        if mounted and (disk / folder.name).exists():  # there is something to complain of
            shutil.copytree(disk / folder.name, folder)
    finally:
        if mounted:
            subprocess.run(["umount", str(disk)], check=True)
        disk.rmdir()


def network(seed: int, place: Path, reference: Reference) -> Told:
    """A run whose hosts' links are broken. With an odd seed the hosts are in two zones."""
    with (
        Network(HOSTS) as hosts,
        Partition(
            hosts, place / f"run-{seed}", digits(place), ["--orphan-limit", ORPHAN_LIMIT], zones=1 + seed % 2
        ) as partition,
    ):
        code = fight(partition, seed)
        return judged(seed, partition.run, code, partition.struck, reference)


def judged(seed: int, run: Launched, code: int | None, struck: Sequence[Struck], reference: Reference) -> Told:
    """Of a run that has ended, or will be ended: its folder is kept only if there is something to complain of."""
    watch = run.watch
    full = any(blow.kind == "fill disk" and blow.target for blow in struck)
    found = complaints(code, watch.lines, run.folder / "ledger", watch.processes(), reference, full=full)
    found += run.troubles()
    seconds = run.seconds
    if found:
        print(f"\nseed {seed}: {'; '.join(found)}\n{report(run, struck)}", flush=True)
    else:
        shutil.rmtree(run.folder)
        run.output.unlink()
    return Told(
        seed=seed,
        seconds=seconds,
        faults=Counter(blow.kind for blow in struck if blow.target),
        views=watch.seen["view"],
        steps=sum(isinstance(line, StepLine) for line in watch.lines),
        redone=sum(view.outcome == "redo" for view in watch.events(ViewEvent)),
        committed=sum(view.outcome == "commit" for view in watch.events(ViewEvent)),
        complaints=found,
    )


def report(run: Launched, struck: Sequence[Struck]) -> str:
    """What was struck, and what happened."""
    lines = [f"folder {run.folder}", "struck:", *(f"  {blow}" for blow in struck)]
    lines += ["events:", *(f"  {line}" for line in run.watch.lines if not isinstance(line, StepLine))]
    lines += ["output:", run.output.read_text(errors="replace")[-3000:]]
    return "\n".join(lines)
