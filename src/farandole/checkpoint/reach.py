"""Whether this process reaches the run's store, and whether what the run has written is there.

The same path, or URL, may be another place on another machine, and one that can be written to. So the run's identity
lies in the store (`owner.py`), and every worker is told it; who finds it there, and can write beside it, reaches the
run's own. It is no secret.

Of a remote store this is asked by a process of its own, for the reasons given in `save.py`:

    python -m farandole.checkpoint.reach URL IDENTITY

Loads no torch: the command line asks here too.
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

ASKED_S = 90.0  # for a remote store to answer, with all attempts

_log = logging.getLogger("farandole.checkpoint.reach")


def unreached(url: str, identity: str) -> str:
    """Why this process can't write where the checkpoints of the run of that `identity` are, in words; "" if it can."""
    if Store(url).local:
        return _unreached(url, identity)
    command = [sys.executable, "-m", "farandole.checkpoint.reach", url, identity]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True) as asked:
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                asked.wait(Patience.told_s)
            if asked.poll() is None:
                _log.warning(
                    "checkpoints at %s: no answer for %.0f s; it is asked for %.0f s", url, Patience.told_s, ASKED_S
                )
            said, errors = asked.communicate(timeout=ASKED_S - Patience.told_s)
        except subprocess.TimeoutExpired:
            asked.kill()
            return f"{url} has not answered within {ASKED_S:g} s"
        return said.strip() if asked.returncode == 0 else first_line(OSError(errors.strip()[-200:]))


def _unreached(url: str, identity: str) -> str:
    """`unreached`, by this process."""
    store = Store(url)
    try:
        if identity:
            owner = owner_of(store)
            if owner is None:
                return f"{url} is not there, or is another place here than where the run was started"
            if owner.id != identity:
                return f"{url} is another place here than where the run was started, or another run has it now: {owner}"
        store.check()
    except UsageError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  every kind of place has errors of its own
        return f"{url} can't be read: {first_line(error)}"
    return ""


# --- what was written ------------------------------------------------------------------------------------------------


def listed(metrics: Path) -> Newest:
    """The newest checkpoint in the run's store that its metrics.jsonl tells of. A damaged line says nothing."""
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
    """See that the checkpoint `newest`, or a newer one, is at one of the places, whole or damaged. At the first, the
    run's own, only those of `run` count, if it is given.

    Raises:
        CheckpointsGone: it is not.
        Exception: a place can't be read; see `store.reaching`.
    """
    if not newest.path:
        return
    seen = max((step for n, place in enumerate(places) for step in _steps(place, None if n else run)), default=-1)
    if seen >= newest.step:
        return
    there = f"the newest that is there now is of step {seen}" if seen >= 0 else "there is none now"
    raise CheckpointsGone(
        f"the run has written {newest.path}, a checkpoint of step {newest.step}, and {there} at "
        f"{' or '.join(places)}: is a disk missing? Bring it back and start the run again, or begin again, or from "
        f"another checkpoint (--resume), with another --folder"
    )


def _steps(place: str, run: RunIdentity | None) -> list[int]:
    try:
        store, one = look(place, run)
    except UsageError:  # a file that is not there
        return []
    finished = [entry.step for entry in one or store.entries() if entry.whole]
    return finished and [*finished, *(entry.step for entry in store.unfinished() if entry.whole)]


if __name__ == "__main__":
    print(_unreached(*sys.argv[1:]))
