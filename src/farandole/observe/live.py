"""A live run on a display: its events and steps, from one coordinator after the other, what its workers print, and the
figures that sum it up.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from farandole.checkpoint.store import incomplete_here, step_of
from farandole.control.client import subscribe
from farandole.control.run_folder import LOGS
from farandole.control.ticket import Ticket
from farandole.errors import CoordinatorUnreachable
from farandole.membership.events import Over
from farandole.membership.messages import Hello, Note
from farandole.membership.metrics import Line, parse_line, time_of
from farandole.observe.display import Display
from farandole.observe.follow import Follower
from farandole.observe.summary import summary
from farandole.observe.written import Written
from farandole.platform.process import up_to

WRITTEN_S = 2.0  # for the end to be written down
WATCH_S = 0.2  # between two tries to reach a coordinator that has gone
GONE_S = 5.0  # without a coordinator, for a run whose folder nobody holds to be given up
RELAY_S = 0.1  # how often the workers' log files are looked at
TICK_S = 1.0  # how often the display is looked after when nothing happens
FIGURES_S = 5.0  # how often what is written down is summed up,
FIGURES_PART = 0.02  # and for what part of the time at most


async def show_lines(
    ticket: Ticket, display: Display, seen: Callable[[Line], None], held: Callable[[], bool] = lambda: True,
    gone_s: float = GONE_S,
) -> None:  # fmt: skip
    """Events and steps until the run is over; what was shown before is left out. `seen` is called with each line.

    Raises:
        CoordinatorUnreachable: nobody has been there for `gone_s`, and no `farandole run` holds the run's folder, as
            `held` says: it was killed.
    """
    newest, since = 0.0, time.monotonic()
    while True:
        try:
            async with subscribe(ticket, Hello(kind="observer", pid=os.getpid())) as subscription:
                again, since = newest > 0, math.inf
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
            if time.monotonic() - since > gone_s and not held():
                raise
        since = min(since, time.monotonic())
        await asyncio.sleep(WATCH_S)


async def show_output(folder: Path, display: Display, ended: asyncio.Event) -> None:
    """The workers' output, from the log files in the run's folder; the rest of it once they have `ended`."""
    with Follower(folder / LOGS) as follower:
        while not ended.is_set():
            display.outputs(follower.lines())
            await up_to(RELAY_S, ended)
        display.outputs(follower.flush())


async def keep_figures(written: Written, display: Display) -> None:
    """For ever: what a run has cost so far, and what changes while nothing happens."""
    due = 0.0
    while True:
        if (began := time.monotonic()) >= due:
            await _catch_up(written)
            summing = time.monotonic()
            display.account = written.account()
            due = began + max(FIGURES_S, (time.monotonic() - summing) / FIGURES_PART)
        display.refresh()
        await asyncio.sleep(TICK_S)


async def sum_up(written: Written, display: Display, over: Over | None) -> None:
    """The run is over, or killed: what came of it. Its last lines may still be on their way to the file."""
    until = time.monotonic() + WRITTEN_S
    await _catch_up(written)
    while over is not None and written.course.past.code is None and time.monotonic() < until:
        await asyncio.sleep(WATCH_S)
        await _catch_up(written)
    newest = step_of(written.course.past.checkpoint)
    left = incomplete_here(written.checkpoints, after=-1 if newest is None else newest)
    display.summary(summary(written.course, written.account(), over, left))


async def _catch_up(written: Written) -> None:
    """A part at a time, so that others get their turn."""
    while written.read_on():
        await asyncio.sleep(0)
