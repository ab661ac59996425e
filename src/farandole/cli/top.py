"""`farandole top`: live runs on a terminal, from their own machine or, with a copy of the ticket, from another one."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farandole.cli.folders import RUNS, RunOption, live, past_of
from farandole.control.run_folder import held
from farandole.errors import CoordinatorUnreachable, FarandoleError, UsageError
from farandole.platform.output import tell
from farandole.platform.process import up_to

if TYPE_CHECKING:
    from rich.console import RenderableType

    from farandole.control.status import Status
    from farandole.control.ticket import Ticket

EVERY_S = 1.0


def top(
    run: RunOption = None,
    ticket: Annotated[
        str | None,
        typer.Option("--ticket", metavar="FILE", help="Ticket of a run on another machine; - for standard input."),
    ] = None,
) -> None:
    """Watch a run's progress, workers, events and cost. If several runs are alive, show one line for each.

    If the output is not a terminal, print once.
    """
    if run is not None and ticket is not None:
        raise UsageError("top: --run and --ticket name two runs; give one of them")
    alive = [] if run is not None or ticket is not None else _alive()
    if len(alive) > 1:
        asyncio.run(_list(alive))
        return
    from farandole.control import ticket as tickets
    from farandole.control.run_folder import TICKET
    from farandole.platform import files

    if ticket is not None:
        asyncio.run(_one(tickets.load(ticket), None))
        return
    watched = live(run or (alive[0] if alive else None))
    with watched:
        asyncio.run(_one(tickets.load(str(watched.folder / TICKET), files.opener), watched.folder))


def _alive() -> list[Path]:
    """Those under runs/ that are this user's."""

    found: list[Path] = []
    for folder in sorted(RUNS.glob("*")):
        with suppress(OSError):
            if not files.foreign(folder.stat()) and held(folder):
                found.append(folder)
    return found


async def _list(folders: list[Path]) -> None:
    """Until all are over."""
    from farandole.observe.top import list_picture

    async def look() -> RenderableType | None:
        there = [folder for folder in folders if held(folder)]
        answers = await asyncio.gather(*(asyncio.to_thread(_status, folder) for folder in there))
        return list_picture(dict(zip((folder.name for folder in there), answers, strict=True))) if there else None

    await _show(look)


def _status(folder: Path) -> Status | None:
    with suppress(FarandoleError):
        return live(folder).api.status()
    return None


async def _one(ticket: Ticket, folder: Path | None) -> None:
    """Until it is over, or Ctrl-C. `folder`: the run's, on this machine."""
    from farandole.control.client import Api
    from farandole.observe.live import show_lines
    from farandole.observe.top import Recent, picture

    api, recent = Api(ticket), Recent()
    status, heard = await asyncio.to_thread(api.status), time.monotonic()
    over, killed = asyncio.Event(), False
    watching = (
        asyncio.create_task(show_lines(ticket, recent, lambda _: None, lambda: folder is None or held(folder)))
        if sys.stdout.isatty()
        else None
    )
    if watching is not None:
        watching.add_done_callback(lambda _: over.set())

    async def look() -> RenderableType | None:
        nonlocal status, heard, killed
        if over.is_set():
            return None
        word = ""
        try:
            status, heard = await asyncio.to_thread(api.status), time.monotonic()
        except CoordinatorUnreachable:
            killed = folder is not None and not held(folder)
            if killed:
                return None
            word = f"no answer for {time.monotonic() - heard:.0f} s; a run trains on without its coordinator"
        return picture(status, recent, word)

    await _show(look)
    if watching is None:
        return
    ended = watching.done() and watching.exception() is None
    watching.cancel()
    await asyncio.wait({watching})
    past = past_of(folder) if killed and folder is not None else None
    if killed and not ended and (past is None or past.code is None):
        raise CoordinatorUnreachable(f"run {ticket.run} was killed: nobody holds its folder, and nobody answers")
    tell(recent.events[-1] if ended and recent.events else f"run {ticket.run} {'is over' if killed else 'goes on'}")


async def _show(look: Callable[[], Awaitable[RenderableType | None]]) -> None:
    """What `look` gives, again and again, until that is nothing; once, where the output is no terminal."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    shown = await look()
    if not console.is_terminal:
        if shown is not None:
            console.print(shown)
        return
    left = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, left.set)
    with Live(shown or "", console=console, screen=True, auto_refresh=False) as screen:
        while shown is not None and not left.is_set():
            await up_to(EVERY_S, left)
            shown = await look()
            if shown is not None:
                screen.update(shown, refresh=True)
