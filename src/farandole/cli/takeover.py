"""Takeover: continues a run whose `farandole run` was killed while workers of the run still train.

Workers of other hosts and external workers survive the death of `farandole run` and its coordinator: they continue to
train until the orphan limit. A new `farandole run` on the folder takes the run over in that time, with the same secret
and address, the state in the journal, and the settings of the run. The local workers ended with the old process.

The folder's lock ensures that only one process on this machine does so. The modification time of metrics.jsonl shows
when the run last had a coordinator.
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
    """Restores in `folder` the run folder of `ticket`, whose machine is lost, from the copy beside its checkpoints.

    The run's code is packed again here. A message is printed if it has changed. `files`: see `pack`.

    Raises:
        UsageError: the folder holds a run, or no copy exists, or the run's script is not on this machine.
        FarandoleError: the place at `url` can't be reached.
    """
    if (folder / SETTINGS).exists():
        raise UsageError(f"--folder {folder} holds a run already: leave out --take-over, or give another --folder")
    loaded = load(str(ticket))
    shipped = shipping.load(url, loaded.run)
    make(folder)
    settings = msgspec.structs.replace(shipped.settings, folder=str(folder.resolve()))
    copies.keep(settings.command[0], folder / CODE)
    write(folder / SETTINGS, msgspec.json.encode(settings))
    since = max(loaded.since, shipped.time)  # the run may have been taken over since the ticket was copied
    msgspec.structs.replace(loaded, since=since).save(folder / TICKET)
    journal = Journal(folder)
    journal.commit((), shipped.state)
    journal.close()
    os.utime(folder / METRICS, (shipped.time, shipped.time))
    if settings.job:
        _pack_again(folder, settings.command[0], files, settings.job.pack)


def _pack_again(folder: Path, script: str, files: Path | None, expected: str) -> None:
    """Packs the code for hosts that join later, if it has not changed."""
    packed = pack(Path.cwd(), script, files, run=folder)
    if packed.hash == expected:
        write(folder / PACK, packed.content)
    else:
        tell(f"the code in {Path.cwd()} differs from the run's code: its hosts continue, no other host can join")


@dataclass(frozen=True, kw_only=True)
class Takeover:
    """A run without its `farandole run`: `far` workers may still train, `local` workers have certainly ended."""

    settings: RunSettings
    far: tuple[KnownWorker, ...]
    local: tuple[KnownWorker, ...]

    @property
    def summary(self) -> str:
        hosts = dict.fromkeys(worker.host for worker in self.far)
        return f"taking over the run in this folder: {len(self.far)} of its workers still train, on {', '.join(hosts)}"


def find_takeover(folder: Path, command: Sequence[str], listen: str | None = None) -> Takeover | None:
    """Returns the run to take over in `folder`. None if the run is over, or no worker can be alive now.

    `listen`: the new address of the run; its hosts are notified.

    Raises:
        UsageError: the run is alive with another script or other arguments.
    """
    if not all((folder / name).exists() for name in (SETTINGS, TICKET, METRICS, JOURNAL)):
        return None
    try:
        settings = decoded(read(folder / SETTINGS), RunSettings)
        state = read_state(folder)
    except (OSError, msgspec.MsgspecError, sqlite3.Error):
        return None  # the code that resumes the run reports the error
    away_s = time.time() - (folder / METRICS).stat().st_mtime
    if state is None or state.over or away_s > settings.orphan_s:
        return None
    local = _local(settings)
    far = tuple(worker for worker in state.workers if worker.pool not in local)
    if not far:
        return None
    if tuple(command) != settings.command:
        raise UsageError(
            f"{folder}: {len(far)} workers of its run still train, with `{' '.join(settings.command)}`; use that "
            f"command to take the run over, or wait {settings.orphan_s - away_s:.0f} s until they have ended"
        )
    return Takeover(
        settings=taken_over(settings, listen or settings.listen), far=far, local=_ended(settings, state, local)
    )


def taken_over(settings: RunSettings, listen: str) -> RunSettings:
    """Returns the settings with this process as the owner of the run."""
    own = settings.pool.pool if settings.pool else ""
    pool = OwnPool(pool=own, host=socket.gethostname(), pid=os.getpid())
    return msgspec.structs.replace(settings, pool=pool, listen=listen, taken_over=True)


def _local(settings: RunSettings) -> tuple[str, ...]:
    """Returns the names of the run's local pools."""
    if settings.pools:
        return tuple(pool.name for pool in settings.pools if pool.kind == "local")
    return (settings.pool.pool,) if settings.pool else ()


def _ended(settings: RunSettings, state: Durable, local: Sequence[str]) -> tuple[KnownWorker, ...]:
    """Returns the run's local workers if it ran on this machine: they end with the process of their pool."""
    same_host = settings.pool is not None and settings.pool.host == socket.gethostname()
    return tuple(worker for worker in state.workers if worker.pool in local and same_host)
