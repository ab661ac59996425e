"""Whether this process reaches the run's store, and whether what the run has written is there.

The same path, or URL, may be another place on another machine, and one that can be written to. So `farandole run`
leaves a mark in the store, and tells it to every worker; who finds it there, and can write beside it, reaches the run's
own. The mark is no secret. It stays, and serves who resumes the run.

Of a remote store this is asked by a process of its own, for the reasons given in `uploader.py`:

    python -m farandole.checkpoint.reach URL MARK

Loads no torch: the command line asks here too.
"""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from farandole.checkpoint.place import look
from farandole.checkpoint.store import Store, first_line, step_of
from farandole.errors import CheckpointsGone, UsageError
from farandole.membership.events import Checkpoint, Resumed, Saved, name_of
from farandole.membership.last_resort import TOLD
from farandole.membership.messages import Newest
from farandole.membership.metrics import parse_line

MARK = ".run"
ASKED_S = 60.0  # for a remote store to answer


def leave_mark(url: str) -> str:
    """The mark of the store at `url`; it is made if there is none.

    Raises:
        UsageError: the store can't be read or written.
    """
    store = Store(url)
    store.check()
    try:
        with contextlib.suppress(FileNotFoundError):
            if mark := _mark(store):  # empty where a disk was full
                return mark
        mark = secrets.token_hex(16)
        store.put(MARK, mark.encode())
    except Exception as error:  # noqa: BLE001  every kind of place has errors of its own
        raise UsageError(f"checkpoints at {url} can't be written: {first_line(error)}") from None
    return mark


def unreached(url: str, mark: str) -> str:
    """Why this process can't write where the run's checkpoints are, in words; "" if it can."""
    if Store(url).local:
        return _unreached(url, mark)
    command = [sys.executable, "-m", "farandole.checkpoint.reach", url, mark]
    try:
        asked = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ASKED_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{url} has not answered within {ASKED_S:g} s"
    return asked.stdout.strip() if asked.returncode == 0 else first_line(OSError(asked.stderr.strip()[-200:]))


def _unreached(url: str, mark: str) -> str:
    """`unreached`, by this process."""
    store = Store(url)
    try:
        if mark and _mark(store) != mark:
            return f"{url} is another place here than where the run was started"
        store.check()
    except FileNotFoundError:
        return f"{url} is not there, or is another place here than where the run was started"
    except UsageError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  every kind of place has errors of its own
        return f"{url} can't be read: {first_line(error)}"
    return ""


def _mark(store: Store) -> str:
    return store.files.cat_file(_place(store)).decode()


def _place(store: Store) -> str:
    return f"{store.path}/{MARK}"


# --- what was written ------------------------------------------------------------------------------------------------


def listed(metrics: Path) -> Newest:
    """The newest checkpoint in the run's store that its metrics.jsonl tells of. A damaged line says nothing."""
    heads = tuple(f'{{"event":"{name_of(event)}",'.encode() for event in TOLD)
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
        case Resumed(step=step, path=path):
            return Newest(step=step, path=path)
        case Checkpoint(step=step, path=path) if step >= newest.step:
            return Newest(step=step, path=path)
        case Saved(path=path, whole=True) if (step := step_of(path)) is not None and step >= newest.step:
            return Newest(step=step, path=path)
        case _:
            return newest


def see(places: Sequence[str], newest: Newest) -> None:
    """See that the checkpoint `newest`, or a newer one, is at one of the places, whole or damaged.

    Raises:
        CheckpointsGone: it is not.
        Exception: a place can't be read; see `store.reaching`.
    """
    if not newest.path:
        return
    seen = max((step for place in places for step in _steps(place)), default=-1)
    if seen >= newest.step:
        return
    there = f"the newest that is there now is of step {seen}" if seen >= 0 else "there is none now"
    raise CheckpointsGone(
        f"the run has written {newest.path}, a checkpoint of step {newest.step}, and {there} at "
        f"{' or '.join(places)}: is a disk missing? Bring it back and start the run again, or begin again, or from "
        f"another checkpoint (--resume), with another --folder"
    )


def _steps(place: str) -> list[int]:
    try:
        store, one = look(place)
    except UsageError:  # a file that is not there
        return []
    finished = [entry.step for entry in one or store.entries() if entry.whole]
    return finished and [*finished, *(entry.step for entry in store.unfinished() if entry.whole)]


if __name__ == "__main__":
    print(_unreached(*sys.argv[1:]))
