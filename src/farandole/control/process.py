"""The coordinator as a process of its own: `python -m farandole.control.process FOLDER [--again] [--die-with PID]`.

It reads the run's settings from FOLDER/settings.json, listens, writes FOLDER/ticket and FOLDER/coordinator.json, and
ends by itself when the run is over. It imports no torch. It ignores SIGINT: Ctrl-C is for `farandole run`, which asks
it to stop; and it does not outlive that process.

`--again` takes over from one that was killed: the same secret and address, so that the workers find it, and the books
that the journal holds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from farandole.control.endpoint import endpoint
from farandole.control.files import write_atomically
from farandole.control.journal import Journal
from farandole.control.parent import die_with_parent
from farandole.control.paths import RECORD, SETTINGS, TICKET
from farandole.control.server import Server
from farandole.control.ticket import Ticket
from farandole.errors import FarandoleError, UsageError
from farandole.membership.records import RunSettings


class CoordinatorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """FOLDER/coordinator.json: who serves, or served, this folder's run."""

    pid: int
    address: str


async def coordinate(folder: Path, *, again: bool) -> None:
    """Serve the run of `folder` until it is over.

    Raises:
        UsageError: the folder has no settings that can be read, or `again` without a ticket.
        OSError: the address of the one before is taken.
    """
    try:
        settings = msgspec.json.decode((folder / SETTINGS).read_bytes(), type=RunSettings)
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"{folder / SETTINGS}: {error}; `farandole run` writes it") from None
    place = endpoint(folder, settings.listen)
    journal = Journal(folder)
    server = Server(settings, secret=place.secret, journal=journal, known=journal.books() if again else None)
    try:
        address = await server.start(place.host, place.port, place.certificate)
        ticket = Ticket(address=address, secret=place.secret, run=settings.run, fingerprint=place.fingerprint)
        ticket.save(folder / TICKET)
        record = CoordinatorRecord(pid=os.getpid(), address=address)
        write_atomically(folder / RECORD, msgspec.json.encode(record) + b"\n")
        await server.serve()
    finally:
        await server.close()
        journal.close()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="farandole.control.process", description="the coordinator of a run")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--die-with", type=int, default=0, metavar="PID", help="end when this parent process ends")
    parser.add_argument("--again", action="store_true", help="take over from one that was killed")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if options.die_with:
        die_with_parent(options.die_with)
    _allow_connections()
    try:
        asyncio.run(coordinate(options.folder, again=options.again))
    except FarandoleError as error:
        print(f"farandole: error: {error}", file=sys.stderr)
        return 1
    return 0


def _allow_connections() -> None:
    """As many open files as this process may have: each worker is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
