"""Whether the coordinator's process is alive: not only there, but answering.

A process may be frozen for good (SIGSTOP, a debugger, a mount that hangs) without having died. So it is asked for a
sign of life every second. It counts as frozen when several tries in a row are without an answer and `limit_s` have
passed in them, by the time that *this* process has run: who was suspended together with it, or stopped by Ctrl-Z, has
not waited. One that is starting has `START_S`.
"""

from __future__ import annotations

import asyncio

from farandole.control.client import Api
from farandole.control.ticket import Ticket
from farandole.errors import CoordinatorUnreachable, UsageError

START_S = 30.0  # for a coordinator to listen
ASK_S = 1.0  # between two tries
ANSWER_S = 2.0  # for an answer
LEAST = 3  # tries


class Silence:
    """How long nothing was heard, as counted by who listens. Pure; times in seconds."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.heard_once = False
        self._missed = 0
        self._silent_s = 0.0

    def heard(self) -> None:
        self.heard_once = True
        self._missed, self._silent_s = 0, 0.0

    def missed(self, took_s: float) -> bool:
        """A try that took so long was without an answer. Whether that is enough."""
        self._missed += 1
        self._silent_s += min(took_s, ASK_S + ANSWER_S)
        limit_s = self.limit_s if self.heard_once else max(START_S, self.limit_s)
        return self._missed >= LEAST and self._silent_s >= limit_s


async def until_silent(ticket: Ticket, limit_s: float) -> None:
    """Returns when the coordinator of `ticket` is frozen."""
    loop, api, silence = asyncio.get_running_loop(), Api(ticket, timeout_s=ANSWER_S), Silence(limit_s)
    while True:
        began = loop.time()
        await asyncio.sleep(ASK_S)
        try:
            await asyncio.to_thread(api.alive)
            silence.heard()
        except (CoordinatorUnreachable, UsageError):
            if silence.missed(loop.time() - began):
                return
