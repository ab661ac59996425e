"""At the run's folder: another user of the machine, who reads what he can, holds what he can and plants what he can."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attack.base import USER, Attack, Succeeded
from attack.live import Live
from chaos.launched import Launched
from chaos.trial import digits
from farandole.control.run_folder import LOCK, METRICS, TICKET

PLANTED = "ba" * 32  # the secret that the other user knows
PRECIOUS = b'{"step": 7, "loss": 0.5}\n' * 40 + b"and an end without a newline"
SEEN_S = 30.0
LARGEST = 1 << 20


def read(folder: str, pids: tuple[int, ...]) -> bytes:
    """Every file of the folder, and what /proc says of the run's processes."""
    proc = [Path(f"/proc/{pid}/{name}") for pid in pids for name in ("cmdline", "environ", "maps", "mem")]
    found = [path.encode() + b"\n" + content for path, content in _contents([*_walk(folder), *proc])]
    return b"\n".join(found)


def _walk(folder: str) -> list[Path]:
    return [Path(place, name) for place, _, names in os.walk(folder) for name in names]


def _contents(paths: list[Path]) -> Iterator[tuple[str, bytes]]:
    for path in paths:
        with contextlib.suppress(OSError), path.open("rb") as file:
            yield str(path), file.read(LARGEST)


def reading(live: Live) -> str:
    pids = tuple(live.run.watch.processes())
    got = live.by_stranger(read, str(live.folder), pids)
    named = [path.name for path in _walk(str(live.folder)) if str(path).encode() + b"\n" in got]
    if named:
        raise Succeeded(f"{len(named)} files of the folder were read: {', '.join(sorted(named)[:4])}, ...")
    return f"no file of the folder; of {len(pids)} processes the command lines, in which is no secret"


def lock(folder: str) -> bytes:
    """Take the folder's lock in every way; says which."""
    with contextlib.suppress(OSError):
        handle = os.open(Path(folder, LOCK), os.O_RDONLY)
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return b"HELD"
        return b"OPENED"
    return b""


def locking(live: Live) -> str:
    """Who can open it can hold it as soon as the run is over, and then nobody resumes the run."""
    got = live.by_stranger(lock, str(live.folder))
    if got:
        raise Succeeded(f"the lock was {got.decode().lower()} by another user")
    return "the lock can't be opened"


def plant(folder: str, mode: int, target: str) -> bytes:
    """A folder of one's own, ready for somebody's run: a ticket whose secret is known, and a link to his other file."""
    os.umask(0)
    os.mkdir(folder)
    planted = {"address": "http://127.0.0.1:49152", "secret": PLANTED, "run": "planted", "fingerprint": ""}
    Path(folder, TICKET).write_text(json.dumps(planted))
    os.symlink(target, Path(folder, METRICS))
    Path(folder, LOCK).touch(0o666)
    os.chmod(folder, mode)
    return b""


@contextmanager
def planted(live: Live, mode: int) -> Iterator[tuple[Path, Path]]:
    """A folder that another user has made, and the owner's own file that it has a link to."""
    theirs = live.place / f"theirs-{mode:o}"
    theirs.mkdir()
    theirs.chmod(0o1777)
    precious = live.place / f"precious-{mode:o}"
    precious.write_bytes(PRECIOUS)
    live.by_stranger(plant, str(theirs / "run"), mode, str(precious))
    yield theirs / "run", precious


def writable(live: Live) -> str:
    """It is refused, whoever asks, with the command that mends it."""
    with planted(live, 0o777) as (folder, precious), _run_in(live, folder) as run:
        live.until(lambda: run.process.poll() is not None or _adopted(folder), SEEN_S, "a refusal")
        said = run.output.read_text(errors="replace")
        _unharmed(folder, precious, said)
        if run.process.poll() in (None, 0) or "chmod" not in said:
            raise Succeeded(f"a run was started in a folder that all may write: {said[-200:]!r}")
    return f"refused: {said.strip().splitlines()[-1][:160]!r}"


def owned(live: Live) -> str:
    """Root may use it, and takes nothing over that another user has put there."""
    with planted(live, 0o755) as (folder, precious), _run_in(live, folder) as run:
        live.until(lambda: run.process.poll() is not None or _serves(folder), SEEN_S, "a ticket, or a refusal")
        _unharmed(folder, precious, run.output.read_text(errors="replace"))
        said = run.output.read_text(errors="replace").strip().splitlines() or [""]
        what = "the run took a secret of its own" if run.process.poll() is None else f"refused: {said[-1][:160]!r}"
    return what


def _run_in(live: Live, folder: Path) -> Launched:
    beside = live.place / f"{folder.parent.name}-run"
    return Launched(folder, digits(live.place), ["--workers", "1"], beside=beside)


def _serves(folder: Path) -> bool:
    return (folder / "coordinator.json").exists()


def _adopted(folder: Path) -> bool:
    return _serves(folder) and PLANTED in (folder / TICKET).read_text()


def _unharmed(folder: Path, precious: Path, said: str) -> None:
    if _adopted(folder):
        raise Succeeded("a planted ticket was adopted, with the secret that another user knows")
    if precious.read_bytes() != PRECIOUS:
        raise Succeeded(f"a file of the owner's was changed through a link: {said[-200:]!r}")


ATTACKS = (
    Attack(name="folder: reading it, and /proc", who=USER, act=reading, needs_root=True, short=True),
    Attack(name="folder: holding the lock", who=USER, act=locking, needs_root=True, short=True),
    Attack(name="folder: one that all may write", who=USER, act=writable, needs_root=True),
    Attack(name="folder: another user's, with planted files", who=USER, act=owned, needs_root=True),
)
