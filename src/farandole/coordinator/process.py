"""The coordinator as a process of its own: `python -m farandole.coordinator.process FOLDER [--again] [--die-with PID]
[--state DESCRIPTOR] [--listener DESCRIPTOR]`.

It reads the run's settings from FOLDER/settings.json, listens, writes FOLDER/ticket and FOLDER/coordinator.json, and
ends when the run is over. It imports no torch. It ignores SIGINT: Ctrl-C goes to `farandole run`, which asks it to
stop; and it does not outlive that process.

`--again` takes over from a killed coordinator: with the same secret and address, so that the workers find it, and with
the state in the journal, or in the memory behind `--state` (see `journal.py`). For that it needs no space on the disk:
the files exist already. `--listener` is the run's socket, bound by the parent (see `listener.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sqlite3
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from farandole.control.run_folder import JOURNAL, RECORD, SETTINGS, TICKET, TICKETS
from farandole.control.ticket import Ticket, load
from farandole.coordinator.journal import Journal, Safekeeping, set_aside
from farandole.coordinator.listener import endpoint
from farandole.coordinator.server import Server
from farandole.errors import FarandoleError, NotPrivate, UsageError
from farandole.platform import files, output
from farandole.platform.files import FileThread, decoded, read, write_atomically
from farandole.platform.output import guard, say
from farandole.platform.process import die_with_parent
from farandole.protocol import events
from farandole.protocol.coordinator.state import RunSettings
from farandole.settings import verbosity

_log = logging.getLogger("farandole.coordinator.process")


class CoordinatorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """FOLDER/coordinator.json: the process that serves, or served, this folder's run."""

    pid: int
    address: str


async def coordinate(
    folder: Path, *, is_restart: bool, safekeeping: Safekeeping | None = None, listener: socket.socket | None = None
) -> None:
    """Serve the run of `folder` until it is over, at `listener` if it is given.

    Raises:
        UsageError: the folder has no readable settings, or it is not possible to listen at their address.
        FarandoleError: the journal can't be opened.
    """
    try:
        settings = decoded(read(folder / SETTINGS), RunSettings)
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"{folder / SETTINGS}: {error}; `farandole run` writes it") from None
    place = endpoint(folder, settings.listen, is_restart=is_restart)
    journal, damage = open_journal(folder, settings, safekeeping, is_restart=is_restart)
    if not is_restart:
        (folder / TICKETS).unlink(missing_ok=True)  # tickets of an earlier session: its address is gone
    server = Server(
        settings, secret=place.secret, journal=journal, restored_state=journal.state() if is_restart else None
    )
    try:
        if damage:
            server.coordinator.record(events.JournalDamagedEvent(reason=damage))
        address = await server.start(place.host, place.port, place.certificate, listener)
        previous = load(str(folder / TICKET)) if is_restart else None
        ticket = Ticket(
            address=address, secret=place.secret, run=settings.run, fingerprint=place.fingerprint, bits=settings.bits,
            since=since(previous, address),
        )  # fmt: skip
        record = CoordinatorRecord(pid=os.getpid(), address=address)
        if previous != ticket:
            ticket.save(folder / TICKET)
        try:
            write_atomically(folder / RECORD, msgspec.json.encode(record) + b"\n")
        except OSError as error:
            if not is_restart:
                raise
            _log.warning("%s still names the previous process: %s", folder / RECORD, error)
        await server.serve()
    finally:
        await server.close()
        journal.close()


def since(previous: Ticket | None, address: str) -> float:
    """The start time of the run at this address. After a move it is later than the previous one, whatever the clocks
    say.
    """
    if previous is None:
        return time.time()
    return previous.since if previous.address == address else max(time.time(), previous.since + 1.0)


def open_journal(
    folder: Path, settings: RunSettings, safekeeping: Safekeeping | None, *, is_restart: bool
) -> tuple[Journal, str]:
    """The journal of `folder`, and the damage of a previous journal that was set aside, "" for none.

    Workers of pools on other machines outlive this machine, so each commit then goes to the disk.

    Raises:
        FarandoleError: it can't be opened or is damaged, and the run's state is stored nowhere else.
    """
    path = folder / JOURNAL
    outlived = any(pool.kind != "local" for pool in settings.pools)
    try:
        return Journal(folder, safekeeping, outlived=outlived), ""
    except NotPrivate:
        raise
    except (OSError, sqlite3.Error) as error:
        damaged = type(error) is sqlite3.DatabaseError  # its subclasses report errors of the disk
        if not damaged or (is_restart and not (safekeeping and safekeeping.state)):
            raise FarandoleError(
                f"{path}: {error}, so the run's state can't be read or saved; free some space, or make it "
                f"writable, or, if it is damaged, move it away: the run then goes on from its checkpoints"
            ) from None
        damaged_path = set_aside(folder)
        return Journal(
            folder, safekeeping, outlived=outlived
        ), f"{path}: {error}; it was renamed to {damaged_path.name}, and a new journal was created"


def main(arguments: Sequence[str]) -> int:
    guard()
    parser = argparse.ArgumentParser(prog="farandole.coordinator.process", description="the coordinator of a run")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--die-with", type=int, default=0, metavar="PID", help="end when this parent process ends")
    parser.add_argument("--again", action="store_true", help="take over from a killed coordinator")
    parser.add_argument("--state", type=int, metavar="DESCRIPTOR", help="the parent's memory for the state")
    parser.add_argument("--listener", type=int, metavar="DESCRIPTOR", help="the parent's listening socket")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if options.die_with:
        die_with_parent(options.die_with)
    files.allow_all()  # each worker takes one descriptor
    log = FileThread("log")  # standard error is a file in the run's folder, whose disk may not answer
    output.show(verbosity(), lambda line: log.post(partial(say, line)))
    try:
        safekeeping = None if options.state is None else Safekeeping(options.state)
        listener = None if options.listener is None else socket.socket(fileno=options.listener)
        asyncio.run(coordinate(options.folder, is_restart=options.again, safekeeping=safekeeping, listener=listener))
    except FarandoleError as error:
        say(f"farandole: error: {error}")
        return 1
    finally:
        log.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
