"""`farandole scale`, `release`, `stop` and `ticket`: commands that change a live run."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farandole.cli.folders import RunOption, live
from farandole.cli.options import seconds
from farandole.errors import CoordinatorUnreachable, UsageError
from farandole.platform import files
from farandole.platform.output import say, tell

if TYPE_CHECKING:
    from farandole.control.security import IssuedTicket


# --- scale ------------------------------------------------------------------------------------------------------------


def scale(
    workers: Annotated[int, typer.Argument(help="The target number of workers.")],
    pool: Annotated[str, typer.Option("--pool", help="Set the target of this pool.")] = "",
    run: RunOption = None,
) -> None:
    """Set the number of workers; they join or leave between two steps."""
    with live(run) as api:
        api.scale(workers, pool)
    tell(f"target: {workers} workers{f' of {pool}' if pool else ''}")


# --- release ----------------------------------------------------------------------------------------------------------
#
# `farandole release`: make a worker, or all workers of a host, leave gracefully.


def release(
    name: Annotated[str, typer.Argument(help="A worker's id or a host's name, from `farandole status`.")],
    run: RunOption = None,
) -> None:
    """Remove a worker or a host between two steps; nothing is lost.

    The pool does not replace it: the target of `farandole scale` becomes lower too. Workers of `farandole join` do not
    count in that target.
    """
    with live(run) as api:
        released = api.release(name)
    tell(f"{', '.join(released)} asked to leave")


# --- stop -------------------------------------------------------------------------------------------------------------
#
# `farandole stop`: end a live run after the current step, with a checkpoint.


def stop(run: RunOption = None) -> None:
    """Save the state of a run and end it, after the same step."""
    connection = live(run)
    with connection as api:
        api.stop("farandole stop", 0)
    tell(f"the run in {connection.folder} is stopping")


# --- ticket -----------------------------------------------------------------------------------------------------------
#
# `farandole ticket`: additional join tickets, which can expire and be revoked.
#
# The secrets are made here and written into the run's folder. The coordinator is asked to read them from there; no
# secret is sent to it.

app = typer.Typer(help="Create, list and revoke join tickets.", no_args_is_help=True)


@app.callback()
def ticket() -> None:
    """Create, list and revoke join tickets."""


@app.command("new")
def new(
    *,
    name: Annotated[
        str, typer.Option("--name", help="Name of the ticket.", show_default="ticket-1, ticket-2, ...")
    ] = "",
    expires: Annotated[
        str, typer.Option("--expires", metavar="TIME", help="How long the ticket admits new workers: 30m, 12h or 7d.")
    ] = "",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Where to write it.", show_default="standard output")
    ] = None,
    run: RunOption = None,
) -> None:
    """Create a ticket that lets workers join a live run and read its status, nothing else."""
    import msgspec

    from farandole.control.run_folder import TICKET
    from farandole.control.security import MOST, IssuedTicket
    from farandole.control.ticket import load, new_secret
    from farandole.platform.files import write_atomically

    until = time.time() + seconds("--expires", expires) if expires else 0.0
    with changing(run) as (folder, tickets):
        owners = load(str(folder / TICKET))
        names = {each.name for each in tickets}
        number = next(n for n in range(1, MOST + 2) if f"ticket-{n}" not in names)
        try:
            issued = msgspec.convert(
                {"name": name or f"ticket-{number}", "secret": new_secret(), "expires": until}, IssuedTicket
            )
        except msgspec.ValidationError:
            raise UsageError(f"--name {name}: up to 64 letters, digits, dots, dashes and underscores") from None
        if issued.name in names:
            raise UsageError(f"--name {name}: a ticket of that name exists; `farandole ticket list` shows them")
        if len(tickets) >= MOST:
            raise UsageError(f"{len(tickets)} tickets are issued, the limit of a run")
        content = msgspec.json.encode(msgspec.structs.replace(owners, secret=issued.secret)) + b"\n"
        if out is not None:
            try:
                write_atomically(out, content)
            except OSError as error:
                raise UsageError(f"--out {out}: {error.strerror}") from None
        tickets.append(issued)
    if out is None:
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
    say(f"ticket {issued.name}: {_state(issued)}")


@app.command("list")
def list_(run: RunOption = None) -> None:
    """Show a run's issued tickets, never their secrets."""
    from farandole.control.run_folder import TICKETS
    from farandole.control.security import read_tickets

    for each in read_tickets(live(run).folder / TICKETS):
        tell(f"{each.name}  {_state(each)}")


@app.command("revoke")
def revoke(
    name: Annotated[str, typer.Argument(help="Name of the ticket, from `list`.")], run: RunOption = None
) -> None:
    """Revoke a ticket: its workers are removed, and nobody can join with it."""
    import msgspec

    with changing(run) as (_, tickets):
        matches = [n for n, each in enumerate(tickets) if each.name == name]
        if not matches:
            names = ", ".join(each.name for each in tickets) or "none"
            raise UsageError(f"revoke {name}: no such ticket; the tickets are: {names}")
        tickets[matches[0]] = msgspec.structs.replace(tickets[matches[0]], revoked=True)
    tell(f"ticket {name} is revoked")


@contextmanager
def changing(run: Path | None) -> Generator[tuple[Path, list[IssuedTicket]]]:
    """Yields the folder and the tickets of a live run.

    Then writes the tickets and notifies the coordinator, unless the body raises.
    """
    from farandole.control.run_folder import TICKETS
    from farandole.control.security import read_tickets, write_tickets

    connection = live(run)
    with connection as api:
        api.alive()
    lock = os.open(connection.folder, os.O_RDONLY)
    try:
        files.take(lock, connection.folder, "its tickets can't be changed safely; name another --folder", wait=True)
        tickets = list(read_tickets(connection.folder / TICKETS))
        yield connection.folder, tickets
        write_tickets(connection.folder / TICKETS, tuple(tickets))
    finally:
        os.close(lock)
    try:
        with connection as api:
            api.reread_tickets()
    except CoordinatorUnreachable as error:
        say(f"written; takes effect when the coordinator answers again ({error})")


def _state(issued: IssuedTicket) -> str:
    if issued.revoked:
        return "revoked"
    if not issued.expires:
        return "valid until the run ends"
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(issued.expires))
    return f"expired at {when}" if issued.over(time.time()) else f"valid until {when}"
