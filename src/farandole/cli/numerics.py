"""`farandole numerics`: what this machine computes, and whether a run, or another machine, computes the same bits.

Settings of torch are a script's, not the machine's: for a comparison those of the other side are put in force first.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farandole.errors import UsageError
from farandole.platform import cpu
from farandole.platform.output import tell

if TYPE_CHECKING:
    from farandole.control.status import Numerics


def numerics(
    *,
    threads: Annotated[
        int | None, typer.Option("--threads", help="Intra-op threads.", show_default="those compared with, or 1")
    ] = None,
    bits: Annotated[
        str | None,
        typer.Option(
            "--bits", metavar="same|portable", help="Compute in this mode.", show_default="as what it is compared with"
        ),
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the results to this file, for a later --against."),
    ] = None,
    rows: Annotated[bool, typer.Option("--rows", help="With --against: show every operation and setting.")] = False,
    against: Annotated[
        str,
        typer.Option(
            "--against",
            metavar="TICKET|FILE",
            help="Compare with a live run (its ticket) or with a file that --json wrote.",
        ),
    ] = "",
) -> None:
    """Show what this machine's libraries compute. With --against, print one sentence; exit code 0 if all bits are
    equal, else 1.
    """
    if threads is not None and threads < 1:
        raise UsageError(f"--threads {threads}: a worker needs at least one")
    if bits not in (None, "same", "portable"):
        raise UsageError(f"--bits {bits}: say same or portable; under any, machines compute as under same")
    other = _other(against) if against else None
    bits = bits or ("portable" if other and other.bits == "portable" else "same")
    cpu.set_for(bits)
    from rich.console import Console

    from farandole.control.status import write
    from farandole.membership import likeness
    from farandole.observe.table import numerics_table
    from farandole.training import run_state

    with contextlib.suppress(ImportError):  # with it the decoder of images is compared
        import PIL.Image  # noqa: F401  # pyright: ignore[reportUnusedImport]

    theirs = other.facts if other else {}
    here = dict(run_state.here(threads or int(theirs.get(likeness.THREADS, "1")), bits, theirs))
    if json is not None:
        write(json, here, bits)
    if other is None or rows:
        Console().print(numerics_table(here, theirs), soft_wrap=True)
    if other is not None:
        found = likeness.unlike(theirs.items(), here.items())
        whose = f"run {other.run}" if other.run else against
        tell(f"{likeness.verdict(found, whose, other.bits if other.run else bits)}")
        raise typer.Exit(1 if found.bits else 0)


def _other(against: str) -> Numerics:
    from farandole.control.client import Api
    from farandole.control.status import read
    from farandole.control.ticket import load

    try:
        ticket = load(against)
    except UsageError:
        return read(Path(against))
    found = Api(ticket).numerics()
    if not found.facts:
        raise UsageError(f"run {found.run}: no worker has asked in yet, so there is nothing to compare with; ask again")
    return found
