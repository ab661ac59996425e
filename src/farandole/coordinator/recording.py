"""What is kept and told of a run: events and state in the journal, and lines for files and observers.

Invariant: an event is in the journal, with the state that it led to, before anything is promised of it (`keep`); its
line is written after the messages have left. A disk that is full or doesn't answer costs lines and events, which are
counted and told of, never the training. Nobody waits for a line, and for the journal at most `file_thread.LIMIT_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

import msgspec

from farandole.control.status import RATE_STEPS
from farandole.coordinator.journal import Journal, Shipping, outlived
from farandole.coordinator.observers import Observers
from farandole.protocol import events
from farandole.protocol.coordinator import reconnection
from farandole.protocol.coordinator.coordinator import Coordinator
from farandole.protocol.coordinator.state import RunSettings
from farandole.protocol.events import Recorded
from farandole.protocol.metrics import Line, StepLine

_log = logging.getLogger(__name__)


class Recording:
    """Of one coordinator's process. `recent`: the last lines of the one before it. `settings`: where state are shipped.

    Attributes:
        steps: the last ones' lines.
    """

    def __init__(
        self, journal: Journal, recent: Iterable[Line], observers: Observers, settings: RunSettings | None = None
    ) -> None:
        self._journal, self._observers = journal, observers
        self._shipping = Shipping(settings, self._not_shipped) if settings and outlived(settings) else None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unkept: list[events.Event] = []
        self._unwritten: list[Line] = []
        self._lost, self._why = 0, ""  # lines that could not be written, and are not told of
        self.steps = deque((line for line in recent if isinstance(line, StepLine)), maxlen=RATE_STEPS)

    def event(self, event: events.Event) -> None:
        """Kept before the next promise, at the next tick at the latest."""
        self._unkept.append(_now(event))

    def keep(self, coordinator: Coordinator) -> None:
        """The events so far and the state that they led to. Before any promise goes out, and at every tick."""
        self._loop = asyncio.get_running_loop()
        kept, self._unkept = self._unkept, []
        if not kept and not (coordinator.unrecorded and self._journal.ready):
            return
        for event in kept:
            self.note(event)
        state = reconnection.to_durable(coordinator)
        if self._shipping:
            self._shipping.put(state)
        try:
            self._journal.keep(kept, state, partial(self._soon, self._kept_late, coordinator, len(kept)))
        except (OSError, sqlite3.Error) as error:  # a full disk must not end the training
            _log.error("the journal could not be written: %s; lost: %s", error, kept)
            if not coordinator.unrecorded:  # to whoever watches: our own output is a file in the run's folder
                self.note(_now(events.NotRecordedEvent(reason=str(error))))
            coordinator.unrecorded += len(kept)
            self._journal.remember(reconnection.to_durable(coordinator))  # the next one may have room, and tell
        else:
            if coordinator.unrecorded:
                self.event(events.RecordedAgainEvent(missing=coordinator.unrecorded))
                coordinator.unrecorded = 0

    def _kept_late(self, coordinator: Coordinator, count: int) -> None:
        """Events that the disk had not taken within the limit are in the journal after all. If a later write has come
        before this was heard, they have been counted as missing already.
        """
        if coordinator.unrecorded:
            coordinator.unrecorded -= count
            if not coordinator.unrecorded:
                self.event(events.RecordedAgainEvent(missing=0))

    def _soon(self, call: Callable[..., object], *arguments: object) -> None:
        """From other threads: call it in the event loop."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: so is the run
            self._loop.call_soon_threadsafe(call, *arguments)

    def _not_shipped(self, reason: str) -> None:
        self._soon(self.event, events.NotShippedEvent(reason=reason))

    def close(self) -> None:
        """What was kept last is shipped, if that is possible soon."""
        if self._shipping:
            self._shipping.close()

    def note(self, line: Line) -> None:
        """A line for files and observers, after the messages: their writers were woken before this is scheduled."""
        if not self._unwritten:
            asyncio.get_running_loop().call_soon(self.write_lines)
        self._unwritten.append(line)
        if isinstance(line, StepLine):
            self.steps.append(line)

    def write_lines(self) -> None:
        self._loop = asyncio.get_running_loop()
        lines, self._unwritten = self._unwritten, []
        for line in lines:
            self._observers.tell(line)
            if not self._journal.write(line, partial(self._written, line)):
                self._lose(line, "the disk does not answer, and too many lines wait for it")

    def _written(self, line: Line, error: Exception | None) -> None:
        """In the journal's thread."""
        if error is not None:
            _log.error("metrics.jsonl could not be written: %s; lost: %s", error, line)
            self._soon(self._lose, line, str(error))
        elif self._lost:
            self._soon(self._tell_lost)

    def _lose(self, line: Line, why: str) -> None:
        self._lost += not isinstance(line, Recorded)  # events are in the journal
        self._why = why

    def _tell_lost(self) -> None:
        if self._lost:
            self.event(events.LinesLostEvent(worker="", lines=self._lost, reason=self._why))
            self._lost = 0


def _now(event: events.Event) -> events.Event:
    return msgspec.structs.replace(event, time=time.time())
