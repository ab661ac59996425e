"""Checks that this process reaches the run's store, and that the run's checkpoints are there.

The same path or URL may be another, writable location on another machine. So the store contains the run's identity
(`owner.py`), and every worker receives it. A worker that finds it in a store, and can write there, reaches the run's
own store. The identity is not a secret.

For a remote store a separate process does this check, for the reasons given in `save.py`:

    python -m farandole.checkpoint.reach URL IDENTITY

This module does not import torch: the command line uses it too.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from farandole.checkpoint.owner import owner_of
from farandole.checkpoint.store import Patience, RunIdentity, Store, first_line, look, step_of
from farandole.errors import CheckpointsGone, UsageError
from farandole.protocol.events import CheckpointEvent, ResumedEvent, SavedEvent, name_of
from farandole.protocol.messages import Newest
from farandole.protocol.metrics import parse_line
from farandole.protocol.reported_events import CHECKPOINT_EVENTS

ASKED_S = 90.0  # seconds for a remote store to answer, with all attempts

_log = logging.getLogger("farandole.checkpoint.reach")


def unreached(url: str, identity: str) -> str:
    """Return why this process can't write to the store of the run with `identity`; "" if it can."""
    if Store(url).local:
        return _unreached(url, identity)
    command = [sys.executable, "-m", "farandole.checkpoint.reach", url, identity]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(Patience.log_after_s)
            if process.poll() is None:
                _log.warning(
                    "checkpoints at %s: no answer for %.0f s; timeout after %.0f s", url, Patience.log_after_s, ASKED_S
                )
            output, errors = process.communicate(timeout=ASKED_S - Patience.log_after_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return f"{url} has not answered within {ASKED_S:g} s"
        return output.strip() if process.returncode == 0 else first_line(OSError(errors.strip()[-200:]))


def _unreached(url: str, identity: str) -> str:
    """Do the check of `unreached` in this process."""
    store = Store(url)
    try:
        if identity:
            owner = owner_of(store)
            if owner is None:
                return f"{url} does not exist, or is another location on this machine than where the run was started"
            if owner.id != identity:
                return f"{url} is another location here than where the run was started, or now belongs to {owner}"
        store.check()
    except UsageError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  each kind of store has its own errors
        return f"{url} can't be read: {first_line(error)}"
    return ""


# --- the run's checkpoints -------------------------------------------------------------------------------------------


def listed(metrics: Path) -> Newest:
    """Return the newest checkpoint in the run's store that its metrics.jsonl records. Damaged lines are ignored."""
    heads = tuple(f'{{"event":"{name_of(event)}",'.encode() for event in CHECKPOINT_EVENTS)
    newest = Newest()
    try:
        with metrics.open("rb") as lines:
            for line in lines:
                if line.startswith(heads):
                    newest = _after(newest, line)
    except OSError:
        pass
    return newest


def _after(newest: Newest, line: bytes) -> Newest:
    match parse_line(line):
        case ResumedEvent(step=step, path=path):
            return Newest(step=step, path=path)
        case CheckpointEvent(step=step, path=path) if step >= newest.step:
            return Newest(step=step, path=path)
        case SavedEvent(path=path, whole=True) if (step := step_of(path)) is not None and step >= newest.step:
            return Newest(step=step, path=path)
        case _:
            return newest


def see(places: Sequence[str], newest: Newest, run: RunIdentity | None = None) -> None:
    """Verify that the checkpoint `newest`, or a newer one, is at one of the places, whole or damaged.

    At the first place, the run's own store, only checkpoints of `run` count, if it is given.

    Raises:
        CheckpointsGone: none of the places has one.
        Exception: a place can't be read; see `store.reaching`.
    """
    if not newest.path:
        return
    newest_step = max(
        (step for n, place in enumerate(places) for step in _steps(place, None if n else run)), default=-1
    )
    if newest_step >= newest.step:
        return
    present = f"the newest one now is of step {newest_step}" if newest_step >= 0 else "there is none now"
    raise CheckpointsGone(
        f"the run has written {newest.path}, a checkpoint of step {newest.step}, but {present} at "
        f"{' or '.join(places)}: is a disk missing? Mount it and start the run again, or start a new run, also from "
        f"another checkpoint (--resume), with another --folder"
    )


def _steps(place: str, run: RunIdentity | None) -> list[int]:
    try:
        store, one = look(place, run)
    except UsageError:  # a file that does not exist
        return []
    finished = [entry.step for entry in one or store.entries() if entry.whole]
    return finished and [*finished, *(entry.step for entry in store.unfinished() if entry.whole)]


if __name__ == "__main__":
    print(_unreached(*sys.argv[1:]))
