"""`farandole join`: one worker. The one door that every pool uses, and anybody who holds the run's ticket.

What can be checked without torch is checked before it is imported; then the process is the script's to the end.
"""

from __future__ import annotations

from typing import Annotated

import typer

from farandole.cli.run import check_script
from farandole.cli.verbose import Verbose
from farandole.errors import HostNotPrepared
from farandole.platform import switches
from farandole.platform.output import say
from farandole.settings import Settings
from farandole.worker.departure import pause


def join(
    ticket: Annotated[str, typer.Argument(help="The run's ticket: a file, or - for standard input.")],
    script: Annotated[str, typer.Argument(help="The training script, the same as the run's.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="The script's own.")] = None,
    *,
    prepare: Annotated[
        str,
        typer.Option("--prepare", metavar="COMMAND", help="Must succeed here first, once for all workers of a host."),
    ] = "",
    die_with: Annotated[int, typer.Option("--die-with", metavar="PID", hidden=True)] = 0,
    verbose: Verbose = 0,
) -> None:
    """Join a live run as one more worker, from now until it ends or lets this worker go."""
    del verbose
    if die_with:
        from farandole.platform.parent import die_with_parent

        die_with_parent(die_with)
    settings = Settings.read()
    pause(settings.returns)
    if not settings.code:
        check_script(script)
    from farandole.control.ticket import exposed, load

    switches.set_for(load(ticket).bits)
    if ticket != "-" and (said := exposed(ticket)):
        say(f"farandole: note: {said}")
    if prepare:
        _prepare(prepare, ticket)
    from farandole.script import run_script

    run_script(ticket, script, arguments or [])


def _prepare(command: str, ticket: str) -> None:
    from farandole.control.ticket import load
    from farandole.pool.preparation import prepare

    try:
        prepare(command, run=load(ticket).secret, host=Settings.read().host)
    except HostNotPrepared as error:
        from farandole.script import tell_failure

        tell_failure(ticket, str(error))
        raise
