"""`farandole join`: one worker. The one door that every pool uses, and anybody who holds the run's ticket.

What can be checked without torch is checked before it is imported; then the process is the script's to the end.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from farandole.cli.checks import check_script
from farandole.cli.verbose import Verbose
from farandole.errors import HostNotPrepared
from farandole.platform import switches
from farandole.platform.output import say
from farandole.pool.notices import clouds
from farandole.settings import Settings
from farandole.worker.departure import pause


def join(
    ticket: Annotated[str, typer.Argument(help="The run's ticket: a file, or - for standard input.")],
    script: Annotated[
        str | None,
        typer.Argument(help="The training script, the same as the run's.  [default: the run's own, fetched]"),
    ] = None,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="The script's own.")] = None,
    *,
    prepare: Annotated[
        str,
        typer.Option("--prepare", metavar="COMMAND", help="Must succeed here first, once for all workers of a host."),
    ] = "",
    notices: Annotated[str, typer.Option("--notices", metavar="CLOUD", help=clouds.HELP)] = "",
    die_with: Annotated[int, typer.Option("--die-with", metavar="PID", hidden=True)] = 0,
    verbose: Verbose = 0,
) -> None:
    """Join a live run as one more worker, from now until it ends or lets this worker go."""
    del verbose
    if die_with:
        from farandole.platform.parent import die_with_parent

        die_with_parent(die_with)
    settings = Settings.read()
    clouds.check(notices)
    pause(settings.returns)
    if script and not settings.code:
        check_script(script)
    from farandole.control.ticket import exposed, load

    switches.set_for(load(ticket).bits)
    if ticket != "-" and (said := exposed(ticket)):
        say(f"farandole: note: {said}")
    if script is None:
        ticket = _absolute(ticket)
        script, arguments = _fetched(ticket)
    if prepare:
        _prepare(prepare, ticket)
    from farandole.script import noticed, run_script

    if not settings.pool:  # a pool's host is seen to by its agent
        from farandole.pool.notices import watch

        watch.in_background(notices, settings.metadata, noticed)
    run_script(ticket, script, arguments or [])


def _absolute(ticket: str) -> str:
    """The same file from any folder; also for this process should it begin anew, as `worker/departure.py` has it."""
    if ticket == "-":
        return ticket
    path = os.path.abspath(ticket)
    sys.orig_argv[:] = [path if word == ticket else word for word in sys.orig_argv]
    return path


def _fetched(ticket: str) -> tuple[str, list[str]]:
    """The run's own script and its arguments. The process is in the folder where its code is from then on."""
    from farandole.control.api import Api
    from farandole.control.fetch import unpacked
    from farandole.control.ticket import load
    from farandole.pool.preparation import run_once

    loaded = load(ticket)
    job = Api(loaded).job()
    os.chdir(unpacked(loaded, job.pack) / job.folder)
    os.environ["FARANDOLE_PACK"] = job.pack
    if job.setup:
        run_once(job.setup, "--setup", key=(job.pack, job.setup), host=Settings.read().host)
    return job.script, list(job.arguments)


def _prepare(command: str, ticket: str) -> None:
    from farandole.control.ticket import load
    from farandole.pool.preparation import prepare

    try:
        prepare(command, run=load(ticket).secret, host=Settings.read().host)
    except HostNotPrepared as error:
        from farandole.script import tell_failure

        tell_failure(ticket, str(error))
        raise
