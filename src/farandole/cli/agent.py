"""`farandole agent`: what starts a host's workers there. Pools start it; nobody needs to by hand.

The command reads the run's ticket, starts the agent in a session of its own, and returns once that has reached the
run: so whoever has started it, over SSH or as a machine comes up, hears at once what is wrong.
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

from farandole.errors import FarandoleError
from farandole.platform.output import say, tell
from farandole.pool.notices import clouds
from farandole.settings import AGENT

if TYPE_CHECKING:
    from farandole.control.ticket import Ticket
    from farandole.pool.agents.post import Post

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
) -> None:
    """Serve a run as one of its hosts, until the run lets it go."""
    from farandole.control.ticket import load
    from farandole.pool.agents import marked
    from farandole.pool.agents import post as posts
    from farandole.pool.agents.post import NOTE, UNFIT

    clouds.check(notices)
    loaded = load(ticket)
    folder = posts.place(loaded, pool, host)
    post = posts.Post(folder=folder, pool=pool, host=host, interface=interface, notices=notices, threads=threads)
    posts.leave_ticket(folder, loaded)
    if (held := posts.lock(folder)) is None:
        tell("it is there already")
        return
    os.environ[AGENT] = folder.name
    if others := marked.other_runs(folder.name, marked.environs()):
        tell(f"{NOTE}agents of {others} other runs are here: all share its cores and memory")
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
    os.close(held)
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


def _become(post: Post) -> None:
    """A process of its own, also for those who look at it. Forked: another interpreter would take most of a second."""
    from farandole.platform.files import append
    from farandole.platform.output import show_command
    from farandole.pool.agents.post import LOG

    os.setsid()
    with append(post.folder / LOG) as log, Path(os.devnull).open("rb") as nothing:
        for stream, descriptor in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(stream.fileno(), descriptor)
    show_command([sys.executable, *post.command(post.folder)], os.environ)


def _serve_and_answer(post: Post, ticket: Ticket, writing: int) -> None:
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


def _serve(post: Post, ticket: Ticket, joined: Callable[[str], None]) -> str:
    """Returns why the host could not be prepared, if so.

    What takes longest goes first: torch is loaded by another process while this one is still at its own imports.
    """
    from farandole.pool.agents.post import environ
    from farandole.pool.local import load_ahead

    if post.threads:
        load_ahead(post.threads, environ(ticket))

    from farandole.pool.agents.agent import Agent

    return asyncio.run(Agent(post, joined).serve())
