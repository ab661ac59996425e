"""A live run on a display: its events and steps, from one coordinator after the other, and what its workers print."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from farandole.control.run_folder import ASIDE, LOGS
from farandole.control.subscription import subscribe
from farandole.control.ticket import Ticket
from farandole.errors import CoordinatorUnreachable
from farandole.membership.events import Over
from farandole.membership.messages import Hello, Note
from farandole.membership.metrics import Line, parse_line, time_of
from farandole.observe.display import Display
from farandole.observe.follow import Follower
from farandole.platform.waiting import up_to

WATCH_S = 0.2  # between two tries to reach a coordinator that has gone
RELAY_S = 0.1  # how often the workers' log files are looked at


async def show_lines(ticket: Ticket, display: Display, seen: Callable[[Line], None], patient: bool = True) -> None:
    """Events and steps until the run is over; what was shown before is left out. `seen` is called with each line.

    Raises:
        CoordinatorUnreachable: nobody is there, and it is not to be `patient`.
    """
    newest = 0.0
    while True:
        try:
            async with subscribe(ticket, Hello(kind="observer", pid=os.getpid())) as subscription:
                again = newest > 0
                while (message := await subscription.receive()) is not None:
                    line = parse_line(message.line) if isinstance(message, Note) else None
                    if line is None or (again and time_of(line) <= newest):
                        continue
                    again = False
                    newest = max(newest, time_of(line))
                    display.line(line)
                    seen(line)
                    if isinstance(line, Over):
                        return
        except CoordinatorUnreachable:
            if not patient:
                raise
        await asyncio.sleep(WATCH_S)


async def show_output(folder: Path, display: Display, ended: asyncio.Event) -> None:
    """The workers' output, from the log files in the run's folder; the rest of it once they have `ended`."""
    with Follower(folder / LOGS) as follower:
        while not ended.is_set():
            _show(display, follower.lines())
            await up_to(RELAY_S, ended)
        _show(display, follower.flush())


def _show(display: Display, lines: list[tuple[str, str]]) -> None:
    for worker, text in lines:
        if not text.startswith(ASIDE):
            display.output(worker, text)
