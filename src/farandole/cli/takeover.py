"""Whether the run in a folder is still on without its `farandole run`, and can be taken over.

Workers of other hosts, and guests, outlive a `farandole run` that is killed, and its coordinator: they train on until
the orphan limit is over. Who starts `farandole run` on the folder meanwhile goes on where that one was: the same secret
and address, the state of the journal, the settings that the run began with. Its own local workers have ended with it.

The folder's lock says that nobody else does so on this machine. metrics.jsonl says when the run last had a coordinator.
"""

from __future__ import annotations

import os
import socket
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from farandole.code import pack as copies
from farandole.code.pack import pack
from farandole.control.run_folder import CODE, JOURNAL, METRICS, PACK, SETTINGS, TICKET
from farandole.control.ticket import load
from farandole.coordinator import journal as shipping
from farandole.coordinator.journal import Journal, read_state
from farandole.errors import UsageError
from farandole.platform.files import decoded, make, read, write
from farandole.platform.output import tell
from farandole.protocol.coordinator.reconnection import Durable, KnownWorker
from farandole.protocol.coordinator.state import OwnPool, RunSettings

# --- takeover ---------------------------------------------------------------------------------------------------------


def fetch(folder: Path, url: str, ticket: Path, files: Path | None = None) -> None:
    """Have in `folder` what the run of `ticket` had in its own, on a machine that is lost: from beside its checkpoints.
    Its code is packed again, here, and it is told where that is no longer the same; `files`: see `pack`.

    Raises:
        UsageError: the folder holds a run, or there is nothing to be had, or the run's script is not here.
        FarandoleError: the place can't be reached.
    """
    if (folder / SETTINGS).exists():
        raise UsageError(f"--folder {folder} holds a run already: leave out --take-over, or name another --folder")
    loaded = load(str(ticket))
    shipped = shipping.load(url, loaded.run)
    make(folder)
    settings = msgspec.structs.replace(shipped.settings, folder=str(folder.resolve()))
    copies.keep(settings.command[0], folder / CODE)
    write(folder / SETTINGS, msgspec.json.encode(settings))
    since = max(loaded.since, shipped.time)  # another one may have been taken over since the ticket was copied
    msgspec.structs.replace(loaded, since=since).save(folder / TICKET)
    journal = Journal(folder)
    journal.keep((), shipped.state)
    journal.close()
    os.utime(folder / METRICS, (shipped.time, shipped.time))
    if settings.job:
        _pack_again(folder, settings.command[0], files, settings.job.pack)


def _pack_again(folder: Path, script: str, files: Path | None, expected: str) -> None:
    """For hosts that are yet to come."""
    packed = pack(Path.cwd(), script, files, run=folder)
    if packed.hash == expected:
        write(folder / PACK, packed.content)
    else:
        tell(f"the code in {Path.cwd()} is not what the run began with: hosts that have that go on, no other can join")


@dataclass(frozen=True, kw_only=True)
class Left:
    """What a `farandole run` has left: `far` workers may train on, `local` ones have ended for certain where it was."""

    settings: RunSettings
    far: tuple[KnownWorker, ...]
    local: tuple[KnownWorker, ...]

    @property
    def said(self) -> str:
        hosts = dict.fromkeys(worker.host for worker in self.far)
        return f"taking over the run in this folder: {len(self.far)} of its workers train on, on {', '.join(hosts)}"


def left(folder: Path, command: Sequence[str], listen: str | None = None) -> Left | None:
    """What is to be taken over in `folder`; None where the run is over, or nobody can be there now. `listen`: where
    it is to be reached from now on; its hosts are told.

    Raises:
        UsageError: it is on, with another script or other arguments.
    """
    if not all((folder / name).exists() for name in (SETTINGS, TICKET, METRICS, JOURNAL)):
        return None
    try:
        settings = decoded(read(folder / SETTINGS), RunSettings)
        state = read_state(folder)
    except (OSError, msgspec.MsgspecError, sqlite3.Error):
        return None  # what resumes the run says what is wrong
    away_s = time.time() - (folder / METRICS).stat().st_mtime
    if state is None or state.over or away_s > settings.orphan_s:
        return None
    local = _local(settings)
    far = tuple(worker for worker in state.workers if worker.pool not in local)
    if not far:
        return None
    if tuple(command) != settings.command:
        raise UsageError(
            f"{folder}: {len(far)} workers of the run in it train on, with `{' '.join(settings.command)}`; start it "
            f"with that to take it over, or wait for {settings.orphan_s - away_s:.0f} s, after which they have ended"
        )
    return Left(settings=taken_over(settings, listen or settings.listen), far=far, local=_ended(settings, state, local))


def taken_over(settings: RunSettings, listen: str) -> RunSettings:
    """As they were, but for whose the run is now."""
    own = settings.pool.pool if settings.pool else ""
    pool = OwnPool(pool=own, host=socket.gethostname(), pid=os.getpid())
    return msgspec.structs.replace(settings, pool=pool, listen=listen, taken_over=True)


def _local(settings: RunSettings) -> tuple[str, ...]:
    """The names of its local pools."""
    if settings.pools:
        return tuple(pool.name for pool in settings.pools if pool.kind == "local")
    return (settings.pool.pool,) if settings.pool else ()


def _ended(settings: RunSettings, state: Durable, local: Sequence[str]) -> tuple[KnownWorker, ...]:
    """Its local workers, where that was this machine: nothing of a local pool outlives its process."""
    here = settings.pool is not None and settings.pool.host == socket.gethostname()
    return tuple(worker for worker in state.workers if worker.pool in local and here)
