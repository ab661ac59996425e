"""`farandole join`, which runs one worker, and `farandole agent`, which starts the workers of a host.

Every pool starts workers with `farandole join`, and so does any user with the run's ticket. Everything that needs no
torch is checked before torch is imported; then the process runs the script until it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farandole.cli.options import Verbose, check_script, show_script_help
from farandole.errors import FarandoleError, HostNotPrepared
from farandole.platform import cpu
from farandole.platform.output import say, tell
from farandole.pool import clouds
from farandole.settings import AGENT, Settings
from farandole.worker.process_exit import pause, set_stdin

if TYPE_CHECKING:
    from farandole.control.ticket import Ticket
    from farandole.pool.agent import AgentIdentity
    from farandole.protocol.messages import Job


# --- join -------------------------------------------------------------------------------------------------------------


def join(
    ticket: Annotated[str, typer.Argument(help="The run's ticket: a file, or - for standard input.")],
    script: Annotated[
        str | None,
        typer.Argument(
            help="The training script; it must be the run's.",
            show_default="the run's own, if it has --files, --setup or a --pool of other hosts",
        ),
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
    """Join a run as one more worker, until it ends or releases it."""
    del verbose
    if die_with:
        from farandole.platform.process import die_with_parent

        die_with_parent(die_with)
    settings = Settings.read()
    clouds.check(notices)
    pause(settings.returns)
    if script and not settings.code:
        check_script(script)
    if script and not settings.pool:
        show_script_help(script, arguments)
    from farandole.control.ticket import exposed, load

    loaded = load(ticket)
    cpu.set_for(loaded.bits)
    if ticket != "-" and (note := exposed(ticket)):
        say(f"farandole: note: {note}")
    if script is None:
        ticket = from_anywhere(ticket, prepare, notices)
        job = _fetched(ticket)
        script, arguments, prepare = job.script, list(job.arguments), prepare or job.prepare
    if prepare:
        _prepare(prepare, ticket)
    if not settings.pool:
        say(f"farandole: loads torch, then joins run {loaded.run} at {loaded.address}")
    from farandole.script import noticed, run_script

    if settings.bench:
        from farandole.bench import loop

        loop.begin(settings.bench)
    if settings.check:
        from farandole.check import loop as check_loop

        check_loop.begin(settings.check)

    if not settings.pool:  # on a host of a pool, the agent watches for preemption notices
        from farandole.pool import preemption

        preemption.in_background(notices, settings.metadata, noticed)
    run_script(ticket, script, arguments or [])


def from_anywhere(ticket: str, prepare: str, notices: str) -> str:
    """Returns the absolute path of the ticket, and sets it in the command line.

    The process may restart itself in another folder (`worker/process_exit.py`).
    """
    ticket = ticket if ticket == "-" else os.path.abspath(ticket)
    options = [word for option in (("--prepare", prepare), ("--notices", notices)) if option[1] for word in option]
    sys.orig_argv[:] = [sys.executable, "-m", "farandole", "join", *options, ticket]
    return ticket


def _fetched(ticket: str) -> Job:
    """Fetches the run's job and code, and changes to the folder of the code.

    If the run's setup created an interpreter there, the process restarts with that one.
    """
    from farandole.control.api import Api
    from farandole.control.client import unpacked
    from farandole.control.ticket import load, read_stdin
    from farandole.pool.local import set_up

    loaded = load(ticket)
    job = Api(loaded).job()
    folder = unpacked(loaded, job.pack)
    os.chdir(folder)
    os.environ["FARANDOLE_PACK"] = job.pack
    if python := set_up(job.setup, folder, host=Settings.read().host):
        if ticket == "-":
            set_stdin(read_stdin())
        os.execv(python, [str(python), *sys.orig_argv[1:]])
    return job


def _prepare(command: str, ticket: str) -> None:
    from farandole.control.ticket import load
    from farandole.pool.local import prepare

    try:
        prepare(command, run=load(ticket).secret, host=Settings.read().host)
    except HostNotPrepared as error:
        from farandole.script import tell_failure

        tell_failure(ticket, str(error))
        raise


# --- agent ------------------------------------------------------------------------------------------------------------
#
# `farandole agent`: starts the workers on a host. Pools start it; users need not.
#
# The command reads the run's ticket, starts the agent in a session of its own, and returns once the agent has reached
# the run. So its caller, over SSH or at the boot of a machine, gets an error at once.

BEGIN_S = 40.0


def agent(
    ticket: Annotated[str, typer.Argument(help="The run's ticket: a file, or - for standard input.")],
    *,
    pool: Annotated[str, typer.Option("--pool", help="The pool that this host belongs to.")],
    host: Annotated[str, typer.Option("--host", help="This host's name in the pool.")],
    interface: Annotated[
        str, typer.Option("--interface", help="Address at which other hosts reach this host's workers.")
    ] = "",
    notices: Annotated[str, typer.Option("--notices", metavar="CLOUD", help=clouds.HELP)] = "",
    wait: Annotated[
        bool, typer.Option("--wait", help="Serve in this process, and return when the run lets the host go.")
    ] = False,
    threads: Annotated[
        int, typer.Option("--threads", help="Intra-op threads of a worker; its imports are loaded in advance.")
    ] = 0,
    grace: Annotated[
        float,
        typer.Option("--grace", help="SIGTERM announces that this host goes in so many seconds; 0: SIGTERM ends it."),
    ] = 0.0,
    zone: Annotated[str, typer.Option("--zone", help="This host's zone, as its workers report it.")] = "",
) -> None:
    """Serve a run as one of its hosts, until the run lets it go.

    The slowest part starts first: another process loads torch while this one imports its own modules.
    """
    from farandole.control.ticket import load
    from farandole.pool.local import load_ahead

    clouds.check(notices)
    loaded = load(ticket)
    if wait and threads:
        load_ahead(threads, {**os.environ, **cpu.environment_of(loaded.bits)})

    from farandole.pool import agent as marked
    from farandole.pool.agent import NOTE, UNFIT

    folder = marked.agent_folder(loaded, pool, host)
    post = marked.AgentIdentity(
        folder=folder,
        pool=pool,
        host=host,
        interface=interface,
        notices=notices,
        threads=threads,
        grace_s=grace,
        zone=zone,
        source="" if ticket == "-" else os.path.abspath(ticket),
    )
    marked.leave_ticket(folder, loaded)
    if (lock := marked.lock(folder)) is None:
        tell("the agent is already running")
        return
    os.environ[AGENT] = folder.name
    if others := marked.other_runs(folder.name, marked.environs()):
        tell(f"{NOTE}agents of {others} other runs are on this host: all share its cores and memory")
    if wait:
        if reason := _serve(post, loaded, tell):
            say(reason)
            raise typer.Exit(UNFIT)
        return
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _become(post)
        _serve_and_answer(post, loaded, writing)
        return
    os.close(lock)
    os.close(writing)
    answer = _answer(reading)
    if answer != "joined":
        if not answer:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        raise FarandoleError(answer or f"the agent has not reached the run within {BEGIN_S:g} s; see {folder}")
    tell("joined")


def _answer(reading: int) -> str:
    ready, _, _ = select.select([reading], [], [], BEGIN_S)
    return os.read(reading, 4096).decode(errors="replace") if ready else ""


def _become(post: AgentIdentity) -> None:
    """Makes this forked child a daemon with its own command line. A new interpreter would take most of a second."""
    from farandole.platform.files import append
    from farandole.platform.output import show_command
    from farandole.pool.agent import LOG

    os.setsid()
    with append(post.folder / LOG) as log, Path(os.devnull).open("rb") as nothing:
        for stream, descriptor in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(stream.fileno(), descriptor)
    show_command([sys.executable, *post.command(post.folder)], os.environ)


def _serve_and_answer(post: AgentIdentity, ticket: Ticket, writing: int) -> None:
    answers = [writing]

    def answer(text: str) -> None:
        while answers:
            with contextlib.suppress(OSError):
                os.write(answers[0], text.encode()[:4000])
            os.close(answers.pop())

    try:
        _serve(post, ticket, answer)
    except FarandoleError as error:
        answer(str(error))
        raise


def _serve(post: AgentIdentity, ticket: Ticket, joined: Callable[[str], None]) -> str:
    """Serves the run until it ends. Returns why the host could not be prepared, "" if it could."""
    from farandole.pool.agent import Agent, environ
    from farandole.pool.local import load_ahead

    if post.threads:
        load_ahead(post.threads, environ(ticket))
    return asyncio.run(Agent(post, joined).serve())
