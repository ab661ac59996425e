"""`farandole agent`: what starts a host's workers there. Pools start it; nobody needs to by hand.

The command reads the run's ticket, starts the agent in a session of its own, and returns once that has reached the
run: so whoever has started it, over SSH or as a machine comes up, hears at once what is wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from farandole.errors import FarandoleError, UsageError
from farandole.platform.output import tell

BEGIN_S = 40.0


def agent(
    ticket: Annotated[str, typer.Argument(help="The run's ticket: a file, or - for standard input.")],
    *,
    pool: Annotated[str, typer.Option("--pool", help="The pool whose host this is.")],
    host: Annotated[str, typer.Option("--host", help="The host's name there.")],
    interface: Annotated[str, typer.Option("--interface", help="The address that others reach its workers at.")] = "",
    wait: Annotated[bool, typer.Option("--wait", help="Serve in this process, and return when it is over.")] = False,
    serve: Annotated[int, typer.Option("--serve", metavar="FD", hidden=True)] = 0,
) -> None:
    """Serve a run as one of its hosts, until the run lets it go."""
    import msgspec

    from farandole.control.ticket import load
    from farandole.platform.private import append
    from farandole.pool import agent as process

    if serve:
        _serve(Path(ticket), pool, host, interface, serve)
        return
    loaded = load(ticket)
    folder = process.place(loaded, pool, host)
    process.leave_ticket(folder, msgspec.json.encode(loaded))
    if (held := process.lock(folder)) is None:
        tell("it is there already")
        return
    if wait:
        asyncio.run(process.Agent(folder, pool, host, interface, tell).serve())
        return
    os.close(held)
    reading, writing = os.pipe()
    words = [sys.executable, "-m", "farandole", "agent", str(folder), "--pool", pool, "--host", host]
    words += ["--interface", interface, "--serve", str(writing)]
    with append(folder / process.LOG) as log:
        child = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, pass_fds=(writing,)
        )
    os.close(writing)
    answer = _answer(reading)
    if answer != "joined":
        if not answer:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
        raise FarandoleError(answer or f"the agent has not reached the run within {BEGIN_S:g} s; see {folder}")
    tell("joined")


def _answer(reading: int) -> str:
    ready, _, _ = select.select([reading], [], [], BEGIN_S)
    return os.read(reading, 4096).decode(errors="replace") if ready else ""


def _serve(folder: Path, pool: str, host: str, interface: str, writing: int) -> None:
    from farandole.pool import agent as process

    answers = [writing]

    def answer(text: str) -> None:
        while answers:
            with contextlib.suppress(OSError):
                os.write(answers[0], text.encode()[:4000])
            os.close(answers.pop())

    held = process.lock(folder)
    if held is None:
        answer("joined")  # another one was faster
        return
    try:
        asyncio.run(process.Agent(folder, pool, host, interface, answer).serve())
    except (FarandoleError, UsageError) as error:
        answer(str(error))
        raise
