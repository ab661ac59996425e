"""What the dashboard knows of a run: its lines as they come, and, while somebody looks, what the coordinator says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from farandole import __version__
from farandole.control.client import Api
from farandole.control.run_folder import METRICS, Tail
from farandole.control.status import Status
from farandole.errors import FarandoleError
from farandole.observe.report import prices_in, settings_of
from farandole.observe.story.about import About, about
from farandole.observe.story.facts import Bill, bill
from farandole.observe.story.story import Story

EVERY_S = 1.0
SLICE = 2_000  # lines at a time, before others get their turn
BILL_S = 5.0  # between two looks at what it has cost


class Watch:
    """`await follow()` for ever; `looked` is set, and another one put in its place, when there is something new.

    Attributes:
        watchers: how many pages are open; without any the coordinator is not asked.
        behind: the part of the lines that is still to be read, in words; "" once all are.
    """

    def __init__(self, folder: Path, api: Callable[[], Api | None], live: Callable[[], bool]) -> None:
        """`api`: of the coordinator, None where there is none. `live`: whether the run is on."""
        self.folder = folder
        self.name = folder.resolve().name
        self.story = Story()
        self.status: Status | None = None
        self.live = live()
        self.paid: Bill | None = None
        self.about: About = []
        self.watchers = 0
        self.behind = "0 %"
        self.looked = asyncio.Event()
        self._api, self._is_live = api, live
        self._tail = Tail(folder / METRICS)
        self._settings = settings_of(folder)
        self._billed = (-1, 0.0)  # events then, and when

    async def follow(self) -> None:
        while True:
            await self._read()
            self.live = await asyncio.to_thread(self._is_live)
            self.status = await asyncio.to_thread(self._ask) if self.watchers and self.live else None
            self._bill()
            looked, self.looked = self.looked, asyncio.Event()
            looked.set()
            await asyncio.sleep(EVERY_S)

    async def _read(self) -> None:
        while lines := self._tail.lines():
            for first in range(0, len(lines), SLICE):
                for line in lines[first : first + SLICE]:
                    self.story.take(line)
                await asyncio.sleep(0)
            if self.behind:
                self.behind = f"{100 * self._tail.at / max(self._tail.size, 1):.0f} %"
                self.looked.set()
                self.looked = asyncio.Event()
        self.behind = ""

    def _ask(self) -> Status | None:
        with suppress(FarandoleError, OSError):
            api = self._api()
            return None if api is None else api.status()
        return None

    def _bill(self) -> None:
        count, at = self._billed
        if self.story.count == count and time.monotonic() < at + BILL_S:
            return
        self._billed = (self.story.count, time.monotonic())
        self.about = about(self._settings, self.story, __version__)
        self.paid = bill(self.story.account.account(self.name, prices_in(self._settings)), self.story)
