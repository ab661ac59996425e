"""`farandole join`: one worker. The one door that every pool uses, and anybody who holds the run's ticket.

What can be checked without torch is checked before it is imported; then the process is the script's to the end.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from farandole.cli.checks import check_script
from farandole.cli.verbose import Verbose
from farandole.errors import HostNotPrepared
from farandole.platform import cpu
from farandole.platform.output import say
from farandole.pool.notices import clouds
from farandole.settings import Settings
from farandole.worker.exit import feed, pause

if TYPE_CHECKING:
    from farandole.membership.hosts import Job


def join(
    ticket: Annotated[str, typer.Argument(help="The run's ticket: a file, or - for standard input.")],
    script: Annotated[
        str | None,
        typer.Argument(help="The training script; it must be the run's.", show_default="the run's own, fetched"),
    ] = None,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Arguments of the script.")] = None,
    *,
    prepare: Annotated[
        str,
        typer.Option(
            "--prepare", metavar="COMMAND", help="Command that must succeed on this host before its first worker joins."
        ),
    ] = "",
    notices: Annotated[str, typer.Option("--notices", metavar="CLOUD", help=clouds.HELP)] = "",
    die_with: Annotated[int, typer.Option("--die-with", metavar="PID", hidden=True)] = 0,
    verbose: Verbose = 0,
) -> None:
    """Join a live run as one more worker, until the run ends or releases it."""
    del verbose
    if die_with:
        from farandole.platform.process import die_with_parent

        die_with_parent(die_with)
    settings = Settings.read()
    clouds.check(notices)
    pause(settings.returns)
    if script and not settings.code:
        check_script(script)
    from farandole.control.ticket import exposed, load

    cpu.set_for(load(ticket).bits)
    if ticket != "-" and (said := exposed(ticket)):
        say(f"farandole: note: {said}")
    if script is None:
        ticket = from_anywhere(ticket, prepare, notices)
        job = _fetched(ticket)
        script, arguments, prepare = job.script, list(job.arguments), prepare or job.prepare
    if prepare:
        _prepare(prepare, ticket)
    from farandole.script import noticed, run_script

    if not settings.pool:  # a pool's host is seen to by its agent
        from farandole.pool.notices import watch

        watch.in_background(notices, settings.metadata, noticed)
    run_script(ticket, script, arguments or [])


def from_anywhere(ticket: str, prepare: str, notices: str) -> str:
    """The ticket's path in any folder: should this process begin anew (`worker/exit.py`), it is in another."""
    ticket = ticket if ticket == "-" else os.path.abspath(ticket)
    options = [word for option in (("--prepare", prepare), ("--notices", notices)) if option[1] for word in option]
    sys.orig_argv[:] = [sys.executable, "-m", "farandole", "join", *options, ticket]
    return ticket


def _fetched(ticket: str) -> Job:
    """What the run has a worker do. The process is in the folder of its code from then on, and its interpreter is the
    one that the run's setup has made there, if it has.
    """
    from farandole.control.client import Api, unpacked
    from farandole.control.ticket import given, load
    from farandole.pool.preparation import set_up

    loaded = load(ticket)
    job = Api(loaded).job()
    folder = unpacked(loaded, job.pack)
    os.chdir(folder)
    os.environ["FARANDOLE_PACK"] = job.pack
    if python := set_up(job.setup, folder, host=Settings.read().host):
        if ticket == "-":
            feed(given())
        os.execv(python, [str(python), *sys.orig_argv[1:]])
    return job


def _prepare(command: str, ticket: str) -> None:
    from farandole.control.ticket import load
    from farandole.pool.preparation import prepare

    try:
        prepare(command, run=load(ticket).secret, host=Settings.read().host)
    except HostNotPrepared as error:
        from farandole.script import tell_failure

        tell_failure(ticket, str(error))
        raise
